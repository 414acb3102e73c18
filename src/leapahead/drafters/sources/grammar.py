"""What a grammar forces: the brackets, keys and separators of JSON, the rest of a choice, the end of a tool call.

    {"name": "Ada", ┊ "born": ┊ 1815}        between the marks the schema leaves no choice

No model is asked for such tokens. They are nearly always accepted; not always, since the target may write the same text
with other tokens. After drafted tokens of other sources too, the grammar is asked what follows.
"""

from __future__ import annotations

from typing import Any, ClassVar

from leapahead.core.grammar import GrammarState
from leapahead.models.base import CHAIN
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Candidate, Source

LOGP = -0.01  # of the forced token
INNER, LAST = 0, 1  # as a candidate's feature: whether the next token is forced as well


Path = tuple[int, ...]  # a state: the drafted tokens from below the root


class Forced(Source):
    """Proposes the tokens that the sequence's grammar forces; nothing without a grammar."""

    name: ClassVar[str] = "grammar"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self) -> None:
        self._grammar: GrammarState | None = None
        self._length = 0  # committed tokens
        self._proposed = 0

    def begin(self, sequence: SequenceView) -> None:
        self._grammar = sequence.grammar

    def root(self, sequence: SequenceView) -> Path | None:
        self._length = len(sequence.tokens)
        return None if self._grammar is None else ()

    def follow(self, state: Path, token: int) -> Path:
        return (*state, token)

    def candidates(self, state: Path, limit: int) -> list[Candidate]:
        assert self._grammar is not None, "without a grammar there are no states"
        forced = self._grammar.forced(self._length, state)
        if not forced:
            return []
        self._proposed += 1
        return [Candidate(forced[0], LOGP, (INNER if len(forced) > 1 else LAST,))]

    def figures(self) -> dict[str, Any]:
        return {"proposed": self._proposed}
