"""The KV cache of a decoder with cross-attention: beside its entries, every row has the keys and values of its source.

    row 0    c c c c n n       keys and values of the encoder's 5 tokens      x x x x x        computed once, when the
    row 1    c c n n           keys and values of the encoder's 3 tokens      x x x . .        prompt is read

The source is the encoder's input. Its keys and values depend on nothing else, so that all samples of a prompt, and
later requests with the same one, share them. For a forward over several rows they are put together, padded to the
longest; that is kept until other rows are stepped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from leapahead.models.transformers.kv_cache import KVCache, Row


class Cross(NamedTuple):
    """The keys and values of one or several sources, as a model reads them.

    Attributes:
        entries: by layer, keys and values [batch, heads, tokens, dim].
        lengths: tokens of each source.
        mask: bool [batch, 1, 1, tokens], what is no padding; None where there is none.
    """

    entries: Any
    lengths: tuple[int, ...]
    mask: Tensor | None = None

    @classmethod
    def together(cls, each: Sequence[Cross]) -> Cross:
        """Those of several rows as one batch."""
        lengths = tuple(length for one in each for length in one.lengths)
        longest, entries = max(lengths), DynamicCache()
        for layer in range(len(each[0].entries.layers)):
            layers = [one.entries.layers[layer] for one in each]
            keys, values = [one.keys for one in layers], [one.values for one in layers]
            entries.update(_stacked(keys, longest), _stacked(values, longest), layer)
        if len(set(lengths)) == 1:
            return cls(entries, lengths)
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        return cls(entries, lengths, mask[:, None, None].to(each[0].entries.layers[0].keys.device))


def _stacked(parts: Sequence[Tensor], longest: int) -> Tensor:
    """[batch, heads, longest, dim] of [1, heads, tokens, dim] each."""
    if all(part is parts[0] for part in parts):  # samples of one prompt
        return parts[0].expand(len(parts), -1, -1, -1)
    return torch.cat([pad(part, (0, 0, 0, longest - part.shape[2])) for part in parts])


@dataclass(eq=False)
class CrossedRow(Row):
    """A row with the keys and values of its source.

    Attributes:
        source: the encoder's input; empty in the self-test, whose sources are drawn from the first token of the text.
        states: the encoder's output for it, where that was given.
        cross: None until the source is encoded.
    """

    source: tuple[int, ...] = ()
    states: Any = None
    cross: Cross | None = None


class CrossedCache(KVCache):
    """See the module."""

    row_class = CrossedRow
    rows: list[CrossedRow]  # type: ignore[assignment]

    def __init__(self, usual_length: int) -> None:
        self._together: tuple[list[Cross], Cross] | None = None
        super().__init__(usual_length)

    def take(self, tokens: list[int], reuse: int, reserve: int = 0, owner: str = "") -> CrossedRow:
        row = super().take(tokens, reuse, reserve, owner)
        assert isinstance(row, CrossedRow)
        row.source, row.states, row.cross = (), None, None
        return row

    def forget(self) -> None:
        super().forget()
        self._together = None
        for row in self.rows:
            if not row.busy:
                row.source, row.states, row.cross = (), None, None

    def known(self, owner: str) -> Cross | None:
        """The keys and values of the source of any row of this owner, where it is encoded."""
        return next((row.cross for row in self.rows if row.owner == owner and row.cross is not None), None)

    @property
    def stepped(self) -> list[CrossedRow]:
        """The rows of the current forward, in the order of its batch."""
        return self.rows[self._first_row : self._first_row + len(self._lengths)]

    def cross(self) -> Cross:
        """The keys and values of the sources of the current forward's rows, all of which are encoded."""
        each = [row.cross for row in self.stepped if row.cross is not None]
        if len(each) == 1:
            return each[0]
        if self._together is None or not _same(self._together[0], each):
            self._together = each, Cross.together(each)
        return self._together[1]


def _same(some: Sequence[Cross], others: Sequence[Cross]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


class BothCaches(EncoderDecoderCache):  # type: ignore[misc]
    """What one forward of a decoder is given: its own entries and those of the sources.

    Args:
        entries: of the decoder.
        cross: of the sources.
        begin: the position that the model counts the new tokens from, where it is not told positions.
    """

    def __init__(self, entries: KVCache, cross: Cross, begin: int) -> None:
        super().__init__(entries, cross.entries)
        self.begin = begin

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.begin
