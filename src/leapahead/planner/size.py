"""The sizes of forwards that a latency profile knows: each number of rows, and intervals where there are many."""

from __future__ import annotations

FINE = 16  # up to so many additional rows each number of rows is a size of its own; larger sizes are intervals
HOPE = 1.5  # standard deviations by which a time seen once may have been too long, see `Size.hope`
MOST_SEEN = 12  # times that count: the newest has a weight of at least one such part


class Size:
    """What steps have taught of one size.

    Attributes:
        rows: of the smallest forward that counts to it.
        largest: rows of the largest forward seen.
        correction: log factor on the prior.
        seen: how often, at most `MOST_SEEN`.
        agreed: 1 if the first time was as expected, so that the expectation counts as one more time; otherwise 0.
        first, last: the steps in which it was seen first and last.
    """

    def __init__(self, rows: int, correction: float, step: int) -> None:
        self.rows = self.largest = rows
        self.correction = correction
        self.seen = self.agreed = 0
        self.first = self.last = step

    @property
    def weight(self) -> float:
        """Of the next time in the mean of all."""
        return 1 / (self.seen + 1 + self.agreed)

    def learn(self, error: float, rows: int, step: int) -> None:
        """Corrects it by one time.

        Args:
            error: log factor between the time and what was expected.
            rows: of the forward.
            step: its number.
        """
        self.correction += max(self.weight, 1 / MOST_SEEN) * error
        self._note(min(self.seen + 1, MOST_SEEN), rows, step)

    def believe(self, error: float, rows: int, step: int) -> None:
        """Takes one time for the truth, and forgets the others; see `learn`."""
        self.correction += error
        self._note(1, rows, step)

    def _note(self, seen: int, rows: int, step: int) -> None:
        self.seen, self.last, self.largest = seen, step, max(self.largest, rows)

    def hope(self, noise: float) -> float:
        """Log factor by which it may take less time than the mean of the times seen says.

        Times that were too long by chance would keep a plan from this size for ever, while those that were too short
        are corrected by the steps that they lead to. This makes up for it.

        Args:
            noise: standard deviation of the log seconds of one step.
        """
        return HOPE * noise / (self.seen + self.agreed) if self.seen else 0.0


def interval(rows: int, first: int) -> int:
    """The smallest number of rows of the size that these rows count to.

    Args:
        rows: of a forward.
        first: rows of a plain step.
    """
    more = rows - first
    shift = max(more.bit_length() - FINE.bit_length() + 1, 0)
    return first + (more >> shift << shift)
