"""The cost curve: T(n), the time of a forward over n nodes, on this machine and for this target.

Begun by a measurement (`measure`), and corrected by every step. A curve knows sizes and times only: no models,
no trees, no disk.

    log T(n) = pace + shape(n)        shape of the smallest size is 0; between sizes T is a straight line

    pace     how fast the machine is just now, for all n alike; wanders by a few percent a step
    shape    what n nodes cost in units of the smallest size; hardly moves

Both are one Gaussian belief, corrected by a Kalman filter. Its prior says how a curve may be wrong: the cost of further
nodes by one factor for all of them, and every size a little on its own, alike for neighbours:

    cov(i, j) = (wrong g_i)(wrong g_j) + ALONE^2 2^-|log2 n_i - log2 n_j|,   g = share of further nodes in T(n)

So steps of 4 and 8 nodes teach what 16 cost, a pace that changes in the middle does not bend the shape, and what is
known well moves little.

A step that took far longer or shorter than is believable (a stopped machine, a clock that was set, a kernel that is
compiled when a size comes first) teaches nothing, unless others follow soon: then the belief was wrong, and gives way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from math import log, log2, sqrt
from random import Random
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from leapahead.core.errors import LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, Target

if TYPE_CHECKING:
    from typing_extensions import Self

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
ASSUMED = 0.05  # cost of a further node in units of the first, where nothing was measured
MEASURED_WRONG, ASSUMED_WRONG = 0.5, 1.5  # log factor by which the cost of further nodes may be wrong
ALONE = 0.08  # the same of one size on its own, of its T(n)
PACE, UNKNOWN_PACE = 0.3, 5.0  # log factor by which the pace may be wrong at the beginning
WANDER = 0.06  # of the pace in a step: variance, in units of the noise's
AGE, TIMES = 2e-5, 16  # of the shape in a step, in units of the prior's variance; every so many steps
NOISE, LEAST, MOST = 0.1, 0.03, 0.3  # log seconds of a step: at first, and the bounds of what is learned
FAR = 3.0  # standard deviations beyond which a step is doubted ...
PATIENCE = 3  # ... until so many have been, of the last dozen or so
FORGIVE = 0.25  # doubts taken back by a step that is believable
WIDEST = 9.0  # what the shape's variance grows by at most when it gives way, in units of the prior's


class CostCurve:
    """T(n) in seconds: values at some sizes, lines between them, the last slope beyond them.

    Args:
        seconds: size -> seconds, of at least one size. Of one only, the others are assumed.
        pace: log factor by which all of them together may be wrong.
    """

    def __init__(self, seconds: Mapping[int, float], pace: float = PACE) -> None:
        known = sorted(seconds)
        if not known or known[0] < 1 or any(not 0 < seconds[n] < float("inf") for n in known):
            raise ValueError(f"a cost curve needs positive seconds of positive sizes, got {dict(seconds)}")
        wrong = MEASURED_WRONG
        if len(known) == 1:
            (first,), wrong = known, ASSUMED_WRONG
            known = [first, *(n for n in SIZES if n > first), *(() if first < SIZES[-1] else (2 * first,))]
            seconds = {n: seconds[first] * (1 + ASSUMED * (n - first)) for n in known}
        self.steps = 0
        self._sizes = known
        one = seconds[known[0]]
        self._belief = np.array([log(one), *(log(seconds[n] / one) for n in known[1:])])  # pace, shape from the second
        floor = [ASSUMED * (n - known[0]) for n in known]  # a curve that looks flat may be wrong as well
        share = [max(1 - one / seconds[n], more / (1 + more)) for n, more in zip(known, floor, strict=True)][1:]
        logs = np.log2(known[1:])
        self._prior = np.zeros((len(known), len(known)))
        self._prior[1:, 1:] = wrong**2 * np.outer(share, share)
        self._prior[1:, 1:] += ALONE**2 * 0.5 ** np.abs(logs[:, None] - logs[None, :])
        self._covariance = self._prior.copy()
        self._covariance[0, 0] = pace**2
        self._noise = NOISE**2
        self._doubts = 0.0
        self._doubted: list[tuple[int, int, float]] = []  # (step, nodes, log seconds)
        self._met: set[int] = set()
        self._table: list[float] = []

    @classmethod
    def guessed(cls) -> Self:
        """Nothing is known: its first step tells the pace, and some tens of them the shape."""
        return cls({1: 1.0}, UNKNOWN_PACE)

    def __call__(self, nodes: int) -> float:
        """Seconds that a forward over so many nodes takes just now."""
        if not self._table:
            self._table = np.interp(range(self._sizes[-1] + 1), self._sizes, self._values()).tolist()
        if nodes < len(self._table):
            return self._table[max(nodes, 0)]
        low, high = self._sizes[-2:]
        slope = max(self._table[high] - self._table[low], 0.0) / (high - low)
        return self._table[high] + slope * (nodes - high)

    def _values(self) -> Any:
        """Seconds at the sizes."""
        return np.exp(self._belief[0] + np.concatenate(([0.0], self._belief[1:])))

    def observe(self, nodes: int, seconds: float) -> None:
        """A forward over so many nodes took so long."""
        if nodes < 1 or not 0 < seconds < float("inf"):
            return
        here = log(seconds)
        self.steps += 1
        first, self._met = nodes not in self._met, self._met | {nodes}
        if not self._learn(nodes, here):
            if first:
                return  # what a size needs once is no measure of it
            self._doubted = [*self._doubted, (self.steps, nodes, here)][-PATIENCE:]
            self._doubts += 1
            if self._doubts >= PATIENCE:
                self._give_way()
        else:
            self._doubts = max(0.0, self._doubts - FORGIVE)
            if not self._doubts:
                self._doubted = []

    def _give_way(self) -> None:
        """The belief was wrong. Where every step was, by about the same, it is the pace; else it may be the shape."""
        doubted, self._doubted, self._doubts = self._doubted, [], 0.0
        offs = [here - log(self(nodes)) for _, nodes, here in doubted]
        middle = median(offs)
        spread = median(abs(off - middle) for off in offs)
        every = doubted[-1][0] - doubted[0][0] < len(doubted)  # none in between was as believed
        self._covariance[0, 0] += middle**2
        self._covariance += min((spread if every else middle) ** 2 / self._prior.max(), WIDEST) * self._prior
        for off, (_, nodes, here) in zip(offs, doubted, strict=True):
            if abs(off - middle) <= 2 * spread + FAR * sqrt(self._noise):  # one of them may be an accident
                self._learn(nodes, here)

    def _learn(self, nodes: int, here: float) -> bool:
        """One step of the filter; false, and nothing learned, if that cannot be believed."""
        self._covariance[0, 0] += WANDER * self._noise
        if self.steps % TIMES == 0:
            self._covariance += TIMES * AGE * self._prior
        weights = self._weights(nodes)
        spread = sum(weight * self._covariance[index] for index, weight in weights)
        certain = float(sum(weight * spread[index] for index, weight in weights))
        off = here - log(self(nodes))
        if abs(off) > FAR * sqrt(certain + self._noise):
            return False
        self._belief += spread * (off / (certain + self._noise))
        self._covariance -= np.outer(spread, spread) / (certain + self._noise)
        self._table = []
        seen = off**2 * self._noise / (certain + self._noise)  # the part of the surprise that noise is blamed for
        self._noise = min(max(self._noise + 0.05 * (seen - self._noise), LEAST**2), MOST**2)
        return True

    def _weights(self, nodes: int) -> list[tuple[int, float]]:
        """What log T(n) changes by, for each number of the belief: (index, derivative)."""
        right = bisect_right(self._sizes, nodes)
        if right == 0 or (right == 1 and nodes == self._sizes[0]):
            return [(0, 1.0)]
        if right == len(self._sizes):
            return [(0, 1.0), (right - 1, 1.0)]
        low, high = self._sizes[right - 1 : right + 1]
        share = (nodes - low) / (high - low) * self(high) / self(nodes)  # of T(n) that comes from the size above
        below = [(right - 1, 1 - share)] if right > 1 else []
        return [(0, 1.0), *below, (right, share)]

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

    def relative(self) -> dict[int, float]:
        """Size -> T(n) in units of the smallest size, which is a plain step."""
        return {n: self(n) / self(self._sizes[0]) for n in self._sizes}

    def as_dict(self) -> dict[str, float]:
        """Size -> seconds, for the disk."""
        return {str(n): self(n) for n in self._sizes}


# ------------------------------------------------------------------------------------------------------- measuring

SECONDS = 0.8  # for a measurement
AT_MOST = 1.0  # the first forwards of the sizes that matter most may take until then
FIRST = (1, 4, 8, 16)  # these, in this order of importance
ENOUGH = 5.0  # sizes beyond the first that costs so many plain steps are not looked at: no tree brings that
LARGE, SELDOM = 32, 3  # greater sizes are measured in every third round only
DIPS = 3  # rounds that must show that more nodes take less time, before it is believed

Round = dict[int, float]  # rows -> seconds
Progress = Callable[[float, float], None]  # seconds spent, of how many


def measure(
    target: Target,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
    clock: Callable[[], float] = perf_counter,
) -> CostCurve:
    """The curve, as well as `seconds` of time allow.

    At 20 ms a token all sizes that may pay are measured, at 200 ms 1, 4 and 8, and from 500 ms on only the plain step:
    the others are assumed then (each further node at `ASSUMED` of the first) until steps have taught them. The first
    forward is waited for, however long it takes.

    Raises:
        LeapaheadError: what the target raises; it may have no room for a further session.
    """
    return CostCurve(fitted(rounds(target, sizes, seconds, clock=clock)))


def rounds(
    target: Target,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
    sequences: int = 1,
    clock: Callable[[], float] = perf_counter,
    progress: Progress = lambda spent, total: None,
) -> list[Round]:
    """Times of forwards over chains.

    Every round measures the sizes in an order of its own, so that a slow moment touches all alike. The first is the
    warm-up, of every size once, and its tokens are the context of the others: no prompt is read, which would take a
    slow model seconds.

    Args:
        sizes: nodes of each sequence.
        seconds: that it may take; see `measure`.
        sequences: that are stepped together.

    Returns:
        rows (`sequences` times a size) -> seconds, each round; the warm-up first.

    Raises:
        LeapaheadError: what the target raises, if nothing has been measured then.
    """
    began, random = clock(), Random(0)
    found: list[Round] = [{}]
    with ExitStack() as opened:
        sessions = [opened.enter_context(closing(target.open([1 % target.vocab_size], SamplingParams())))]
        for _ in range(sequences - 1):
            sessions.append(opened.enter_context(closing(target.open([1 % target.vocab_size], SamplingParams()))))
        most = min(target.max_nodes, max(sizes)) if CHAIN in target.capabilities else 1
        able = [n for n in sizes if n <= most] or [1]

        def take(n: int) -> float | None:
            """Seconds; none where the context or the cache is full."""
            if len(sessions[0].tokens) + n + 1 >= target.context_length:
                return None
            try:
                took = _step(target, sessions, n, len(found) == 1, clock)
            except LeapaheadError:
                if not found[0]:
                    raise
                return None
            found[-1][sequences * n] = took
            progress(clock() - began, seconds)
            return took

        first = [n for n in FIRST if n in able]
        for n in (first or able[:1]) + [n for n in able if n not in first]:
            limit = max(AT_MOST, seconds) if n in first else seconds
            one = found[0].get(sequences * able[0], 0.0)
            if found[0] and clock() - began + _expected(found[0], sequences * n) > limit:
                continue
            if one and any(took > ENOUGH * one for rows, took in found[0].items() if rows < sequences * n):
                continue
            if take(n) is None:
                break
        measured = sorted(n // sequences for n in found[0])
        for turn in range(1, 10_000):
            found.append({})
            some = [n for n in measured if n <= LARGE or turn % SELDOM == 1]
            for n in random.sample(some, len(some)):
                if clock() - began + found[0][sequences * n] > seconds or take(n) is None:
                    return [each for each in found if each]
    return found


def fitted(found: Sequence[Round]) -> dict[int, float]:
    """Rows -> seconds, out of rounds: what noise has added is taken off.

    Of each size the lower quartile is taken, since noise only adds time; the warm-up counts where there is little else.
    More nodes take no less time, unless several rounds say that they do (some kernels are made for certain sizes): then
    the curve dips; else neighbours in the wrong order get their mean (isotonic regression).
    """
    times = samples(found)
    values = {n: float(np.quantile(some, 0.25)) for n, some in sorted(times.items())}
    blocks: list[tuple[float, list[int]]] = []  # (mean, sizes)
    start = 0  # of the part behind the last dip
    for n, value in values.items():
        if blocks and value < blocks[-1][0] and _dips(found, blocks[-1][1][-1], n):
            start = len(blocks)
        blocks.append((value, [n]))
        while len(blocks) - start > 1 and blocks[-1][0] < blocks[-2][0]:
            _, last = blocks.pop()
            _, before = blocks.pop()
            both = before + last
            weights = [len(times[size]) for size in both]
            mean = sum(w * values[size] for w, size in zip(weights, both, strict=True)) / sum(weights)
            blocks.append((mean, both))
    return {n: mean for mean, some in blocks for n in some}


def samples(found: Sequence[Round]) -> dict[int, list[float]]:
    """Rows -> the times that count: the warm-up only of sizes with less than two others."""
    warm, *others = found
    times: dict[int, list[float]] = defaultdict(list)
    for each in others:
        for n, took in each.items():
            times[n].append(took)
    for n, took in warm.items():
        if len(times[n]) < 2:
            times[n].append(took)
    return {n: times[n] for n in sorted(times)}


def _dips(found: Sequence[Round], low: int, high: int) -> bool:
    """Whether most rounds, and enough of them, say that the larger size takes less time."""
    pairs = [(each[low], each[high]) for each in found[1:] if low in each and high in each]
    less = sum(after < before for before, after in pairs)
    return less >= DIPS and less >= 0.8 * len(pairs)


class _Point(NamedTuple):
    rows: int
    seconds: float


def _expected(known: Round, rows: int) -> float:
    """Seconds of a size that was not measured yet: on the line through the last two, or one that is not too hopeful."""
    points = [_Point(n, took) for n, took in sorted(known.items())]
    if above := [point for point in points if point.rows >= rows]:
        return above[0].seconds
    last = points[-1]
    if len(points) == 1:
        return last.seconds * (1 + 0.1 * log2(rows / last.rows))
    slope = max(0.0, (last.seconds - points[-2].seconds) / (last.rows - points[-2].rows))
    return last.seconds + slope * (rows - last.rows)


def _step(target: Target, sessions: Sequence[Any], nodes: int, keep: bool, clock: Callable[[], float]) -> float:
    """A forward over a chain; of tokens that differ, since experts and caches tell them apart."""
    trees = []
    for session in sessions:
        tokens = [(1 + 7 * (len(session.tokens) + i)) % target.vocab_size for i in range(nodes - 1)]
        trees.append(TokenTree.chain(session.tokens[-1], tokens))
    start = clock()
    chosen = [choices[0] for choices in target.step(sessions, trees)]
    took = clock() - start
    for session, tree, token in zip(sessions, trees, chosen, strict=True):
        kept = tree.tokens[1:].tolist() if keep else []
        path = tuple(range(len(kept) + 1))
        session.commit(Verdict(path, (*kept, max(int(token), 0)), len(kept)))
    return max(took, 1e-9)  # of a clock that was set back
