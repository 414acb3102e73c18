"""Attention over a tree mask with static shapes: queries packed by key/value head, no host reads, one softmax.

    query   [batch, heads, rows, dim]      ->   [batch, key heads, heads of a key head * rows, dim]
    mask    [batch, 1, rows, cells]        ->   [batch, 1, heads of a key head * rows, cells], added to scores
    keys, values                                stay what they are: views of the cache, not repeated for query heads

This is what a captured forward calls: shapes depend on shapes alone, never on values, and nothing is read by the host.
So the operations can be recorded in a CUDA graph, or traced, on one tree and replayed on others. For forwards that are
not captured there is `grouped`, which also takes trees of different sizes without padding.

Which kernel torch's `scaled_dot_product_attention` takes on CUDA for a mask that is added:

    flash       takes no mask at all
    efficient   takes one, if keys have as many heads as queries (it is not used with `enable_gqa=True`) and the strides
                of the mask are multiples of 8 elements; otherwise the mask is copied into a padded one in every layer
    cudnn       takes a mask and grouped heads, in half precision; torch 2.11 prefers it on an H100, else it comes last
    math        takes everything; it repeats keys and values with `enable_gqa=True`, and writes all scores to memory

Packing gives keys as many heads as queries, and `added` makes masks whose rows begin at multiples of `ALIGNED`
elements. A boolean mask would be converted into one that is added in every layer; here it is converted once for all
layers of a kind (`attention`). The efficient kernel computes rows in blocks of a head, so packing also fills rows that
it computes anyway. With soft-capped scores (Gemma 2) or attention sinks (gpt-oss) the softmax is written out.

A sliding window is part of the mask. Whatever else a layer asks for is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from leapahead.core.errors import Refused

NAME = "leapahead_packed"
ALIGNED = 16  # elements; kernels on CUDA need 8, those on XPU 16
OTHER_OPTIONS = ("position_bias", "cache")  # with which the attention is something else


class Shared:
    """What the layers of one forward share, each computed for the first layer that asks for it.

    Tensors are told apart by identity; each is kept, so that its id stays its own.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Tensor, Any]] = {}

    def get(self, tensor: Tensor, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives for this tensor and key."""
        name = id(tensor), key
        if name not in self._found:
            self._found[name] = tensor, make()
        return self._found[name][1]


_under_way: ContextVar[Shared | None] = ContextVar("the forward with packed attention that is under way", default=None)


@contextmanager
def attention(config: Any, name: str = NAME) -> Iterator[None]:
    """Within the block, which is one forward, a model's layers with this configuration use this attention.

    Without it, as when the name is set for good, the mask is converted in every layer.

    Args:
        config: of the language model, which nobody else runs.
        name: of an attention that is registered here or in `compacted`.
    """
    before, token = config._attn_implementation, _under_way.set(Shared())
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
        _under_way.reset(token)


def shared() -> Shared:
    """Of the forward that is under way; a new one outside of `attention`."""
    return _under_way.get() or Shared()


def pack(query: Tensor, key_heads: int) -> Tensor:
    """[batch, heads, rows, dim] -> [batch, key heads, heads of a key head * rows, dim]."""
    batch, _, _, dim = query.shape
    return query.reshape(batch, key_heads, -1, dim)


def unpack(found: Tensor, rows: int) -> Tensor:
    """[batch, key heads, heads of a key head * rows, dim] -> [batch, rows, heads, dim]."""
    batch, _, _, dim = found.shape
    return found.reshape(batch, -1, rows, dim).transpose(1, 2).contiguous()


def pack_mask(mask: Tensor, key_heads: int, heads: int) -> Tensor:
    """[batch, 1 or heads, rows, cells] -> [batch, 1 or key heads, heads of a key head * rows, cells]."""
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, heads // key_heads, 1)
    return mask.reshape(len(mask), key_heads, -1, mask.shape[3])


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to be added to scores; every row begins at a multiple of `ALIGNED` elements.

    Args:
        mask: bool [..., cells]; true where a row attends. Each row has a true cell.
        dtype: of the numbers.

    Returns:
        0 and minus infinity, [..., cells].
    """
    cells = mask.shape[-1]
    wide = pad(mask, (0, -cells % ALIGNED)) if cells % ALIGNED else mask
    zero, hidden = (torch.full((), value, dtype=dtype, device=mask.device) for value in (0.0, -torch.inf))
    return torch.where(wide, zero, hidden)[..., :cells]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention of packed queries.

    Args:
        query: float [batch, key heads, packed rows, dim].
        key: float [batch, key heads, cells, dim].
        value: float [batch, key heads, cells, value dim].
        mask: float [batch, 1 or key heads, packed rows, cells], added to scores.
        scaling: of the scores; 1 / sqrt(dim) by default.
        softcap: keeps scores between this and its negative: `softcap * tanh(score / softcap)` (Gemma 2, 2408.00118).
        sinks: float [1, key heads, packed rows, 1], a score that takes part in the softmax and has no value.

    Returns:
        float [batch, key heads, packed rows, value dim].
    """
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return written_out(query, key, value, mask, scaling, softcap, sinks)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same as operations of their own, which write all scores to memory."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = (scores + mask).to(torch.promote_types(query.dtype, torch.float32))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:3], 1)], dim=-1)
    return torch.softmax(scores, -1)[..., : key.shape[2]].to(value.dtype) @ value


def pack_sinks(sinks: Tensor, key_heads: int, rows: int) -> Tensor:
    """[heads] -> [1, key heads, heads of a key head * rows, 1]."""
    return sinks.view(1, key_heads, -1, 1).expand(-1, -1, -1, rows).reshape(1, key_heads, -1, 1)


def checked_mask(module: torch.nn.Module, mask: Tensor | None, dropout: float, options: dict[str, Any]) -> Tensor:
    """The mask of a layer.

    Raises:
        Refused: there is none, or the layer asks for another kind of attention; the message names it.
    """
    asked = next((name for name in OTHER_OPTIONS if options.get(name) is not None), "dropout" if dropout > 0 else "")
    if asked or mask is None:
        what = f"asks for {asked}" if asked else "is given no mask"
        raise Refused(
            f"the attention of {type(module).__name__} {what}, which packed attention does not support; run this model "
            "with its own attention"
        )
    return mask


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, with the interface of Transformers' own functions.

    Args:
        module: the layer's attention.
        query: float [batch, heads, rows, dim].
        key: float [batch, key heads, cells, dim].
        value: float [batch, key heads, cells, value dim].
        attention_mask: [batch, 1 or heads, rows, cells], boolean or added to scores.
        s_aux: float [heads], the sinks.

    Returns:
        float [batch, rows, heads, value dim], and no weights.

    Raises:
        Refused: see `checked_mask`.
    """
    given = checked_mask(module, attention_mask, dropout, options)
    heads, rows, key_heads = query.shape[1], query.shape[2], key.shape[1]

    def numbers() -> Tensor:
        packed = pack_mask(given, key_heads, heads)
        return added(packed, query.dtype) if packed.dtype == torch.bool else packed.to(query.dtype)

    mask = shared().get(given, (heads, key_heads, query.dtype), numbers)
    sinks = None if s_aux is None else pack_sinks(s_aux, key_heads, rows)
    return unpack(attend(pack(query, key_heads), key, value, mask, scaling, softcap, sinks), rows), None


AttentionInterface.register(NAME, forward)
