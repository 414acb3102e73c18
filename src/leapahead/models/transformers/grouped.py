"""Attention over a tree's few rows without copies of the cache, for models whose query heads share key heads.

    query   [batch, heads, rows, dim]       ->   [batch, key heads, heads of a key head * rows, dim]
    mask    [batch, 1, rows, cached]        ->   [batch, 1, heads of a key head * rows, cached]
    keys, values                                 stay what they are, views of the cache

Transformers' "sdpa" does this for a single row. For more rows it repeats keys and values for every query head, which
copies the whole cache in every layer and forward (grouped-query attention, 2305.13245).

The function is registered with Transformers under a name of its own, and a model's configuration has this name only
while a forward of ours runs. So this is for models that nobody else runs: another thread would find that name. Whether
a model gives its own logits with it is tested like everything else (`selftest`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "leapahead_grouped_sdpa"
MOST_ROWS = 64  # of a sequence; a copy of the cache costs little beside the attention of more rows
OTHER_OPTIONS = ("position_bias", "softcap", "cache")  # with which `sdpa` computes something else


def fits(config: Any, implementation: str, device: torch.device) -> bool:
    """Whether a model's attention copies the cache otherwise.

    Args:
        config: of the language model.
        implementation: the name of its attention implementation.
        device: of the model; on others, Transformers' "sdpa" needs no copies.
    """
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return implementation == "sdpa" and device.type in ("cpu", "cuda") and bool(heads and shared and shared < heads)


@contextmanager
def attention(config: Any) -> Iterator[None]:
    """Within the block, a model's layers with this configuration use the grouped attention."""
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


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
        query: float [batch, heads, rows, dim].
        key: float [batch, key heads, cached, dim].
        value: float [batch, key heads, cached, value dim].
        attention_mask: bool [batch, 1, rows, cached].

    Returns:
        float [batch, rows, heads, value dim], and no weights.
    """
    batch, heads, rows, dim = query.shape
    shared = key.shape[1]
    is_other = dropout > 0 or any(options.get(name) is not None for name in OTHER_OPTIONS)
    is_other |= attention_mask is None or attention_mask.shape[1] != 1 or heads == shared
    if attention_mask is None or is_other or not 1 < rows <= MOST_ROWS:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    query = query.reshape(batch, shared, heads // shared * rows, dim)
    mask = attention_mask.repeat(1, 1, heads // shared, 1)
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, heads, rows, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, forward)
