"""The time of one layer's attention over a tree mask, computed in several ways: which of them serves trees best.

packed                 `packed.attend`: torch's fused attention, queries packed by key/value head
written out            the same packing, products and softmax as operations of their own
keys repeated          fused attention with keys and values repeated for every query head, as Transformers does it
enable_gqa             fused attention told of the heads, which has no fused kernel for masks
compacted              exact mode's: `compacted.attend`
FlexAttention          compiled for these shapes, with the block mask given; on CUDA only
its block mask         what that needs in every forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from leapahead.bench.conditions import Data
from leapahead.core.errors import LeapaheadError, first_line
from leapahead.models.transformers import compacted, packed
from research.gpu.lab import Lab
from research.gpu.timing import Clock, median_seconds

ROWS = (1, 16, 64, 128)
CELLS = (1024, 4096)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}  # of outputs, from those in float64
BLOCK_MASK = "its block mask"


class Given(NamedTuple):
    """What one layer gives its attention, over a tree behind committed entries."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor

    @classmethod
    def of(cls, model: Any, rows: int, cells: int, device: torch.device) -> Given:
        """Random, in the shapes of a model; the nodes' parents are random too."""
        config, random = model.config, torch.Generator().manual_seed(rows + cells)
        heads, key_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        query, key, value = (
            torch.randn(1, count, length, dim, generator=random).to(device, model.dtype)
            for count, length in ((heads, rows), (key_heads, cells), (key_heads, cells))
        )
        mask, length = torch.zeros(1, 1, rows, cells, dtype=torch.bool), cells - rows
        mask[..., :length] = True
        for row in range(rows):
            if row:
                mask[0, 0, row] |= mask[0, 0, int(torch.randint(row, (), generator=random))]
            mask[0, 0, row, length + row] = True
        return cls(query, key, value, mask.to(device))

    @property
    def repeated(self) -> tuple[Tensor, Tensor]:
        """Keys and values for every query head."""
        group = self.query.shape[1] // self.key.shape[1]
        return self.key.repeat_interleave(group, 1), self.value.repeat_interleave(group, 1)


def variants(given: Given) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The names, and what computes [1, rows, heads, dim]."""
    query, key, value, mask = given
    rows, key_heads, heads = query.shape[2], key.shape[1], query.shape[1]
    added = packed.added(packed.pack_mask(mask, key_heads, heads), query.dtype)
    visible = compacted.Compaction.of(mask)
    sums, scale = torch.promote_types(query.dtype, torch.float32), query.shape[3] ** -0.5

    def unpacked(attend: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return packed.unpack(attend(packed.pack(query, key_heads), key, value, *arguments), rows)

    def repeated() -> Tensor:
        return scaled_dot_product_attention(query, *given.repeated, attn_mask=mask).transpose(1, 2).contiguous()

    def grouped() -> Tensor:
        found = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=heads != key_heads)
        return found.transpose(1, 2).contiguous()

    def compact() -> Tensor:
        found = compacted.attend(packed.pack(query, key_heads).to(sums) * scale, key, value, visible)
        return packed.unpack(found.to(query.dtype), rows)

    yield "packed", lambda: unpacked(packed.attend, added)
    yield "written out", lambda: unpacked(packed.written_out, added)
    yield "keys repeated", repeated
    yield "enable_gqa", grouped
    yield "compacted", compact
    if query.is_cuda:
        yield from _flex(given)


def _flex(given: Given) -> Iterator[tuple[str, Callable[[], Any]]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value, mask = given
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def seen(batch: Tensor, head: Tensor, row: Tensor, cell: Tensor) -> Tensor:
        return mask[batch, 0, row, cell]

    def block_mask() -> Any:
        return create_block_mask(seen, 1, None, query.shape[2], key.shape[2], device=query.device)

    blocks, gqa = block_mask(), query.shape[1] != key.shape[1]

    def flex() -> Tensor:
        found: Tensor = compiled(query, key, value, block_mask=blocks, enable_gqa=gqa)
        return found.transpose(1, 2).contiguous()

    yield "FlexAttention", flex
    yield BLOCK_MASK, block_mask


def measure(lab: Lab, clock: Clock) -> Data:
    """Microseconds of each variant by rows and cells, and how far its output is from that in float64."""
    rows: list[Data] = []
    for cells in CELLS:
        for count in ROWS:
            if clock.has_run_out:
                break
            given = Given.of(lab.model, count, cells, lab.device)
            expected = _expected(given)
            for name, compute in variants(given):
                rows.append({"variant": name, "rows": count, "cells": cells, **_row(lab, name, compute, expected)})
    return {"rows": rows}


def _row(lab: Lab, name: str, compute: Callable[[], Tensor], expected: Tensor) -> Data:
    """Of one variant; a variant that cannot be computed here says why."""
    try:
        with torch.no_grad():
            found = compute()
            error = None if name == BLOCK_MASK else (found.double() - expected).abs().max().item()
            if error is not None and not error <= TOLERANCE[lab.model.dtype]:
                raise LeapaheadError(f"the attention {name!r} is wrong: it differs by {error:.3g}")
            return {"microseconds": 1e6 * median_seconds(compute, lab.device, lab.settings.rounds), "error": error}
    except (RuntimeError, ValueError, NotImplementedError) as why:  # of torch, and of its compiler
        return {"microseconds": None, "error": None, "refused": f"{type(why).__name__}: {first_line(why)}"}


def _expected(given: Given) -> Tensor:
    """[1, rows, heads, dim] in float64."""
    query, key, value = given.query.double(), *(each.double() for each in given.repeated)
    return scaled_dot_product_attention(query, key, value, attn_mask=given.mask).transpose(1, 2)
