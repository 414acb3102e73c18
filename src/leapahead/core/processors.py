"""The calling convention of logits processors, which is that of Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Array = Any  # a numpy array or a torch tensor: whatever the target's logits are


class LogitsProcessor(Protocol):
    """A user's change to the logits, with the calling convention of Transformers.

    It must be a function of its arguments: it is called on drafted prefixes that may never be committed.
    """

    def __call__(self, prefixes: Array, logits: Array, /) -> Array:
        """prefixes: int [rows, length]; logits: float [rows, vocab]; returns float [rows, vocab].

        The arrays are of the target's kind: torch for Transformers, numpy elsewhere.
        """
        ...


@dataclass(frozen=True)
class PrefixFree:
    """Marks a processor that does not read its prefixes, so that one call serves nodes of every depth."""

    processor: LogitsProcessor

    def __call__(self, prefixes: Array, logits: Array, /) -> Array:
        return self.processor(prefixes, logits)
