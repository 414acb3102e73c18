"""Attention over the trees of a batch: without copies of the cache, and without padding anywhere else in the model.

    query   [batch, heads, rows, dim]       ->   [batch, key heads, heads of a key head * rows, dim]
    mask    [batch, 1, rows, cached]        ->   [batch, 1, heads of a key head * rows, cached]
    keys, values                                 stay what they are, views of the cache

Transformers' "sdpa" does this for a single row. For more rows it repeats keys and values for every query head, which
copies the whole cache in every layer and forward (grouped-query attention, 2305.13245).

The trees of a batch differ in size. Padded to the largest, a batch of 16 sequences of which one has a drafted node
takes 32 rows through every layer. So the nodes of all trees are given to the model as one sequence, and only their
queries are padded, within the attention:

    nodes of all trees   [1, heads, nodes, dim]  ->  padded  [batch, heads, rows, dim]  ->  [1, nodes, heads, dim]

Each node finds the keys of its own tree's sequence there, since keys and values are those of the cache.

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
OTHER_OPTIONS = ("position_bias", "softcap", "cache")  # with which `sdpa` computes something else


class Packing(NamedTuple):
    """Where the nodes of trees of different sizes lie: one after the other, and padded to the rows of the largest.

    Attributes:
        batch: number of trees.
        padded: int64 [nodes]; the place of each node in [batch * rows].
        packed: int64 [batch * rows]; the node at each place, for padding the tree's first.
    """

    batch: int
    padded: Tensor
    packed: Tensor

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Packing:
        """Of trees with so many nodes."""
        count = torch.tensor(sizes)
        place = torch.arange(max(sizes)).repeat(len(sizes), 1)
        real = place < count[:, None]
        packed = torch.where(real, place, 0) + (count.cumsum(0) - count)[:, None]
        return cls(len(sizes), real.flatten().nonzero()[:, 0].to(device), packed.flatten().to(device))


class _Forward:
    """What the layers of one forward share.

    Attributes:
        packing: see `attention`.
    """

    def __init__(self, packing: Packing | None) -> None:
        self.packing = packing
        self._masks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def mask(self, mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """A boolean mask [batch, 1, rows, cached] for the heads of a key head, to be added to scores.

        There is one for all layers of a kind, and sdpa would make a mask to be added of a boolean one in each of them.
        """
        key = id(mask), heads
        if key not in self._masks:
            added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
            self._masks[key] = mask, added.repeat(1, 1, heads, 1)  # the mask is kept, so that its id stays its own
        return self._masks[key][1]


_under_way: ContextVar[_Forward | None] = ContextVar("the forward that is under way", default=None)


def fits(implementation: str, device: torch.device) -> bool:
    """Whether this can take the place of a model's attention.

    Args:
        implementation: the name of its attention implementation.
        device: of the model; on others, Transformers' "sdpa" is something else.
    """
    return implementation == "sdpa" and device.type in ("cpu", "cuda")


@contextmanager
def attention(config: Any, packing: Packing | None = None) -> Iterator[None]:
    """Within the block, a model's layers with this configuration use the grouped attention.

    Args:
        config: of the language model.
        packing: of the nodes that the model is given as one sequence; None where it is given [batch, rows].
    """
    before, token = config._attn_implementation, _under_way.set(_Forward(packing))
    config._attn_implementation = NAME
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
    packing = under_way.packing
    if packing is not None:
        nodes = query[0].transpose(0, 1).index_select(0, packing.packed)  # [batch * rows, heads, dim]
        query = nodes.view(packing.batch, -1, *nodes.shape[1:]).transpose(1, 2)
    batch, heads, rows, dim = query.shape
    shared = key.shape[1]
    is_other = dropout > 0 or any(options.get(name) is not None for name in OTHER_OPTIONS)
    is_other |= attention_mask is None or attention_mask.shape[1] != 1
    if attention_mask is None or is_other or heads == shared or not 1 < rows <= MOST_ROWS:
        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )[0]
    else:
        query = query.reshape(batch, shared, heads // shared * rows, dim)
        mask = under_way.mask(attention_mask, heads // shared, query.dtype)
        found = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        output = found.reshape(batch, heads, rows, value.shape[-1]).transpose(1, 2).contiguous()
    return output if packing is None else output.flatten(0, 1).index_select(0, packing.padded)[None], None


AttentionInterface.register(NAME, forward)
