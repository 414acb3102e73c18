"""The sequences of a host that is not ours: what the drafter knows of each request, kept by its id.

A request keeps its state while it waits after a preemption. In every step the host's record of its tokens is compared
with ours, at the seam of the new tokens; where they differ, or steps were missed, the state is brought up to date or
made anew. So nothing that the host does can mix the texts of two requests.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from leapahead.core.parameters import LARGEST
from leapahead.core.sampling import LEAST_TEMPERATURE, Sampler, SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.cache import DrafterCache
from leapahead.integrations.vllm.batch import Request
from leapahead.integrations.vllm.verified import ForwardRows, Verified
from leapahead.planner.draft import Forward, Proposal, SequenceView, Step

SEAM = 8  # tokens before the new ones that are compared with the host's record

Record = npt.NDArray[np.integer[Any]]


def endings(records: Record, lengths: abc.Sequence[int], new: int) -> list[list[int]]:
    """The last tokens of the records of a batch: the seam and `new` tokens, or all where there are fewer.

    Args:
        records: int [requests or more, longest].
        lengths: of each request.
        new: the most new tokens of a request.
    """
    return [
        record[max(length - SEAM - new, 0) : length].tolist()
        for record, length in zip(records, lengths, strict=False)  # of whole records: faster than by a number each
    ]


@dataclass(eq=False)
class Sequence:
    """One request.

    Attributes:
        view: what drafters see.
        sampler: holds its tokens; it chooses nothing.
        request: what is known of it beside its tokens.
        proposal: the draft that was given to the host last, of the root alone where that was none; None if the
            sequence was not asked.
    """

    view: SequenceView
    sampler: Sampler
    request: Request
    proposal: Proposal | None = None

    @classmethod
    def of(
        cls, record: Record, length: int, new: int, request: Request, vocab_size: int, cache: DrafterCache | None
    ) -> Sequence:
        """A sequence that is seen for the first time.

        Args:
            record: int [longest], the host's record of its tokens.
            length: how many of them are committed.
            new: how many of these are new.
            request: what is known of it.
            vocab_size: token ids are below it.
            cache: the drafter cache, if there is one.
        """
        prompt = min(request.prompt_length or length - new, length)
        tokens = record[:prompt].tolist()
        # Some versions of vLLM take numbers beyond those of float32.
        temperature = min(max(request.temperature, LEAST_TEMPERATURE), LARGEST) if request.temperature > 0 else 0.0
        sampler = Sampler(SamplingParams(temperature=temperature), tokens, vocab_size)
        tokens += record[prompt:length].tolist()
        sampler.committed()
        return cls(SequenceView(sampler, cache, request.prediction), sampler, request)

    @property
    def tokens(self) -> list[int]:
        """All committed tokens, as they were last seen."""
        return self.sampler.tokens

    def follows(self, ending: list[int], length: int, new: list[int]) -> bool:
        """Whether the record is ours and these new tokens, as far as the seam shows.

        Args:
            ending: the last tokens of the record, see `endings`.
            length: of the record.
            new: its new tokens.
        """
        held = len(self.tokens)
        if held + len(new) != length:
            return False
        expected = self.tokens[-SEAM:] + new
        return ending[-len(expected) :] == expected

    def catches_up(self, record: Record, length: int) -> bool:
        """Takes over tokens of steps that were missed; False if the record is that of another text."""
        tokens, self.proposal = self.tokens, None
        held = len(tokens)
        if held > length or record[:held].tolist() != tokens:
            return False
        self.extend(record[held:length].tolist())
        return True

    def extend(self, new: abc.Sequence[int]) -> None:
        """Commits tokens."""
        self.sampler.tokens += new
        self.sampler.committed()

    def step(
        self, new: abc.Sequence[int], verified: int | None, rows: ForwardRows | None, start: int, forward: Forward
    ) -> Step | None:
        """The step that has committed these tokens, as the drafter observes it; None if they are not of our draft.

        Args:
            new: the tokens.
            verified: how many drafted tokens went through the forward; None for all of the draft.
            rows: of the forward, if its logits are known.
            start: the row of the sequence's root.
            forward: that the step is part of.
        """
        proposal = self._verified(verified)
        accepted = len(new) - 1
        if accepted and proposal.tree.token_list[1 : accepted + 1] != list(new[:-1]):
            return None
        verdict = Verdict(tuple(range(len(new))), tuple(new), accepted)
        choices = Verified(proposal.tree, self.sampler, new, rows, start)
        return Step(proposal, choices, verdict, len(self.tokens) - 1, forward)

    def _verified(self, verified: int | None) -> Proposal:
        """The part of the last draft that the host has verified; schedulers and grammars may shorten it."""
        proposal, size = self.proposal, (verified or 0) + 1
        if proposal is None:
            return Proposal(TokenTree.root(self.view.root))
        tree = proposal.tree
        if verified is None or size >= len(tree):
            return proposal
        expected = None if proposal.expected is None else proposal.expected[:size]
        return Proposal(TokenTree.chain(tree.token_list[0], tree.token_list[1:size]), proposal.sources[:size], expected)
