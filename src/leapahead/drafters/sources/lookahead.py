"""Lookahead decoding as one source among others: the window's n-grams are candidates; it rides along where it pays.

    without a window   tokens a step / what the step cost        both are measured, and the better one goes on;
    with one           tokens a step / what the step cost        the other is tried again, ever more seldom

What a window earns is not only its own n-grams: what the target thinks at its nodes teaches other sources too (Token
Recycling keeps it), so steps with it are compared with steps without it. A window whose nodes cost more than it can
hope to earn, as on most CPUs, is not even tried.
"""

from __future__ import annotations

from collections import Counter
from math import log
from typing import Any, ClassVar

from leapahead.core.tree import TreeBuilder
from leapahead.drafters.base import Context, Step
from leapahead.drafters.pool import NgramPool, SharedPool
from leapahead.planner.source import Candidate, Source
from leapahead.drafters.window import Window
from leapahead.models.base import TREE

SHAPES = ((0, 0), (3, 3), (5, 4), (7, 5), (10, 5), (15, 5))  # (W, N), rising in what they cost
HOPES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # tokens a step that a window of the shape brings where it does well
TRIAL = 48  # steps with another shape
FIRST_PAUSE, LONGEST_PAUSE = 96, 8192  # steps between trials
LATELY = 400.0  # steps of a shape; older ones count half, a quarter, ...
GUESSES, CAPACITY = 8, 50_000

Tails = tuple[tuple[int, ...], ...]  # what is left of the n-grams that agree with the draft so far, most recent first


class Judge:
    """How large a window pays, learned over all texts of a target.

    Attributes:
        level: index of the shape that is used now.
    """

    def __init__(self) -> None:
        self.level = self._best = 0
        self._seen = [[0.0, 0.0, 0.0] for _ in SHAPES]  # steps, tokens, cost
        self._left, self._pause, self._up = FIRST_PAUSE, FIRST_PAUSE, True

    def told(self, tokens: int, cost: float) -> None:
        """A step brought so many tokens for so much time, in any unit."""
        seen = self._seen[self.level]
        seen[0] += 1
        seen[1] += tokens
        seen[2] += cost
        if seen[0] > LATELY:
            seen[:] = [value / 2 for value in seen]
        self._left -= 1
        if self._left <= 0:
            self._decide()

    def _rate(self, level: int) -> float:
        steps, tokens, cost = self._seen[level]
        return tokens / cost if steps >= TRIAL / 2 and cost > 0 else 0.0

    def _decide(self) -> None:
        """After a trial, the better one; after a pause, a trial of the next larger or smaller one."""
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

    def too_dear(self) -> None:
        """The shape that was to be used could not pay for its nodes: the next trial is far away."""
        self.level = self._best = max(0, self.level - 1)
        self._left = self._pause = LONGEST_PAUSE


class LookaheadSource(Source):
    """The window's n-grams, and the window.

    Args:
        judge: of its size; of all texts together, or this one's own.
    """

    name: ClassVar[str] = "lookahead"
    needs: ClassVar[frozenset[str]] = frozenset({TREE})

    def __init__(self, judge: Judge | None = None) -> None:
        self.judge = judge or Judge()
        self.pool = NgramPool(SHAPES[-1][1], GUESSES, CAPACITY)
        self._shared: SharedPool | None = None
        self._window: Window | None = None
        self._level = 0
        self._probed = False
        self._seen = 0

    @property
    def probes(self) -> int:
        """Nodes of the window, those that it may share with the draft counted."""
        width, ngram = SHAPES[self.judge.level]
        return width * (ngram - 1) - 1 if width else 0

    @property
    def hope(self) -> float:
        """Tokens a step that it may earn."""
        return HOPES[self.judge.level]

    def probe(self, context: Context, builder: TreeBuilder) -> None:
        """Hangs the window under the root."""
        # When sampling, its tokens belong to positions: a step that it did not see leaves them where they are not.
        lost = context.sampled and self._seen != len(context.tokens)
        if self._window is None or lost or self._level != self.judge.level:
            self._level = self.judge.level
            self._window = Window(*SHAPES[self._level])
            self._window.begin(context, self.pool.peek)
        self._window.add(builder)
        self._probed = True

    def begin(self, context: Context) -> None:
        if context.drafter_cache is not None:
            self._shared = context.drafter_cache.section("lookahead", SharedPool)

    def finish(self, context: Context) -> None:
        if self._shared is not None:
            self._shared.put(ngram for ngram in self.pool.ngrams() if len(ngram[1]) == SHAPES[-1][1] - 1)

    def _tails(self, token: int) -> Tails:
        return tuple(self.pool.get(token) or (self._shared.get(token) if self._shared is not None else ()))

    def root(self, context: Context) -> Tails:
        return self._tails(context.root)

    def follow(self, state: Tails, token: int) -> Tails:
        return tuple(tail[1:] for tail in state if tail[0] == token and len(tail) > 1) or self._tails(token)

    def candidates(self, state: Tails, limit: int) -> list[Candidate]:
        if not state:
            return []
        counts = Counter(tail[0] for tail in state)  # of equals the most recent first
        return [
            Candidate(token, log(times / len(state)), (min(times, 3), len(state[0])))
            for token, times in counts.most_common(limit)
        ]

    def observe(self, context: Context, step: Step) -> None:
        if self._probed and self._window is not None:
            for key, tail in self._window.observe(context, step):
                self.pool.add(key, tail)
            self._seen = len(context.tokens)
        self._probed = False

    def figures(self) -> dict[str, Any]:
        width, ngram = SHAPES[self.judge.level]
        return {"window": width, "ngram": ngram, "ngrams": len(self.pool)}
