"""Sibling rows: what the target predicted after rejected nodes of recent steps, by position in the text.

    step n      root ── a ── b ── c        text: root a X; b and c were rejected
                             │    └ row: what comes at position 4
                             └ row: what comes at position 3
    step n+1    root = X ── ?              position 3: the tokens of b's row are candidates

A rejected token is often a paraphrase of the one that came, or the text goes on in the same way after it. Nodes below
the end of the committed path saw the whole text but its last token, so their rows count more than those of other
branches; rows of the step before count less than those of the last one. When sampling, the kept log-probabilities are
ranked with the Gumbel noise of the position.

Memory and time are bounded by the size of a tree: a row whose position is passed is dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import reduce
from math import log
from operator import add
from typing import Any, ClassVar

import numpy as np

from leapahead.models.base import CHAIN, TOP_K, Capture
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.source import Candidate, Score, Source

GREEDY, SAMPLED = 8, 32  # likeliest tokens of a row that count
ASIDE = 0.2  # weight of the row of a node that is not below the end of the path
OLDER = 0.3  # factor on the weights of rows at every further step
# Bucket edges of the sum of weights at a position. No sum of the weights above meets one, or rounding would decide.
WEIGHTS = (0.2537, 0.9137, 1.9137, 3.9137)


class Siblings(Source):
    """Proposes the mean of the rows of rejected nodes at the candidate's position. A state is a position."""

    name: ClassVar[str] = "siblings"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN, TOP_K})
    capture: ClassVar[Capture] = Capture(top_k=SAMPLED)

    def __init__(self) -> None:
        self._k = 0
        self._rows: dict[int, dict[int, float]] = {}  # position -> token -> sum of weight * probability

    def begin(self, sequence: SequenceView) -> None:
        self._k = min(SAMPLED if sequence.sampled else GREEDY, sequence.vocab_size)

    def root(self, sequence: SequenceView) -> int:
        return len(sequence.tokens)

    def follow(self, state: int, token: int) -> int:
        return state + 1

    def candidates(self, state: int, limit: int) -> list[Candidate]:
        if not (row := self._rows.get(state)):
            return []
        total = reduce(add, row.values(), 0.0)  # `sum` of later versions of Python rounds in another way
        feature = (bisect_left(WEIGHTS, total),)
        chosen = sorted(row, key=row.__getitem__, reverse=True)[:limit]
        return [Candidate(token, log(row[token] / total), feature) for token in chosen]

    def seed_aware_candidates(self, state: int, limit: int, score: Score) -> list[Candidate]:
        return self.candidates(state, len(self._rows.get(state, ())))

    def observe(self, sequence: SequenceView, step: Step) -> None:
        length, tree = len(sequence.tokens), step.tree
        self._rows = {
            position: {token: OLDER * weight for token, weight in row.items()}
            for position, row in self._rows.items()
            if position >= length
        }
        nodes = [node for node in range(1, len(tree)) if step.position + tree.depth_list[node] + 1 >= length]
        if not nodes:
            return
        following, logits = step.choices.top_k(self._k)
        chances = np.exp(logits - logits[:, :1])
        chances /= chances.sum(axis=1, keepdims=True)
        below = {step.verdict.path[-1]}  # the end of the committed path, and what is below it
        for node in range(1, len(tree)):
            if tree.parent_list[node] in below:
                below.add(node)
        for node in nodes:
            row = self._rows.setdefault(step.position + tree.depth_list[node] + 1, {})
            weight = 1.0 if node in below else ASIDE
            for token, chance in zip(following[node].tolist(), chances[node].tolist(), strict=True):
                row[token] = row.get(token, 0.0) + weight * chance

    def figures(self) -> dict[str, Any]:
        return {"positions": len(self._rows)}
