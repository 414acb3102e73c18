"""What passes between the decoding loop, the drafters and the planner: a view of a sequence, a proposal, a step.

Imports neither targets nor drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from leapahead.core.sampling import Sampler
from leapahead.core.tree import IntArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import Cost
from leapahead.models.choices import Choices


class SectionStore(Protocol):
    """The drafter cache, as sources use it; see `leapahead.drafters.cache.DrafterCache`."""

    def section(self, name: str, make: Callable[[], Any]) -> Any:
        """The section of that name, made when it is first asked for."""


class SequenceView:
    """What a drafter may know of one sequence.

    Attributes:
        tokens: committed tokens, prompt included. Live: it grows between calls. Not to be written.
        prompt_length: how many of them were given.
        given: how many of `text` were given, source included.
        vocab_size: token ids are below it.
        params: of the sampling.
        sampled: whether the temperature is above 0. The noise of a position is fixed then, so a drafted token is best
            kept for the position that it was drafted for.
        drafter_cache: what drafters keep from one text to the next; None where nothing is to be kept.
        prediction: the tokens that the user expects the text to consist of; empty where nothing is expected.
        grammar: what tokens may come next, see `leapahead.core.grammar`; None where the text may have any form.
        owner: see `Target.open`, for targets that draft.
        source: the encoder's input, of an encoder-decoder model, whose `tokens` are the decoder's; else empty.
        replay: committed tokens that take rows of the next forward once more; see `Session.replay`.
        explained: whether `Drafter.draft_probabilities` is called after the steps. To be set before `Drafter.begin`;
            what draft models compute for it takes time.
    """

    def __init__(
        self,
        sampler: Sampler,
        drafter_cache: SectionStore | None = None,
        prediction: Sequence[int] = (),
        owner: str = "",
        source: Sequence[int] = (),
        copies: bool = True,
    ) -> None:
        self.drafter_cache, self.prediction, self.owner = drafter_cache, tuple(prediction), owner
        self.source = tuple(source)
        self.replay = 0
        self.explained = False
        self._sampler = sampler
        self.tokens = sampler.tokens
        self.prompt_length = sampler.prompt_length
        self.vocab_size = sampler.vocab_size
        self.sampled = sampler.noise is not None
        self.params = sampler.params
        self.grammar = sampler.grammar
        # Behind the tokens that begin every text, so that the first token of the source is a continuation, too.
        self._text = [*self.tokens, *self.source] if self.source and copies else self.tokens
        self.given = len(self._text)

    @property
    def text(self) -> list[int]:
        """What a drafter may copy from: `tokens`, and in front of them the source. Live, as `tokens` is.

        A source of another vocabulary is left out, since its numbers are those of other tokens.
        """
        if self._text is not self.tokens and (new := len(self.tokens) + self.given - len(self._text)) > 0:
            self._text += self.tokens[-new:]
        return self._text

    @property
    def root(self) -> int:
        """The last committed token, at position `len(tokens) - 1`."""
        return self.tokens[-1]

    def allowed(self, draft: Sequence[int]) -> Sequence[int]:
        """The beginning of a draft, up to the first token that the grammar forbids; without a grammar, the whole."""
        return draft if self.grammar is None else draft[: self.grammar.admitted(len(self.tokens), draft)]

    def rank(self, position: int, tokens: npt.ArrayLike, logp: npt.ArrayLike) -> IntArray:
        """The order in which to try candidates for `position`, best first; see `Sampler.rank`."""
        return self._sampler.rank(position, tokens, logp)

    def scores(self, position: int, tokens: npt.ArrayLike, logp: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """What `rank` orders by when sampling, float64 [candidates]: `logp / T` plus the noise of the position."""
        scores = self._sampler.noisy_scores(position, tokens, logp)
        assert scores is not None, "greedy decoding has no noise"
        return scores


class Proposal(NamedTuple):
    """A draft and what is known of it.

    Attributes:
        tree: over the sequence's root.
        sources: which source drafted each node (the root's entry is not read); empty means the drafter's name for all.
        expected: float [nodes], the estimated probability that the node is accepted; NaN where there is no estimate.
        judge: another rule than `verify`, for drafts that were sampled: given the target's choices, what is committed.
    """

    tree: TokenTree
    sources: tuple[str, ...] = ()
    expected: npt.NDArray[np.float64] | None = None
    judge: Callable[[Choices], Verdict] | None = None


@dataclass(frozen=True, eq=False)
class Forward:
    """One forward of a target, timed.

    Attributes:
        seconds: wall clock.
        cost: its size.
        prepares: see `Choices.prepares`.
        drafted: nodes of all sequences, roots excluded.
        committed: tokens of each sequence that has taken part, in the order of their commits; complete after the step.
    """

    seconds: float
    cost: Cost
    prepares: bool = False
    drafted: int = 0
    committed: list[int] = field(default_factory=list)

    @property
    def is_usual(self) -> bool:
        """Whether its time tells that of others: no prompt was read in it, and nothing was prepared for others."""
        return not (self.cost.read or self.prepares)


class Step(NamedTuple):
    """One step of one sequence, as the drafter and the caller see it after the commit.

    Attributes:
        proposal: what went through the target.
        choices: the target's next token after every node, accepted or not.
        verdict: what was committed.
        position: of the tree's root.
        forward: the forward that the nodes were part of. All steps of one forward share the object.
    """

    proposal: Proposal
    choices: Choices
    verdict: Verdict
    position: int
    forward: Forward

    @property
    def tree(self) -> TokenTree:
        return self.proposal.tree

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed tokens; the first `verdict.accepted` of them were drafted."""
        return self.verdict.tokens
