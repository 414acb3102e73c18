"""Attention over the trees of a batch: without copies of the cache, and without padding anywhere else in the model.

    query   [batch, heads, rows, dim]       ->   [batch, key heads, heads of a key head * rows, dim]
    mask    [batch, 1, rows, cached]        ->   [batch, 1, heads of a key head * rows, cached]
    keys, values                                 stay what they are, views of the cache

Transformers' "sdpa" does this for a single row. For more rows it repeats keys and values for every query head, which
copies the whole cache in every layer and forward (grouped-query attention, 2305.13245).

The trees of a batch differ in size. Padded to the largest, a batch of 16 sequences of which one has a drafted node
takes 32 rows through every layer. So the nodes of all trees are given to the model as one sequence, and only their
queries are padded, within the attention, where each finds the keys of its own sequence in the cache:

    nodes of all trees   [1, heads, nodes, dim]  ->  blocks  [trees, heads, rows, dim]  ->  [1, nodes, heads, dim]

There is a block of the first rows of all trees, and one for the other rows of each larger tree.

The function is registered with Transformers under a name of its own, and a model's configuration has this name only
while a forward of ours runs. So this is for models that nobody else runs: another thread would find that name. Whether
a model gives its own logits with it is tested like everything else (`selftest`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "leapahead_grouped_sdpa"
MOST_ROWS = 64  # of a sequence; a copy of the cache costs little beside the attention of more rows
BLOCK_ROWS = 24  # on a CPU another call of the attention takes as long as about so many rows of padding
OTHER_OPTIONS = ("position_bias", "softcap", "cache")  # with which `sdpa` computes something else


class Block(NamedTuple):
    """Rows of some neighbouring trees whose attention is computed together, padded to a rectangle.

    Attributes:
        trees, rows: which.
        nodes: int64 [trees * rows]; the packed node at each place, for padding the tree's first or, where it has none,
            another one.
        real: int64 [real]; the places that are no padding.
        to: int64 [real]; the packed nodes there.
    """

    trees: slice
    rows: slice
    nodes: Tensor
    real: Tensor
    to: Tensor

    def take(self, packed: Tensor) -> Tensor:
        """[nodes, heads, dim] -> [trees, heads, rows, dim]."""
        found = packed.index_select(0, self.nodes)
        return found.view(-1, self.rows.stop - self.rows.start, *packed.shape[1:]).transpose(1, 2)

    def put(self, found: Tensor, packed: Tensor) -> None:
        """[trees, rows, heads, dim] -> into [nodes, heads, dim]."""
        packed.index_copy_(0, self.to, found.flatten(0, 1).index_select(0, self.real))

    def on(self, device: torch.device) -> Block:
        """The same, of tensors on a device."""
        return Block(self.trees, self.rows, *(each.to(device) for each in (self.nodes, self.real, self.to)))


class OneTree(NamedTuple):
    """The same for one tree, whose rows follow each other in the packed nodes, without padding."""

    trees: slice
    rows: slice
    nodes: slice

    def take(self, packed: Tensor) -> Tensor:
        return packed[None, self.nodes].transpose(1, 2)

    def put(self, found: Tensor, packed: Tensor) -> None:
        packed[self.nodes] = found[0]

    def on(self, device: torch.device) -> OneTree:
        return self


class Packing(NamedTuple):
    """The nodes of all trees of a batch as one sequence, tree after tree.

    Attributes:
        padded: int64 [nodes]; the place of each node in [batch * rows of the largest tree].
        blocks: of the attention.
    """

    padded: Tensor
    blocks: list[Block | OneTree]

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Packing:
        """Of trees with so many nodes, of which some may have none."""
        counts = torch.tensor(sizes)
        first, place = counts.cumsum(0) - counts, torch.arange(max(sizes)).repeat(len(sizes), 1)
        is_real = place < counts[:, None]  # [batch, rows]
        nodes = (torch.where(is_real, place, 0) + first[:, None]).clamp_max(sum(sizes) - 1)
        common = _common_rows(sizes) if device.type == "cpu" else max(sizes)
        inside, real = nodes[:, :common].flatten(), is_real[:, :common].flatten().nonzero()[:, 0]
        together = inside.to(device), real.to(device), inside[real].to(device)
        blocks: list[Block | OneTree] = [Block(slice(0, len(sizes)), slice(0, common), *together)]
        for at, size in enumerate(sizes):
            if size > common:
                begin = int(first[at])
                blocks.append(OneTree(slice(at, at + 1), slice(common, size), slice(begin + common, begin + size)))
        return cls(is_real.flatten().nonzero()[:, 0].to(device), blocks)


def _common_rows(sizes: Sequence[int]) -> int:
    """How many rows of all trees are computed together; larger trees have a block of their own for the others."""

    def rows(common: int) -> int:  # that cost as much
        return len(sizes) * common + sum(BLOCK_ROWS + size - common for size in sizes if size > common)

    return min({1, *sizes} - {0}, key=rows)


class _Forward:
    """What the layers of one forward share.

    Attributes:
        packing: see `attention`.
    """

    def __init__(self, packing: Packing | None) -> None:
        self.packing = packing
        self._blocks: dict[torch.device, list[Block | OneTree]] = {}
        self._masks: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def blocks(self, packing: Packing, device: torch.device) -> list[Block | OneTree]:
        """Those of the packing on a device, of which a model whose layers are divided has several."""
        if device not in self._blocks:
            self._blocks[device] = [block.on(device) for block in packing.blocks]
        return self._blocks[device]

    def mask(self, mask: Tensor, block: Block | OneTree | None, heads: int, dtype: torch.dtype) -> Tensor:
        """A block of a boolean mask [batch, 1, rows, cached] for the heads of a key head, to be added to scores.

        There is one for all layers of a kind, and sdpa would make a mask to be added of a boolean one in each of them.
        """
        key = id(mask), id(block), heads
        if key not in self._masks:
            part = _part(mask, block)
            added = torch.zeros(part.shape, dtype=dtype, device=part.device).masked_fill_(~part, -torch.inf)
            self._masks[key] = mask, added.repeat(1, 1, heads, 1)  # the mask is kept, so that its id stays its own
        return self._masks[key][1]


def _part(mask: Tensor, block: Block | OneTree | None) -> Tensor:
    """[trees, 1, rows, cached] of [batch, 1, rows, cached]."""
    return mask if block is None else mask[block.trees, :, block.rows]


_under_way: ContextVar[_Forward | None] = ContextVar("the forward that is under way", default=None)


def fits(implementation: str, device: torch.device) -> bool:
    """Whether this can take the place of a model's attention.

    Args:
        implementation: the name of its attention implementation.
        device: of the model; on others, Transformers' "sdpa" is something else.
    """
    return implementation == "sdpa" and device.type in ("cpu", "cuda")


@contextmanager
def attention(config: Any, packing: Packing | None = None, name: str = NAME) -> Iterator[None]:
    """Within the block, a model's layers with this configuration use the grouped attention.

    Args:
        config: of the language model.
        packing: of the nodes that the model is given as one sequence; None where it is given [batch, rows].
        name: of the registered function: this module's, or one that does something else before it.
    """
    before, token = config._attn_implementation, _under_way.set(_Forward(packing))
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
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
    """The attention of one layer, with the interface of Transformers' own functions.

    Args:
        module: the layer's attention.
        query: float [batch, heads, rows, dim]; where nodes are packed, [1, heads, nodes, dim].
        key: float [batch, key heads, cached, dim].
        value: float [batch, key heads, cached, value dim].
        attention_mask: bool [batch, 1, rows, cached].

    Returns:
        float [batch, rows, heads, value dim], or [1, nodes, heads, value dim], and no weights.
    """
    under_way = _under_way.get() or _Forward(None)

    def attend(query: Tensor, key: Tensor, value: Tensor, block: Block | OneTree | None) -> Tensor:
        """[batch, rows, heads, value dim] of [batch, heads, rows, dim]."""
        batch, heads, rows, dim = query.shape
        shared = key.shape[1]
        is_other = dropout > 0 or any(options.get(name) is not None for name in OTHER_OPTIONS)
        is_other |= attention_mask is None or attention_mask.shape[1] != 1
        if attention_mask is None or is_other or heads == shared or not 1 < rows <= MOST_ROWS:
            mask = None if attention_mask is None else _part(attention_mask, block)
            output: Tensor = sdpa_attention_forward(
                module, query, key, value, mask, dropout=dropout, scaling=scaling, **options
            )[0]
            return output
        query = query.reshape(batch, shared, heads // shared * rows, dim)
        added = under_way.mask(attention_mask, block, heads // shared, query.dtype)
        found = scaled_dot_product_attention(query, key, value, attn_mask=added, scale=scaling)
        return found.reshape(batch, heads, rows, value.shape[-1]).transpose(1, 2).contiguous()

    if under_way.packing is None:
        return attend(query, key, value, None), None
    nodes = query[0].transpose(0, 1)  # [nodes, heads, dim]
    output = nodes.new_empty(*nodes.shape[:2], value.shape[-1])
    for block in under_way.blocks(under_way.packing, nodes.device):
        block.put(attend(block.take(nodes), key[block.trees], value[block.trees], block), output)
    return output[None], None


AttentionInterface.register(NAME, forward)
