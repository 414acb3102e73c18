"""Where the time of a step goes: the phases of `Stats.seconds`, shared between the sequences of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leapahead.core.stats import PHASES, Stats


class Clock:
    """Charges the time since the last charge to a phase of `Stats.seconds`.

    Args:
        now: gives the time in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.last = now()
        self._charged = dict.fromkeys(PHASES, 0.0)  # that are not shared yet

    def charge(self, phase: str, choose: float = 0.0) -> None:
        """Charges a phase, until `settle`. Of the seconds since the last charge, `choose` are charged to that phase."""
        last, self.last = self.last, self._now()
        self._charged[phase] += self.last - last - choose
        self._charged["choose"] += choose

    def settle(self, batch: Sequence[Stats]) -> None:
        """Shares what was charged between these sequences, equally."""
        if not batch:
            return
        shares = [(phase, seconds / len(batch)) for phase, seconds in self._charged.items() if seconds]
        for stats in batch:
            spent = stats.seconds
            for phase, seconds in shares:
                spent[phase] += seconds
        self._charged = dict.fromkeys(PHASES, 0.0)

    def share(self, phase: str, batch: Sequence[Stats], part: float = 1.0) -> float:
        """Charges several sequences with equal shares of `part` of the seconds since the last charge. Returns these."""
        last, self.last = self.last, self._now()
        seconds = part * (self.last - last) / len(batch)
        for stats in batch:
            stats.seconds[phase] += seconds
        return self.last - last
