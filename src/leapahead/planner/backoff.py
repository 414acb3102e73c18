"""Suspends what did not pay, for longer each time (exponential back-off)."""

from __future__ import annotations

from collections.abc import Sequence

GAIN_PART = 0.5  # of what a draft is expected to gain, that further ones which do not pay may cost
MOST_CREDIT = 0.5  # plain steps


class BackOff:
    """After consecutive drafts that did not pay, drafting is suspended with exponential back-off.

    The suspension takes 1, 2, 4, ... steps, up to a limit, and ends at the first draft that pays. It begins when drafts
    that do not pay have cost a part of what those before them gained: after a run of copied text there are a few tokens
    that nothing foresees, and the next run is not to be missed.

    Args:
        credit: plain steps that drafts may cost before any has paid, at most `MOST_CREDIT`.

    Attributes:
        remaining: steps for which it is suspended still.
        usual: steps of the longest suspension where drafts are not worth far less than they cost.
    """

    def __init__(self, credit: float = 0.0) -> None:
        self.remaining = self.usual = 0
        self._last = 0  # steps of the last suspension
        self._credit = min(credit, MOST_CREDIT)

    def update(self, paid: bool, longest: int, gain: float = 0.0, cost: float = 1.0) -> None:
        """Takes the outcome of a draft into account.

        Args:
            paid: whether it was worth its cost.
            longest: greatest number of steps of a suspension; 0 for none.
            gain: plain steps that it is expected to gain, if it paid.
            cost: plain steps that it took, if it did not.
        """
        if paid:
            self._last, self._credit = 0, min(self._credit + GAIN_PART * gain, MOST_CREDIT)
        elif self._credit >= cost:
            self._last, self._credit = 0, self._credit - cost
        else:
            self._last = min(max(1, 2 * self._last), longest)
        self.remaining = self._last

    def carried(self) -> BackOff:
        """The back-off with which a next text begins: a suspension goes on, for at most `usual` steps."""
        carried = BackOff()
        carried.usual, carried._last = self.usual, min(self._last, self.usual)
        carried.remaining = min(self.remaining, self.usual)
        return carried

    def suspended(self) -> bool:
        """Whether drafting is suspended in this step. To be called once per step: it counts the steps."""
        if self.remaining == 0:
            return False
        self.remaining -= 1
        return True


def suspend_together(back_offs: Sequence[BackOff]) -> None:
    """Makes all suspensions end in the same step, since asking for one sequence takes as long as for a few."""
    longest = max((back_off.remaining for back_off in back_offs), default=0)
    for back_off in back_offs:
        back_off.remaining = longest
