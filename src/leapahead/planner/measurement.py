"""Measures the time of a target's forward by its number of token rows.

    found = rounds(target)              every round: each size once
    LatencyProfile(fitted(found))       one time per size, with the noise removed
    agree(found)                        whether the measurement can be relied upon

This module leaves no trace on the target but cache rows that the target keeps for later prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from math import log, log2
from random import Random
from time import perf_counter
from typing import NamedTuple

import numpy as np

from leapahead.core import openmp
from leapahead.core.errors import ContextOverflow, LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, Session, Target, read_prompt
from leapahead.planner.latency import SIZES

SECONDS = 1.5  # time of a measurement
SECONDS_FIRST = 1.5  # limit until which the first forwards of `FIRST_SIZES` may take
FIRST_SIZES = (1, 4, 8, 16)  # measured first, in this order
NEXT_SIZES = (2, 3, 6, 12)  # measured next, in this order; then all others
TOO_SLOW = 5.0  # a size is not measured when a smaller one takes so many plain steps: no draft is worth that
REPEATS = 3  # of the first size in the warm-up, in a third of the time; one in any case
LARGE, LARGE_ROUNDS = 32, 3  # sizes above LARGE are measured in every third round only
DIP_ROUNDS, DIP_SHARE = 3, 0.8  # rounds, and their share, that must show that a larger size takes less time
MOST_ROUNDS = 10_000
MOST_PREPARING = 20  # forwards of a size that take longer than later ones will, as a target says
AGREE, AGREE_QUANTILE = 1.2, 0.75  # greatest ratio of the two halves' times, at this quantile of the sizes

Round = dict[int, float]  # rows -> seconds
Progress = Callable[[float, float], None]  # called with the seconds spent and the seconds allowed


def rounds(
    target: Target,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
    sequences: int = 1,
    clock: Callable[[], float] = perf_counter,
    progress: Progress = lambda spent, total: None,
) -> list[Round]:
    """Times of forwards over chains, under the target's lock and on sessions of its own, which are closed afterwards.

    The first round, the warm-up, measures every size once; the tokens that it commits are the context of the others,
    since reading a prompt would take too long on a slow model. Every other round measures the sizes in a random order,
    so that a temporary slowdown affects all sizes alike.

    At 20 ms per forward, all useful sizes are measured; at 200 ms, only 1, 4 and 8; from 500 ms on, only the plain
    step. The first two forwards are waited for, however long they take.

    Args:
        target: the model.
        sizes: rows of each sequence.
        seconds: that the measurement may take.
        sequences: that are stepped together.
        clock: in seconds.
        progress: called after every forward.

    Returns:
        For each round, rows of all sequences -> seconds; the warm-up first.

    Raises:
        LeapaheadError: what the target raises before anything was measured, such as `CacheFull`.
    """
    with target.lock, ExitStack() as opened:
        sessions = []
        for _ in range(sequences):
            session = opened.enter_context(closing(target.open([1 % target.info.vocab_size], SamplingParams())))
            read_prompt(target, session)
            sessions.append(session)
        return _Measurement(target, sessions, sizes, seconds, clock, progress).run()


class _Measurement:
    """The state of one call of `rounds`; arguments as there."""

    def __init__(
        self,
        target: Target,
        sessions: Sequence[Session],
        sizes: Sequence[int],
        seconds: float,
        clock: Callable[[], float],
        progress: Progress,
    ) -> None:
        self.target, self.sessions, self.seconds, self.clock, self.progress = target, sessions, seconds, clock, progress
        most = min(target.max_nodes, max(sizes)) if CHAIN in target.info.capabilities else 1
        bucket = target.info.bucket
        self.sizes = [n for n in sizes if n <= most and (n == 1 or n % bucket == 0)] or [1]
        self.found: list[Round] = [{}]
        self.began = clock()

    def run(self) -> list[Round]:
        self._warm_up()
        warm, random = self.found[0], Random(0)
        if not warm:
            raise ContextOverflow(f"a context of {self.target.info.context_length} tokens is too short for measuring")
        for turn in range(1, MOST_ROUNDS):
            self.found.append({})
            some = [n for n in sorted(self.sizes) if self._rows(n) in warm and (n <= LARGE or turn % LARGE_ROUNDS == 1)]
            for n in random.sample(some, len(some)):
                if self._spent + warm[self._rows(n)] > self.seconds or not self._take(n):
                    return [each for each in self.found if each]
        return self.found

    def _warm_up(self) -> None:
        warm = self.found[0]
        first = [n for n in FIRST_SIZES if n in self.sizes] or self.sizes[:1]
        important = [*first, *(n for n in NEXT_SIZES if n in self.sizes)]
        for n in dict.fromkeys([*important, *self.sizes]):
            limit = max(SECONDS_FIRST, self.seconds) if n in first else self.seconds
            if warm and self._spent + _expected(warm, self._rows(n)) > limit:
                continue
            plain = warm.get(self._rows(self.sizes[0]), float("inf"))
            if any(took > TOO_SLOW * plain for rows, took in warm.items() if rows < self._rows(n)):
                continue
            if not self._take(n):
                break
            if n == first[0]:
                self._repeat(n)

    def _repeat(self, size: int) -> None:
        """Measures the first size again, since first forwards may take twice the time of later ones.

        Of a slow model, each size is measured but a few times, and what a plain step takes decides everything else.
        """
        warm, rows = self.found[0], self._rows(size)
        for repeat in range(REPEATS):
            before = warm[rows]
            if (repeat and self._spent + before > self.seconds / 3) or not self._take(size):
                return
            warm[rows] = min(before, warm[rows])

    def _take(self, size: int) -> bool:
        """Measures one forward; False where the context or the cache has no room for it."""
        if len(self.sessions[0].tokens) + size + 1 >= self.target.info.context_length:
            return False
        try:
            took = self._forward(size)
        except LeapaheadError:
            if not self.found[0]:
                raise
            return False
        self.found[-1][self._rows(size)] = took
        self.progress(self._spent, self.seconds)
        return True

    def _forward(self, size: int) -> float:
        """Seconds of a forward over chains of different tokens, which load different experts and cache lines.

        For a target on several devices there is one chain for each of them, of `size` nodes together.
        """
        trees, devices = [], self.target.info.devices
        for session in self.sessions:
            following = range(len(session.tokens), len(session.tokens) + size - 1)
            tokens = [(1 + 7 * index) % self.target.info.vocab_size for index in following]
            parents = [-1, *(max(0, node - devices) for node in range(1, size))]
            trees.append(TokenTree([session.tokens[-1], *tokens], parents))
        openmp.crowding.look()
        if self.target.info.bucket > 1:  # the first forward of another size takes longer
            self.target.step(self.sessions, trees)
        for _ in range(MOST_PREPARING):  # again where the first forwards of a size prepare others
            start = self.clock()
            found = self.target.step(self.sessions, trees)
            chosen = [choices[0] for choices in found]
            took = self.clock() - start
            if not found[0].prepares:
                break
        for session, tree, token in zip(self.sessions, trees, chosen, strict=True):
            some = range(1, size, devices) if len(self.found) == 1 else ()  # the warm-up's are the others' context
            kept = [tree.token_list[node] for node in some]
            session.commit(Verdict((0, *some), (*kept, max(int(token), 0)), len(kept)))
        return max(took, 1e-9)  # the clock may have been set back

    def _rows(self, size: int) -> int:
        return len(self.sessions) * size

    @property
    def _spent(self) -> float:
        return self.clock() - self.began


class _Point(NamedTuple):
    rows: int
    seconds: float


def _expected(known: Round, rows: int) -> float:
    """Seconds of a size that was not measured yet, on the line through the last two sizes."""
    points = [_Point(n, took) for n, took in sorted(known.items())]
    if above := [point for point in points if point.rows >= rows]:
        return above[0].seconds
    last = points[-1]
    if len(points) == 1:
        return last.seconds * (1 + 0.1 * log2(rows / last.rows))
    slope = max(0.0, (last.seconds - points[-2].seconds) / (last.rows - points[-2].rows))
    return last.seconds + slope * (rows - last.rows)


def fitted(found: Sequence[Round]) -> dict[int, float]:
    """Rows -> seconds, estimated from rounds.

    Each size gets the lower quartile of its times, since noise only adds time. More rows take no less time: sizes in
    the wrong order get their mean (isotonic regression), unless enough rounds show that the larger size really is
    faster, as with kernels made for certain sizes.
    """
    times = samples(found)
    values = {n: _quartile(some) for n, some in times.items()}
    blocks: list[tuple[float, list[int]]] = []  # (mean, sizes)
    start = 0  # of the blocks behind the last real dip
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
    """Rows -> the times that count, sizes rising. The warm-up counts only for sizes with fewer than two other times."""
    warm, *others = found
    times: dict[int, list[float]] = defaultdict(list)
    for each in others:
        for n, took in each.items():
            times[n].append(took)
    for n, took in warm.items():
        if len(times[n]) < 2:
            times[n].append(took)
    return {n: times[n] for n in sorted(times)}


def agree(found: Sequence[Round]) -> bool:
    """Whether the rounds agree well enough for the profile to be stored.

    The times of each size are split in two halves. For most sizes the estimates from both must be close to each other.
    False where no size was measured twice, as on a target that takes longer than about 100 ms per forward: its profile
    is stored once steps have corrected it.
    """
    ratios = [
        abs(log(_quartile(times[0::2]) / _quartile(times[1::2]))) for times in samples(found).values() if len(times) > 1
    ]
    return bool(ratios) and float(np.quantile(ratios, AGREE_QUANTILE)) <= log(AGREE)


def _quartile(times: Sequence[float]) -> float:
    return float(np.quantile(times, 0.25))


def _dips(found: Sequence[Round], low: int, high: int) -> bool:
    """Whether most rounds, and enough of them, show that the larger size takes less time."""
    pairs = [(each[low], each[high]) for each in found[1:] if low in each and high in each]
    less = sum(after < before for before, after in pairs)
    return less >= DIP_ROUNDS and less >= DIP_SHARE * len(pairs)
