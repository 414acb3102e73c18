"""How likely is a candidate to be the target's choice? Learned from what happened to candidates like it.

A candidate has a key, from coarse to fine: (source, rank, match length, share, ...). The estimate of each beginning of
the key leans on that of the one before, as on so many trials of its own, which is a Beta prior with that mean:

    p(k1 .. kn) = (hits + LEAN * p(k1 .. kn-1)) / (trials + LEAN)

Old trials fade: a cell that is full is halved. A trial is a candidate whose parent the text went through, whether it
was drafted or not; so a source is known before its first node is paid for, and goes on being known while none is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from threading import Lock
from typing import Any

Key = tuple[Hashable, ...]

LEAN = 6.0
FULL = 300.0  # trials of a cell; older ones count half, a quarter, ...
UNKNOWN = 0.25
HOPED, START, FADE = 6.0, 0.9, 0.98  # of a text: the prior's weight in expected hits and its mean; what a hit fades by
KEPT = 256  # trials for which an estimate is used before it is made again: they move slowly, and drafts must be quick


class Trust:
    """How far the estimates hold for this text: some are harder to guess than others, and most are at their beginning.

        factor = (hits + HOPED * start) / (hits that were expected + HOPED)

    Args:
        start: the factor before anything was seen.
    """

    def __init__(self, start: float = START) -> None:
        self._prior = HOPED * start
        self._hits, self._expected = self._prior, HOPED

    @property
    def factor(self) -> float:
        """What an estimate is multiplied by."""
        return self._hits / self._expected

    def learn(self, expected: float, hit: bool) -> None:
        """One place of the text: how likely it was that a guess is right, before this factor, and whether one was."""
        self._hits = FADE * (self._hits - self._prior) + hit + self._prior
        self._expected = FADE * (self._expected - HOPED) + expected + HOPED


class Calibration:
    """Counts by key, shared by the requests of a process.

    Args:
        priors: key -> probability, where nothing was counted yet; of any length.
    """

    def __init__(self, priors: Mapping[Key, float] | None = None) -> None:
        self.priors = dict(priors or {})
        self._cells: dict[Key, list[float]] = {}  # [hits, trials]
        self._lock = Lock()
        self._estimates: dict[Key, float] = {}
        self._learned = 0

    def probability(self, key: Key) -> float:
        """The estimate of a key, a few hundred trials old at most."""
        found = self._estimates.get(key)
        if found is None:
            found = self._estimates[key] = self.estimate(key)
        return found

    def estimate(self, key: Key, unknown: float = UNKNOWN) -> float:
        """The estimate of a key just now; `unknown` is what the shortest beginning leans on."""
        estimate, cells, priors = unknown, self._cells, self.priors
        for end in range(1, len(key) + 1):
            part = key[:end]
            estimate = priors.get(part, estimate)
            cell = cells.get(part)
            if cell is not None:
                estimate = (cell[0] + LEAN * estimate) / (cell[1] + LEAN)
        return estimate

    def learn(self, key: Key, hit: bool) -> None:
        """One trial, of the key and all its beginnings."""
        with self._lock:
            self._learned += 1
            if self._learned % (KEPT if self._learned > KEPT else 8) == 0:
                self._estimates = {}
            for end in range(1, len(key) + 1):
                cell = self._cells.setdefault(key[:end], [0.0, 0.0])
                cell[0] += hit
                cell[1] += 1.0
                if cell[1] > FULL:
                    cell[0] *= 0.5
                    cell[1] *= 0.5

    def rows(self, longest: int = 99) -> list[dict[str, Any]]:
        """Every cell, or those of keys up to a length, as plain types: for `stats` and for priors."""
        with self._lock:
            cells = [(key, hits, trials) for key, (hits, trials) in self._cells.items() if len(key) <= longest]
        return [
            {"key": list(key), "hits": round(hits, 2), "trials": round(trials, 2), "p": round(self.estimate(key), 4)}
            for key, hits, trials in sorted(cells, key=lambda each: repr(each[0]))
        ]
