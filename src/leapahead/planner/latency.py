"""The latency profile: T(n), the time of a target's forward by its number of token rows n, on this machine.

`LatencyProfile` holds T(n) for a fixed number of sequences and corrects it by the time of every step. This module knows
rows and seconds only: `planner.measurement` measures them, and `planner.profile` stores them.

The model of T(n):

    log T(n) = level + shape(n)       shape of the smallest size is 0; T is linear between the sizes that are kept

    level    how fast the machine is now, common to all n; drifts by a few percent per step
    shape    what n rows cost relative to the smallest size; hardly changes

Both are estimated together by a Kalman filter whose state is (level, shape at every size but the smallest). Its prior
covariance of the shape states how a profile may be wrong: the cost of additional rows by one common factor, and each
size by a small error of its own, which is correlated between neighbouring sizes:

    cov(i, j) = (error g_i)(error g_j) + SIZE_ERROR^2 2^-|log2 n_i - log2 n_j|,   g = additional rows' share of T(n)

So steps of 4 and 8 rows also correct the estimate for 16, a change of the level does not change the shape, and what is
known well changes little.

A step whose time is an outlier (a stopped process, a changed clock, a kernel compiled at its first use) is ignored,
unless more outliers follow soon: then the estimate was wrong, and its covariance is increased so that it can change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import log, sqrt
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
ASSUMED_SLOPE = 0.05  # cost of an additional row relative to the smallest size, where nothing was measured

# Standard deviations of the prior, in log seconds.
MEASURED_SLOPE_ERROR, ASSUMED_SLOPE_ERROR = 0.5, 1.5  # of the common factor of the cost of additional rows
SIZE_ERROR = 0.08  # of each size on its own
LEVEL_ERROR, UNKNOWN_LEVEL_ERROR = 0.3, 5.0

LEVEL_DRIFT = 0.06  # variance added to the level at each step, relative to the noise
SHAPE_DRIFT, SHAPE_DRIFT_STEPS = 2e-5, 16  # the same of the shape, relative to its prior; added every so many steps
NOISE, LEAST_NOISE, MOST_NOISE = 0.1, 0.03, 0.3  # log seconds of one step: the first estimate and its bounds
NOISE_RATE = 0.05  # weight of the newest step in the estimate of the noise

OUTLIER = 3.0  # standard deviations beyond which a step is an outlier
OUTLIERS_BELIEVED = 3.0  # after so many outliers in close succession the estimate is taken to be wrong
OUTLIER_DECAY = 0.25  # by which a step that is none lowers their count
MOST_WIDENING = 9.0  # greatest variance added to the shape then, relative to its prior


class LatencyProfile:
    """T(n) in seconds for one number of sequences: estimated at some sizes, linear between them and beyond the last.

    Args:
        seconds: rows -> seconds, for at least one size. If there is only one, the other sizes are assumed, each
            additional row at `ASSUMED_SLOPE` of it.
        level_error: standard deviation of the level, in log seconds.

    Attributes:
        steps: how many steps were observed.

    Raises:
        ValueError: no size, or sizes or seconds that are not positive and finite.
    """

    def __init__(self, seconds: Mapping[int, float], level_error: float = LEVEL_ERROR) -> None:
        sizes = sorted(seconds)
        if not sizes or sizes[0] < 1 or any(not 0 < seconds[n] < float("inf") for n in sizes):
            raise ValueError(f"a latency profile needs positive seconds of positive sizes, got {dict(seconds)}")
        slope_error = MEASURED_SLOPE_ERROR
        if len(sizes) == 1:
            (first,), slope_error = sizes, ASSUMED_SLOPE_ERROR
            sizes = [first, *(n for n in SIZES if n > first), *(() if first < SIZES[-1] else (2 * first,))]
            seconds = {n: seconds[first] * (1 + ASSUMED_SLOPE * (n - first)) for n in sizes}
        self.steps = 0
        self._sizes = sizes
        one = seconds[sizes[0]]
        self._state = np.array([log(one), *(log(seconds[n] / one) for n in sizes[1:])])  # level, shape of the others
        least = [ASSUMED_SLOPE * (n - sizes[0]) for n in sizes]  # a profile that seems flat may be wrong as well
        share = [max(1 - one / seconds[n], more / (1 + more)) for n, more in zip(sizes, least, strict=True)][1:]
        logs = np.log2(sizes[1:])
        self._prior = np.zeros((len(sizes), len(sizes)))
        self._prior[1:, 1:] = slope_error**2 * np.outer(share, share)
        self._prior[1:, 1:] += SIZE_ERROR**2 * 0.5 ** np.abs(logs[:, None] - logs[None, :])
        self._covariance = self._prior.copy()
        self._covariance[0, 0] = level_error**2
        self._noise = NOISE**2
        self._outlier_count = 0.0
        self._outliers: list[tuple[int, int, float]] = []  # (step, rows, log seconds)
        self._observed: set[int] = set()
        self._table: list[float] = []  # T at 0, 1, ... rows; empty when the state has changed

    @classmethod
    def guessed(cls) -> Self:
        """A profile without a measurement: its first step sets the level, and a few tens of steps the shape."""
        return cls({1: 1.0}, UNKNOWN_LEVEL_ERROR)

    def __call__(self, rows: int) -> float:
        """Seconds that a forward over so many rows is expected to take now."""
        if not self._table:
            values = np.exp(self._state[0] + np.concatenate(([0.0], self._state[1:])))
            self._table = np.interp(range(self._sizes[-1] + 1), self._sizes, values).tolist()
        if rows < len(self._table):
            return self._table[max(rows, 0)]
        low, high = self._sizes[-2:]
        slope = max(self._table[high] - self._table[low], 0.0) / (high - low)
        return self._table[high] + slope * (rows - high)

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows at which T is estimated, rising."""
        return list(self._sizes)

    def as_dict(self) -> dict[str, float]:
        """Rows -> seconds at every size, for files."""
        return {str(n): self(n) for n in self._sizes}

    def observe(self, rows: int, seconds: float) -> None:
        """Corrects the profile by a forward over so many rows that took so long."""
        if rows < 1 or not 0 < seconds < float("inf"):
            return
        value = log(seconds)
        self.steps += 1
        is_new, self._observed = rows not in self._observed, self._observed | {rows}
        if self._update(rows, value):
            self._outlier_count = max(0.0, self._outlier_count - OUTLIER_DECAY)
            if not self._outlier_count:
                self._outliers = []
        elif not is_new:  # the first forward of a size may compile a kernel or capture a graph
            self._outliers = [*self._outliers, (self.steps, rows, value)][-int(OUTLIERS_BELIEVED) :]
            self._outlier_count += 1
            if self._outlier_count >= OUTLIERS_BELIEVED:
                self._widen()

    def _widen(self) -> None:
        """Increases the covariance after several outliers and learns from those that agree with each other.

        If every step since the first of them was an outlier, by about the same factor, the level has changed; otherwise
        the shape may be wrong.
        """
        outliers, self._outliers, self._outlier_count = self._outliers, [], 0.0
        errors = [value - log(self(rows)) for _, rows, value in outliers]
        middle = median(errors)
        spread = median(abs(error - middle) for error in errors)
        consecutive = outliers[-1][0] - outliers[0][0] < len(outliers)
        self._covariance[0, 0] += middle**2
        wanted = (spread if consecutive else middle) ** 2 / self._prior.max()
        self._covariance += min(wanted, MOST_WIDENING) * self._prior
        for error, (_, rows, value) in zip(errors, outliers, strict=True):
            if abs(error - middle) <= 2 * spread + OUTLIER * sqrt(self._noise):
                self._update(rows, value)

    def _update(self, rows: int, value: float) -> bool:
        """One step of the Kalman filter; False, and the state stays, if log seconds `value` is an outlier."""
        self._covariance[0, 0] += LEVEL_DRIFT * self._noise
        if self.steps % SHAPE_DRIFT_STEPS == 0:
            self._covariance += SHAPE_DRIFT_STEPS * SHAPE_DRIFT * self._prior
        gradient = self._gradient(rows)
        spread = sum(weight * self._covariance[index] for index, weight in gradient)
        variance = float(sum(weight * spread[index] for index, weight in gradient)) + self._noise
        error = value - log(self(rows))
        if abs(error) > OUTLIER * sqrt(variance):
            return False
        self._state += spread * (error / variance)
        self._covariance -= np.outer(spread, spread) / variance
        self._table = []
        seen = error**2 * self._noise / variance  # the part of the squared error that is due to noise
        self._noise = min(max(self._noise + NOISE_RATE * (seen - self._noise), LEAST_NOISE**2), MOST_NOISE**2)
        return True

    def _gradient(self, rows: int) -> list[tuple[int, float]]:
        """The derivative of log T(rows) by the state, as (index, derivative) of those that are not 0."""
        right = bisect_right(self._sizes, rows)
        if right == 0 or (right == 1 and rows == self._sizes[0]):
            return [(0, 1.0)]
        if right == len(self._sizes):
            return [(0, 1.0), (right - 1, 1.0)]
        low, high = self._sizes[right - 1 : right + 1]
        share = (rows - low) / (high - low) * self(high) / self(rows)  # of T(rows) that comes from the size above
        below = [(right - 1, 1 - share)] if right > 1 else []
        return [(0, 1.0), *below, (right, share)]
