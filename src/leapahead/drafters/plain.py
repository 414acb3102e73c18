"""Plain decoding as a drafter: it drafts nothing, so every step commits one token."""

from __future__ import annotations

from typing import ClassVar

from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import SequenceDrafter
from leapahead.planner.draft import Proposal, SequenceView


class Plain(SequenceDrafter):
    """Plain decoding: nothing is drafted, one token per step. It is the reference for every other drafter."""

    name: ClassVar[str] = "plain"

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        return Proposal(TokenTree.root(sequence.root))
