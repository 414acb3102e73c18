"""The n-gram pool of lookahead decoding: token sequences that followed a token before.

key token ──> at most G tails of N-1 tokens; the least recently used one is dropped      (2402.02057, section 3.2)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from leapahead.core.errors import BadParameter

Tail = tuple[int, ...]
Ngram = tuple[int, Tail]  # key, tail


class NgramPool:
    """N-grams by their first token, bounded per key and in total; the least recently used are dropped.

    Args:
        ngram: N, the length of an n-gram, key included; at least 2.
        guesses: G, greatest number of tails of one key.
        capacity: greatest number of n-grams in total.
    """

    def __init__(self, ngram: int, guesses: int, capacity: int) -> None:
        if ngram < 2 or guesses < 1 or capacity < 1:
            raise BadParameter(
                f"an n-gram pool with ngram={ngram}, guesses={guesses} and pool_capacity={capacity} is not possible: "
                "guesses and pool_capacity must be at least 1 and ngram at least 2"
            )
        self.ngram, self.guesses, self.capacity = ngram, guesses, capacity
        # Dicts as ordered sets, least recently used first: of the keys, and of the tails of each key.
        self._tails: dict[int, dict[Tail, None]] = {}
        self._size = 0
        self.lookups = self.hits = 0

    def __len__(self) -> int:
        return self._size

    def add(self, key: int, tail: Tail) -> None:
        """Enters an n-gram, or marks it as the most recent of its key."""
        tails = self._tails.pop(key, None) or {}
        self._tails[key] = tails
        if tail in tails:
            del tails[tail]
        else:
            self._size += 1
        tails[tail] = None
        if len(tails) > self.guesses:
            self._drop_oldest(key)
        while self._size > self.capacity:
            self._drop_oldest(next(iter(self._tails)))

    def _drop_oldest(self, key: int) -> None:
        tails = self._tails[key]
        del tails[next(iter(tails))]
        self._size -= 1
        if not tails:
            del self._tails[key]

    def add_text(self, tokens: Sequence[int], start: int = 0) -> None:
        """Enters every n-gram of `tokens` that ends at or after index `start`."""
        n = self.ngram
        for first in range(max(start - n + 1, 0), len(tokens) - n + 1):
            self.add(tokens[first], tuple(tokens[first + 1 : first + n]))

    def get(self, key: int) -> list[Tail]:
        """The tails of `key`, most recent first. Marks the key as used."""
        self.lookups += 1
        tails = self._tails.pop(key, None)
        if tails is None:
            return []
        self._tails[key] = tails
        self.hits += 1
        return list(reversed(tails))

    def peek(self, key: int) -> Tail | None:
        """The most recent tail of `key`, without marking the key as used or counting a look-up."""
        tails = self._tails.get(key)
        return next(reversed(tails)) if tails else None

    def known(self, key: int) -> list[Tail]:
        """As `get`, without marking the key as used or counting a look-up."""
        return list(reversed(self._tails.get(key, {})))

    def ngrams(self) -> list[Ngram]:
        """All n-grams, the least recently used key first, its tails oldest first.

        Entering them into an empty pool in this order gives an equal pool.
        """
        return [(key, tail) for key, tails in self._tails.items() for tail in tails]

    def figures(self) -> dict[str, Any]:
        """Number of prefixes (keys) and continuations (tails), fan-out (tails of a key), hit rate of look-ups."""
        fan_out = [len(tails) for tails in self._tails.values()]
        return {
            "prefixes": len(fan_out),
            "continuations": self._size,
            "fan_out": {
                "mean": round(self._size / len(fan_out), 4) if fan_out else 0.0,
                "median": median(fan_out) if fan_out else 0,
                "max": max(fan_out, default=0),
            },
            "lookups": self.lookups,
            "hit_rate": round(self.hits / self.lookups, 4) if self.lookups else 0.0,
        }
