"""What guesses. A drafter sees tokens and steps, never a backend's tensors unless it declares the need.

Whatever it proposes, the text stays the target's: a wrong draft costs time, never a wrong token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from leapahead.core.sampling import Sampler
from leapahead.core.text import Tokenizer
from leapahead.core.tree import Budget, IntArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.cache import Memory
from leapahead.models.base import Choices, PromptTopK, Target, require


class Context:
    """What a drafter may know of its sequence.

    Attributes:
        tokens: committed tokens, prompt included; live (it grows between calls), not to be written.
        prompt_length: how many of them were given.
        vocab_size: ids are below it.
        params: of the sampling.
        sampled: true with temperature. A draft is best kept at its position then, where its dice are; ranking needs no
            such question, `rank` knows.
        memory: what drafters keep from one text to the next; None where nothing is to be kept.
        prediction: the tokens that the user expects the text to be, about; empty where nothing is expected.
        prompt_top_k: what the target thought might follow the prompt's last tokens, if it was asked (`top_k` of its
            `open`): those tokens [n], the best behind each, int64 [n, k], and their logits, float64 [n, k], falling.
    """

    def __init__(
        self,
        sampler: Sampler,
        memory: Memory | None = None,
        prediction: Sequence[int] = (),
        prompt_top_k: PromptTopK | None = None,
    ) -> None:
        self.memory, self.prediction, self.prompt_top_k = memory, tuple(prediction), prompt_top_k
        self._sampler = sampler
        self.tokens = sampler.tokens
        self.prompt_length = sampler.prompt_length
        self.vocab_size = sampler.vocab_size
        self.sampled = sampler.dice is not None
        self.params = sampler.params

    @property
    def root(self) -> int:
        """The last committed token, at position `len(tokens) - 1`."""
        return self.tokens[-1]

    def rank(self, position: int, tokens: npt.ArrayLike, logp: npt.ArrayLike) -> IntArray:
        """The order in which to try candidates for `position`, best first: see `Sampler.rank`."""
        return self._sampler.rank(position, tokens, logp)

    def scores(self, position: int, tokens: npt.ArrayLike, logp: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """What `rank` orders by when sampling, float64 [candidates]: see `Sampler.rank`."""
        scores = self._sampler.dice_scores(position, tokens, logp)
        assert scores is not None, "there are no dice when greedy"
        return scores


@dataclass(frozen=True)
class Proposal:
    """A draft and what is known of it.

    Attributes:
        tree: over the context's root.
        sources: who drafted each node (the root's entry is not read); empty means the drafter's name for all.
        expected: float [nodes], probability that the node is accepted, if the drafter has an opinion.
        judge: another rule than `verify`, for drafts that were sampled: given the target's choices, what is committed.
    """

    tree: TokenTree
    sources: tuple[str, ...] = ()
    expected: npt.NDArray[np.float64] | None = None
    judge: Callable[[Choices], Verdict] | None = None


@dataclass(frozen=True, eq=False)
class Forward:
    """One forward of the target.

    Attributes:
        seconds: wall clock.
        sequences: that it was for.
        rows: nodes of all of them, padding counted.
    """

    seconds: float
    sequences: int
    rows: int


@dataclass(frozen=True)
class Step:
    """One step of one sequence, as the drafter and the caller see it afterwards.

    Attributes:
        proposal: what went through the target.
        choices: the target's next token after every node, accepted or not.
        verdict: what was committed.
        position: of the tree's root.
        forward: that the nodes went through; None where nobody timed it.
    """

    proposal: Proposal
    choices: Choices
    verdict: Verdict
    position: int
    forward: Forward | None = None

    @property
    def tree(self) -> TokenTree:
        return self.proposal.tree

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed tokens; the first `verdict.accepted` of them were drafted."""
        return self.verdict.tokens


class Ask(NamedTuple):
    """One sequence's part of a step."""

    drafter: Drafter
    context: Context
    budget: Budget


class Drafter(ABC):
    """One instance per sequence. Subclasses are registered by name, see `leapahead.drafters`.

    Class attributes:
        name: the registered name.
        needs: capabilities that the target must have ("chain", "tree", "logits", "top_k"); refused by name at
            construction.
        same_text: whether the text is that of plain decoding, and not only as likely: false of a rule other than match.
        predicts: whether it makes use of a predicted text, `Context.prediction`.
        prompt_top_k: so many of the best tokens after each of the prompt's last tokens are wanted in
            `Context.prompt_top_k`, from targets that can.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    same_text: ClassVar[bool] = True
    predicts: ClassVar[bool] = False
    prompt_top_k: ClassVar[int] = 0

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:  # noqa: B027  (most drafters bring no tokens of their own)
        """Called where the target's tokenizer is known, before any text.

        Raises:
            BadParameter: what the drafter brings was made with another one.
        """

    def check_target(self, target: Target) -> None:  # noqa: B027  (most ask for capabilities only)
        """Called with the model that will decode, before any text.

        Raises:
            LeapaheadError: this drafter cannot draft for it.
        """

    def fits(self, target: Target, tokenizer: Tokenizer | None = None) -> None:
        """Refuses by name, before any work, a target or a tokenizer that this drafter cannot draft for.

        Raises:
            LeapaheadError: as of `check_target` and `check_tokenizer`; or a capability is missing.
        """
        require(target, self.needs, self.name)
        self.check_target(target)
        if tokenizer is not None:
            self.check_tokenizer(tokenizer)

    def begin(self, context: Context) -> None:  # noqa: B027  (most drafters keep nothing of the prompt)
        """Called once, with the prompt committed, before the first `propose`."""

    @abstractmethod
    def propose(self, context: Context, budget: Budget) -> Proposal:
        """The draft for the next step, inside `budget`."""

    @classmethod
    def propose_together(cls, target: Target, asks: Sequence[Ask]) -> list[Proposal]:
        """The drafts of all sequences of a step that use this class, for drafters that share a plan."""
        return [ask.drafter.propose(ask.context, ask.budget) for ask in asks]

    def observe(self, context: Context, step: Step) -> None:  # noqa: B027
        """Called after the commit of every step but the last; `context.tokens` has grown by `step.tokens`."""

    def opinions(self, tree: TokenTree) -> dict[str, npt.NDArray[np.float64]]:
        """For those who look on, after a step: what each draft model thought of every node of its tree.

        Returns:
            Its name -> q, float64 [nodes]: the probability of the node's token after its parent; NaN where it did not
            look. Empty of drafters without such models.
        """
        return {}

    def finish(self, context: Context) -> None:  # noqa: B027
        """Called once when the text is complete: what it teaches for others goes to `context.memory`."""

    def close(self) -> None:  # noqa: B027  (most drafters hold nothing)
        """Called when the text is over, complete or not: what is held for it is given back. Twice is harmless."""

    def figures(self) -> dict[str, Any]:
        """What the drafter says of itself, for `Stats.drafter` (plain types)."""
        return {}
