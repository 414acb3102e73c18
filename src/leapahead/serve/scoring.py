"""Log-probabilities of a prompt: it is decoded as a text whose tokens are given.

prompt  a b c d      the text begins after a; b, c and d are drafted, and committed whatever the target chooses

A target that takes no drafts reads one token in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from leapahead.core.errors import CacheFull
from leapahead.core.tree import Budget, TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.base import Drafter
from leapahead.models.base import CHAIN, LOGITS, TargetInfo
from leapahead.models.choices import Choices
from leapahead.planner.draft import Proposal, SequenceView
from leapahead.serve.errors import ApiError

CHUNK = 64  # tokens of a step: their logits are all in memory


def check_prompts(prompts: Sequence[Sequence[int]], info: TargetInfo) -> None:
    """Refuses prompts whose tokens get no log-probabilities.

    Raises:
        ApiError: they are read by an encoder, which gives none.
        CacheFull: one is longer than the KV cache. It is decoded behind its first token, so nothing else would tell.
    """
    if info.decoder is not None:
        message = "encoder-decoder models have no log-probabilities of prompts; leave out prompt_logprobs, or echo"
        raise ApiError(400, message, "prompt_logprobs", "invalid_value")
    if info.cache_tokens and (longest := max(map(len, prompts))) > info.cache_tokens + 1:  # the last one needs no room
        raise CacheFull(f"the prompt has {longest} tokens and the cache {info.cache_tokens}; shorten it")


class Given(Drafter):
    """Commits the prediction, token by token, after a prompt of one token. The tokens behind it are the target's."""

    name: ClassVar[str] = "given"
    needs: ClassVar[frozenset[str]] = frozenset({LOGITS})
    same_text: ClassVar[bool] = False
    takes_prediction: ClassVar[bool] = True
    decides: ClassVar[bool] = True

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        most = CHUNK if CHAIN in self.host.info.capabilities else 0
        return [_proposal(sequence, budget, most) for sequence, budget in zip(sequences, budgets, strict=True)]


def _proposal(sequence: SequenceView, budget: Budget, most: int) -> Proposal:
    done = len(sequence.tokens) - 1
    tokens = tuple(sequence.prediction[done : done + min(most, budget.nodes, budget.depth) + 1])
    if not tokens:
        return Proposal(TokenTree.root(sequence.root))
    return Proposal(TokenTree.chain(sequence.root, tokens[:-1]), judge=partial(_verdict, tokens))


def _verdict(tokens: tuple[int, ...], _: Choices) -> Verdict:
    return Verdict(tuple(range(len(tokens))), tokens, len(tokens) - 1)
