"""What a planned drafter keeps of one sequence; see `leapahead.drafters.planned`."""

from __future__ import annotations

from leapahead.planner.acceptance import Correction
from leapahead.planner.backoff import BackOff
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source
from leapahead.planner.tree_search import TreeSearch


class Drafting:
    """What a planned drafter keeps of one sequence.

    Attributes:
        sequence: the sequence.
        sources: of its own.
        readers: those of them that read the text before they are asked.
        correction: its factor on the acceptance estimates.
        back_off: of drafting.
        search: made when the sources are asked for the first time.
        asked: whether they were asked in the step that is under way.
    """

    def __init__(self, sequence: SequenceView, sources: list[Source]) -> None:
        self.sequence, self.sources = sequence, sources
        self.readers = [source for source in sources if type(source).read is not Source.read]
        self.correction, self.back_off = Correction(), BackOff()
        self.search: TreeSearch | None = None
        self.asked = False
