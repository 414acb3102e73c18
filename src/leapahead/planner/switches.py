"""How much longer a forward takes when the one before had another number of rows, learned from pairs of steps.

    plain, drafted, drafted         the first drafted step enters: it takes longer than the second one of its size
    drafted, plain, plain           the first plain step leaves: it takes longer than the second one

llama.cpp keeps the graph of the last size, so a plain step after a drafted one takes a little longer. OpenVINO prepares
every operation anew for another size, which may take as long as a plain step.
"""

from __future__ import annotations

from math import exp

MOST, RATE = 0.7, 0.1  # greatest log factor; least weight of the newest pair
FIRST, FIRST_RUN, RUN_RATE = 0.4, 8.0, 0.2  # where entering costs: what is assumed before it is known


class Switches:
    """The price of changes between plain and drafted steps.

    Args:
        both_ways: whether drafted steps take longer after plain ones, too; otherwise only plain ones after drafted ones
            do, and their price is that of one drafted step.
    """

    def __init__(self, both_ways: bool) -> None:
        self.both_ways = both_ways
        self._factors = [FIRST if both_ways else 0.0] * 2  # log factors of a plain step, and of a drafted one
        self._pairs = [0, 0]  # that they are the means of
        self._last: tuple[int, float] | None = None  # rows and log seconds of the last step, if it had another size
        self._run, self._usual = 0, [FIRST_RUN, FIRST_RUN]  # drafted (or minus plain) steps in a row; how many usually

    def seconds(self, was_plain: bool, plain: float, drafted: float) -> float:
        """Seconds to add to a drafted step.

        Where both ways cost, the price of both is spread over the drafted steps that usually follow each other; and a
        drafted step after another one saves it, spread over the plain steps that usually follow each other.

        Args:
            was_plain: whether the last step was a plain one.
            plain, drafted: seconds of a plain step, and of a small drafted one.
        """
        leaving = (exp(max(self._factors[0], 0.0)) - 1.0) * plain
        if not self.both_ways:
            return leaving if was_plain else 0.0
        both = leaving + (exp(max(self._factors[1], 0.0)) - 1.0) * drafted
        return both / self._usual[1] if was_plain else -both / self._usual[0]

    def observe(self, rows: int, value: float, resized: bool, is_plain: bool, wanted: bool) -> float:
        """Learns from a step.

        Args:
            rows: of its forward.
            value: its log seconds.
            resized: whether the forward before had another size.
            is_plain: whether it drafted nothing.
            wanted: whether a plain step was wanted, whatever could be drafted.

        Returns:
            By how much its log seconds exceed those of one after another of its size.
        """
        before, self._last = self._last, (rows, value) if resized else None
        if before is not None and not resized and before[0] == rows and (is_plain or self.both_ways):
            kind = 0 if is_plain else 1
            self._pairs[kind] += 1
            factor = min(max(before[1] - value, -MOST), MOST)
            self._factors[kind] += max(1 / (self._pairs[kind] + 1), RATE) * (factor - self._factors[kind])
        if not (is_plain and wanted):
            self._count(not is_plain)
        if not resized or not (is_plain or self.both_ways):
            return 0.0
        return max(self._factors[0 if is_plain else 1], 0.0)

    def _count(self, is_drafted: bool) -> None:
        """Counts steps of one kind in a row."""
        if self._run and (self._run > 0) != is_drafted:
            self._usual[not is_drafted] += RUN_RATE * (abs(self._run) - self._usual[not is_drafted])
            self._run = 0
        self._run += 1 if is_drafted else -1
