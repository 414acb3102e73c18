"""Where the time of a step goes: the phases of `Stats.seconds`, shared between the sequences of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add

from leapahead.core.stats import PHASES, Stats


class Clock:
    """Charges the time since the last charge to a phase, and then each sequence with its share.

    Args:
        now: gives the time in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.last = now()
        self._charged = dict.fromkeys(PHASES, 0.0)  # that are not shared yet

    def charge(self, phase: str, choose: float = 0.0, part: float = 1.0) -> float:
        """Charges a phase; returns the seconds since the last charge.

        Args:
            choose: seconds of these that are charged to that phase instead.
            part: of the seconds that are charged at all.
        """
        last, self.last = self.last, self._now()
        seconds = self.last - last
        self._charged[phase] += part * seconds - choose
        self._charged["choose"] += choose
        return seconds

    def settle(self, batch: Sequence[Stats]) -> None:
        """Shares what was charged between these sequences, equally."""
        if not batch:
            return
        shares = [self._charged[phase] / len(batch) for phase in PHASES]
        for stats in batch:
            spent = stats.seconds
            spent.update(zip(PHASES, map(add, map(spent.__getitem__, PHASES), shares), strict=True))
        self._charged = dict.fromkeys(PHASES, 0.0)
