"""Plain decoding as a drafter: it drafts nothing."""

from __future__ import annotations

from typing import ClassVar

from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import Context, Drafter, Proposal


class Plain(Drafter):
    """Plain decoding: one token per step, the reference that every other drafter's text must equal."""

    name: ClassVar[str] = "plain"

    def propose(self, context: Context, budget: Budget) -> Proposal:
        return Proposal(TokenTree.root(context.root))
