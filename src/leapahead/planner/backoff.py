"""Suspends what did not pay, for longer each time (exponential back-off)."""

from __future__ import annotations


class BackOff:
    """After consecutive drafts that did not pay, drafting is suspended with exponential back-off.

    The suspension takes 1, 2, 4, ... steps, up to a limit, and ends at the first draft that pays.

    Attributes:
        remaining: steps for which it is suspended still.
    """

    def __init__(self) -> None:
        self.remaining = 0
        self._last = 0  # steps of the last suspension

    def update(self, paid: bool, longest: int) -> None:
        """Takes the outcome of a draft into account.

        Args:
            paid: whether it was worth its cost.
            longest: greatest number of steps of a suspension; 0 for none.
        """
        self._last = 0 if paid else min(max(1, 2 * self._last), longest)
        self.remaining = self._last

    def suspended(self) -> bool:
        """Whether drafting is suspended in this step. To be called once per step: it counts the steps."""
        if self.remaining == 0:
            return False
        self.remaining -= 1
        return True
