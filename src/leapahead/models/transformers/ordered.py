"""Attention whose sums do not depend on what else a forward computes: for bit-for-bit equal logits.

    positions   0 ........ 127 | 128 ....... 255 | 256 ....... 383        blocks of fixed size at fixed positions
    plain       [   block 0    ] [   block 1     ] [ . . . root            ]
    drafted     [   block 0    ] [   root a b  | c . .                     ]

Every query is multiplied with one block of keys at a time, and its output is the sum over the blocks in their order. So
a query at position p takes part in the same products of matrices of the same shapes, whatever the length of the cache
was when its forward began. Positions that it must not see have a weight of zero, and adding zero changes no bit.

In a tree the entries of a path do not lie side by side. For each path, the entries from the last full block of
committed ones on are gathered, so that each lies at its position:

    slots       . . . 130 131 132 133 134        tree   130 ┬ 131 ── 133
    path 1      . . . 130 131 133                           └ 132 ── 134
    path 2      . . . 130 132 134

All rows of the forward are multiplied with each block, so that the shapes stay the same, and each row keeps the result
of its own path. Scores and sums are of the cache's precision, which is float32 for models in half precision.

Knows tensors and trees; knows neither models nor how a cache is kept. See `exact`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from leapahead.core.errors import Refused
from leapahead.core.tree import TokenTree

NAME = "leapahead_ordered"
BLOCK = 128  # positions
OTHER_OPTIONS = ("position_bias", "cache", "s_aux")  # with which the attention is something else


class Visible(NamedTuple):
    """Which earlier positions a layer attends to; see `families.Pattern`."""

    window: int | None
    chunk: int | None


class Part(NamedTuple):
    """The attention of one sequence's rows.

    Attributes:
        batch: the sequence's row of the cache, counted from the first of the forward.
        rows: of the forward.
        begin: the first position of the gathered entries, a multiple of `BLOCK`.
        end: behind the last, a multiple too.
        paths: int64 [end - begin] each, the slots of a path's entries in the order of their positions; None for slots
            that are positions already.
        path_of: int64 [all rows of the forward]; the path of each row. None where there is but one.
        masks: float [all rows, end] by pattern, to be added to scores.
    """

    batch: int
    rows: slice
    begin: int
    end: int
    paths: list[Tensor | None]
    path_of: Tensor | None
    masks: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        batch: int,
        rows: slice,
        total: int,
        tree: TokenTree,
        first: int,
        length: int,
        patterns: Mapping[str, Visible],
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> Part:
        """Of a tree behind `length` committed entries, of which the nodes from `first` on are computed.

        Args:
            rows: of the forward, which has `total`; those behind the tree's nodes are padding.
            device: of the tensors; the CPU by default.
        """
        here = np.full(total, length)
        new = slice(rows.start, rows.start + len(tree) - first)
        here[new] = [length + depth for depth in tree.depth_list[first:]]
        begin, end = length // BLOCK * BLOCK, (int(here.max()) // BLOCK + 1) * BLOCK
        paths: list[Tensor | None] = [None]
        path_of = np.zeros(total, dtype=np.int64)
        if not tree.is_chain:
            paths, of_node = [], np.zeros(len(tree), dtype=np.int64)
            for leaf in tree.leaf_list:
                nodes = np.array(tree.path(leaf))
                slots = np.arange(begin, end)
                slots[length - begin : length - begin + len(nodes)] = length + nodes
                of_node[nodes] = len(paths)
                in_place = bool((nodes == np.arange(len(nodes))).all())
                paths.append(None if in_place else torch.from_numpy(slots).to(device=device))
            path_of[new] = of_node[first:]
        masks = {name: _mask(here, end, pattern, dtype).to(device=device) for name, pattern in patterns.items()}
        row_paths = torch.from_numpy(path_of).to(device=device) if len(paths) > 1 else None
        return cls(batch, rows, begin, end, paths, row_paths, masks)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, softcap: float | None = None) -> Tensor:
        """The attention of this part's rows; other rows of the result mean nothing.

        Args:
            query: float [key heads, heads of a key head * rows, dim], scaled.
            keys, values: float [key heads, slots, dim], of this sequence.
            mask: float [rows, end].
            softcap: keeps scores between this and its negative.

        Returns:
            float [key heads, heads of a key head * rows, value dim].
        """
        heads = len(query)
        shared = [torch.bmm(query, keys[:, at : at + BLOCK].mT) for at in range(0, self.begin, BLOCK)]
        tails = [self._tail(path, keys, values) for path in self.paths]
        ends = range(0, self.end - self.begin, BLOCK)
        found = [torch.cat([torch.bmm(query, key[:, at : at + BLOCK].mT) for at in ends], -1) for key, _ in tails]
        scores = torch.cat([*shared, self._own(found)], -1).view(heads, -1, len(mask), self.end)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = torch.softmax(scores + mask, -1).view(heads, -1, self.end)
        output = query.new_zeros(heads, query.shape[1], values.shape[2])
        for at in range(0, self.begin, BLOCK):
            output = torch.baddbmm(output, weights[:, :, at : at + BLOCK], values[:, at : at + BLOCK])
        outputs = []
        for _, value in tails:
            own = output
            for at in ends:
                place = self.begin + at
                own = torch.baddbmm(own, weights[:, :, place : place + BLOCK], value[:, at : at + BLOCK])
            outputs.append(own)
        return self._own(outputs)

    def _tail(self, path: Tensor | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a path from `begin` to `end`, each at its position."""
        if path is None:
            return keys[:, self.begin : self.end], values[:, self.begin : self.end]
        return keys.index_select(1, path), values.index_select(1, path)

    def _own(self, of_paths: Sequence[Tensor]) -> Tensor:
        """[key heads, heads of a key head * rows, width]: of each row what was computed for its path."""
        if self.path_of is None:
            return of_paths[0]
        heads, count, width = of_paths[0].shape
        every = torch.stack(list(of_paths)).view(len(of_paths), heads, -1, len(self.path_of), width)
        here = torch.arange(len(self.path_of), device=self.path_of.device)
        own = every[self.path_of, :, :, here]  # [rows, key heads, heads of one, width]
        return own.permute(1, 2, 0, 3).reshape(heads, count, width)


def _mask(here: Any, end: int, pattern: Visible, dtype: torch.dtype) -> Tensor:
    """[rows, end]: 0 where a row at its position attends to a position, else minus infinity."""
    mine, there = here[:, None], np.arange(end)
    seen = there <= mine
    if pattern.window is not None:
        seen &= mine - there < pattern.window
    if pattern.chunk is not None:
        seen &= mine // pattern.chunk == there // pattern.chunk
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)


class _Forward(NamedTuple):
    """What the layers of one forward share: the parts, and the pattern that each mask stands for."""

    parts: Sequence[Part]
    patterns: dict[int, str]


_under_way: ContextVar[_Forward | None] = ContextVar("the exact forward that is under way", default=None)


@contextmanager
def attention(config: Any, parts: Sequence[Part], masks: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block, a model's layers with this configuration compute the attention of these parts.

    Args:
        config: of the language model, which nobody else runs.
        masks: what the model is given as masks, by pattern; they only tell which pattern a layer has.
    """
    patterns = {id(mask): name for name, mask in masks.items()}
    before, experts = config._attn_implementation, config._experts_implementation
    token = _under_way.set(_Forward(parts, patterns))
    config._attn_implementation = NAME
    if experts is not None:
        config._experts_implementation = "batched_mm"  # each token's experts in products of their own
    try:
        yield
    finally:
        config._attn_implementation = before
        if experts is not None:
            config._experts_implementation = experts
        _under_way.reset(token)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, with the interface of Transformers' own functions.

    Args:
        module: the layer's attention.
        query: float [1, heads, rows, dim].
        key, value: float [batch, key heads, slots, dim].
        attention_mask: one of `attention`'s.

    Returns:
        float [1, rows, heads, value dim], and no weights.

    Raises:
        Refused: the layer asks for another kind of attention.
    """
    under_way = _under_way.get()
    name = under_way.patterns.get(id(attention_mask)) if under_way is not None else None
    others = [each for each in OTHER_OPTIONS if options.get(each) is not None]
    if under_way is None or name is None or dropout > 0 or others:
        raise Refused(
            f"the attention of {type(module).__name__} {'uses ' + others[0] if others else 'makes a mask of its own'}, "
            "which exact mode does not support"
        )
    _, heads, rows, dim = query.shape
    shared = key.shape[1]
    scaled = query[0].to(key.dtype) * (dim**-0.5 if scaling is None else scaling)
    scaled = scaled.reshape(shared, heads // shared * rows, dim)
    output = query.new_empty(rows, heads, value.shape[3])
    for part in under_way.parts:
        found = part.attend(scaled, key[part.batch], value[part.batch], part.masks[name], softcap)
        output[part.rows] = found.view(heads, rows, -1).transpose(0, 1)[part.rows].to(query.dtype)
    return output[None], None


AttentionInterface.register(NAME, forward)
