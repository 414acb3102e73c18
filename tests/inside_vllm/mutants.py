"""Proposers with one fault each, which the tests of real texts must notice."""

from __future__ import annotations

from typing import Any

from leapahead.integrations.vllm import Proposer


class Longer(Proposer):
    """Drafts more tokens than vLLM has room for."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        return [draft and (draft * 9)[: self._most + 3] for draft in super().propose(*args, **kwargs)]


class Outside(Proposer):
    """Drafts a token outside the vocabulary."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        return [draft and [*draft[:-1], 1_000_000] for draft in super().propose(*args, **kwargs)]


class Shifted(Proposer):
    """Gives every request the draft of the next one, which changes no text and costs all acceptance."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        drafts = super().propose(*args, **kwargs)
        return [*drafts[1:], *drafts[:1]]
