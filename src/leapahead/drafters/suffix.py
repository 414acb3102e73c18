"""The drafter "suffix": the suffix automaton alone."""

from __future__ import annotations

from typing import ClassVar

from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.suffix import Suffix
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source


class SuffixDrafter(Planned):
    """A suffix automaton over prompt and output (2411.10666): the longest earlier match, whatever its length.

    Args:
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
    """

    name: ClassVar[str] = "suffix"
    needs: ClassVar[frozenset[str]] = Suffix.needs

    def __init__(self, nodes: int = 16) -> None:
        super().__init__(nodes)

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [Suffix()]
