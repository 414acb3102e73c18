"""The section "phrases" of the drafter cache: n-grams of past texts, for the phrase pools of the drafter `ouroboros`.

    WarmPool ── own n-grams of a text, most recent first ── then those of past texts with the same first token

As published (2402.13720), a pool goes on from text to text. Here a text has a pool of its own, which enters the section
when the text ends, so texts that are decoded together do not change each other's drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from leapahead.core.forks import Mutex
from leapahead.drafters.cache import Arrays, Section
from leapahead.drafters.pool import Ngram, NgramPool, Tail

CAPACITY, TAILS = 20_000, 16  # n-grams of one length that are kept, and of them those with the same first token
ARRAYS = ("counts", "tokens")  # of saved n-grams


class PastPhrases(Section):
    """N-grams of past texts, a pool for each length."""

    token_arrays: ClassVar[tuple[str, ...]] = ("tokens",)

    def __init__(self) -> None:
        self._pools: dict[int, NgramPool] = {}
        self._lock = Mutex()

    def enter(self, ngrams: Iterable[Ngram]) -> None:
        """Enters n-grams, the most recent one last."""
        with self._lock:
            _enter(self._pools, ngrams)

    def known(self, key: int, ngram: int) -> list[Tail]:
        """The tails of a first token in n-grams of a length, most recent first."""
        with self._lock:
            pool = self._pools.get(ngram)
            return [] if pool is None else pool.known(key)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """`counts`, int32 [n-grams], is the length of each, and `tokens`, int32, are all of them concatenated."""
        with self._lock:
            ngrams = [(key, *tail) for pool in self._pools.values() for key, tail in pool.ngrams()]
        return {
            "counts": np.array([len(each) for each in ngrams], dtype=np.int32),
            "tokens": np.array([token for each in ngrams for token in each], dtype=np.int32),
        }

    def merge(self, arrays: Arrays) -> None:
        if missing := [name for name in ARRAYS if name not in arrays]:
            raise ValueError(f"past phrases need the array {missing[0]!r}")
        counts, tokens = (arrays[name] for name in ARRAYS)
        if any(each.ndim != 1 or each.dtype != np.int32 for each in (counts, tokens)):
            raise ValueError("the arrays of past phrases must be int32 and have one dimension")
        if (counts < 2).any() or counts.sum() != len(tokens):
            raise ValueError("the counts of past phrases do not match their tokens")
        rows = [row.tolist() for row in np.split(tokens, np.cumsum(counts)[:-1])] if len(counts) else []
        merged: dict[int, NgramPool] = {}
        _enter(merged, ((row[0], tuple(row[1:])) for row in rows))
        with self._lock:
            _enter(merged, (ngram for pool in self._pools.values() for ngram in pool.ngrams()))
            self._pools = merged

    def figures(self) -> dict[str, Any]:
        return {"phrases": sum(len(pool) for pool in self._pools.values())}


def _enter(pools: dict[int, NgramPool], ngrams: Iterable[Ngram]) -> None:
    for key, tail in ngrams:
        length = len(tail) + 1
        if (pool := pools.get(length)) is None:
            pool = pools[length] = NgramPool(length, TAILS, CAPACITY)
        pool.add(key, tail)


class WarmPool(NgramPool):
    """A text's pool that knows those of past texts too.

    Args:
        ngram, guesses, capacity: see `NgramPool`.

    Attributes:
        past: of the drafter cache; None where nothing is kept between texts.
    """

    def __init__(self, ngram: int, guesses: int, capacity: int) -> None:
        super().__init__(ngram, guesses, capacity)
        self.past: PastPhrases | None = None

    def known(self, key: int) -> list[Tail]:
        own = super().known(key)
        if self.past is not None and len(own) < self.guesses:
            own += [tail for tail in self.past.known(key, self.ngram) if tail not in own]
        return own[: self.guesses]

    def get(self, key: int) -> list[Tail]:
        super().get(key)  # marks it
        return self.known(key)

    def peek(self, key: int) -> Tail | None:
        return next(iter(self.known(key)), None)
