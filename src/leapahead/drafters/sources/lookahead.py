"""Lookahead decoding as a source: the n-grams of its window are candidates, and the window is added where it pays.

    without a window   tokens per step / time per step        both are measured, the better one is used,
    with a window      tokens per step / time per step        and the other is tried again, more and more rarely

The window earns more than its own n-grams: the target's logits at its nodes teach other sources too (Token Recycling
keeps them), so steps with a window are compared with steps without one. A window whose nodes cost more than it can be
hoped to earn, as on most CPUs, is not tried at all.
"""

from __future__ import annotations

from collections import Counter
from math import log
from typing import Any, ClassVar

from leapahead.core.tree import TreeBuilder
from leapahead.drafters.pool import NgramPool, SharedPool
from leapahead.drafters.window import Window
from leapahead.models.base import TREE
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.source import Candidate, Source

SHAPES = ((0, 0), (3, 3), (5, 4), (7, 5), (10, 5), (15, 5))  # (W, N), in the order of rising cost
GAINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # tokens per step that a window of the shape earns where it does well
TRIAL = 48  # steps with another shape
FIRST_PAUSE, LONGEST_PAUSE = 96, 8192  # steps between trials
MEMORY = 400.0  # steps of a shape after which their weight is halved
GUESSES, CAPACITY = 8, 50_000

Tails = tuple[tuple[int, ...], ...]  # the rests of the n-grams that agree with the draft so far, most recent first


class WindowTuner:
    """Learns which window pays, over all texts of a drafter.

    Attributes:
        level: index of the shape that is used now.
    """

    def __init__(self) -> None:
        self.level = self._best = 0
        self._seen = [[0.0, 0.0, 0.0] for _ in SHAPES]  # steps, tokens, cost
        self._left, self._pause, self._up = FIRST_PAUSE, FIRST_PAUSE, True

    def learn(self, tokens: int, cost: float) -> None:
        """Takes one step into account: how many tokens it committed in how much time, in any unit."""
        seen = self._seen[self.level]
        seen[0] += 1
        seen[1] += tokens
        seen[2] += cost
        if seen[0] > MEMORY:
            seen[:] = [value / 2 for value in seen]
        self._left -= 1
        if self._left <= 0:
            self._decide()

    def too_expensive(self) -> None:
        """The present shape cannot pay for its nodes: the next smaller one is used, and the next trial is far away."""
        self.level = self._best = max(0, self.level - 1)
        self._left = self._pause = LONGEST_PAUSE

    def _rate(self, level: int) -> float:
        """Tokens per cost of a shape; 0 if it was hardly tried."""
        steps, tokens, cost = self._seen[level]
        return tokens / cost if steps >= TRIAL / 2 and cost > 0 else 0.0

    def _decide(self) -> None:
        """After a trial: use the better shape. After a pause: try the next larger or smaller one."""
        if self.level != self._best:
            if self._rate(self.level) > self._rate(self._best):
                self._best, self._pause = self.level, FIRST_PAUSE
            else:
                self.level, self._up = self._best, not self._up
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._left = self._pause
            return
        other = self._best + (1 if self._up else -1)
        if not 0 <= other < len(SHAPES):
            self._up = not self._up
            other = self._best + (1 if self._up else -1)
        self.level, self._left = other, TRIAL


class LookaheadSource(Source):
    """The n-grams of a lookahead window, and the window itself as probe nodes.

    Args:
        tuner: of the window's size; shared by the sequences of a drafter.
    """

    name: ClassVar[str] = "lookahead"
    needs: ClassVar[frozenset[str]] = frozenset({TREE})
    probe_name: ClassVar[str] = "window"

    def __init__(self, tuner: WindowTuner | None = None) -> None:
        self.tuner = tuner or WindowTuner()
        self.pool = NgramPool(SHAPES[-1][1], GUESSES, CAPACITY)
        self._shared: SharedPool | None = None
        self._window: Window | None = None
        self._level = 0
        self._probed = False
        self._seen = 0

    def begin(self, sequence: SequenceView) -> None:
        if sequence.drafter_cache is not None:
            self._shared = sequence.drafter_cache.section("lookahead", SharedPool)

    def finish(self, sequence: SequenceView) -> None:
        if self._shared is not None:
            self._shared.put(ngram for ngram in self.pool.ngrams() if len(ngram[1]) == SHAPES[-1][1] - 1)

    def root(self, sequence: SequenceView) -> Tails:
        return self._tails(sequence.root)

    def follow(self, state: Tails, token: int) -> Tails:
        return tuple(tail[1:] for tail in state if tail[0] == token and len(tail) > 1) or self._tails(token)

    def candidates(self, state: Tails, limit: int) -> list[Candidate]:
        if not state:
            return []
        counts = Counter(tail[0] for tail in state)  # of equally frequent ones, the most recent first
        return [
            Candidate(token, log(times / len(state)), (min(times, 3), len(state[0])))
            for token, times in counts.most_common(limit)
        ]

    def observe(self, sequence: SequenceView, step: Step) -> None:
        if self._probed and self._window is not None:
            for key, tail in self._window.observe(sequence, step):
                self.pool.add(key, tail)
            self._seen = len(sequence.tokens)
        self._probed = False

    @property
    def probe_nodes(self) -> int:
        """Nodes of the window, those that it may share with the draft included."""
        width, ngram = SHAPES[self.tuner.level]
        return width * (ngram - 1) - 1 if width else 0

    @property
    def probe_gain(self) -> float:
        return GAINS[self.tuner.level]

    def skip_probe(self) -> None:
        self.tuner.too_expensive()

    def probe(self, sequence: SequenceView, builder: TreeBuilder) -> None:
        """Adds the window below the root."""
        # When sampling, the window's tokens belong to positions, so they are lost if a step was not observed.
        lost = sequence.sampled and self._seen != len(sequence.tokens)
        if self._window is None or lost or self._level != self.tuner.level:
            self._level = self.tuner.level
            self._window = Window(*SHAPES[self._level])
            self._window.begin(sequence, self.pool.peek)
        self._window.add(builder)
        self._probed = True

    def learn_yield(self, tokens: int, cost: float) -> None:
        self.tuner.learn(tokens, cost)

    def figures(self) -> dict[str, Any]:
        width, ngram = SHAPES[self.tuner.level]
        return {"window": width, "ngram": ngram, "ngrams": len(self.pool)}

    def _tails(self, token: int) -> Tails:
        return tuple(self.pool.get(token) or (self._shared.get(token) if self._shared is not None else ()))
