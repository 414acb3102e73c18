"""The drafter "recycling": Token Recycling alone (2408.08696)."""

from __future__ import annotations

from typing import ClassVar

from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.recycling import Recycling
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source


class TokenRecycling(Planned):
    """Token Recycling (2408.08696): the target's own top-k tokens after each context, as last computed.

    Args:
        k: keep exactly so many of the likeliest tokens after a context; 0 for 8 when greedy and 128 when sampling.
        longest: never compare more than so many tokens of a context; 1 as published.
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
    """

    name: ClassVar[str] = "recycling"
    needs: ClassVar[frozenset[str]] = Recycling.needs

    def __init__(self, k: int = 0, longest: int = 4, nodes: int = 16) -> None:
        super().__init__(nodes)
        self.k, self.longest = k, longest
        self.make_sources(None)  # refuses impossible options

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [Recycling(self.k, self.longest)]
