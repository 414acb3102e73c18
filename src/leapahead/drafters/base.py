"""The interface of a drafter. Whatever it proposes, the text stays the target's: a wrong draft costs time only.

    Drafter             one object for all sequences of an engine that use it; proposes for a whole batch at once
    SequenceDrafter     one object per sequence, the simpler way to write one; `PerSequence` makes a Drafter of it

The engine calls, for one sequence: `begin` when its session is open, `read_prompt` for each chunk of its prompt,
`propose` and `observe` in every step, `finish` when its text is complete, `close` when it is over, complete or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.core.text import Tokenizer
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.draft_models import DraftModels
from leapahead.drafters.trained_heads import TrainedHeads
from leapahead.models.base import NOTHING, Capture, Target, TargetInfo, require
from leapahead.models.choices import PromptRows
from leapahead.planner.acceptance import AcceptanceTable
from leapahead.planner.draft import Proposal, SequenceView, Step
from leapahead.planner.profile import LatencyProfiles

Probabilities = dict[str, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Host:
    """What an engine gives its drafters.

    Attributes:
        info: of the target that they draft for.
        latency: how long a forward of that target takes, by its number of rows.
        acceptance: how often candidates of each kind were accepted, shared by all drafters of the engine.
        tokenizer: of the target; None where none is known.
        target: the target itself, for draft models that are made of it ("self:skip=2-4") and for measuring it again.
            Drafters never run a forward of it. None where the host has no such object.
        draft_models: the loaded draft models, shared by all drafters of the engine.
        heads: the loaded trained heads, likewise.
        running: the number of sequences of the forward that is being drafted for, those of other drafters included.
    """

    info: TargetInfo
    latency: LatencyProfiles
    acceptance: AcceptanceTable
    tokenizer: Tokenizer | None = None
    target: Target | None = None
    draft_models: DraftModels = field(default_factory=DraftModels)
    heads: TrainedHeads = field(default_factory=TrainedHeads)
    running: Callable[[], int] = int


class Drafter(ABC):
    """Drafts for all sequences of an engine that name it. Registered by name, see `leapahead.drafters`.

    Subclasses keep what they know of one sequence in a dictionary keyed by its view, and drop it in `close`.

    Attributes:
        name: the registered name.
        needs: capabilities that the target must have ("chain", "tree", "logits", "top_k", "hidden",
            "embeddings").
        same_text: whether the text under a seed is plain decoding's; false for rules that keep only the distribution.
        takes_prediction: whether it makes use of the user's prediction.
        copies_target: whether it drafts with a copy of the target's model, which must be one of Transformers then.
        decides: whether it decides what is committed (`Proposal.judge`) in every step. It is asked where nothing can be
            drafted, too, with a budget of no nodes.
        plans: whether it reads the latency profile, which is then measured before the first request. Known after
            `attach`.
        capture: what the target's forwards are to give beside the choices. Known after `attach`.
        host: what `attach` was given.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    same_text: ClassVar[bool] = True
    takes_prediction: ClassVar[bool] = False
    copies_target: ClassVar[bool] = False
    decides: ClassVar[bool] = False
    plans: bool = False
    capture: Capture = NOTHING
    host: Host

    def attach(self, host: Host) -> None:
        """Called once, before any sequence: takes what the engine gives, or refuses it by name.

        Raises:
            LeapaheadError: this drafter cannot draft for that target, or with that tokenizer.
        """
        # Of a string, every letter would count.
        if not isinstance(self.needs, (set, frozenset)) or not all(isinstance(need, str) for need in self.needs):
            raise BadParameter(
                f"drafter {self.name!r} has needs={self.needs!r}, which must be a set of names: frozenset({{'chain'}})"
            )
        require(host.info, self.needs | self.capture.needs, f"drafter {self.name!r}")
        self.host = host

    def capture_of(self, tokens: Sequence[int], owner: str) -> Capture:
        """What is to be captured of a new sequence's prompt: `capture`, without hidden states that are known already.

        Args:
            tokens: the prompt.
            owner: see `Target.open`.
        """
        return self.capture

    def prepare(self) -> None:  # noqa: B027  (most drafters have nothing to measure)
        """Called before the first request that uses it, outside of every request's time: measurements of its own."""

    def begin(self, sequence: SequenceView) -> None:  # noqa: B027
        """Called once, before the prompt is read."""

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:  # noqa: B027
        """Called for each chunk of the prompt of which `capture` asked for something. The rows expire afterwards."""

    @abstractmethod
    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        """A draft for each sequence, inside its budget. An empty draft is the tree of the root alone."""

    def observe(self, sequences: Sequence[SequenceView], steps: Sequence[Step]) -> None:  # noqa: B027
        """Called after the commit of every step but a text's last; the tokens of the sequences have grown."""

    def draft_probabilities(self, sequence: SequenceView, tree: TokenTree) -> Probabilities:
        """Of a sequence that is `explained`, after a step: the probability that each draft model gave to every node.

        Returns:
            Name of the draft model -> q, float64 [nodes]: the probability of the node's token after its parent, NaN
            where the draft model did not compute it. Empty for drafters without draft models.
        """
        return {}

    def finish(self, sequence: SequenceView) -> None:  # noqa: B027
        """Called when a text ends, complete or cancelled: what it teaches goes to `sequence.drafter_cache`."""

    def close(self, sequence: SequenceView) -> None:  # noqa: B027
        """Called when a text is over: everything held for it is released. Calling it twice is harmless."""

    def release(self) -> None:  # noqa: B027
        """Called when the engine is closed, or keeps this drafter no longer: what it has learned is written."""

    def figures(self, sequence: SequenceView) -> dict[str, Any]:
        """What the drafter reports of a sequence, for `Stats.drafter` (plain types)."""
        return {}


def close_all(kept: dict[SequenceView, Any], sequence: SequenceView, closing: Sequence[Callable[[], object]]) -> None:
    """Calls all of these, which release what a drafter keeps of a sequence, also after one that raises.

    The sequence is forgotten then. After an interrupt it is not, since the engine closes it again.
    """
    try:
        with ExitStack() as stack:
            for close in closing:
                stack.callback(close)
    except Exception:
        kept.pop(sequence, None)
        raise
    kept.pop(sequence, None)


class SequenceDrafter(ABC):
    """Drafts for one sequence: an object is made for each. Class attributes as of `Drafter`."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    same_text: ClassVar[bool] = True
    takes_prediction: ClassVar[bool] = False
    copies_target: ClassVar[bool] = False
    capture: Capture = NOTHING

    def begin(self, sequence: SequenceView) -> None:  # noqa: B027
        """Called once, before the prompt is read."""

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:  # noqa: B027
        """Called for each chunk of the prompt of which `capture` asked for something."""

    @abstractmethod
    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        """The draft of the next step, inside the budget."""

    def observe(self, sequence: SequenceView, step: Step) -> None:  # noqa: B027
        """Called after the commit of every step but the last."""

    def finish(self, sequence: SequenceView) -> None:  # noqa: B027
        """Called when the text ends: what it teaches goes to `sequence.drafter_cache`."""

    def figures(self) -> dict[str, Any]:
        """What the drafter reports, for `Stats.drafter` (plain types)."""
        return {}


class PerSequence(Drafter):
    """Makes a `Drafter` of a `SequenceDrafter` class, of which it keeps one object for each sequence.

    Args:
        new: returns a new object of that class.
    """

    def __init__(self, new: Callable[[], SequenceDrafter]) -> None:
        first = new()  # refuses impossible options
        kind = type(first)
        self.name, self.needs, self.same_text = kind.name, kind.needs, kind.same_text  # type: ignore[misc]
        self.takes_prediction, self.capture = kind.takes_prediction, first.capture  # type: ignore[misc]
        self._new = new
        self._drafters: dict[SequenceView, SequenceDrafter] = {}

    def begin(self, sequence: SequenceView) -> None:
        drafter = self._drafters[sequence] = self._new()
        drafter.begin(sequence)

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:
        self._drafters[sequence].read_prompt(sequence, rows)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        return [
            self._drafters[sequence].propose(sequence, budget)
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]

    def observe(self, sequences: Sequence[SequenceView], steps: Sequence[Step]) -> None:
        for sequence, step in zip(sequences, steps, strict=True):
            self._drafters[sequence].observe(sequence, step)

    def finish(self, sequence: SequenceView) -> None:
        if (drafter := self._drafters.get(sequence)) is not None:
            drafter.finish(sequence)

    def close(self, sequence: SequenceView) -> None:
        self._drafters.pop(sequence, None)

    def figures(self, sequence: SequenceView) -> dict[str, Any]:
        drafter = self._drafters.get(sequence)
        return {} if drafter is None else drafter.figures()
