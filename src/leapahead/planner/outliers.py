"""The times of forwards that were far from what was expected, kept until something explains them.

The machine may have been interrupted, may have become slower for all sizes alike, or the size may really take so long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median

KEPT = 3  # the newest ones
NOISE, LEAST_NOISE, MOST_NOISE = 0.1, 0.05, 0.25  # log seconds of one step: the first estimate and its bounds
NOISE_RATE = 0.05  # weight of the newest step in the estimate of the noise
OUTLIER = 3.5  # times the noise

Error = Callable[[int, float], float]  # rows and log seconds -> by how much these exceed what is expected now


class Noise:
    """How much the times of steps of one size vary.

    Attributes:
        value: standard deviation of the log seconds of one step.
        threshold: error of log seconds beyond which a step is an outlier.
    """

    def __init__(self) -> None:
        self._set(NOISE)

    def learn(self, error: float) -> None:
        """Takes a step that was no outlier into account; of a normal distribution, sigma = 1.25 E|x|."""
        value = self.value + NOISE_RATE * (1.25 * abs(error) - self.value)
        self._set(min(max(value, LEAST_NOISE), MOST_NOISE))

    def _set(self, value: float) -> None:
        self.value, self.threshold = value, OUTLIER * value


class Outliers:
    """Rows and log seconds of drafted steps, in the order in which they came.

    Args:
        error: what a time exceeds the expectation by.
    """

    def __init__(self, error: Error) -> None:
        self._error = error
        self._kept: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, rows: int) -> bool:
        """Whether one of so many rows is kept."""
        return any(kept == rows for kept, _ in self._kept)

    def add(self, rows: int, value: float) -> None:
        """Keeps one."""
        self._kept.append((rows, value))

    def forget_oldest(self) -> None:
        """To be called when a step took as long as expected."""
        self._kept = self._kept[1:]

    def median(self) -> float:
        """Of their errors."""
        return median(self._error(*each) for each in self._kept)

    def agreeing(self, error: float, threshold: float) -> float | None:
        """The error of the newest one that is about as large as that of a plain step; None if there is none.

        An interruption concerns one forward, so such a pair shows that the machine's speed has changed.
        """
        errors = (self._error(*each) for each in reversed(self._kept))
        return next((each for each in errors if abs(each - error) <= threshold), None)

    def believed(self, threshold: float) -> dict[int, float]:
        """Rows -> log seconds, where one size took so long again; those and what is explained now are dropped.

        Two times must be alike, since interruptions differ in length; of three, the smallest counts.
        """
        left = [each for each in self._kept if abs(self._error(*each)) > threshold]
        times = defaultdict[int, list[float]](list)
        for rows, value in left:
            times[rows].append(value)
        found = {
            rows: min(some)
            for rows, some in times.items()
            if len(some) > 2 or (len(some) == 2 and abs(some[0] - some[1]) <= threshold)
        }
        self._kept = [each for each in left if each[0] not in found][-KEPT:]
        return found
