"""The interface of a source: one provider of candidates of a token tree that is planned node by node.

    root(sequence) ──> state ── candidates ──> (token, log-probability, feature) ...
                         │ follow(token)
                         └──> state below it ── candidates ──> ...

Several sources fill one tree together (`leapahead.planner.tree_search`). A source tells what may come next and does not
decide what is drafted. The planner knows sources by this interface only; what one source can do and most cannot is an
optional hook with a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from leapahead import native
from leapahead.models.base import NOTHING, Capture
from leapahead.models.choices import PromptRows
from leapahead.planner.draft import SequenceView, Step

Feature = tuple[int, ...]  # at most 4 numbers from 0 to 31
FloatArray = npt.NDArray[np.float64]
Score = Callable[[npt.ArrayLike, npt.ArrayLike], FloatArray]  # of tokens and their log-probabilities

# Candidates that are ranked with the Gumbel noise, of a source that does not override `seed_aware_candidates`.
NOISE_CANDIDATES = 32


class Candidate(NamedTuple):
    """A token that may come next.

    Attributes:
        token: its id.
        logp: the source's own log-probability of it, among its candidates after this node.
        feature: what else its acceptance depends on, from coarse to fine: match length, count, recency, ... At most 4
            numbers from 0 to 31.
    """

    token: int
    logp: float
    feature: Feature


class Source(ABC):
    """Provides candidates for one sequence. There is one object for each sequence.

    A state stands for a position in the text and in a draft. It may be of any type; it is never changed in place.

    Attributes:
        name: who drafted a node, in reports and in the keys of acceptance estimates.
        needs: capabilities that the target must have.
        capture: what the target's forwards are to give beside the choices.
        costs_forward: whether a candidate list costs a forward of another model. How often the first of its candidates
            is right is then counted under a key of its own, which tells what such a forward is worth.
        compiled: the source of the compiled module that the compiled search asks in its place; None for most.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    capture: ClassVar[Capture] = NOTHING
    costs_forward: ClassVar[bool] = False
    compiled: native.module.Source | None = None

    # ------------------------------------------------------------------------------- the life of a sequence

    def begin(self, sequence: SequenceView) -> None:  # noqa: B027
        """Called once. `sequence.tokens` are the prompt, which the target has not read yet."""

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:  # noqa: B027
        """Called for each chunk of the prompt of which `capture` asked for something. The rows expire afterwards."""

    def read(self, sequence: SequenceView) -> None:  # noqa: B027
        """Called before `root`: reads tokens that were committed in steps for which `observe` was not called."""

    def committed(self, sequence: SequenceView, step: Step) -> None:  # noqa: B027
        """Called after every commit, of sources that capture hidden states: those of the step can be read now only."""

    def observe(self, sequence: SequenceView, step: Step) -> None:
        """Called after the commit of a step in which `root` was called; `sequence.tokens` contain `step.tokens`."""
        self.read(sequence)

    def finish(self, sequence: SequenceView) -> None:  # noqa: B027
        """Called once when the text ends: what it teaches for others goes to `sequence.drafter_cache`."""

    def close(self) -> None:  # noqa: B027
        """Called when the text is over, complete or not. Calling it twice is harmless."""

    def figures(self) -> dict[str, Any]:
        """What the source reports, for `Stats.drafter` (plain types)."""
        return {}

    # ------------------------------------------------------------------------------------------- candidates

    @abstractmethod
    def root(self, sequence: SequenceView) -> Any:
        """The state after the last committed token; None if the source has no candidates there."""

    @abstractmethod
    def follow(self, state: Any, token: int) -> Any:
        """The state one drafted token further; None if the source has no candidates there."""

    @abstractmethod
    def candidates(self, state: Any, limit: int) -> list[Candidate]:
        """At most `limit` tokens that may come next after a state, likeliest first, each once."""

    def seed_aware_candidates(self, state: Any, limit: int, score: Score) -> list[Candidate]:
        """The candidates for seed-aware drafting, in any order; the caller ranks them by `score` and keeps `limit`.

        Args:
            score: see `SequenceView.scores`, for the position of the candidates.
        """
        return self.candidates(state, NOISE_CANDIDATES)

    # --------------------------------------------------------------------------------------------- reports

    def probabilities(self, parents: Sequence[tuple[int, ...]], tokens: Sequence[int]) -> FloatArray | None:
        """The probability q that a draft model gave to nodes of the last tree; None for other sources.

        Args:
            parents: for each node, the drafted tokens from below the root to its parent.
            tokens: of the nodes.

        Returns:
            float64 [nodes]; NaN where the draft model did not compute it.
        """
        return None
