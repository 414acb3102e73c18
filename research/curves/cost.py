"""The latency profile T(n) of a target, measured for a figure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any

import numpy as np

from leapahead.bench.conditions import Data, Progress, Tokens, conditions, silent
from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models.base import CHAIN, Target, read_prompt

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
    """The latency profile: wall-clock time T(n) of a forward over a chain of n nodes, relative to one node.

    Every round measures every size once, in a random order, so that a change of the machine's speed affects all sizes
    alike; T(n)/T(1) is taken within a round. The time includes reading one choice, since an accelerator may not have
    finished before. Nothing is committed.

    Args:
        text: tokens that fill the context and the chains, repeated as needed.
        contexts: lengths of context, a curve each.
        sizes: numbers of nodes n; 1 is always measured.
        rounds: measured rounds; `WARM_UP` more come before.
        seed: of the random orders.

    Returns:
        rows of context, nodes, and median, low and high (quartiles) of `milliseconds` and of `relative`.

    Raises:
        Refused: the target cannot read a chain.
        ContextOverflow: a context and its largest chain are longer than the target's.
    """
    sizes = sorted({1, *sizes})
    if sizes[0] < 1 or not contexts or min(contexts) < 1 or rounds < 1 or not text:
        raise BadParameter("contexts, sizes and rounds must be at least 1, and there must be a text")
    _require_room(target, max(contexts), sizes[-1])
    order, rows, turns = random.Random(seed), [], rounds + WARM_UP
    for number, context in enumerate(contexts):
        tokens = [text[index % len(text)] for index in range(context + sizes[-1])]
        trees = {size: TokenTree.chain(tokens[context - 1], tokens[context : context + size - 1]) for size in sizes}
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        sampling = SamplingParams()
        with target.lock, closing(target.open(tokens[:context], sampling, reserve=context + sizes[-1])) as session:
            read_prompt(target, session)
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


def _require_room(target: Target, context: int, size: int) -> None:
    """Refuses sizes that the target cannot read, and contexts that are too long with them."""
    info = target.info
    if CHAIN not in info.capabilities or target.max_nodes < size:
        most = target.max_nodes if CHAIN in info.capabilities else 1
        raise Refused(f"{info.name} reads at most {most} nodes in one forward; ask for no size of {size}")
    if context + size - 1 > info.context_length:
        raise ContextOverflow(
            f"a context of {context} tokens and a chain of {size} do not fit into the "
            f"{info.context_length} of {info.name}; choose shorter ones"
        )


def _quartiles(values: Any) -> dict[str, float]:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}
