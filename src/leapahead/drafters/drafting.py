"""What a planned drafter keeps of one sequence; see `leapahead.drafters.planned`."""

from __future__ import annotations

from leapahead.planner.acceptance import Correction
from leapahead.planner.backoff import MOST_CREDIT, BackOff
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.source import Source
from leapahead.planner.tree_search import TreeSearch


class Drafting:
    """What a planned drafter keeps of one sequence.

    Attributes:
        sequence: the sequence.
        sources: of its own.
        readers: those of them that read the text before they are asked.
        correction: its factor on the acceptance estimates.
        back_off: of drafting; it goes on with that of a text before, so that short texts do not each try anew.
        search: made when the sources are asked for the first time.
        asked: whether they were asked in the step that is under way; false between steps.
        can_pay: whether a draft would pay if the target chose all of its tokens.
    """

    def __init__(self, sequence: SequenceView, sources: list[Source], before: BackOff) -> None:
        self.sequence, self.sources = sequence, sources
        self.readers = [source for source in sources if type(source).read is not Source.read]
        # Where the user has said what the text will be, some drafts that do not pay yet are no reason to wait.
        self.correction = Correction()
        self.back_off = BackOff(MOST_CREDIT) if sequence.prediction else before.carried()
        self.search: TreeSearch | None = None
        self.asked = False
        self.can_pay = True
        self._was_right = False  # whether the likeliest token was chosen when the sources were asked last

    def observe_choice(self, step: Step) -> bool:
        """Takes the token into account that the target chose in a step in which the sources were asked.

        Where it was their likeliest one, they are asked again soon, since estimates that many useless drafts have
        lowered would rise too slowly with a longer back-off; in the next step where it was so the time before, too,
        and right drafts can pay.

        Returns:
            Whether they are asked in the next step for this reason.
        """
        assert self.search is not None, "the sources were asked"
        was_right, self._was_right = self._was_right, self.search.likeliest == step.tokens[0]
        at_once = self.can_pay and was_right and self._was_right
        if self._was_right:
            self.back_off.remaining = 0 if at_once else min(self.back_off.remaining, self.back_off.usual)
        return at_once
