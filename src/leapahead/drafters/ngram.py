"""The drafter "ngram": the n-gram source alone."""

from __future__ import annotations

from typing import ClassVar

from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.ngram import Ngrams
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source


class NgramDrafter(Planned):
    """Multi-level n-grams (2404.08698): what followed the last 1, 2, ... tokens before, the longest match first.

    Args:
        longest: never compare more than so many of the last tokens.
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
    """

    name: ClassVar[str] = "ngram"
    needs: ClassVar[frozenset[str]] = Ngrams.needs

    def __init__(self, longest: int = 8, nodes: int = 16) -> None:
        super().__init__(nodes)
        self.longest = longest
        self.make_sources(None)  # refuses impossible options

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [Ngrams(self.longest)]
