"""What guesses. A drafter sees tokens and steps, never a backend's tensors unless it declares the need.

Whatever it proposes, the text stays the target's: a wrong draft costs time, never a wrong token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from leapahead.sampling import Sampler
from leapahead.target import Choices
from leapahead.tree import Budget, IntArray, TokenTree
from leapahead.verify import Verdict


class Context:
    """What a drafter may know of its sequence.

    Attributes:
        tokens: committed tokens, prompt included; live (it grows between calls), not to be written.
        prompt_length: how many of them were given.
        vocab_size: ids are below it.
        sampled: true with temperature. A draft is best kept at its position then, where its dice are; ranking needs no
            such question, `rank` knows.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.tokens = sampler.tokens
        self.prompt_length = sampler.prompt_length
        self.vocab_size = sampler.vocab_size
        self.sampled = sampler.dice is not None

    @property
    def root(self) -> int:
        """The last committed token, at position `len(tokens) - 1`."""
        return self.tokens[-1]

    def rank(self, position: int, tokens: npt.ArrayLike, logp: npt.ArrayLike) -> IntArray:
        """The order in which to try candidates for `position`, best first: see `Sampler.rank`."""
        return self._sampler.rank(position, tokens, logp)


@dataclass(frozen=True)
class Proposal:
    """A draft and what is known of it.

    Attributes:
        tree: over the context's root.
        sources: who drafted each node (the root's entry is not read); empty means the drafter's name for all.
        expected: float [nodes], probability that the node is accepted, if the drafter has an opinion.
    """

    tree: TokenTree
    sources: tuple[str, ...] = ()
    expected: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Step:
    """One step of one sequence, as the drafter and the caller see it afterwards.

    Attributes:
        proposal: what went through the target.
        choices: the target's next token after every node, accepted or not.
        verdict: what was committed.
        position: of the tree's root.
    """

    proposal: Proposal
    choices: Choices
    verdict: Verdict
    position: int

    @property
    def tree(self) -> TokenTree:
        return self.proposal.tree

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed tokens; the first `verdict.accepted` of them were drafted."""
        return self.verdict.tokens


class Drafter(ABC):
    """One instance per sequence. Subclasses are registered by name, see `leapahead.drafters`.

    Class attributes:
        name: the registered name.
        needs: capabilities that the target must have ("chain", "tree", "logits"); refused by name at construction.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()

    def begin(self, context: Context) -> None:  # noqa: B027  (most drafters keep nothing of the prompt)
        """Called once, with the prompt committed, before the first `propose`."""

    @abstractmethod
    def propose(self, context: Context, budget: Budget) -> Proposal:
        """The draft for the next step, inside `budget`."""

    def observe(self, context: Context, step: Step) -> None:  # noqa: B027
        """Called after the commit; `context.tokens` has grown by `step.tokens`."""

    def figures(self) -> dict[str, Any]:
        """What the drafter says of itself, for `Stats.drafter` (plain types)."""
        return {}
