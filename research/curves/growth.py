"""Time and memory of the drafters' text indexes by length of the text; both should be linear.

seconds    to index the whole text, to be compared with its prefill
bytes      held afterwards, traced in a separate pass, because tracing slows
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

from leapahead.bench.conditions import Data, Progress, Tokens, conditions, silent
from leapahead.core.errors import BadParameter
from leapahead.drafters.pool import NgramPool
from leapahead.drafters.sources.ngram import Ngrams
from leapahead.drafters.sources.suffix_automaton import SuffixAutomaton

SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 40_000, 70_000, 100_000)
VOCAB, EXPONENT = 50_000, 1.1  # of random text
PHRASES = 0.3  # of random text: the share that is copied from earlier in the text


def zipf(length: int, seed: int = 0, vocab_size: int = VOCAB) -> list[int]:
    """Random text: token frequencies by Zipf's law, with repeated phrases."""
    rng = random.Random(seed)
    frequent = [1.0 / rank**EXPONENT for rank in range(1, vocab_size + 1)]
    drawn = iter(rng.choices(range(vocab_size), frequent, k=length))
    text: list[int] = []
    while len(text) < length:
        if text and rng.random() < PHRASES / 5:
            first = rng.randrange(len(text))
            text += text[first : first + rng.randint(2, 12)]
        else:
            text.append(next(drawn))
    return text[:length]


def _ngrams(text: Tokens) -> object:
    source = Ngrams()
    source.index(text)
    return source


def _automaton(text: Tokens) -> object:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.add(token)
    return automaton


def _pool(text: Tokens) -> object:
    pool = NgramPool(ngram=5, guesses=8, capacity=50_000)
    pool.add_text(text)
    return pool


INDEXES: dict[str, Callable[[Tokens], object]] = {
    "n-grams": _ngrams,
    "suffix automaton": _automaton,
    "lookahead pool": _pool,  # of bounded size
}


def growth(
    text: Tokens | None = None,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
    prefill: float | None = None,
    seed: int = 0,
    progress: Progress = silent,
    clock: Callable[[], float] = perf_counter,
) -> Data:
    """Time and memory of the text indexes by length of the text. Needs no model.

    Every round indexes every size once, so that a change of the machine's speed affects all sizes alike.

    Args:
        text: at least as many tokens as the greatest of `sizes`; by default random text, see `zipf`.
        sizes: numbers of tokens.
        rounds: timed rounds.
        prefill: prefill time of a target, seconds per token.
        seed: of random text.

    Returns:
        text, described in words; rows of index, tokens, seconds (median of the rounds), microseconds_per_token, bytes,
        bytes_per_token and of_prefill (None without `prefill`); linear, a row for each index: from and to (the
        size nearest to a tenth of the greatest, and that) and ratio of the time per token at `to` over that at `from`,
        within a round, the median: about 1 where time is linear.
    """
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1 or rounds < 1 or (prefill is not None and prefill <= 0):
        raise BadParameter("there must be sizes and rounds of at least 1, and prefill must take longer than no time")
    if text is not None and len(text) < sizes[-1]:
        raise BadParameter(f"a text of {len(text)} tokens cannot be indexed to a length of {sizes[-1]}")
    words = f"random tokens and phrases by Zipf's law, seed {seed}" if text is None else "the prompts"
    tokens = list(zipf(sizes[-1], seed) if text is None else text)
    parts = {size: tokens[:size] for size in sizes}
    seconds: dict[tuple[str, int], list[float]] = {(name, size): [] for name in INDEXES for size in sizes}
    for turn in range(rounds):
        for number, (name, size) in enumerate(seconds):
            progress(f"{name} of {size} tokens", turn * len(seconds) + number, (rounds + 1) * len(seconds))
            seconds[name, size].append(_seconds(INDEXES[name], parts[size], clock))
    rows: list[dict[str, Any]] = []
    for number, (name, size) in enumerate(seconds):
        progress(f"{name}: memory", rounds * len(seconds) + number, (rounds + 1) * len(seconds))
        held, taken = _bytes(INDEXES[name], parts[size]), median(seconds[name, size])
        rows.append(
            {
                "index": name,
                "tokens": size,
                "seconds": round(taken, 6),
                "microseconds_per_token": round(1e6 * taken / size, 3),
                "bytes": held,
                "bytes_per_token": round(held / size, 1),
                "of_prefill": None if prefill is None else round(taken / (prefill * size), 6),
            }
        )
    return {
        "figure": "growth",
        "conditions": conditions(rounds=rounds, prefill_seconds_per_token=prefill),
        "text": words,
        "rows": rows,
        "linear": _linearity(seconds, sizes),
    }


def _linearity(seconds: dict[tuple[str, int], list[float]], sizes: Sequence[int]) -> list[Data]:
    """The rows of `linear`, see `growth`."""
    tenth, whole = min(sizes, key=lambda size: abs(size - sizes[-1] / 10)), sizes[-1]
    rows: list[Data] = []
    for name in INDEXES:
        few, many = seconds[name, tenth], seconds[name, whole]
        ratio = median((m / whole) / (f / tenth) for f, m in zip(few, many, strict=True))
        rows.append({"index": name, "from": tenth, "to": whole, "ratio": round(ratio, 3)})
    return rows


def _seconds(build: Callable[[Tokens], object], text: Tokens, clock: Callable[[], float]) -> float:
    gc.collect()
    began = clock()
    build(text)
    return clock() - began


def _bytes(build: Callable[[Tokens], object], text: Tokens) -> int:
    with _traced() as held:
        kept = build(text)
        found = held()
    del kept
    return found


@contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    """Gives a function that returns the bytes allocated since. Tracing that was on before stays on."""
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        if not already:
            tracemalloc.stop()
