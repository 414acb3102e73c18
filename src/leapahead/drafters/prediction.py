"""The drafter "prediction": the user's predicted output alone."""

from __future__ import annotations

from typing import ClassVar

from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.prediction import Prediction
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source


class PredictionDrafter(Planned):
    """The text that the user expects, given as prediction=..., for edits and templates.

    Args:
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
    """

    name: ClassVar[str] = "prediction"
    needs: ClassVar[frozenset[str]] = Prediction.needs
    takes_prediction: ClassVar[bool] = True

    def __init__(self, nodes: int = 16) -> None:
        super().__init__(nodes)

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [Prediction()]
