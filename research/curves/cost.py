"""The cost curve T(n) of a target."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any

import numpy as np

from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.tree import TokenTree
from leapahead.models.base import CHAIN, Target
from research.curves.run import GREEDY, Data, Progress, Tokens, conditions, silent

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
WARM_UP = 2  # rounds that are not counted


def cost(
    target: Target,
    text: Tokens,
    contexts: Sequence[int] = (128, 512),
    sizes: Sequence[int] = SIZES,
    rounds: int = 15,
    seed: int = 0,
    progress: Progress = silent,
    clock: Callable[[], float] = perf_counter,
) -> Data:
    """The cost curve T(n): wall-clock time of a forward over a chain of n nodes, against that of one node.

    Every round measures every size once, in an order of its own, so that a machine that slows down slows all of them;
    T(n)/T(1) is taken within a round. The time includes reading one choice, without which an accelerator may not have
    finished, and nothing is committed.

    Args:
        text: tokens to fill the context and the chains with, repeated as needed.
        contexts: lengths of context, each a curve.
        sizes: n; 1 is always measured.
        rounds: that count; two more come before.
        seed: of the orders.

    Returns:
        rows of context, nodes, and median, low and high (quartiles) of `milliseconds` and of `relative`.

    Raises:
        Refused: the target cannot read a chain.
        ContextOverflow: a context and its largest chain are longer than the target's.
    """
    sizes = sorted({1, *sizes})
    if sizes[0] < 1 or not contexts or min(contexts) < 1 or rounds < 1 or not text:
        raise BadParameter("contexts, sizes and rounds must be at least 1, and there must be a text")
    if CHAIN not in target.capabilities or target.max_nodes < sizes[-1]:
        most = target.max_nodes if CHAIN in target.capabilities else 1
        raise Refused(f"{target.name} reads at most {most} nodes in one forward, and {sizes[-1]} were asked for")
    if max(contexts) + sizes[-1] - 1 > target.context_length:
        raise ContextOverflow(
            f"a context of {max(contexts)} tokens and a chain of {sizes[-1]} do not fit into the "
            f"{target.context_length} of {target.name}; name shorter ones"
        )
    order, rows, turns = random.Random(seed), [], rounds + WARM_UP
    for number, context in enumerate(contexts):
        tokens = [text[index % len(text)] for index in range(context + sizes[-1])]
        trees = {size: TokenTree.chain(tokens[context - 1], tokens[context : context + size - 1]) for size in sizes}
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        with closing(target.open(tokens[:context], GREEDY, reserve=context + sizes[-1])) as session:
            for turn in range(turns):
                progress(f"context of {context} tokens", number * turns + turn, len(contexts) * turns)
                for size in order.sample(sizes, len(sizes)):
                    began = clock()
                    _ = target.step([session], [trees[size]])[0][0]
                    seconds[size].append(clock() - began)
        counted = {size: np.array(each[WARM_UP:]) for size, each in seconds.items()}
        rows += [
            {
                "context": context,
                "nodes": size,
                "milliseconds": _quartiles(1e3 * counted[size]),
                "relative": _quartiles(counted[size] / counted[1]),
            }
            for size in sizes
        ]
    return {"figure": "cost", "conditions": conditions(target, rounds=rounds), "rows": rows}


def _quartiles(values: Any) -> dict[str, float]:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}
