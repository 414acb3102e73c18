"""The token table as a source: the target's own likeliest tokens after the last one alone, whatever came before it.

    after (.., b, a):   row a of a table that was computed once per model

It speaks after every token, so also where no other source knows the context; the rows of the text's own contexts, which
`recycling` keeps, are better where there are some. It needs nothing from the target's forwards.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from leapahead.drafters.token_table import TokenTable
from leapahead.models.base import CHAIN
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Candidate, Score, Source


class TableSource(Source):
    """Proposes the tokens of a table's row. A state is the last token.

    Args:
        table: of the target; all sequences share it.
    """

    name: ClassVar[str] = "table"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, table: TokenTable) -> None:
        self.table = table

    def root(self, sequence: SequenceView) -> int:
        return sequence.root

    def follow(self, state: int, token: int) -> int:
        return token

    def candidates(self, state: int, limit: int) -> list[Candidate]:
        tokens, logp = self.table.tokens[state, :limit].tolist(), self.table.logp[state, :limit].tolist()
        return [Candidate(token, value, ()) for token, value in zip(tokens, logp, strict=True)]

    def seed_aware_candidates(self, state: int, limit: int, score: Score) -> list[Candidate]:
        tokens, logp = self.table.tokens[state], self.table.logp[state].astype(np.float64)
        if len(tokens) > limit:
            best = np.argpartition(score(tokens, logp), -limit)[-limit:]
            tokens, logp = tokens[best], logp[best]
        return [Candidate(token, value, ()) for token, value in zip(tokens.tolist(), logp.tolist(), strict=True)]

    def figures(self) -> dict[str, Any]:
        return {"tokens": len(self.table.tokens), "k": self.table.k}
