"""Prompts that somebody else has read: a model's own forward, of inputs beside token ids such as images.

    images, token ids ── the model's own forward ──> entries of the KV cache ── written to a session, which reads on

Such entries depend on more than the tokens, so that sessions with them share none with others. This module imports no
backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from leapahead.core.sampling import SamplingParams
from leapahead.models.base import Capture, Session


@dataclass(frozen=True, eq=False)
class PromptEntries:
    """The entries of a prompt's first tokens.

    Attributes:
        layers: by number of the layer, its keys and values, each [heads, tokens, dim] of the target's kind. Layers
            without entries are missing.
        offset: what the model counts beyond the tokens from there on: the token at index i has the position i plus
            this. Negative where an image takes fewer positions than tokens.
    """

    layers: dict[int, tuple[Any, Any]]
    offset: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens they are of."""
        return int(next(iter(self.layers.values()))[0].shape[1])


@runtime_checkable
class TakesEntries(Protocol):
    """A target whose sessions may begin with given entries."""

    def open_entries(
        self, tokens: Sequence[int], params: SamplingParams, begin: PromptEntries, capture: Capture, reserve: int = 0
    ) -> Session:
        """As `Target.open`, with the entries of some of the first tokens, at most of all but the last one.

        Nothing is captured of the prompt, and its entries are shared with no other session.

        Raises:
            Refused: the target cannot go on from entries, or hidden states of the prompt are to be captured.
        """
