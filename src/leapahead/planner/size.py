"""The sizes of forwards that a latency profile knows: each number of rows, and intervals where there are many."""

from __future__ import annotations

from math import log

FINE = 16  # up to so many additional rows each number of rows is a size of its own; larger sizes are intervals


class Size:
    """What steps have taught of one size.

    Attributes:
        rows: of the smallest forward that counts to it.
        largest: rows of the largest forward seen.
        correction: log factor on the prior.
        seen: how often, at most `MOST_SEEN`.
        first, last: the steps in which it was seen first and last.
    """

    def __init__(self, rows: int, correction: float, step: int) -> None:
        self.rows, self.log = rows, log(rows)
        self.largest = rows
        self.correction = correction
        self.seen = 0
        self.first = self.last = step


def interval(rows: int, first: int) -> int:
    """The smallest number of rows of the size that these rows count to.

    Args:
        rows: of a forward.
        first: rows of a plain step.
    """
    more = rows - first
    shift = max(more.bit_length() - FINE.bit_length() + 1, 0)
    return first + (more >> shift << shift)
