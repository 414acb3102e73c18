"""Acceptance estimates: how likely a candidate is to be the target's choice, learned from similar candidates.

A candidate has a key, from coarse to fine: (source, greedy or sampled, rank, match length, ...). The estimate of each
prefix of the key is the mean of a Beta posterior whose prior is the estimate of the next shorter prefix, counted as
`PRIOR_TRIALS` trials:

    p(k1 .. kn) = (hits + PRIOR_TRIALS * p(k1 .. kn-1)) / (trials + PRIOR_TRIALS)

Old trials lose weight: the counts of a key are halved when they reach `MOST_TRIALS`. A trial is a candidate whose
parent is on the committed path, whether the candidate was drafted or not. So a source is calibrated before any of its
candidates is drafted, and remains so while none is.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leapahead.core.forks import Mutex
from leapahead.planner.mixer import Mixer, Row

if TYPE_CHECKING:
    from typing import Self

Key = tuple[Hashable, ...]

PRIORS = Path(__file__).parent / "priors.json"
PRIOR_TRIALS = 6.0
MOST_TRIALS = 300.0
UNKNOWN = 0.25  # the estimate of a key of which nothing is known
REFRESH, FIRST_REFRESH = 256, 8  # trials after which kept estimates are computed anew: later, and at first

# Of a request's correction: weight of the prior in expected hits, its mean, and what every trial's weight decays by.
CORRECTION_WEIGHT, CORRECTION_START, CORRECTION_DECAY = 6.0, 1.0, 0.98


class Correction:
    """A request's factor on the acceptance estimates, since some texts are harder to predict than others.

        factor = (hits + CORRECTION_WEIGHT * start) / (expected hits + CORRECTION_WEIGHT)

    Args:
        start: the factor before anything was observed.
    """

    def __init__(self, start: float = CORRECTION_START) -> None:
        self._prior = CORRECTION_WEIGHT * start
        self._hits, self._expected = self._prior, CORRECTION_WEIGHT

    @property
    def factor(self) -> float:
        """By which an estimate is multiplied."""
        return self._hits / self._expected

    def learn(self, expected: float, hit: bool) -> None:
        """Takes one position of the text into account.

        Args:
            expected: the estimated probability, before the factor, that one of the candidates is right.
            hit: whether one was.
        """
        self._hits = CORRECTION_DECAY * (self._hits - self._prior) + hit + self._prior
        self._expected = CORRECTION_DECAY * (self._expected - CORRECTION_WEIGHT) + expected + CORRECTION_WEIGHT


class AcceptanceTable:
    """Hits and trials by key, shared by all requests of an engine. Thread-safe.

    Args:
        priors: key prefix of any length -> the estimate before anything was counted.
        mixer: parameters with which the mixer begins.

    Attributes:
        mixer: makes one probability of the estimates of several sources.
    """

    def __init__(self, priors: Mapping[Key, float] | None = None, mixer: Iterable[Row] = ()) -> None:
        self.priors = dict(priors or {})
        self.mixer = Mixer(mixer)
        self._counts: dict[Key, list[float]] = {}  # [hits, trials]
        self._lock = Mutex()
        self._estimates: dict[Key, float] = {}
        self._learned = 0

    @classmethod
    def with_priors(cls) -> Self:
        """A table that begins with the measured priors of this package."""
        return cls(*priors())

    def probability(self, key: Key) -> float:
        """The estimate of a key, at most `REFRESH` trials old."""
        found = self._estimates.get(key)
        if found is None:
            found = self._estimates[key] = self.estimate(key)
        return found

    def estimate(self, key: Key, unknown: float = UNKNOWN) -> float:
        """The present estimate of a key.

        Args:
            key: from coarse to fine.
            unknown: the prior of the shortest prefix, where the priors have none.
        """
        estimate = unknown
        for end in range(1, len(key) + 1):
            prefix = key[:end]
            estimate = self.priors.get(prefix, estimate)
            counts = self._counts.get(prefix)
            if counts is not None:
                estimate = (counts[0] + PRIOR_TRIALS * estimate) / (counts[1] + PRIOR_TRIALS)
        return estimate

    def learn(self, key: Key, hit: bool) -> None:
        """Counts one trial for the key and all its prefixes."""
        with self._lock:
            self._learned += 1
            if self._learned % (REFRESH if self._learned > REFRESH else FIRST_REFRESH) == 0:
                self._estimates = {}
            for end in range(1, len(key) + 1):
                counts = self._counts.setdefault(key[:end], [0.0, 0.0])
                counts[0] += hit
                counts[1] += 1.0
                if counts[1] > MOST_TRIALS:
                    counts[0] *= 0.5
                    counts[1] *= 0.5

    def rows(self, longest: int = 99) -> list[dict[str, Any]]:
        """The counts and estimates of all keys up to a length, as plain types, for `Stats.drafter` and for priors."""
        with self._lock:
            counts = [(key, hits, trials) for key, (hits, trials) in self._counts.items() if len(key) <= longest]
        return [
            {"key": list(key), "hits": round(hits, 2), "trials": round(trials, 2), "p": round(self.estimate(key), 4)}
            for key, hits, trials in sorted(counts, key=lambda each: repr(each[0]))
        ]


@cache
def priors() -> tuple[dict[Key, float], list[Row]]:
    """What was measured on other texts, from `priors.json`: shares of accepted candidates by key, and the mixer."""
    read = json.loads(PRIORS.read_text(encoding="utf-8"))
    return {tuple(key): p for key, p in read["estimates"]}, [tuple(row) for row in read["mixer"]]
