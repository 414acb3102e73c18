"""The tensors of the KV cache: planes of keys or values, what a forward writes of them, and what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Views(NamedTuple):
    """What one forward writes and reads of stacked planes, made once for all of its layers.

    Attributes:
        written: of each plane, where the new entries go, [batch, heads, n, dim]; where `at` is given, all its
            entries, [rows * heads * capacity, dim].
        at: int64 [batch * n * heads], which of those the new entries are, where rows are not equally long or packed.
        read: of each plane, all entries of the batch, [batch, heads, kv, dim].
    """

    written: tuple[Tensor, ...]
    at: Tensor | None
    read: tuple[Tensor, ...]


@dataclass(eq=False)
class Planes:
    """Keys and values of equal shape, stacked so that moving a row's entries is one operation for all of them.

    Attributes:
        entries: [planes, rows, heads, capacity, dim].
    """

    entries: Tensor

    @property
    def bytes_per_token(self) -> int:
        """Of one slot of one row."""
        return self.entries[:, 0, :, 0].nbytes

    def resize(self, rows: int, capacity: int) -> None:
        """Keeps what fits. New entries are zero: a masked entry is multiplied by a weight of zero, so it is finite."""
        planes, old_rows, heads, old_capacity, dim = self.entries.shape
        if (rows, capacity) != (old_rows, old_capacity):
            resized = self.entries.new_zeros(planes, rows, heads, capacity, dim)
            kept_rows, kept = min(rows, old_rows), min(capacity, old_capacity)
            resized[:, :kept_rows, :, :kept] = self.entries[:, :kept_rows, :, :kept]
            self.entries = resized

    def views(self, first: int, lengths: Sequence[int], new: Sequence[int], packed: bool, end: int) -> Views:
        """For a forward that writes `new` entries of each row behind its own `lengths`, the rows from `first` on.

        It reads the slots up to `end`.
        """
        heads, capacity = self.entries.shape[2:4]
        longest, n, rows = max(lengths), max(new), slice(first, first + len(lengths))
        read = self.entries[:, rows, :, :end].unbind()
        if min(lengths) == longest and not packed:
            return Views(self.entries[:, rows, :, longest : longest + n].unbind(), None, read)
        counts = torch.tensor(new if packed else [n] * len(lengths))
        ends = counts.cumsum(0)
        starts = torch.tensor([(first + row) * heads * capacity + length for row, length in enumerate(lengths)])
        total = sum(new) if packed else n * len(lengths)
        slots = torch.arange(total) + (starts - ends + counts).repeat_interleave(counts, output_size=total)
        slots = slots[:, None] + torch.arange(heads) * capacity  # [nodes, heads]
        return Views(self.entries.flatten(1, 3).unbind(), slots.flatten().to(self.entries.device), read)


def kind(plane: Tensor) -> object:
    """Planes of one kind can be stacked: [rows, heads, capacity, dim]."""
    return plane.shape[1], plane.shape[3], plane.dtype, plane.device
