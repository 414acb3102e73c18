"""How much longer a forward takes when the one before had another number of rows, learned from pairs of steps.

    plain, drafted, drafted         the first drafted step enters: it takes longer than the second one of its size
    drafted, plain, plain           the first plain step leaves: it takes longer than the second one

llama.cpp keeps the graph of the last size, so a plain step after a drafted one takes a little longer. OpenVINO prepares
every operation anew for another size, which may take as long as a plain step. There, the decision to draft is one with
hysteresis: a change pays if the gain of drafting lasts. So the state in which a step leaves the machine has a value:

    value  =  HORIZON x mean gain of a drafted step over a plain one, lately       from -leaving to entering

A plain step forgoes it. With a lasting gain, entering is free and drafting goes on over a few steps that do not pay;
where drafting loses on the whole, it needs a step that pays for entering and for leaving. A change between sizes of
drafted steps counts as a part of its price, since such a size lasts for a few steps.
"""

from __future__ import annotations

from math import exp

MOST, RATE = 1.2, 0.1  # greatest log factor; least weight of the newest pair
FIRST = 0.4  # log factor where entering costs: what is assumed before it is known
HORIZON, GAIN_RATE = 8.0, 0.15  # steps for which a mean gain is expected to last; weight of the newest gain in it
LASTS = 3.0  # drafted steps of one size that follow each other


class Switches:
    """The price of changes between plain and drafted steps.

    Args:
        both_ways: whether drafted steps take longer after ones of another size, too; otherwise only plain ones after
            drafted ones do, and their price is that of one drafted step.
    """

    def __init__(self, both_ways: bool) -> None:
        self.both_ways = both_ways
        self._factors = [FIRST if both_ways else 0.0] * 2  # log factors of a plain step, and of a drafted one
        self._pairs = [0, 0]  # that they are the means of
        self._last: tuple[int, float] | None = None  # rows and log seconds of the last step, if it had another size
        self._gain: float | None = None  # mean seconds that a drafted step gained lately

    def prices(self, plain: float, drafted: float) -> tuple[float, float]:
        """Seconds that a plain step takes longer after a drafted one, and a drafted one after one of another size.

        Args:
            plain, drafted: seconds of a plain step, and of a small drafted one.
        """
        leaving, entering = ((exp(max(factor, 0.0)) - 1.0) for factor in self._factors)
        return leaving * plain, entering * drafted

    def value(self, plain: float, drafted: float) -> float:
        """Seconds that it is worth to have drafted in the last step, where both ways cost: most before a gain is known.

        Args:
            plain, drafted: see `prices`.
        """
        leaving, entering = self.prices(plain, drafted)
        return entering if self._gain is None else min(max(HORIZON * self._gain, -leaving), entering)

    def changes(self, was_drafted: bool, plain: float, drafted: float) -> tuple[float, float]:
        """Seconds to add to a plain step now, and to a drafted one that has another size than the last step.

        Args:
            was_drafted: whether the last step was a drafted one.
            plain, drafted: see `prices`.
        """
        leaving, entering = self.prices(plain, drafted)
        of_plain = max(self.value(plain, drafted), 0.0)
        return (of_plain + leaving, entering / LASTS) if was_drafted else (of_plain, entering)

    def observe_gain(self, seconds: float) -> None:
        """Takes into account what a drafted step gains over a plain one now, whether nodes were drafted or not."""
        self._gain = seconds if self._gain is None else self._gain + GAIN_RATE * (seconds - self._gain)

    def observe(self, rows: int, value: float, resized: bool, is_plain: bool) -> float:
        """Learns from a step.

        Args:
            rows: of its forward.
            value: its log seconds.
            resized: whether the forward before had another size.
            is_plain: whether it drafted nothing.

        Returns:
            By how much its log seconds exceed those of one after another of its size.
        """
        before, self._last = self._last, (rows, value) if resized else None
        if before is not None and not resized and before[0] == rows and (is_plain or self.both_ways):
            kind = 0 if is_plain else 1
            self._pairs[kind] += 1
            factor = min(max(before[1] - value, -MOST), MOST)
            self._factors[kind] += max(1 / (self._pairs[kind] + 1), RATE) * (factor - self._factors[kind])
        if not resized or not (is_plain or self.both_ways):
            return 0.0
        return max(self._factors[0 if is_plain else 1], 0.0)
