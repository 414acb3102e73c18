"""The KV cache of captured forwards: written through slots in tensors, and read as a view that does not change.

    captured forward   [move entries of the last accepted paths]  [write new ones at slots]  [read a constant view]

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

from leapahead.core.tree import UNLIMITED
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
    first_capacity = 1024  # so that most texts need captures of one length only
    rows: list[StaticRow]  # type: ignore[assignment]

    def __init__(self, usual_length: int = UNLIMITED) -> None:
        self._flat: list[tuple[Tensor, tuple[Tensor, ...]]] = []  # see `flat`
        self._first: dict[tuple[int, ...], Tensor] = {}  # see `_first_places`
        super().__init__(usual_length)

    def forget(self) -> None:
        self._flat = []  # which would keep the memory
        super().forget()

    def plane(self, layer: int, part: int) -> Tensor:
        self.flush()
        return super().plane(layer, part)

    # Rows

    def take(self, tokens: list[int], reuse: int, reserve: int = 0, owner: str = "") -> Row:
        self.flush()
        return super().take(tokens, reuse, reserve, owner)

    def gather(self, row: Row, slots: Sequence[int]) -> None:
        assert isinstance(row, StaticRow)
        self._flush(row)
        row.moves = [(row.length + slot, row.length + at) for at, slot in enumerate(slots) if slot != at]

    def clear(self) -> None:
        super().clear()
        for row in self.rows:
            if not row.busy:
                row.moves = []

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

    def _make_room(self, count: int, need: int) -> None:
        if count > len(self.rows) or need > self.capacity:
            self._flat = []  # so that the old tensors are released before the next ones are made
        super()._make_room(count, need)

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
        first = rows[order[0]]
        first.extent = max(first.extent, ends[order[0]] + n + 1)  # padding rows write into its spare slot
        batch = min(batch, len(self.rows))
        for group in self.groups:
            self._first_places(group, batch)
        return Placed(order, batch, [ends[i] for i in order], slots_of(need, self.first_capacity, self.capacity))

    @property
    def flat(self) -> list[Tensor]:
        """Of every plane, its entries as [rows * heads * capacity, dim]: what forwards write. The same objects until
        the storage changes."""
        return [each for _, planes in self._flats() for each in planes]

    def _flats(self) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
        stacks = [group.entries for group in self.groups]
        if len(stacks) != len(self._flat) or any(
            one is not other for one, (other, _) in zip(stacks, self._flat, strict=True)
        ):
            self._flat = [(entries, tuple(plane.flatten(0, 2) for plane in entries)) for entries in stacks]
        return self._flat

    def _first_places(self, group: Planes, batch: int) -> Tensor:
        """Places in [rows * heads * capacity] of the first slot of every head: int64 [batch, 1, heads]. Captured
        forwards read it, so that it is made before and kept."""
        key = (*group.entries.shape[2:4], batch)
        if key not in self._first:
            heads, capacity = group.entries.shape[2:4]
            rows = torch.arange(batch * heads, device=group.entries.device)
            self._first[key] = rows.view(batch, 1, heads) * capacity
        return self._first[key]

    def move(self, shape: Shape, slots: Slots) -> None:
        """Moves entries of the rows. This is captured."""
        for group in self.groups:
            entries = group.entries.flatten(1, 3)  # [planes, rows * heads * capacity, dim]
            first = self._first_places(group, shape.batch)
            source, goal = (torch.stack((slots.source, slots.goal))[..., None] + first).flatten(1)
            entries.index_copy_(1, goal, entries.index_select(1, source))

    def enter(self, shape: Shape, slots: Slots) -> None:
        """Sets what the layers write and read. This is captured.

        The model is told that the cache is empty: a number of entries that it computed with would be that of the
        captured forward for good.
        """
        self.longest = 0
        for group, (entries, written) in zip(self.groups, self._flats(), strict=True):
            read = tuple(each.view(entries.shape[1:])[: shape.batch, :, : shape.end] for each in written)
            self._views[group] = Views(written, _places(group, slots.home, slots.written), read)

    def leave(self) -> None:
        """Ends what `enter` began."""
        self._views = {}


def _places(group: Planes, row: Tensor, slot: Tensor) -> Tensor:
    """Places in [rows * heads * capacity] of rows [batch] and slots [batch, slots]: int64 [batch * slots * heads]."""
    heads, capacity = group.entries.shape[2:4]
    first = (row[:, None] * heads + torch.arange(heads, device=row.device)) * capacity  # [batch, heads]
    return (first[:, None] + slot[:, :, None]).flatten()
