"""The part of a sequence's cache that a query attends to most, copied into a block of its own (TriForce, 2404.11912).

    row of the target    [ 0 ][ 1 ][ 2 ][ 3 ] . . [ n-1 ] e e e e e        chunks of a few entries, then the newest ones
                           |         |               |    |       |
    block                [ 0 ][ 2 ][ n-1 ] e e e e e | + + | t t t t       + entries of tokens committed since
                         `--- the chosen chunks                            t pending entries of the draft's tree

In every layer, each key head has its own chunks: the first one, and those whose mean key has the greatest part of the
attention of the last committed token, summed over the query heads that share the key head. The query is that of the
draft's own forward, which chooses in a layer and then attends to what it has chosen there, so the target's forwards are
not changed. Entries keep the positions that they were computed for.

The block is copied, so that attention reads its length and no mask hides the rest. What is in it are always the
target's own entries of committed tokens; what the draft itself has computed stays pending and is overwritten.

Knows caches and tensors; knows neither models nor drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from leapahead.models.transformers import grouped
from leapahead.models.transformers.kv_cache import KVCache, Row

NAME = "leapahead_retrieval"
NEWEST_SHARE = 8  # the newest entries are at least this part of the budget


class Layout(NamedTuple):
    """What of a row is copied.

    Attributes:
        chunks: to choose from; the entries behind them are copied as they are.
        chosen: the number of chunks that are copied.
    """

    chunks: int
    chosen: int


@dataclass(frozen=True)
class Retrieval:
    """How much is retrieved, and how often.

    Attributes:
        budget: entries that are copied when chunks are chosen, the newest ones among them.
        chunk: entries of a chunk.
        refresh: chunks are chosen again when so many tokens were committed since.
        newest: entries at the end that are copied whatever their chunks are, at least.
    """

    budget: int
    chunk: int
    refresh: int
    newest: int

    @classmethod
    def of(cls, budget: int, chunk: int, refresh: int) -> Retrieval:
        """With the usual part of the budget for the newest entries."""
        return cls(budget, chunk, refresh, max(chunk, budget // NEWEST_SHARE))

    def layout(self, length: int) -> Layout:
        """Of a row with so many entries."""
        chunks = max(0, length - self.newest) // self.chunk
        return Layout(chunks, min(chunks, (self.budget - (length - chunks * self.chunk)) // self.chunk))


class Fill(NamedTuple):
    """What a forward copies into a block, in every layer, before it attends to it.

    Attributes:
        retrieved: whose block.
        layout: of the chunks that are chosen; None where they stay.
        start, stop: the row's entries that are copied as they are.
        at: where in the block these begin.
    """

    retrieved: Retrieved
    layout: Layout | None
    start: int
    stop: int
    at: int


class Retrieved:
    """What is kept of one sequence: its block, and the mean keys of its chunks.

    Args:
        settings: of the retrieval.
        row: of the target, with the sequence's entries; only committed ones are read.
        source: the target's cache.
        cache: of the blocks.

    Attributes:
        block: its row in `cache`.
        selections: how often chunks were chosen.
    """

    def __init__(self, settings: Retrieval, row: Row, source: KVCache, cache: BlockCache) -> None:
        self.settings, self._row, self.source, self.cache = settings, row, source, cache
        self.tokens = row.tokens
        self.block = cache.take([], 0)
        self.block.offset = row.offset
        self.selections = 0
        self._means: dict[int, Tensor] = {}  # layer -> [key heads, capacity, dim]
        self._known: dict[int, int] = {}  # layer -> chunks whose mean key is known
        self.forget()

    @property
    def row(self) -> Row:
        """Another one after the sequence was preempted."""
        if self._row.tokens is not self.tokens:
            self._row = self.source.row_of(self.tokens) or self._row
        return self._row

    @property
    def length(self) -> int:
        return self.row.length

    @property
    def replay(self) -> int:
        return 0

    def commit(self, path: Sequence[int]) -> None:
        """Nothing: the target's row has the committed entries, and `renew` copies them."""

    def close(self) -> None:
        """Gives the block back. Closing twice is harmless."""
        if self.block.busy:
            self.cache.release(self.block)
        self._means.clear()

    def forget(self) -> None:
        """Chooses anew at the next step; to be called when a forward has failed, in the middle of copying."""
        self._chosen_at = self._copied = -1

    def renew(self) -> Fill:
        """The block of the next step: the committed entries that it does not have yet, or other chunks."""
        block, length = self.block, self.row.length
        layout, start = None, self._copied
        if self._chosen_at < 0 or length - self._chosen_at >= self.settings.refresh:
            layout = self.settings.layout(length)
            start = layout.chunks * self.settings.chunk
            block.left_out = start - layout.chosen * self.settings.chunk
            self._chosen_at = length
            self.selections += 1
        assert start <= length, "committed entries are never taken back"
        self._copied = length
        block.length, block.pending = length - block.left_out, 0
        return Fill(self, layout, start, length, start - block.left_out)

    def copy(self, layer: int, fill: Fill, query: Tensor, scaling: float | None) -> None:
        """Copies what `fill` says, in one layer.

        Args:
            layer: number of the layer.
            fill: by `renew`.
            query: [heads, dim], of the last committed token.
            scaling: of the scores; by default 1 / sqrt(dim).
        """
        pairs = [
            (self.source.plane(layer, part)[self.row.index], self.cache.plane(layer, part)[self.block.index])
            for part in (0, 1)
        ]
        if fill.layout is not None and fill.layout.chosen:
            means = self.mean_keys(layer, fill.layout.chunks)
            chosen = best_chunks(query, means, fill.layout.chosen, scaling)
            heads = torch.arange(len(chosen), device=chosen.device)[:, None]
            for entries, block in pairs:
                block[:, : fill.at] = self._chunks(entries[:, : fill.start])[heads, chosen].flatten(1, 2)
        if fill.stop > fill.start:
            for entries, block in pairs:
                block[:, fill.at : fill.at + fill.stop - fill.start] = entries[:, fill.start : fill.stop]

    def _chunks(self, entries: Tensor) -> Tensor:
        """[key heads, entries, dim] -> [key heads, chunks, entries of a chunk, dim], a view."""
        return entries.view(len(entries), -1, self.settings.chunk, entries.shape[2])

    def mean_keys(self, layer: int, chunks: int) -> Tensor:
        """[key heads, chunks, dim]: of the first chunks. Each is computed once."""
        entries = self.source.plane(layer, 0)[self.row.index]  # [key heads, capacity, dim]
        known, means = self._known.get(layer, 0), self._means.get(layer)
        if means is None or means.shape[1] < chunks:
            grown = entries.new_empty(len(entries), 1 << (chunks - 1).bit_length(), entries.shape[2])
            if means is not None:
                grown[:, :known] = means[:, :known]
            means = self._means[layer] = grown
        if known < chunks:
            size = self.settings.chunk
            means[:, known:chunks] = self._chunks(entries[:, known * size : chunks * size]).mean(2)
            self._known[layer] = chunks
        return means[:, :chunks]


def best_chunks(query: Tensor, means: Tensor, count: int, scaling: float | None) -> Tensor:
    """The chunks that a query attends to most, by their mean keys; the first one is always among them.

    Args:
        query: [heads, dim].
        means: [key heads, chunks, dim].
        count: of the chunks to choose.
        scaling: of the scores; by default 1 / sqrt(dim).

    Returns:
        int64 [key heads, count], ascending.
    """
    dim = query.shape[-1]
    scores = query.view(len(means), -1, dim) @ means.mT  # [key heads, heads of a key head, chunks]
    attention = torch.softmax(scores.float() * (dim**-0.5 if scaling is None else scaling), -1).sum(1)
    attention[:, 0] = torch.inf
    return attention.topk(count, -1).indices.sort(-1).values


class BlockCache(KVCache):
    """A cache of blocks, which knows the layer that a forward is in."""

    layer = -1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.layer = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _Forward(NamedTuple):
    """The forward that is under way: what it copies, and where the query of each sequence's root is.

    Attributes:
        cache: of the blocks.
        fills: what is copied, and the index of the root in [batch] or, where nodes are packed, in [nodes].
        packed: whether they are.
    """

    cache: BlockCache
    fills: Sequence[tuple[Fill, int]]
    packed: bool


_under_way: ContextVar[_Forward | None] = ContextVar("the forward over blocks that is under way", default=None)


@contextmanager
def filling(cache: BlockCache, fills: Sequence[tuple[Fill, int]], packed: bool) -> Iterator[None]:
    """Within the block, each layer copies what `fills` says before it attends to the blocks; see `_Forward`."""
    token = _under_way.set(_Forward(cache, fills, packed))
    try:
        yield
    finally:
        _under_way.reset(token)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as `grouped.forward` computes it over views of the blocks, which are filled first."""
    if (under_way := _under_way.get()) is not None:
        for fill, root in under_way.fills:
            of_root = query[0, :, root] if under_way.packed else query[root, :, 0]
            fill.retrieved.copy(under_way.cache.layer, fill, of_root, scaling)
    return grouped.forward(module, query, key, value, attention_mask, dropout, scaling, **options)


AttentionInterface.register(NAME, forward)
