"""TriForce's costs over long contexts, measured, and its speed-up at simulated acceptance rates, computed from them.

The keys and values of the context are random numbers, so that no long prompt is read: what a forward costs depends on
their number alone. What would be accepted depends on the text, so that acceptance is an assumption here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from leapahead.bench.conditions import Data, Progress, conditions, silent
from leapahead.core.errors import ContextOverflow
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models.base import Target, read_prompt
from leapahead.models.self_draft.retrieval import RetrievalDraft
from leapahead.models.transformers.model import TransformersSession, TransformersTarget
from leapahead.models.transformers.retrieval import Retrieval, Retrieved

DEPTHS = (1, 2, 3, 4, 6, 8, 12)  # tokens that are drafted for the target in one step
GUESSES = (1, 2, 3)  # of the small model for one forward of the middle level
RATES = (0.6, 0.7, 0.8, 0.9, 0.95)  # simulated: of the middle's tokens that the target accepts
SMALL_RATE = 0.6  # simulated: of the small model's guesses that the middle, or the target, accepts
WARM_UP = 2  # rounds that are not counted
WINDOW = 512  # of the small model


def measured(
    target: TransformersTarget,
    small: Target,
    lengths: Sequence[int],
    budgets: Sequence[int],
    chunk: int = 8,
    refresh: int = 32,
    rounds: int = 9,
    progress: Progress = silent,
    clock: Callable[[], float] = perf_counter,
) -> Data:
    """Measures forwards of the target, of the target over a part of its cache, and of a small model.

    Every round measures every size once, in a random order. The time includes reading one choice.

    Args:
        target: with random weights or others; nothing is committed.
        small: the small model, over a window of `WINDOW` tokens.
        lengths: of contexts.
        budgets: entries of the retrieved part.
        chunk, refresh: see `TriForce`.
        rounds: measured rounds; `WARM_UP` more come before.

    Returns:
        `small_ms`; rows of context with `target_ms` by rows of the forward, and of each budget `middle_ms` by rows,
        `select_ms`, what choosing the chunks adds to a forward, and `first_select_ms`, the same at the first time, when
        the mean keys of all chunks are computed; all are medians. `simulated`, `needed`, `alone`: see these.

    Raises:
        ContextOverflow: a length is greater than the target's context.
    """
    if max(lengths) + max(DEPTHS) >= target.info.context_length:
        raise ContextOverflow(f"{max(lengths)} tokens do not fit the context of {target.info.context_length}")
    drafts = {budget: RetrievalDraft(target, Retrieval.of(budget, chunk, refresh)) for budget in budgets}
    small_ms = _of_small(small, rounds, clock)
    rows = []
    for number, length in enumerate(lengths):
        progress(f"{length} tokens", number, len(lengths))
        session = filled(target, length)
        rows.append({"context": length, **_of_context(target, session, drafts, rounds, clock)})
        session.close()
        target.forget()
    settings = {"chunk": chunk, "refresh": refresh, "window": WINDOW, "small": small.info.name}
    found = {
        "figure": "triforce",
        "conditions": conditions(target, rounds=rounds, **settings),
        "small_ms": small_ms,
        "rows": rows,
    }
    small_alone = [{"context": row["context"], "speedup": alone(found, row)} for row in rows]
    return {**found, "simulated": simulated(found), "needed": needed(found), "alone": small_alone}


def filled(target: TransformersTarget, length: int) -> TransformersSession:
    """A session whose cache holds random entries for all of its tokens but the last."""
    tokens = np.random.default_rng(length).integers(0, target.info.vocab_size, length).tolist()
    with target.lock:
        session = target.open(tokens, SamplingParams())
        target.prefill(session, 8)  # makes the cache's tensors
        cache, row = target.executor.cache, session.state.row  # type: ignore[attr-defined]
        cache.begin([row], [length])  # with room for all
        cache.discard(row)
        for group in cache.groups:
            group.entries[:, row.index, :, :length].normal_()
        row.length = length - 1
    return session


def _of_small(small: Target, rounds: int, clock: Callable[[], float]) -> float:
    """Milliseconds of a forward of the small model over one row, behind half a window more than half of it."""
    rng, seconds = np.random.default_rng(0), []
    session = small.open(rng.integers(0, small.info.vocab_size, WINDOW * 3 // 4).tolist(), SamplingParams())
    read_prompt(small, session)
    for _ in range(rounds + WARM_UP):
        began = clock()
        _ = small.step([session], [TokenTree.root(session.tokens[-1])])[0][0]
        seconds.append(clock() - began)
    session.close()
    return round(1e3 * median(seconds[WARM_UP:]), 3)


def _of_context(
    target: TransformersTarget,
    session: TransformersSession,
    drafts: dict[int, RetrievalDraft],
    rounds: int,
    clock: Callable[[], float],
) -> Data:
    """The milliseconds of one context; see `measured`."""
    root = session.tokens[-1]
    mine = {budget: draft.open(session.tokens, SamplingParams()) for budget, draft in drafts.items()}
    seconds: dict[Any, list[float]] = {}

    def timed(key: Any, model: TransformersTarget, of: TransformersSession, rows: int, computed: int = 0) -> None:
        tree = TokenTree.chain(root, [root] * (rows + computed - 1))
        began = clock()
        _ = model.step([of], [tree], [computed])[0][computed]
        seconds.setdefault(key, []).append(clock() - began)

    for budget, draft in drafts.items():  # when the mean keys of all chunks are computed, too
        timed(("first", budget), draft, mine[budget], 1)
    target_rows = sorted({1, *(depth + 1 for depth in DEPTHS)})
    middle_rows = sorted({1, *(guesses + 1 for guesses in GUESSES)})
    order = random.Random(0)
    tasks: list[Any] = [("target", rows) for rows in target_rows]
    tasks += [(budget, rows) for budget in drafts for rows in middle_rows] + [("select", budget) for budget in drafts]
    for _ in range(rounds + WARM_UP):
        for kind, what in order.sample(tasks, len(tasks)):
            if kind == "target":
                timed((kind, what), target, session, what)
            elif kind == "select":
                state = mine[what].state
                assert isinstance(state, Retrieved)
                state.forget()
                timed((kind, what), drafts[what], mine[what], 1)
            else:  # nothing is to be copied, and the root is computed
                timed((kind, what), drafts[kind], mine[kind], what, computed=1)
    for each in mine.values():
        each.close()
    ms = {key: round(1e3 * median(each[WARM_UP:] if len(each) > 1 else each), 3) for key, each in seconds.items()}
    return {
        "target_ms": {str(rows): ms["target", rows] for rows in target_rows},
        "budgets": {
            str(budget): {
                "middle_ms": {str(rows): ms[budget, rows] for rows in middle_rows},
                "select_ms": round(max(0.0, ms["select", budget] - ms[budget, 1]), 3),
                "first_select_ms": round(max(0.0, ms["first", budget] - ms[budget, 1]), 3),
            }
            for budget in drafts
        },
    }


def simulated(found: Data) -> list[Data]:
    """The best speed-up over plain decoding at simulated acceptance rates, from measured times; see `best`.

    Returns:
        Rows of context, budget, rate, small (whether there is a small model), speedup, and the depth and guesses that
        give it.
    """
    return [
        {"context": row["context"], "budget": int(budget), "rate": rate, "small": small}
        | best(found, row, budget, rate, small)
        for row, rate, small in product(found["rows"], RATES, (False, True))
        for budget in row["budgets"]
    ]


def needed(found: Data) -> list[Data]:
    """The least acceptance rate, in hundredths, from which on drafting is faster than without the middle level.

    That is plain decoding where there is no small model, else the better one of that and the small model alone.

    Returns:
        Rows of context, budget, small and rate; None where no rate is enough.
    """
    rows = []
    for row, small in product(found["rows"], (False, True)):
        without = max(1.0, alone(found, row)) if small else 1.0
        for budget in row["budgets"]:
            gains = ((a / 100, best(found, row, budget, a / 100, small)["speedup"]) for a in range(101))
            rate = next((a for a, speedup in gains if speedup > without), None)
            rows.append({"context": row["context"], "budget": int(budget), "small": small, "rate": rate})
    return rows


def alone(found: Data, row: Data) -> float:
    """The greatest speed-up of one context by the small model alone, if the target accepts at `SMALL_RATE`."""
    speedups: list[float] = []
    for depth in DEPTHS:
        spent = row["target_ms"][str(depth + 1)] + depth * found["small_ms"]
        speedups.append(_expected(SMALL_RATE, depth) * float(row["target_ms"]["1"]) / spent)
    return round(max(speedups), 3)


def best(found: Data, row: Data, budget: str, rate: float, small: bool) -> Data:
    """The greatest speed-up of one context, and the depth and guesses that give it.

    A draft of n tokens, each accepted with rate a where those before it were, brings E = 1 + a + ... + a^n tokens
    (2211.17192, equation 1), in the time of the target's forward over n + 1 rows, of the middle's forwards, and of
    E / refresh selections. Alone, the middle runs n forwards over one row. With g guesses of the small model, one of
    its forwards over g + 1 rows brings 1 + b + ... + b^g tokens, after g forwards of the small model; b is
    `SMALL_RATE`.
    """
    costs, most = row["budgets"][budget], {"speedup": 0.0}
    for depth, guesses in product(DEPTHS, GUESSES if small else (0,)):
        tokens = _expected(rate, depth)
        forwards = depth / _expected(SMALL_RATE, guesses)
        middle = forwards * (costs["middle_ms"][str(guesses + 1)] + guesses * found["small_ms"])
        spent = row["target_ms"][str(depth + 1)] + middle + costs["select_ms"] * tokens / found["conditions"]["refresh"]
        speedup = round(tokens * row["target_ms"]["1"] / spent, 3)
        if speedup > most["speedup"]:
            most = {"speedup": speedup, "depth": depth, "guesses": guesses}
    return most


def _expected(rate: float, depth: int) -> float:
    """Tokens of a chain of so many drafted ones, with the one that the verifying model adds."""
    return float(sum(rate**each for each in range(depth + 1)))
