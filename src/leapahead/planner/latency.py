"""The latency profile: T(n), the time of a target's forward by its number of token rows n, on this machine.

`LatencyProfile` holds T(n) for a fixed number of sequences. This module knows rows and seconds only:
`planner.measurement` measures them, and `planner.profile` stores them.

    T(n) = plain x prior(n) x correction(n)

    plain       seconds of a plain step, the smallest forward; set by the first step and moved by every other one; where
                changes of the size cost much (buckets), not by plain steps that come right after other forwards
    prior       T(n) relative to a plain step as it was stored or measured before, or an assumed straight line
    correction  1 for a plain step; known at the sizes that were seen in this process, interpolated between them,
                constant beyond the largest

So the prior gives a shape and nothing about the level, and it is overruled by every size that is seen; where it agrees
with the first time of a size, it counts as much as that. Where steps contradict it, it is dropped, and the assumed line
is in its place.

A plan may not trust T(n) at sizes that no step of this process has had (`planned`): they are limited to about twice the
largest size seen, and beyond that size the lowest of the prior, the assumed line, and the slope up to that size counts.
So a size that may pay is tried, by steps that cannot cost much, and is then known; one that few steps have had, with
less time (`Size.hope`).

A step whose time is far from T(n), or a first one that is far from what was measured, teaches nothing at once, since
the machine may have been interrupted or have become slower for all sizes alike. A plain step is wanted then
(`wants_plain`), and tells which: if it is as far from what was expected, the speed has changed. Without plain steps,
several such steps in a row are a change of the speed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping
from itertools import pairwise
from math import ceil, exp, inf, log
from operator import attrgetter
from typing import TYPE_CHECKING

from leapahead.planner.outliers import Noise, Outliers
from leapahead.planner.recent import NO_FORWARD, Recent
from leapahead.planner.size import MOST_SEEN, Size, interval
from leapahead.planner.switches import Switches

if TYPE_CHECKING:
    from typing import Self

# Up to 16 every n, since kernels that compute several rows at once make T rise and fall (llama.cpp: in fours).
SIZES = (*range(1, 17), 24, 32, 48, 64, 96, 128)
# Cost of an additional row, where nothing is known, relative to a forward of one row; where a plain step has several,
# relative to the mean of that and a plain step.
ASSUMED_SLOPE = 0.1
LEAST_SLOPE, LEAST_SHAPE = 0.01, 1e-3  # relative to a plain step, at least: a row beyond a prior's last size; any T

# Rows of a planned forward, at most: so many times the largest that was seen, or so many more.
TRUSTED_GROWTH, TRUSTED_ROWS = 2, 3
FREE = 1.03  # of the prior: more rows cost nothing if they take no more than so many times as long
CONTRADICTED = log(1.4)  # log factor between prior and steps from which the prior is dropped
UNEXPECTED = log(2.0)  # log factor between the first time of a size and the prior; more must be seen twice
LEAST_RATIO = log(0.7)  # of a forward to a plain step; less is an outlier
AGREES = 2.0  # times the noise: up to this far from the first time of a size, the expectation counts as one more time
BELIEVED = 2  # times that a size must have been seen before it is stored or contradicts the prior
STALE = 128  # steps after which a size that was seen once is forgotten; twice as many if it was seen twice, ...

LEVEL_GAIN, PLAIN_GAIN = 0.1, 0.2  # weight of a drafted step, and least weight of a plain step, in the level
OUTLIERS_BELIEVED = 3  # without a plain step between them, a change of the level
# Drafted steps between two plain steps: at first, after a change, at most; so many times as many with buckets.
FIRST_PAUSE, CHANGE_PAUSE, LONGEST_PAUSE, BUCKET_PAUSES = 4, 16, 64, 4


class LatencyProfile:
    """T(n) in seconds for one number of sequences.

    Args:
        seconds: rows -> seconds, for at least one size. The smallest is a plain step; of one alone see `ASSUMED_SLOPE`.
        fixed: these are the times, whatever steps take: nothing is learned, nothing is distrusted.
        assumed: the seconds were not measured, or not reliably, so only what steps have seen is stored.
        bucket, prepared: see `TargetInfo`.

    Attributes:
        steps: how many steps were observed.
        switches: what changes of the size cost.
        contradicted: whether steps have shown that the seconds given were wrong.

    Raises:
        ValueError: no size, or sizes or seconds that are not positive and finite.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        fixed: bool = False,
        assumed: bool = False,
        bucket: int = 1,
        prepared: int = 0,
    ) -> None:
        sizes = sorted(seconds)
        if not sizes or sizes[0] < 1 or any(not 0 < seconds[n] < float("inf") for n in sizes):
            raise ValueError(f"a latency profile needs positive seconds of positive sizes, got {dict(seconds)}")
        self.fixed, self.assumed, self.steps, self.contradicted = fixed, assumed, 0, False
        self.bucket, self.prepared = bucket, prepared
        self.changes_cost = bucket > 1 and not prepared  # plain and drafted steps in turns are far slower
        self._first = sizes[0]
        self._prior = {n: seconds[n] / seconds[self._first] for n in sizes} if len(sizes) > 1 else {}
        self._level = log(seconds[self._first])
        self._sizes = [Size(self._first, 0.0, 0)]  # the plain step, and what was seen of others
        self._noise = Noise()
        self._held: float | None = None  # log seconds of a plain step that was an outlier
        self._outliers = Outliers(self._error)  # of others
        self._in_doubt = False  # an outlier came since the last plain step
        self.switches = Switches(bucket > 1, prepared)
        self._pauses = BUCKET_PAUSES if self.changes_cost else 1
        self._since_plain, self._pause, self._plain_step = 0, self._pauses * FIRST_PAUSE, 0
        self._shapes: list[float] = []  # the prior by rows, as far as it was needed
        self._plans: list[float] = []  # `planned` by rows; empty where it must be computed anew, as the next
        self._breaks: list[int] = []  # `sizes`

    @classmethod
    def guessed(cls, bucket: int = 1, prepared: int = 0) -> Self:
        """A profile without a measurement: its first step sets the level, and others the shape."""
        return cls({1: 1.0}, bucket=bucket, prepared=prepared)

    # ------------------------------------------------------------------------------------------------ reading

    def __call__(self, rows: int) -> float:
        """Seconds that a forward over so many rows, and their padding, is expected to take now."""
        plain = exp(self._level)
        return plain if rows <= self._first else plain * self._relative(self._padded(rows))

    def _padded(self, rows: int) -> int:
        """The rows of a forward over so many, padding included."""
        return rows if rows <= self._first else -(-rows // self.bucket) * self.bucket

    def planned(self, rows: int, recent: Recent = NO_FORWARD) -> float:
        """Seconds to plan with: infinite outside the trusted region, hopeful at sizes that no step has had yet.

        Args:
            rows: of the forward.
            recent: what the target is prepared for. Where sizes are padded to buckets, what a change costs is added.
        """
        if self.fixed:
            return self(rows) + self._change(rows, recent, *self._changes(recent))
        plans = self.plans(recent)
        return plans[rows] if rows < len(plans) else float("inf")

    def plans(self, recent: Recent = NO_FORWARD) -> list[float]:
        """`planned` of 0, 1, 2, ... rows, as far as the trusted region goes; of a profile that is not fixed."""
        found = self._plans or self._make_plans()
        if self.bucket == 1:
            return found
        changes = self._changes(recent)
        return [seconds + self._change(rows, recent, *changes) for rows, seconds in enumerate(found)]

    def _changes(self, recent: Recent) -> tuple[float, float]:
        """See `Switches.changes`; nothing where the price is one of drafted steps."""
        return self.switches.changes(recent, self._first, *self._ends) if self.bucket > 1 else (0.0, 0.0)

    def _change(self, rows: int, recent: Recent, plain: float, drafted: float) -> float:
        """Seconds by which a forward takes longer than after one of its size, by the prices of both kinds."""
        if rows <= self._first:
            return plain
        return 0.0 if recent.has(self._padded(rows)) else drafted

    @property
    def largest(self) -> int:
        """The largest number of rows that a step of this process has had, as far as it is remembered."""
        return self._sizes[-1].largest

    @property
    def trusted(self) -> int:
        """The greatest number of rows that a plan may have; more where further blocks of rows cost nothing."""
        most = self._padded(max(TRUSTED_GROWTH * self.largest, self.largest + TRUSTED_ROWS))
        blocks = range(most, TRUSTED_GROWTH * most + 1, self.bucket) if self.bucket > 1 and self._prior else ()
        return max((n for n in blocks if self._shape(n) <= FREE * self._shape(most)), default=most)

    @property
    def wants_plain(self) -> bool:
        """Whether the next step should be a plain one: it tells what the others are to be compared with."""
        if self.fixed:
            return False
        unknown = not self._sizes[0].seen or self._held is not None
        in_doubt = self._in_doubt and (not self.changes_cost or len(self._outliers) > 1)
        return unknown or in_doubt or self._since_plain >= self._pause

    def resizing(self, recent: Recent) -> float:
        """Seconds to add to every drafted step, since forwards of another size take longer; see `planned`."""
        if self.changes_cost:
            return max(-self.switches.value(*self._ends), 0.0)
        return self.leaving if recent.last is None or recent.last <= self._first else 0.0

    @property
    def leaving(self) -> float:
        """Seconds that the first plain step after drafted ones takes longer than others."""
        return self.switches.prices(*self._ends)[0]

    @property
    def _ends(self) -> tuple[float, float]:
        """Seconds of a plain step, and of the smallest drafted one, which counts where sizes are padded to buckets."""
        plain = exp(self._level)
        return plain, self(self._first + 1) if self.bucket > 1 else plain

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows at which T changes its slope, rising; at least two."""
        if not self._breaks:
            own = self._prior or [n for n in SIZES if n > self._first] or [2 * self._first]
            self._breaks = sorted({self._padded(n) for n in (*own, *(size.rows for size in self._sizes))})
        return self._breaks

    def as_dict(self) -> dict[str, float]:
        """Rows -> seconds at every size, for reports."""
        return {str(n): self(n) for n in self.sizes}

    def to_store(self) -> dict[int, float]:
        """Rows -> seconds at the sizes that were measured and not contradicted since, and at those steps have had."""
        seen = [size.rows for size in self._sizes if size.seen >= BELIEVED]
        given = [] if self.assumed else list(self._prior)
        return {n: self(n) for n in sorted({self._first, *given, *seen})}

    def _relative(self, rows: int) -> float:
        """T(rows) / T(plain step)."""
        if rows <= self._first:
            return 1.0
        at = bisect_right(self._sizes, rows, key=attrgetter("rows"))
        low = self._sizes[at - 1]
        factor = exp(low.correction)
        if at < len(self._sizes):
            high = self._sizes[at]
            factor += (exp(high.correction) - factor) * (rows - low.rows) / (high.rows - low.rows)
        return self._shape(rows) * factor

    def _make_plans(self) -> list[float]:
        """`planned` of all rows of the trusted region."""
        plain, sizes, seen = exp(self._level), self._sizes, self.largest
        trusted = self.trusted
        self._shapes += [self._shape(n) for n in range(len(self._shapes), trusted + 1)]
        shapes, found = self._shapes, [plain] * (self._first + 1)
        factors = [plain * self._hopeful(size) for size in sizes]
        for (low, factor), (high, then) in pairwise(zip(sizes, factors, strict=True)):
            start, slope = low.rows, (then - factor) / (high.rows - low.rows)
            found += [shapes[n] * (factor + slope * (n - start)) for n in range(start + 1, high.rows + 1)]
        found += [shape * factors[-1] for shape in shapes[len(found) : trusted + 1]]
        hope, slope = found[seen] / self._line(seen), (found[seen] - plain) / max(seen - self._first, 1)
        slope = max(slope, LEAST_SLOPE * plain) if seen > self._first else inf
        for n in range(seen + 1, len(found)):
            found[n] = min(found[n], hope * self._line(n), found[seen] + slope * (n - seen))
        if self.bucket > 1:
            found = [found[min(self._padded(n), len(found) - 1)] for n in range(len(found))]
        self._plans = found
        return found

    def _hopeful(self, size: Size) -> float:
        """The factor on the prior to plan with."""
        return exp(size.correction - size.hope(self._noise.value) * (size.rows > self._first))

    def _shape(self, rows: int) -> float:
        """The prior: linear between its sizes, rising beyond the last."""
        if rows <= self._first:
            return 1.0
        if not self._prior:
            return self._line(rows)
        sizes = list(self._prior)
        at = min(bisect_right(sizes, rows), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        slope = (self._prior[high] - self._prior[low]) / (high - low)
        if rows > high:
            return self._prior[high] + max(slope, 0.0 if self.fixed else LEAST_SLOPE) * (rows - high)
        return max(self._prior[low] + slope * (rows - low), LEAST_SHAPE)

    def _line(self, rows: int) -> float:
        return 1.0 + ASSUMED_SLOPE * (rows - self._first) / (1.0 + ASSUMED_SLOPE / 2 * (self._first - 1))

    # ----------------------------------------------------------------------------------------------- learning

    def observe(self, rows: int, seconds: float, resized: bool = False, unprepared: bool = False) -> None:
        """Corrects the profile by a forward over so many rows that took so long.

        Args:
            rows: of the forward.
            seconds: that it took.
            resized, unprepared: see `RecentSizes.observe`.
        """
        if self.fixed or rows < 1 or not 0 < seconds < float("inf"):
            return
        self.steps += 1
        is_plain, value = rows <= self._first, log(seconds)
        value -= self.switches.observe(rows, value, is_plain, resized, unprepared)
        if not is_plain:
            self._since_plain += 1
            self._observe_larger(rows, value)
        elif not (unprepared and self.bucket > 1):  # otherwise only the next plain step shows what the change took
            self._observe_plain(value)
        if self.steps % STALE == 0:
            self._sizes[1:] = [size for size in self._sizes[1:] if self.steps - size.last <= STALE * size.seen]
            self._breaks = []
        self._plans = []

    def _observe_plain(self, value: float) -> None:
        plain, error = self._sizes[0], value - self._level
        if self._since_plain >= self._pause:
            self._pause = min(2 * self._pause, self._pauses * LONGEST_PAUSE)
        self._since_plain, self._in_doubt = 0, False
        if not plain.seen:  # the first of a process may be slow, so it counts if it is as expected, or for the second
            plain.seen = int(self._held is not None or abs(error) <= self._noise.threshold)
            self._move_level(error if self._held is None else min(error, 0.0))
            self._held = None if plain.seen else value
        elif abs(error) <= self._noise.threshold:
            self._noise.learn(error)
            plain.seen = min(plain.seen + 1, MOST_SEEN)
            self._level += error * max(1 / plain.seen, PLAIN_GAIN)
            self._held = None
            self._believe_outliers()
        elif self._held is not None and abs(value - self._held) <= self._noise.threshold:
            self._change_level((value + self._held) / 2 - self._level)
        elif self._held is None and (other := self._outliers.agreeing(error, self._noise.threshold)) is not None:
            self._change_level((error + other) / 2)
        else:
            self._held = value
            return
        self._plain_step = self.steps

    def _move_level(self, change: float) -> None:
        """The speed has changed. Sizes seen first since the last plain step were compared with a wrong one."""
        self._level += change
        for size in self._sizes[1:]:
            if size.first > self._plain_step:
                size.correction -= change

    def _change_level(self, change: float) -> None:
        """The speed changed, perhaps before sizes were seen first since the last plain step; they are forgotten."""
        self._level += change
        self._sizes = [size for size in self._sizes if size.first <= self._plain_step]
        self._breaks = []
        self._held, self._pause = None, self._pauses * CHANGE_PAUSE
        self._believe_outliers()

    def _believe_outliers(self) -> None:
        """Drops the outliers that the level explains, and learns from others that came again for as many rows."""
        found = self._outliers.believed(self._noise.threshold) if self._outliers else {}
        for rows, value in found.items():
            self._size(rows).believe(self._error(rows, value), rows, self.steps)

    def _error(self, rows: int, value: float) -> float:
        """By how much log seconds exceed what was expected."""
        return value - self._level - log(self._relative(rows))

    def _observe_larger(self, rows: int, value: float) -> None:
        error = self._error(rows, value)
        if len(self._sizes) == 1 and not self._sizes[0].seen:
            self._level, error = self._level + error, 0.0  # the first step of all sets the level
        size = self._find(rows)
        if size is None:
            ratio = value - self._level
            most = ceil(rows / self.largest) * self._relative(self.largest)  # as so many forwards
            unexpected = bool(self._prior) and error > UNEXPECTED and not self._outliers.has(rows)
            if unexpected or not LEAST_RATIO <= ratio <= log(max(most, self._relative(rows))) + self._noise.threshold:
                self._doubt(rows, value)
                return
            size = self._size(rows)
            size.agreed = int(abs(error) <= AGREES * self._noise.value)
        elif abs(error) > self._noise.threshold:
            self._doubt(rows, value)
            return
        else:
            self._noise.learn(error)
            self._level += LEVEL_GAIN * (1 - size.weight) * error
        size.learn(error, rows, self.steps)
        self._outliers.forget_oldest()
        if self._prior and size.seen >= BELIEVED and abs(size.correction) > CONTRADICTED:
            self._drop_prior()

    def _doubt(self, rows: int, value: float) -> None:
        """Keeps the time of an outlier until it is explained."""
        self._outliers.add(rows, value)
        self._in_doubt = True
        if len(self._outliers) >= OUTLIERS_BELIEVED and self._since_plain >= OUTLIERS_BELIEVED:
            self._level += self._outliers.median()
            self._believe_outliers()

    def _drop_prior(self) -> None:
        """Puts the assumed line in the place of the prior, without a change of T at the sizes seen."""
        for size in self._sizes[1:]:
            size.correction += log(self._shape(size.rows) / self._line(size.rows))
        self._prior, self._shapes, self._breaks, self.contradicted = {}, [], [], True

    # -------------------------------------------------------------------------------------------------- sizes

    def _find(self, rows: int) -> Size | None:
        smallest = interval(rows, self._first)
        at = bisect_right(self._sizes, smallest, key=attrgetter("rows")) - 1
        return self._sizes[at] if self._sizes[at].rows == smallest else None

    def _size(self, rows: int) -> Size:
        """The size of these rows; a new one changes nothing about T yet."""
        found = self._find(rows)
        if found is None:
            smallest = interval(rows, self._first)
            found = Size(smallest, log(self._relative(smallest) / self._shape(smallest)), self.steps)
            insort(self._sizes, found, key=attrgetter("rows"))
            self._breaks = []
        return found
