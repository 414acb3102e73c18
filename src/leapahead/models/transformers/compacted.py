"""Packed attention whose sums do not depend on the tree around a node: for exact mode with static shapes.

A node's output must be the same bits as that of the row of plain decoding at its position. Both see the same entries,
at other places: behind the committed entries, an entry of the node's path lies at the slot of its node.

    slots       0 ........ 127 128 129 | 130 131 132 133 134      tree   130 ┬ 131 ── 133
    plain       x          x   x   x     x   x   x                           └ 132 ── 134
    node 133    x          x   x   x     x   x       x
                `---- head -----´`------ window ------´

Each row's visible entries are divided, by their number alone, into a head and a window of the last ones. Those of the
head are committed, so they lie at their positions; their weights are zero elsewhere. Those of the window are gathered
to the left, in the order of their slots. The head is multiplied in blocks of `BLOCK` cells, and the window behind them,
so that a cache of more cells adds blocks of zeros, which change no bit.

The bits are the same if the batch, the rows, and the shapes of the cache but for its cells are the same in all
forwards, since libraries choose their kernels by shapes. Scores and sums are of float32 at least. Deeper trees than
`REACH` are not allowed: their nodes would belong to the head. `ordered` serves the same purpose where shapes may depend
on the tree.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from leapahead.core.errors import Refused
from leapahead.models.transformers.packed import checked_mask, pack, pack_mask, pack_sinks, shared, unpack

NAME = "leapahead_compacted"
BLOCK = 1024  # cells; those of the cache are a multiple of it
REACH = 64  # depth of the deepest node
STEP = 64  # entries by which the window moves at a time
WINDOW = REACH + STEP  # entries


class Compaction(NamedTuple):
    """Where the visible entries of each row lie, as all layers with these heads read it. Packed rows are those of the
    heads of a key head, one head after the other.

    Attributes:
        hidden: bool [blocks, batch, 1, packed rows, BLOCK]; what is not among the visible entries before the window.
        slots: int64 [batch, rows, WINDOW]; of the entries of the window, in their order; any slot behind the last.
        outside: bool [batch, 1, packed rows, WINDOW]; whether there is no such entry.
        places: int64 [batch, key heads, packed rows, WINDOW]; of the window among the scores of all blocks.
    """

    hidden: Tensor
    slots: Tensor
    outside: Tensor
    places: Tensor

    @classmethod
    def of(cls, mask: Tensor, key_heads: int, group: int) -> Compaction:
        """Of a boolean mask [batch, 1, rows, cells], for key heads of so many heads each."""
        batch, _, rows, cells = mask.shape
        number = mask[:, 0].cumsum(-1)  # [batch, rows, cells]; of visible entries up to a cell
        count = number[..., -1:]
        begin = torch.clamp((count - 1) // STEP * STEP - REACH, min=0)  # entries of the head
        wanted = begin + 1 + torch.arange(WINDOW, device=mask.device)
        slots = torch.searchsorted(number, wanted).clamp(max=cells - 1)
        head = pack_mask(mask & (number <= begin)[:, None], 1, group)
        hidden = torch.stack(torch.split(~head, BLOCK, dim=-1))
        outside = pack_mask((wanted > count)[:, None], 1, group)
        # Scores lie block by block, and in each by sequence, head and row.
        scored = torch.arange(batch * key_heads * group * rows, device=mask.device).view(batch, key_heads, -1, 1)
        packed = slots[:, None].repeat(1, 1, group, 1)
        places = (packed // BLOCK * scored.numel() + scored) * BLOCK + packed % BLOCK
        return cls(hidden, slots, outside, places)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Compaction,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention of packed queries.

    Args:
        query: float [batch, key heads, packed rows, dim], scaled; of the precision of the sums.
        key: float [batch, key heads, cells, dim].
        value: float [batch, key heads, cells, value dim].
        visible: the entries that each row attends to.
        softcap, sinks: see `packed.attend`.

    Returns:
        float [batch, key heads, packed rows, value dim].
    """
    dtype = query.dtype
    blocks = [slice(at, at + BLOCK) for at in range(0, key.shape[2], BLOCK)]
    # Each product has the shape of one block. What is not a sum may be computed of all blocks together.
    every = torch.stack([query @ key[:, :, block].to(dtype).mT for block in blocks])
    if softcap is not None:
        every = torch.tanh(every / softcap) * softcap
    window = torch.take(every, visible.places).masked_fill_(visible.outside, -torch.inf)
    every = every.masked_fill_(visible.hidden, -torch.inf)
    most = torch.maximum(every.amax((0, -1))[..., None], window.amax(-1, keepdim=True))
    if sinks is not None:
        most = torch.maximum(most, sinks)
    every, window = torch.exp(every.sub_(most)), torch.exp(window.sub_(most))
    totals = [each.sum(-1, keepdim=True) for each in (*every, window)]
    outputs = [each @ value[:, :, block].to(dtype) for each, block in zip(every, blocks, strict=True)]
    outputs.append(_of_window(window, value, visible.slots))
    if sinks is not None:
        totals.append(torch.exp(sinks - most))
    found: Tensor = reduce(torch.add, outputs) / reduce(torch.add, totals)
    return found


def _of_window(weights: Tensor, value: Tensor, slots: Tensor) -> Tensor:
    """[batch, key heads, packed rows, value dim]: the window's values, gathered for each row, times their weights."""
    batch, key_heads, _, width = weights.shape
    rows = slots.shape[1]
    at = slots.view(batch, 1, rows * width, 1).expand(-1, key_heads, -1, value.shape[3])
    gathered = value.gather(2, at).to(weights.dtype).view(batch, key_heads, rows, width, -1)
    by_row = weights.view(batch, key_heads, -1, rows, width).transpose(2, 3)  # [batch, key heads, rows, group, width]
    return (by_row @ gathered).transpose(2, 3).reshape(batch, key_heads, -1, value.shape[3])


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
    """The attention of one layer, with the interface of Transformers' own functions; see `packed.forward`.

    Args:
        attention_mask: bool [batch, 1, rows, cells], of a multiple of `BLOCK` cells.

    Raises:
        Refused: the layer asks for another kind of attention, or the mask is none of these.
    """
    mask = checked_mask(module, attention_mask, dropout, options)
    if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[3] % BLOCK:
        raise Refused(
            f"compacted attention needs a boolean mask for all heads, of a multiple of {BLOCK} cells; that of "
            f"{type(module).__name__} is {mask.dtype} of shape {list(mask.shape)}"
        )
    heads, rows, key_heads = query.shape[1], query.shape[2], key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    scaled = pack(query, key_heads).to(dtype) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    group = heads // key_heads
    visible = shared().get(mask, (NAME, key_heads, group), lambda: Compaction.of(mask, key_heads, group))
    sinks = None if s_aux is None else pack_sinks(s_aux, key_heads, rows).to(dtype)
    return unpack(attend(scaled, key, value, visible, softcap, sinks).to(query.dtype), rows), None


AttentionInterface.register(NAME, forward)
