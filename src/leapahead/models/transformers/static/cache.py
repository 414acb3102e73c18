"""The KV cache of captured forwards: written through slots in tensors, and read as a view that does not change.

    captured forward   [move the entries of the last accepted paths]  [write new entries at slots]  [read a constant view]

The rows of a step are the first ones of the cache, so that the view depends on their number alone. A commit moves
nothing itself: its moves are part of the next captured forward, whose inputs hold them. Whatever else reads or moves
entries makes them first (`flush`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from leapahead.models.transformers.kv_cache import KVCache, Row
from leapahead.models.transformers.planes import Planes, Views
from leapahead.models.transformers.static.shapes import Shape, doubled, slots_of

MOVES = 16  # of a row that a captured forward makes at most


@dataclass(eq=False)
class StaticRow(Row):
    """A row whose commit may be outstanding.

    Attributes:
        moves: slots of the row, (from, to), that belong to committed entries.
    """

    moves: list[tuple[int, int]] = field(default_factory=list)


class Placed(NamedTuple):
    """Where the rows of a forward lie.

    Attributes:
        order: see `KVCache.begin`.
        batch: rows of the cache that the forward reads; those behind the stepped ones are padding.
        begins: slots at which the new entries of each stepped row begin, in that order.
        end: slots that it reads, the spare one included.
    """

    order: list[int]
    batch: int
    begins: list[int]
    end: int


class Slots(NamedTuple):
    """What a forward moves and writes, as tensors that lie in static memory.

    Attributes:
        source, goal: int64 [batch, moves]; slots of each row. What is not to be moved goes to its own place.
        home: int64 [batch]; the row that new entries are written to.
        written: int64 [batch, rows]; their slots.
    """

    source: Tensor
    goal: Tensor
    home: Tensor
    written: Tensor


class StaticCache(KVCache):
    """See the module."""

    row_class = StaticRow
    rows: list[StaticRow]  # type: ignore[assignment]

    # Rows

    def take(self, tokens: list[int], reuse: int, reserve: int = 0, owner: str = "") -> Row:
        self.flush()
        return super().take(tokens, reuse, reserve, owner)

    def gather(self, row: Row, slots: Sequence[int]) -> None:
        assert isinstance(row, StaticRow)
        self._flush(row)
        row.moves = [(row.length + slot, row.length + at) for at, slot in enumerate(slots) if slot != at]

    def flush(self) -> None:
        """Makes all outstanding moves."""
        for row in self.rows:
            self._flush(row)

    def _flush(self, row: StaticRow) -> None:
        if row.moves:
            moves = row.moves
            with self.moving([row]):
                self._move(row, moves)

    @contextmanager
    def moving(self, rows: Sequence[Row]) -> Iterator[None]:
        """Within the block, the outstanding moves of rows are made; should it fail, their entries are lost."""
        before = [(row, row.length) for row in rows if isinstance(row, StaticRow) and row.moves]
        for row, length in before:
            row.length = min(length, *(goal for _, goal in row.moves))
            row.moves = []
        yield
        for row, length in before:
            row.length = length

    # The forward

    @property
    def is_ready(self) -> bool:
        """Whether there has been a forward, so that all planes are there and stacked."""
        return bool(self.groups) and len(self._place) == self._stacked

    @property
    def storage(self) -> tuple[object, ...]:
        """Changes when a captured forward would read or write other memory than the cache's."""
        return tuple((group.entries.data_ptr(), *group.entries.shape) for group in self.groups)

    def begin(
        self, rows: Sequence[Row], new: Sequence[int], num_computed: Sequence[int] | None = None, packed: bool = False
    ) -> list[int]:
        self.flush()
        return super().begin(rows, new, num_computed, packed)

    def begin_static(self, rows: Sequence[Row], num_computed: Sequence[int], n: int) -> Placed:
        """Prepares a forward that writes `n` entries behind the computed ones of each row. Raises `CacheFull`.

        One slot more is kept free, where padding rows write.
        """
        ends = self._ends(rows, num_computed)
        need, batch = max(ends) + n + 1, doubled(len(rows))
        if batch > len(self.rows) and batch * max(need, self.capacity) > self.limit:
            batch = len(self.rows)
        if batch > len(self.rows) or need > self.capacity:
            self.flush()
            self._make_room(batch, need)
        self._first_row = self._side_by_side(rows, windows=(0,))
        order = sorted(range(len(rows)), key=lambda i: rows[i].index)
        self._views = {}
        self._await(rows, num_computed, n)
        return Placed(order, min(batch, len(self.rows)), [ends[i] for i in order], slots_of(need, self.capacity))

    def enter(self, shape: Shape, slots: Slots) -> None:
        """Moves entries, and sets what the layers write and read. All of this is captured.

        The model is told that the cache is empty: a number of entries that it computed with would be that of the
        captured forward for good.
        """
        self.longest = 0
        for group in self.groups:
            self._views[group] = _views(group, shape, slots)

    def leave(self) -> None:
        """Ends what `enter` began."""
        self._views = {}


def _views(group: Planes, shape: Shape, slots: Slots) -> Views:
    heads, capacity = group.entries.shape[2:4]
    head = torch.arange(heads, device=group.entries.device)
    batch = torch.arange(shape.batch, device=group.entries.device)

    def at(row: Tensor, slot: Tensor) -> Tensor:
        """int64 [batch * slots * heads], in [rows * heads * capacity], of [batch] and [batch, slots]."""
        first = (row[:, None] * heads + head) * capacity  # [batch, heads]
        return (first[:, None] + slot[:, :, None]).flatten()

    entries = group.entries.flatten(1, 3)  # [planes, rows * heads * capacity, dim]
    entries.index_copy_(1, at(batch, slots.goal), entries.index_select(1, at(batch, slots.source)))
    read = group.entries[:, : shape.batch, :, : shape.end].unbind()
    return Views(entries.unbind(), at(slots.home, slots.written), read)
