"""The interface of a source whose candidates cost a forward of another network: a draft model, or a trained head.

It has candidates only where such a forward was run; where that pays is decided by `leapahead.drafters.draft_forwards`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from leapahead.drafters.sources.computed import ComputedSource, Path
from leapahead.planner.backoff import BackOff
from leapahead.planner.draft import Forward, SequenceView
from leapahead.planner.profile import LatencyProfiles


class ForwardModel(Protocol):
    """A network whose forwards give candidates: a loaded draft model or head, shared by all texts."""

    @property
    def latency(self) -> LatencyProfiles: ...

    @property
    def title(self) -> str:
        """What messages call it: "the draft model small"."""

    @property
    def source_name(self) -> str:
        """Who drafted a node, in reports; a number is added where several have the same."""

    def source(self, name: str) -> ForwardSource:
        """A new source, for one sequence."""

    def known(self, tokens: Sequence[int], owner: str) -> int:
        """How many tokens of a prompt, its first ones, there are whose hidden states it does not need."""

    def prepare(self) -> None:
        """Loads or measures its latency profile."""

    def measure(self) -> None:
        """Measures it anew."""


class ForwardSource(ComputedSource):
    """One such network, for one sequence.

    Args:
        model: the network.
        name: who drafted a node.

    Attributes:
        steps_without: steps since its last draft forward.
        back_off: of its draft forwards.
    """

    costs_forward: ClassVar[bool] = True

    def __init__(self, model: ForwardModel, name: str) -> None:
        super().__init__(name)
        self.model = model
        self.steps_without = 0
        self.back_off = BackOff()

    def read(self, sequence: SequenceView) -> None:
        if self._length != len(sequence.tokens):
            self._length = len(sequence.tokens)
            self._rows = {}
            self.steps_without += 1
            self.back_off.suspended()  # counts the step
            self.commit()

    # ------------------------------------------------------------------------------------ its network's text

    @property
    @abstractmethod
    def failed(self) -> str:
        """Why the network cannot follow this text, any more or for now; "" while it can."""

    @property
    @abstractmethod
    def opened(self) -> bool:
        """Whether it has begun to read the prompt."""

    @property
    @abstractmethod
    def reading(self) -> bool:
        """Whether it has begun to and is not through, so that it cannot draft yet."""

    @property
    @abstractmethod
    def missing(self) -> int:
        """Rows of committed tokens that the next forward must compute beside what it is asked for."""

    @abstractmethod
    def read_ahead(self) -> None:
        """Reads the next chunk of the text."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Stops following the text and releases its cache."""

    @abstractmethod
    def commit(self) -> None:
        """The text has grown: discards what was drafted and was not committed."""

    @classmethod
    @abstractmethod
    def draft(cls, wanted: Sequence[tuple[Any, Sequence[Path]]]) -> Forward | None:
        """Computes paths of several texts in ONE forward of the network that these sources share.

        Args:
            wanted: sources, which are through with reading, and the paths after which they want candidates.

        Returns:
            The forward, timed; None if there was nothing to compute, or it failed.
        """

    def computable(self, path: Path) -> bool:
        """Whether one forward can compute the candidates after a path."""
        return True

    def reach(self, path: Path) -> int:
        """The number of depths of which a forward from a path gives candidates."""
        return 1

    @property
    def rows(self) -> int:
        """Rows of such a forward for each path."""
        return 1

    @property
    def beside(self) -> int:
        """Rows of such a forward beside those of its paths: guesses of the network's own next tokens."""
        return 0

    def root(self, sequence: SequenceView) -> Path | None:
        return None if self.failed else ()
