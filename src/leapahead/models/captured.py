"""The top-k tokens that were captured after the rows of a prompt, and how they are kept with the cache.

They are kept beside the cache entries of the prompt, so that a later prompt that reuses those entries has captured rows
too. This module knows neither models nor caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from leapahead.core.errors import Refused
from leapahead.core.sampling import Array
from leapahead.core.tree import IntArray
from leapahead.models.base import PROMPT_ROWS, Capture
from leapahead.models.choices import FloatArray, PromptRows


@dataclass(frozen=True)
class TopK:
    """The k likeliest tokens after consecutive positions of a sequence.

    Attributes:
        start: the first position.
        tokens: int64 [rows, k], falling.
        logits: float64 [rows, k].
    """

    start: int
    tokens: IntArray
    logits: FloatArray

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + len(self.tokens)

    @property
    def k(self) -> int:
        return int(self.tokens.shape[1])

    def between(self, start: int, end: int) -> TopK | None:
        """The rows of the positions from `start` up to `end`, `end` excluded; None if there are none."""
        first, last = max(start, self.start) - self.start, min(end, self.end) - self.start
        return TopK(self.start + first, self.tokens[first:last], self.logits[first:last]) if first < last else None

    def followed_by(self, later: TopK) -> TopK:
        """These rows and `later` ones, where those begin at the end of these and have no larger k; else `later`."""
        if self.end != later.start or self.k < later.k:
            return later
        tokens = np.concatenate((self.tokens[:, : later.k], later.tokens))
        return TopK(self.start, tokens, np.concatenate((self.logits[:, : later.k], later.logits)))


def joined(kept: TopK | None, found: TopK, start: int, given: int) -> tuple[TopK | None, TopK | None]:
    """Joins what a chunk of a prompt gave with what was kept of the rows before it.

    Args:
        kept: with the cache entries of the rows before; None where nothing was.
        found: of the chunk.
        start: the first position of which rows are kept.
        given: positions up to which rows were returned before.

    Returns:
        What is to be kept now, and what has not been returned yet.
    """
    if kept is not None:
        found = kept.followed_by(found)
    return found.between(start, found.end), found.between(max(start, given), found.end)


class HasRows(Protocol):
    """What a session knows of the captured rows of its prompt.

    Attributes:
        top_k: what is kept beside the cache entries of the prompt.
    """

    top_k: TopK | None


def first_row(start: int, end: int, last: int, capture: Capture) -> int:
    """The position of the first row, of a prompt's tokens [start, end), after which the top-k tokens are captured.

    Args:
        last: position of the prompt's last token.
    """
    return min(max(start, last - PROMPT_ROWS), end) if capture.top_k else end


def prompt_rows(
    kept: HasRows,
    tokens: list[int],
    bounds: tuple[int, int],
    given: int,
    found: TopK | None,
    hidden: Array = None,
) -> PromptRows | None:
    """The captured rows of a chunk of a prompt, those before it included that a reused prefix has; None for none.

    Args:
        kept: beside the cache entries; gets what is found now.
        tokens: the prompt.
        bounds: positions of the chunk, the last one excluded.
        given: positions up to which rows were returned before.
        found: of this chunk.
        hidden: states of the chunk's rows.
    """
    start, end = bounds
    fresh = None
    if found is not None:
        kept.top_k, fresh = joined(kept.top_k, found, len(tokens) - 1 - PROMPT_ROWS, given)
    if hidden is not None:
        return TopKRows(np.array(tokens[start:end]), start, fresh, hidden)
    if fresh is None:
        return None
    return TopKRows(np.array(tokens[fresh.start : fresh.end]), fresh.start, fresh)


class TopKRows(PromptRows):
    """Rows of a prompt whose top-k tokens were selected at once, so that they outlive the target's next forward.

    Args:
        tokens: int64 [rows], the prompt's tokens of these rows.
        start: the position of the first of them in the sequence.
        found: the top-k tokens, of all rows or of the last ones; None where none were captured.
        hidden: see `Rows`.
    """

    def __init__(self, tokens: IntArray, start: int, found: TopK | None, hidden: Array = None) -> None:
        super().__init__(tokens, start, None, hidden)
        self._found = found
        if found is not None:
            self.top_k_start = found.start

    def top_k(self, k: int) -> tuple[IntArray, FloatArray]:
        if self._found is None:
            raise Refused("no top-k tokens were captured; ask for them in Capture(top_k=...)")
        return self._found.tokens[:, :k], self._found.logits[:, :k]
