"""Best-first search for a token tree: its nodes are the likeliest ones that several sources know.

    P(node) = P(parent) * p(token | parent)      p is the acceptance estimate of the candidate's key
    key     = (source, mode, rank, ...)          mode: greedy, sampled (seed-aware) or unaware; rank within the source

A token that several sources propose is one candidate: the mixer makes one probability of their estimates. Candidates
that the sequence's grammar does not allow are dropped, and count nowhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from heapq import heappop, heappush
from itertools import count
from math import exp, log
from operator import add, attrgetter
from typing import Any, NamedTuple

import numpy as np

from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.planner.acceptance import AcceptanceTable, Correction, Key
from leapahead.planner.draft import Proposal, SequenceView, Step
from leapahead.planner.mixer import LEADING, Parameters, logit, mixed
from leapahead.planner.source import Candidate, Score, Source

ROOT_CANDIDATES, CANDIDATES = 8, 4  # of one source: below the root, and below any other node
WIDE = 256  # the same under a grammar, which may forbid some; then as many as above are kept
RANKS = 5  # ranks from this one on share a key
MOST = 0.98  # upper bound of p, and about that of its sum over siblings
NEWTON_STEPS, NEWTON_LONGEST, NEAR = 24, 2.0, 0.005  # two or three steps are usual until the sum is so near to it
ONLY_MARGIN = 9.0  # the margin of a candidate without a competitor
# Bucket edges of what keys contain, from the greatest value down, with the sign turned: `bisect` wants them rising.
SHARES = [-log(share) for share in (0.999, 0.9, 0.75, 0.5, 0.25, 0.1)]  # of a source's candidates
MARGINS = [-3.0, -1.5, -0.5, 0.0, 0.5, 1.5]  # score of the best minus that of the second; of others, minus the best
SCORES = [-5.0, -3.0, -2.0, -1.0, 0.0, 1.0]  # log p / T + noise; the best of a whole vocabulary has 0.6 on average


def first_choice(source: str, mode: str) -> Key:
    """The key under which it is counted how often the first candidate of a source that costs a forward is right."""
    return (f"{source}, first choice", mode)


class Guess(NamedTuple):
    """A candidate for one place of the tree, combined over the sources that propose it.

    Attributes:
        token: its id.
        p: the estimated probability that the target chooses it after its parent, before the request's correction.
        keys: to be updated when the outcome is known.
        logits: of the estimates, by source that has candidates there; None for those that do not propose it.
        source: the user's prediction where it proposes the token, so that reports tell how much of it came true; else
            the one with the greatest estimate.
    """

    token: int
    p: float
    keys: tuple[Key, ...]
    logits: tuple[float | None, ...]
    source: str


def total(guesses: Iterable[Guess]) -> float:
    """The sum of p, added one by one: `sum` of later versions of Python rounds in another way."""
    return reduce(add, (guess.p for guess in guesses), 0.0)


def exclusive(estimates: Sequence[float], factor: float = 1.0) -> list[float]:
    """Probabilities of candidates of which at most one is right, from estimates of one by one.

    Each is multiplied by the factor. Where their sum is more than `MOST` then, the odds p / (1 - p) of all are divided
    by the same number, so that it becomes about `MOST`: a nearly certain candidate remains so, while a smaller factor
    on p would take as large a part of it as of the others. The number is found by Newton's method on its logarithm.
    """
    found = [min(MOST, estimate * factor) for estimate in estimates]
    if reduce(add, found, 0.0) <= MOST:
        return found
    odds, share = [p / (1.0 - p) for p in found], 1.0
    for _ in range(NEWTON_STEPS):
        excess = reduce(add, found, 0.0) - MOST
        if abs(excess) < NEAR:
            break
        slope = reduce(add, [p * (1.0 - p) for p in found], 0.0)
        share *= exp(-min(max(excess / slope, -NEWTON_LONGEST), NEWTON_LONGEST))
        found = [share * each / (1.0 + share * each) for each in odds]
    return found


class TreeSearch:
    """The search for the tree of a sequence's next step, and then for those of further steps.

    Nodes are taken in the order of falling P.

    Args:
        sequence: that it is for.
        sources: in the order in which a candidate of several sources names them.
        acceptance: estimates how likely a candidate is to be accepted.
        budget: limits of the tree.
        seed_aware: rank candidates with the noise of their positions when sampling.
        correction: the request's factor on the estimates; 1 by default.

    Attributes:
        expected: P of each node taken so far; 1 for the root.
        guesses: of every node whose candidates were asked for.
        mode: the second element of all keys.
    """

    def __init__(
        self,
        sequence: SequenceView,
        sources: Sequence[Source],
        acceptance: AcceptanceTable,
        budget: Budget,
        seed_aware: bool = True,
        correction: Correction | None = None,
    ) -> None:
        self.sequence, self.sources, self.acceptance = sequence, sources, acceptance
        self.correction = correction or Correction(1.0)
        self.mode = ("sampled" if seed_aware else "unaware") if sequence.sampled else "greedy"
        self.begin(budget)

    def begin(self, budget: Budget) -> None:
        """Makes it the search for the tree of the sequence's next step, with nothing taken."""
        self.budget = budget
        self.expected = [1.0]
        self.guesses: dict[int, list[Guess]] = {}
        self._parameters: dict[int, list[Parameters]] = {}  # of the mixer, by node
        self._builder = TreeBuilder(self.sequence.root, self.budget)
        self._names = [""]
        self._depths = [0]
        self._states: list[list[Any]] = [[source.root(self.sequence) for source in self.sources]]
        self._order = count()
        # (-P, order, node, guess): a child of the node that may be taken. Without a guess, the node's candidates have
        # not been asked for yet, and P is an upper bound of theirs.
        self._heap: list[tuple[float, int, int, Guess | None]] = [(-1.0, next(self._order), 0, None)]

    def __len__(self) -> int:
        """The nodes taken so far, the root counted."""
        return len(self._builder)

    @property
    def leaves(self) -> int:
        """The leaves of the tree of these nodes."""
        return self._builder.leaves

    @property
    def deepest(self) -> int:
        """The greatest depth of a node; 0 for the root alone."""
        return max(self._depths)

    @property
    def bound(self) -> float:
        """An upper bound of P of all nodes that are not taken yet, without asking any source."""
        return -self._heap[0][0] if self._heap else 0.0

    @property
    def next(self) -> float:
        """P of the likeliest node that is not taken yet; 0 if there is none. Asks sources where that is needed."""
        while self._heap and self._heap[0][3] is None:
            chance, _, node, _ = heappop(self._heap)
            self._expand(node, -chance)
        return self.bound

    @property
    def likeliest(self) -> int | None:
        """The likeliest token after the root; None where no source has any, or none was asked."""
        guesses = self.guesses.get(0)
        return max(guesses, key=attrgetter("p")).token if guesses else None

    def take(self) -> bool:
        """Adds the node that `next` has found to the tree; false, and it is dropped, if the budget forbids it."""
        chance, _, parent, guess = heappop(self._heap)
        assert guess is not None, "`next` was not read"
        if (node := self._builder.add(parent, guess.token)) is None:
            return False
        self._names.append(guess.source)
        self.expected.append(-chance)
        self._depths.append(self._depths[parent] + 1)
        states = zip(self.sources, self._states[parent], strict=True)
        self._states.append([None if state is None else source.follow(state, guess.token) for source, state in states])
        if self._depths[node] < self.budget.depth:
            heappush(self._heap, (chance, next(self._order), node, None))
        return True

    def take_all(self, nodes: int) -> int:
        """Adds `nodes` nodes, or as many as there are; returns the size of the tree, the root counted."""
        while len(self) <= nodes and self.next > 0:
            self.take()
        return len(self)

    def states(self, which: int) -> list[tuple[Any, float, float]]:
        """For each node in which source number `which` has a state: state, P, and the sum of p over its guesses."""
        return [
            (states[which], self.expected[node], min(1.0, total(self.guesses.get(node, ()))))
            for node, states in enumerate(self._states)
            if states[which] is not None and self._depths[node] < self.budget.depth
        ]

    def proposal(self, nodes: int | None = None) -> Proposal:
        """The draft of the first `nodes` nodes that were taken, the root counted; of all of them by default."""
        size = len(self) if nodes is None else nodes
        builder = self._builder
        tree = TokenTree.of_lists(builder.tokens[:size], builder.parents[:size], self._depths[:size])
        return Proposal(tree, tuple(self._names[:size]), np.array(self.expected[:size]))

    def observe(self, step: Step) -> None:
        """The sources and the estimates learn from a step."""
        for source in self.sources:
            source.observe(self.sequence, step)
        self.learn(step)

    def learn(self, step: Step) -> None:
        """Updates the estimates with the outcome of all guesses along the committed path, drafted or not."""
        costly = {source.name for source in self.sources if source.costs_forward}
        for node, token in zip(step.verdict.path, step.tokens, strict=False):
            guesses = self.guesses.get(node, ())
            if guesses:
                self.correction.learn(min(MOST, total(guesses)), any(guess.token == token for guess in guesses))
            for guess in guesses:
                hit = guess.token == token
                self.acceptance.mixer.learn(self._parameters[node], guess.logits, guess.p, hit)
                for key in guess.keys:
                    self.acceptance.learn(key, hit)
                    if key[0] in costly and key[2] == 0:
                        self.acceptance.learn(first_choice(str(key[0]), self.mode), hit)

    def _expand(self, node: int, chance: float) -> None:
        """Asks all sources for candidates below a node whose P is `chance`."""
        depth = self._depths[node]
        limit = ROOT_CANDIDATES if depth == 0 else CANDIDATES
        wide = limit if self.sequence.grammar is None else WIDE
        score = partial(self.sequence.scores, len(self.sequence.tokens) + depth) if self.mode == "sampled" else None
        asked: list[tuple[str, list[tuple[int, Key]]]] = []  # the sources that have candidates here, and these
        for source, state in zip(self.sources, self._states[node], strict=True):
            if state is None:
                continue
            if score is None:
                keyed = self._keyed(source.name, self._filtered(node, source.candidates(state, wide))[:limit])
            else:
                candidates = self._filtered(node, source.seed_aware_candidates(state, wide, score))
                keyed = self._keyed_by_score(source.name, candidates, score, limit)
            if keyed:
                asked.append((source.name, keyed))
        found: dict[int, list[tuple[Key, float] | None]] = {}
        for index, (_, keyed) in enumerate(asked):
            for token, key in keyed:
                found.setdefault(token, [None] * len(asked))[index] = key, self.acceptance.probability(key)
        parameters = self.acceptance.mixer.parameters(self.mode, depth, [name for name, _ in asked])
        guesses = [_guess(token, some, parameters) for token, some in found.items()]
        self.guesses[node], self._parameters[node] = guesses, parameters
        chances = exclusive([guess.p for guess in guesses], self.correction.factor)
        for guess, p in zip(guesses, chances, strict=True):
            heappush(self._heap, (-chance * p, next(self._order), node, guess))

    def allowed(self, path: list[int], tokens: list[int]) -> list[bool]:
        """Whether the grammar allows each of some tokens after a path below the root."""
        grammar = self.sequence.grammar
        return [True] * len(tokens) if grammar is None else grammar.allows(len(self.sequence.tokens), path, tokens)

    def _filtered(self, node: int, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates that may come next after a node."""
        if self.sequence.grammar is None or not candidates:
            return candidates
        path = []
        while node:
            path.append(self._builder.tokens[node])
            node = self._builder.parents[node]
        allowed = self.allowed(path[::-1], [candidate.token for candidate in candidates])
        return [candidate for candidate, is_allowed in zip(candidates, allowed, strict=True) if is_allowed]

    def _keyed(self, name: str, candidates: list[Candidate]) -> list[tuple[int, Key]]:
        """Tokens and keys of candidates that come likeliest first."""
        return [
            (token, (name, self.mode, min(rank, RANKS), *feature[:1], bisect_left(SHARES, -logp), *feature[1:]))
            for rank, (token, logp, feature) in enumerate(candidates)
        ]

    def _keyed_by_score(
        self, name: str, candidates: list[Candidate], score: Score, limit: int
    ) -> list[tuple[int, Key]]:
        """Tokens and keys of the `limit` candidates of greatest score."""
        if not candidates:
            return []
        scores = score([each.token for each in candidates], [each.logp for each in candidates]).tolist()
        order = sorted(range(len(candidates)), key=scores.__getitem__, reverse=True)[:limit]
        found = []
        for rank, index in enumerate(order):
            token, _, feature = candidates[index]
            margin = scores[index] - scores[order[1 if rank == 0 else 0]] if len(order) > 1 else ONLY_MARGIN
            buckets = bisect_left(SCORES, -scores[index]), bisect_left(MARGINS, -margin)
            found.append((token, (name, self.mode, min(rank, RANKS), *feature[:1], *buckets, *feature[1:])))
        return found


def _guess(token: int, estimates: Sequence[tuple[Key, float] | None], parameters: Sequence[Parameters]) -> Guess:
    """One guess from the estimates of all sources that have candidates at a node."""
    logits = tuple([None if each is None else logit(each[1]) for each in estimates])
    proposing = [each for each in estimates if each is not None]
    best, _ = max(proposing, key=lambda each: (each[0][0] == LEADING, each[1]))
    return Guess(token, mixed(parameters, logits), tuple([key for key, _ in proposing]), logits, str(best[0]))


def proposals(
    sequences: Sequence[SequenceView], searches: Mapping[int, TreeSearch], kept: Mapping[int, int]
) -> list[Proposal]:
    """The draft of every sequence of a step.

    Args:
        searches, kept: by index of the sequence: the search, and how many of its nodes are drafted, the root counted.
    """
    return [
        searches[index].proposal(kept[index]) if kept.get(index, 1) > 1 else Proposal(TokenTree.root(sequence.root))
        for index, sequence in enumerate(sequences)
    ]
