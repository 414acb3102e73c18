"""How much longer a forward takes when the one before had another number of rows, learned from pairs of steps.

    plain, drafted, drafted         the first drafted step enters: it takes longer than the second one of its size
    drafted, plain, plain           the first plain step leaves: it takes longer than the second one

llama.cpp keeps the graph of the last size, so a plain step after a drafted one takes a little longer. OpenVINO prepares
every operation anew for another size, which may take as long as a plain step. There, the decision to draft is one with
hysteresis: a change pays if the gain of drafting lasts. So the state in which a step leaves the machine has a value:

    value  =  HORIZON x mean gain of a drafted step over a plain one, lately       from -leaving to entering

The time that drafting takes is part of that gain. A plain step forgoes the value. With a lasting gain, entering is free
and drafting goes on over a few steps that do not pay; where drafting loses on the whole, it needs a step that pays for
entering and for leaving. A change between sizes of drafted steps counts as a part of its price, since such a size lasts
for a few steps.

Where OpenVINO has compiled a model several times (`TargetInfo.prepared`), plain and drafted steps in turns cost no more
than under llama.cpp, and so there is no hysteresis. A drafted step of a size that is not prepared takes longer, and is
charged with that: whole if another size is given up for it, else with the part that falls to it if the size is used
again. What plain steps take longer after a prompt, or in a batch of another size, is learned apart.
"""

from __future__ import annotations

from math import exp

from leapahead.planner.recent import Recent

MOST, RATE = 1.2, 0.1  # greatest log factor; least weight of the newest pair
FIRST = 0.4  # log factor where entering costs: what is assumed before it is known
HORIZON = 8.0  # steps for which a mean gain is expected to last
GAIN_RATE, MOST_GAIN_RATE = 0.15, 0.4  # weight of the newest gain in it, and after a pause
LASTS = 3.0  # drafted steps of one size that follow each other
STAYS = 8.0  # drafted steps of one size while it stays prepared


class Switches:
    """The price of changes between plain and drafted steps.

    Args:
        both_ways: whether drafted steps take longer after ones of another size, too; otherwise only plain ones after
            drafted ones do, and their price is that of one drafted step.
        prepared: see `TargetInfo.prepared`.
    """

    def __init__(self, both_ways: bool, prepared: int = 0) -> None:
        self.both_ways, self.prepared = both_ways, prepared
        leaving = FIRST if both_ways and not prepared else 0.0
        # Log factors of a plain step after a drafted one, of a drafted one, and of a plain one that is not prepared.
        self._factors = [leaving, *[FIRST if both_ways else 0.0] * 2]
        self._pairs = [0, 0, 0]  # that they are the means of
        # By whether they were plain: steps that wait for another of their size. Kind, rows and log seconds of each.
        self._waiting: dict[bool, tuple[int, int, float]] = {}
        self._gain: float | None = None  # mean seconds that a drafted step gained lately

    def prices(self, plain: float, drafted: float) -> tuple[float, float]:
        """Seconds that a plain step takes longer after a drafted one, and a drafted one after one of another size.

        Args:
            plain, drafted: seconds of a plain step, and of a small drafted one.
        """
        leaving, entering = ((exp(max(factor, 0.0)) - 1.0) for factor in self._factors[:2])
        return leaving * plain, entering * drafted

    def value(self, plain: float, drafted: float) -> float:
        """Seconds that it is worth to have drafted in the last step, where both ways cost: most before a gain is known.

        Args:
            plain, drafted: see `prices`.
        """
        leaving, entering = self.prices(plain, drafted)
        return entering if self._gain is None else min(max(HORIZON * self._gain, -leaving), entering)

    def changes(self, recent: Recent, first: int, plain: float, drafted: float) -> tuple[float, float]:
        """Seconds to add to a plain step now, and to a drafted one that has another size than those of `recent`.

        Args:
            recent: what the target is prepared for.
            first: rows of a plain step.
            plain, drafted: see `prices`.
        """
        leaving, entering = self.prices(plain, drafted)
        if self.prepared:
            return 0.0, entering if recent.evicts else entering / STAYS
        of_plain = max(self.value(plain, drafted), 0.0)
        if recent.last is not None and recent.last > first:
            return of_plain + leaving, entering / LASTS
        return of_plain, entering

    def observe_gain(self, seconds: float, steps: int = 1) -> None:
        """Takes into account what a drafted step gains over a plain one now, whether nodes were drafted or not.

        Args:
            seconds: gained.
            steps: since the last one that was observed; after a pause, a gain counts more.
        """
        rate = min(1.0 - (1.0 - GAIN_RATE) ** steps, MOST_GAIN_RATE)
        self._gain = seconds if self._gain is None else self._gain + rate * (seconds - self._gain)

    def observe(self, rows: int, value: float, is_plain: bool, resized: bool, unprepared: bool = False) -> float:
        """Learns from a step.

        Args:
            rows: of its forward.
            value: its log seconds.
            is_plain: whether it drafted nothing.
            resized, unprepared: see `RecentSizes.observe`.

        Returns:
            By how much its log seconds exceed those of one after another of its size.
        """
        before = self._waiting.pop(is_plain, None)
        if not (self.prepared and is_plain):  # else a drafted size stays prepared meanwhile
            self._waiting.clear()
        counts = is_plain or self.both_ways
        if not resized:
            if before is not None and before[1] == rows and counts:
                kind, _, longer = before
                self._pairs[kind] += 1
                factor = min(max(longer - value, -MOST), MOST)
                self._factors[kind] += max(1 / (self._pairs[kind] + 1), RATE) * (factor - self._factors[kind])
            return 0.0
        kind = 1 if not is_plain else 2 if self.prepared and unprepared else 0
        self._waiting[is_plain] = kind, rows, value
        return max(self._factors[kind], 0.0) if counts else 0.0
