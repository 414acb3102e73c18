"""A source that has candidates from a given depth on: for the later positions of a draft, or for none.

In the horizontal cascade of 2312.11462 a draft model drafts the first positions, on whose acceptance all others depend,
and cheaper sources the later ones.
"""

from __future__ import annotations

from typing import Any

from leapahead.models.choices import PromptRows
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.source import Candidate, Score, Source

State = tuple[int, Any]  # depth, and the state of the other source


class Later(Source):
    """Another source's candidates, from a depth on.

    Args:
        source: the other one.
        first: depth of the nodes after which it has candidates; 0 for the root.
    """

    def __init__(self, source: Source, first: int) -> None:
        self.source, self.first = source, first
        self.name, self.needs, self.capture = source.name, source.needs, source.capture  # type: ignore[misc]

    def begin(self, sequence: SequenceView) -> None:
        self.source.begin(sequence)

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:
        self.source.read_prompt(sequence, rows)

    def read(self, sequence: SequenceView) -> None:
        self.source.read(sequence)

    def observe(self, sequence: SequenceView, step: Step) -> None:
        self.source.observe(sequence, step)

    def finish(self, sequence: SequenceView) -> None:
        self.source.finish(sequence)

    def close(self) -> None:
        self.source.close()

    def root(self, sequence: SequenceView) -> State | None:
        return None if (state := self.source.root(sequence)) is None else (0, state)

    def follow(self, state: State, token: int) -> State | None:
        depth, inner = state
        return None if (below := self.source.follow(inner, token)) is None else (depth + 1, below)

    def candidates(self, state: State, limit: int) -> list[Candidate]:
        return self.source.candidates(state[1], limit) if state[0] >= self.first else []

    def seed_aware_candidates(self, state: State, limit: int, score: Score) -> list[Candidate]:
        return self.source.seed_aware_candidates(state[1], limit, score) if state[0] >= self.first else []

    def figures(self) -> dict[str, Any]:
        return self.source.figures()
