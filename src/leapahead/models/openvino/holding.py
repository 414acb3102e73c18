"""How long plain steps keep the number of rows of the drafted step before them.

OpenVINO prepares every operation anew for another number of rows. A plain step that is padded to the rows of the step
before it spares two changes, if the next step drafts again. Padding costs something in every step, the changes only
once, so rows are kept until the padding has cost as much as the changes would:

    steps  =  (leaving + entering) / (T(rows) - T(plain))

This is the rule of ski rental, which costs at most twice what would have been best in hindsight. There is a limit to
the number of padded steps beside it, see `HELD_ROWS`.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# Rows of plain steps that are padded, and their greatest number, in buckets. The planner asks for at most four plain
# steps in a row where it wants to know the time of one, so fewer are padded.
HELD_ROWS, HELD_BUCKETS = 8, 2
NEWEST = 5  # forwards of a kind whose median counts


class Holding:
    """Learns what padding and changes cost, and decides how many plain steps are padded."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], deque[float]] = {}  # by rows, and those of the forward before

    def observe(self, rows: int, before: int, seconds: float) -> None:
        """Takes a forward into account.

        Args:
            rows: of the forward.
            before: of the one before it; 0 where that was no step.
            seconds: that it took.
        """
        self._seconds.setdefault((rows, before), deque(maxlen=NEWEST)).append(seconds)

    def steps(self, plain: int, drafted: int) -> int:
        """How many plain steps in a row are padded: as many as are possible until the costs are known.

        Args:
            plain, drafted: rows of a plain step, and of the drafted one before.
        """
        most, kinds = HELD_ROWS // drafted, ((plain, plain), (drafted, drafted), (plain, drafted), (drafted, plain))
        if not all(kind in self._seconds for kind in kinds):
            return most
        same, padded, leaving, entering = (median(self._seconds[kind]) for kind in kinds)
        padding = padded - same
        return most if padding <= 0.0 else min(most, max(0, int((leaving - same + entering - padded) / padding)))
