"""The time of one layer's attention over a tree mask, computed in several ways: which of them serves trees best.

    packed                 `packed.attend`: torch's fused attention, queries packed by key/value head
    written out            the same packing, products and softmax as operations of their own
    values in parts        the same, the product with the values divided over the cells: more blocks for few heads
    keys repeated          fused attention with keys and values repeated for every query head, as Transformers does it
    enable_gqa             fused attention told of the heads; of its fused kernels cuDNN's alone takes a mask then. The
                           mask is what is added to the scores, made once for all layers
    cuDNN                  the same with that kernel; on CUDA only
    compacted              exact mode's: `compacted.attend`
    FlexAttention          compiled for these shapes, with the block mask given; on CUDA only
    its block mask         what that needs in every forward, which cannot be captured

Each is compared with attention in float64 before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from leapahead.bench.conditions import Data
from leapahead.core.errors import LeapaheadError, first_line
from leapahead.models.transformers import compacted, packed
from research.gpu.lab import Lab
from research.gpu.timing import REPEATS, Clock, median_seconds

ROWS = (1, 16, 64, 128)
CELLS = (1024, 4096)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}  # of outputs, from those in float64
BLOCK_MASK = "its block mask"
PARTS = 8  # of the cells
SPREAD = 2**28  # bytes of keys and values, several times as much as a GPU keeps in its L2 cache


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
    def layers(self) -> list[Given]:
        """Several of them, so that their keys and values do not stay in a GPU's own cache; on a CPU this one alone."""
        size = (self.key.numel() + self.value.numel()) * self.key.element_size()
        more = -(-SPREAD // size) - 1 if self.key.is_cuda else 0
        return [self, *(self._replace(key=self.key.clone(), value=self.value.clone()) for _ in range(more))]

    @property
    def repeated(self) -> tuple[Tensor, Tensor]:
        """Keys and values for every query head."""
        group = self.query.shape[1] // self.key.shape[1]
        return self.key.repeat_interleave(group, 1), self.value.repeat_interleave(group, 1)


def variants(given: Given) -> Iterator[tuple[str, Callable[[Given], Tensor]]]:
    """The names, and what computes [1, rows, heads, dim] of layers with these shapes and this mask."""
    heads, key_heads, rows = given.query.shape[1], given.key.shape[1], given.query.shape[2]
    added = packed.added(packed.pack_mask(given.mask, key_heads, heads), given.query.dtype)
    unrepeated = packed.added(given.mask, given.query.dtype)  # as a forward has it, once for all layers
    visible = compacted.Compaction.of(given.mask, key_heads, heads // key_heads)
    sums, scale = torch.promote_types(given.query.dtype, torch.float32), given.query.shape[3] ** -0.5

    def unpacked(attend: Callable[..., Tensor], layer: Given) -> Tensor:
        return packed.unpack(attend(packed.pack(layer.query, key_heads), layer.key, layer.value, added), rows)

    def repeated(layer: Given) -> Tensor:
        found = scaled_dot_product_attention(layer.query, *layer.repeated, attn_mask=layer.mask)
        return found.transpose(1, 2).contiguous()

    def grouped(layer: Given) -> Tensor:
        options: dict[str, Any] = {"attn_mask": unrepeated, "enable_gqa": heads != key_heads}
        return scaled_dot_product_attention(*layer[:3], **options).transpose(1, 2).contiguous()

    def compact(layer: Given) -> Tensor:
        query = packed.pack(layer.query, key_heads).to(sums) * scale
        return packed.unpack(compacted.attend(query, layer.key, layer.value, visible).to(layer.query.dtype), rows)

    def in_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        weights = torch.softmax((query @ key.mT * scale + mask).to(sums), -1).to(value.dtype)
        batch, count, packed_rows, cells = weights.shape
        some = weights.view(batch, count, packed_rows, PARTS, cells // PARTS).transpose(2, 3)
        parts: Tensor = some @ value.view(batch, count, PARTS, cells // PARTS, -1)
        return parts.sum(2, dtype=sums).to(value.dtype)

    def cudnn(layer: Given) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return grouped(layer)

    yield "packed", partial(unpacked, packed.attend)
    yield "values in parts", partial(unpacked, in_parts)
    yield "written out", partial(unpacked, packed.written_out)
    yield "keys repeated", repeated
    yield "enable_gqa", grouped
    yield "compacted", compact
    if given.query.is_cuda:
        yield "cuDNN", cudnn
        yield from _flex(given)


def _flex(given: Given) -> Iterator[tuple[str, Callable[[Given], Any]]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask, gqa = given.mask, given.query.shape[1] != given.key.shape[1]
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def seen(batch: Tensor, head: Tensor, row: Tensor, cell: Tensor) -> Tensor:
        return mask[batch, 0, row, cell]

    def block_mask(layer: Given) -> Any:
        return create_block_mask(seen, 1, None, layer.query.shape[2], layer.key.shape[2], device=layer.query.device)

    blocks = block_mask(given)

    def flex(layer: Given) -> Tensor:
        found: Tensor = compiled(*layer[:3], block_mask=blocks, enable_gqa=gqa)
        return found.transpose(1, 2).contiguous()

    yield "FlexAttention", flex
    yield BLOCK_MASK, block_mask


def measure(lab: Lab, clock: Clock) -> Data:
    """Microseconds of each variant by rows and cells, and how far its output is from that in float64."""
    rows: list[Data] = []
    for cells, count in product(CELLS, ROWS):
        given = Given.of(lab.model, count, cells, lab.device)
        layers, expected = given.layers, _expected(given)
        for name, compute in variants(given):
            if clock.has_run_out:
                return {"rows": rows}
            rows.append({"variant": name, "rows": count, "cells": cells, **_row(lab, name, compute, layers, expected)})
    return {"rows": rows}


def _row(lab: Lab, name: str, compute: Callable[[Given], Any], layers: Sequence[Given], expected: Tensor) -> Data:
    """Of one variant; a variant that cannot be computed here says why."""

    def work() -> None:
        for layer in layers:
            compute(layer)

    try:
        with torch.no_grad():
            found = compute(layers[0])
            error = None if name == BLOCK_MASK else (found.double() - expected).abs().max().item()
            if error is not None and not error <= TOLERANCE[lab.model.dtype]:
                raise LeapaheadError(f"the attention {name!r} is wrong: it differs by {error:.3g}")
            repeats = max(1, REPEATS // len(layers))
            captured = name != BLOCK_MASK  # which reads values on the host
            seconds = median_seconds(work, lab.device, lab.settings.rounds, repeats, captured) / len(layers)
            return {"microseconds": 1e6 * seconds, "error": error}
    except (RuntimeError, ValueError, NotImplementedError) as why:  # of torch, and of its compiler
        return {"microseconds": None, "error": None, "refused": f"{type(why).__name__}: {first_line(why)}"}


def _expected(given: Given) -> Tensor:
    """[1, rows, heads, dim] in float64."""
    query, key, value = given.query.double(), *(each.double() for each in given.repeated)
    return scaled_dot_product_attention(query, key, value, attn_mask=given.mask).transpose(1, 2)
