"""A tree grown node by node, likeliest first, out of what several sources know.

    P(node) = P(parent) * p(token | parent)      p is the calibrated estimate of the candidate's key
    key     = (source, how, rank, ...)           how: greedy or sampled; ranks are those under the dice

A token that several sources have is one candidate: their estimates are joined as those of independent witnesses, and
the joint estimate is calibrated again, under all their names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import log
from typing import Any, NamedTuple

import numpy as np

from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.drafters.base import Context, Proposal, Step
from leapahead.planner.source import Candidate, Score, Source
from leapahead.drafters.sources.draft import DraftSource
from leapahead.planner.acceptance import Calibration, Key, Trust

WIDE, NARROW = 8, 4  # candidates of a source under the root, and below
RANKS = 5  # that are told apart
MOST = 0.97  # what siblings may sum up to
LARGE = 9.0  # margin where nothing else stands
# Edges of what a key tells apart, from the greatest value down, with the sign turned: bisection wants them rising.
SHARES = [-log(share) for share in (0.999, 0.9, 0.75, 0.5, 0.25, 0.1)]  # of a source's candidates
MARGINS = [-3.0, -1.5, -0.5, 0.0, 0.5, 1.5]  # over the second, or of the others below the first
SCORES = [-5.0, -3.0, -2.0, -1.0, 0.0, 1.0]  # log p / T + dice; the best of a whole vocabulary has 0.6 on average


def first_choice(name: str, how: str) -> Key:
    """Under which it is counted how often a draft model's first choice is right."""
    return (f"{name}, first choice", how)


class Guess(NamedTuple):
    """A candidate of one node, joined over the sources that have it."""

    token: int
    p: float
    keys: tuple[Key, ...]
    source: str


class Growth:
    """The tree of one sequence's next step.

    Args:
        context: of the sequence.
        sources: in the order in which they are named.
        calibration: tells how likely a candidate is.
        trust: tells how far that holds for this text; by default it does.
        budget: that the tree stays within.
        dice: rank candidates under them when sampling.
    """

    def __init__(
        self,
        context: Context,
        sources: Sequence[Source],
        calibration: Calibration,
        budget: Budget,
        seed_aware: bool = True,
        trust: Trust | None = None,
    ) -> None:
        self.seed_aware = seed_aware
        self.trust = trust or Trust(1.0)
        self.context, self.sources, self.calibration, self.budget = context, sources, calibration, budget
        self._builder = TreeBuilder(context.root, budget)
        self._drafts = {source.name for source in sources if isinstance(source, DraftSource)}
        self.how = ("sampled" if seed_aware else "blind") if context.sampled else "greedy"
        self._names = [""]
        self.expected = [1.0]
        self._depths = [0]
        self._states: list[list[Any]] = [[source.root(context) for source in sources]]
        self.guesses: dict[int, list[Guess]] = {}  # of the nodes that were asked about
        self._order = count()
        # (-P, order, node, guess): a child that may come; without a guess, a node whose children are not known yet.
        self._heap: list[tuple[float, int, int, Guess | None]] = [(-1.0, next(self._order), 0, None)]

    def __len__(self) -> int:
        return len(self._builder)

    @property
    def bound(self) -> float:
        """No further node is likelier than this."""
        return -self._heap[0][0] if self._heap else 0.0

    @property
    def next(self) -> float:
        """P of the likeliest node that is not in the tree; 0 if there is none."""
        while self._heap and self._heap[0][3] is None:
            chance, _, node, _ = heappop(self._heap)
            self._ask(node, -chance)
        return self.bound

    def take(self) -> bool:
        """Adds that node; false if the budget does not let it."""
        chance, _, parent, guess = heappop(self._heap)
        assert guess is not None  # `next` has been read
        if (node := self._builder.add(parent, guess.token)) is None:
            return False
        self._names.append(guess.source)
        self.expected.append(-chance)
        self._depths.append(self._depths[parent] + 1)
        states = self._states[parent]
        self._states.append(
            [
                None if s is None else source.follow(s, guess.token)
                for source, s in zip(self.sources, states, strict=True)
            ]
        )
        if self._depths[node] < self.budget.depth:
            heappush(self._heap, (chance, next(self._order), node, None))
        return True

    def places(self, which: int) -> list[tuple[Any, float, float]]:
        """Every node as source number `which` sees it: its state, P, and what is guessed about its children in all."""
        return [
            (states[which], self.expected[node], min(1.0, sum(guess.p for guess in self.guesses.get(node, ()))))
            for node, states in enumerate(self._states)
            if states[which] is not None and self._depths[node] < self.budget.depth
        ]

    def take_all(self, nodes: int) -> int:
        """Adds so many nodes if there are; returns the size of the tree, the root counted."""
        while len(self) <= nodes and self.next > 0:
            self.take()
        return len(self)

    def _ask(self, node: int, chance: float) -> None:
        depth = self._depths[node]
        position = len(self.context.tokens) + depth
        found: dict[int, list[tuple[float, Key]]] = {}
        most = WIDE if depth == 0 else NARROW
        score = partial(self.context.scores, position) if self.seed_aware and self.context.sampled else None
        for source, state in zip(self.sources, self._states[node], strict=True):
            if state is None:
                continue
            if score is None:
                keyed = self._keyed(source.name, source.candidates(state, most))
            else:
                keyed = self._seed_aware_candidates(source.name, source.drawn(state, most, score), score, most)
            for token, key in keyed:
                found.setdefault(token, []).append((self.calibration.probability(key), key))
        guesses = [self._joined(token, some) for token, some in found.items()]
        scale = min(self.trust.factor, MOST / max(sum(guess.p for guess in guesses), 1e-9))
        self.guesses[node] = guesses
        for guess in guesses:
            heappush(self._heap, (-chance * guess.p * scale, next(self._order), node, guess))

    def _keyed(self, name: str, candidates: list[Candidate]) -> list[tuple[int, Key]]:
        """Candidates as they come, by what they are like."""
        return [
            (token, (name, self.how, min(rank, RANKS), *feature[:1], bisect_left(SHARES, -logp), *feature[1:]))
            for rank, (token, logp, feature) in enumerate(candidates)
        ]

    def _seed_aware_candidates(
        self, name: str, candidates: list[Candidate], score: Score, most: int
    ) -> list[tuple[int, Key]]:
        """The best of them under the dice, and by how much."""
        if not candidates:
            return []
        scores = score([each.token for each in candidates], [each.logp for each in candidates]).tolist()
        order = sorted(range(len(candidates)), key=scores.__getitem__, reverse=True)[:most]
        found = []
        for rank, index in enumerate(order):
            token, _, feature = candidates[index]
            margin = scores[index] - scores[order[1 if rank == 0 else 0]] if len(order) > 1 else LARGE
            steps = bisect_left(SCORES, -scores[index]), bisect_left(MARGINS, -margin)
            found.append((token, (name, self.how, min(rank, RANKS), *feature[:1], *steps, *feature[1:])))
        return found

    def _joined(self, token: int, some: list[tuple[float, Key]]) -> Guess:
        if len(some) == 1:
            ((p, key),) = some
            return Guess(token, p, (key,), key[0])  # type: ignore[arg-type]
        no = 1.0
        for p, _ in some:
            no *= 1.0 - p
        names = "+".join(str(key[0]) for _, key in some)
        together: Key = (names, some[0][1][1], round(10 * (1.0 - no)))
        best = max(some)[1][0]
        p = self.calibration.estimate(together, 1.0 - no)
        return Guess(token, p, (*(key for _, key in some), together), str(best))

    def proposal(self, nodes: int | None = None) -> Proposal:
        """The tree of the first `nodes` that were taken, the root counted; all of them by default."""
        size = len(self) if nodes is None else nodes
        tree = TokenTree(np.array(self._builder.tokens[:size]), np.array(self._builder.parents[:size]))
        return Proposal(tree, tuple(self._names[:size]), np.array(self.expected[:size]))

    def learn(self, step: Step) -> None:
        """What became of the guesses along the accepted path, drafted or not."""
        for node, token in zip(step.verdict.path, step.tokens, strict=False):
            guesses = self.guesses.get(node, ())
            if guesses:
                self.trust.learn(min(MOST, sum(guess.p for guess in guesses)), any(g.token == token for g in guesses))
            for guess in guesses:
                hit = guess.token == token
                for key in guess.keys:
                    self.calibration.learn(key, hit)
                    if key[0] in self._drafts and key[2] == 0:
                        self.calibration.learn(first_choice(str(key[0]), self.how), hit)
