"""The KV cache: one row per sequence, each with its own length; accepted entries move in place.

    slots ->   0 . . . . . . . . . . . . . . . . . . . capacity
    row 0      c c c c c c c c|n n n n n|                          c  entries of committed tokens
    row 1      c c c c|n n n n n|. . . .                           n  entries of the nodes of the last step's tree,
    row 2      f f f f f f . . . . . . .                              which the commit moves together or forgets
    row 3      c c c c c c c|n n n n n|. .                         f  a closed sequence's, kept for the next one that
               `------- a view of rows and slots -------´            begins with the same tokens

A forward of the rows [first, first + batch) writes n new entries of every row at that row's own [length, length + n)
and reads the view [first, first + batch) x [0, longest + n) without copying it: the attention mask hides what is not a
row's own. For that, rows that step together lie side by side; they are exchanged only when the set of rows changes.
Sliding-window layers keep everything as well: the window lives in the mask.

This room knows Transformers' `Cache` interface and tensors; it knows neither models nor trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from leapahead.core.errors import Refused
from leapahead.core.tree import UNLIMITED

FIRST_CAPACITY = 256


@dataclass(eq=False)
class Row:
    """One sequence's part of the cache.

    Attributes:
        index: which row of the tensors; changes when rows are exchanged.
        tokens: of the sequence, live; the row holds the entries of the first `length`.
        length: committed entries.
        pending: entries behind them that the last forward wrote.
        slots: where the entry of each pending node lies, counted from `length`; None if each at its own number.
        extent: no slot from here on was ever written.
        busy: a session owns it.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    pending: int = 0
    slots: Sequence[int] | None = None
    extent: int = 0
    busy: bool = False

    def common(self, prefix: Sequence[int]) -> int:
        """How many of the first tokens of `prefix` have their entries here."""
        count = 0
        for mine, theirs in zip(self.tokens[: self.length], prefix, strict=False):
            if mine != theirs:
                break
            count += 1
        return count


@dataclass
class Planes:
    """Keys and values of equal shape, stacked so that moving a row's entries is one operation for all layers.

    Attributes:
        entries: [planes, rows, heads, capacity, dim].
    """

    entries: Tensor

    def reserve(self, rows: int, capacity: int) -> None:
        planes, old_rows, heads, old_capacity, dim = self.entries.shape
        if rows > old_rows or capacity > old_capacity:
            # Zeros, since a masked entry is still multiplied by a weight of zero: it must be finite.
            grown = self.entries.new_zeros(planes, max(rows, old_rows), heads, max(capacity, old_capacity), dim)
            grown[:, :old_rows, :, :old_capacity] = self.entries
            self.entries = grown


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """What a model sees of one layer of the cache."""

    is_sliding = False

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache = cache
        self.index = len(cache.layers)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes [batch, heads, n, dim] and returns all entries of the batch, [batch, heads, kv, dim]."""
        self.is_initialized = True
        return self.cache.write((self.index, 0), key_states), self.cache.write((self.index, 1), value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return -1


class KVCache(Cache):  # type: ignore[misc]
    """Rows of keys and values; see the module for the picture.

    Args:
        max_rows: greatest number of rows; None for as many as sequences are open at once.
        usual_length: doubling goes no further than this many slots, where they suffice.
    """

    def __init__(self, max_rows: int | None = None, usual_length: int = UNLIMITED) -> None:
        super().__init__(layer_class_to_replicate=partial(Layer, self))
        self.max_rows = max_rows
        self.usual_length = usual_length
        self.forget()

    def forget(self) -> None:
        """Gives all memory back. No session may be open."""
        self.rows = [Row(0)]
        self.capacity = FIRST_CAPACITY
        self.longest = 0  # entries, of the longest row of the forward under way, that were there before
        self._groups: list[Planes] = []
        self._place: dict[tuple[int, int], tuple[Planes, int]] = {}  # (layer, 0 key or 1 value) -> plane
        self._batch = slice(0, 1)
        self._lengths: list[int] = [0]
        self._slots: dict[torch.device, tuple[Tensor, Tensor]] = {}  # of a ragged batch, by device

    # Rows

    def take(self, tokens: list[int], prefix: int) -> Row:
        """A row for a new sequence, with as many of its first `prefix` tokens' entries as any row has.

        Raises:
            Refused: more than `max_rows` sequences would be open.
        """
        wanted = tokens[:prefix]
        free = [row for row in self.rows if not row.busy]
        if not free:
            self._add_rows()
            free = [row for row in self.rows if not row.busy]
        # Of equally good rows the one whose entries are the least loss.
        row = max(free, key=lambda each: (each.common(wanted), -each.length))
        source = max(self.rows, key=lambda each: each.common(wanted))
        shared, row.length = source.common(wanted), row.common(wanted)
        if shared > row.length:
            for group in self._groups:
                group.entries[:, row.index, :, :shared] = group.entries[:, source.index, :, :shared]
            row.length, row.extent = shared, max(row.extent, shared)
        row.tokens, row.pending, row.slots, row.busy = tokens, 0, None, True
        return row

    def release(self, row: Row) -> None:
        """The sequence is closed; its entries stay for one that begins like it."""
        row.tokens, row.pending, row.slots, row.busy = row.tokens[: row.length], 0, None, False

    def keep(self, row: Row, path: Sequence[int]) -> None:
        """Commits the pending entries of the nodes `path`, moved to follow each other, and forgets the others."""
        assert path[-1] < row.pending, "commit without a step"
        self.gather(row, [row.slots[node] for node in path] if row.slots is not None else path)
        row.length += len(path)
        row.pending, row.slots = 0, None

    def gather(self, row: Row, slots: Sequence[int]) -> None:
        """Moves the pending entries at these slots, in any order, to follow the committed ones; still pending."""
        moved = [(slot, place) for place, slot in enumerate(slots) if slot != place]
        if moved:
            for group in self._groups:
                entries = group.entries[:, row.index]  # [planes, heads, capacity, dim]
                source, goal = torch.tensor(moved, device=entries.device).T + row.length
                entries.index_copy_(2, goal, entries.index_select(2, source))

    def _add_rows(self) -> None:
        count = len(self.rows)
        wanted = min(2 * count, self.max_rows or 2 * count)
        if wanted == count:
            raise Refused(
                f"{count} sequences are open, which is max_batch; close one first, or load the target with a larger one"
            )
        for group in self._groups:
            group.reserve(wanted, self.capacity)
        self.rows += [Row(index) for index in range(count, wanted)]

    def _side_by_side(self, rows: Sequence[Row]) -> int:
        """Exchanges rows until `rows` are neighbours, in any order; returns where they begin."""
        taken = {row.index for row in rows}
        windows = range(len(self.rows) - len(rows) + 1)
        first = max(windows, key=lambda at: len(taken & set(range(at, at + len(rows)))))
        window = set(range(first, first + len(rows)))
        for here, there in zip(sorted(taken - window), sorted(window - taken), strict=True):
            self._exchange(self.rows[here], self.rows[there])
        return first

    def _exchange(self, one: Row, other: Row) -> None:
        extent = max(one.extent, other.extent)
        for group in self._groups:
            part = group.entries[:, :, :, :extent]
            part[:, [one.index, other.index]] = part[:, [other.index, one.index]]
        one.index, other.index = other.index, one.index
        self.rows[one.index], self.rows[other.index] = one, other

    # The forward

    def begin(self, rows: Sequence[Row], n: int, known: Sequence[int] | None = None) -> list[int]:
        """Makes ready for a forward that writes `n` entries behind each of `rows`.

        Args:
            known: pending entries of each row that stay; the new ones come behind them.

        Returns:
            The order in which they lie in the cache, which is the batch's: indices into `rows`.
        """
        first = self._side_by_side(rows)
        order = sorted(range(len(rows)), key=lambda i: rows[i].index)
        known = known or [0] * len(rows)
        assert all(first <= row.pending for row, first in zip(rows, known, strict=True)), "entries never written"
        lengths = [rows[i].length + known[i] for i in order]
        self.longest = max(lengths)
        need, capacity = self.longest + n, self.capacity
        if need > capacity:
            capacity = max(need, min(1 << (need - 1).bit_length(), self.usual_length))
        for group in self._groups:
            group.reserve(len(self.rows), capacity)
        self.capacity = capacity
        self._batch = slice(first, first + len(rows))
        self._lengths, self._slots = lengths, {}
        for row, first in zip(rows, known, strict=True):
            row.pending, row.slots, row.extent = first + n, None, max(row.extent, row.length + first + n)
        return order

    def end(self) -> None:
        """After a forward. Layers that were new in it are stacked with those of their shape."""
        if len(self._groups) == len({self._kind(group.entries) for group in self._groups}):
            return
        stacked: dict[object, list[tuple[int, int]]] = {}
        for place, (group, _) in self._place.items():
            stacked.setdefault(self._kind(group.entries), []).append(place)
        self._groups = []
        for places in stacked.values():
            group = Planes(torch.cat([self._place[place][0].entries[self._place[place][1]][None] for place in places]))
            self._groups.append(group)
            for plane, place in enumerate(places):
                self._place[place] = group, plane

    def write(self, place: tuple[int, int], states: Tensor) -> Tensor:
        """Puts [batch, heads, n, dim] in its slots; returns the view [batch, heads, kv, dim] of all entries."""
        if place not in self._place:
            _, heads, _, dim = states.shape
            group = Planes(states.new_zeros(1, len(self.rows), heads, self.capacity, dim))
            self._groups.append(group)
            self._place[place] = group, 0
        group, plane = self._place[place]
        entries = group.entries[plane, self._batch]  # [batch, heads, capacity, dim]
        end = self.longest + states.shape[2]
        if min(self._lengths) == self.longest:
            entries[:, :, self.longest : end] = states
        else:
            entries.transpose(1, 2)[self._ragged_slots(states)] = states.transpose(1, 2)
        return entries[:, :, :end]

    def _ragged_slots(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Row and slot of every new entry, [batch, 1] and [batch, n], on the device of `states`."""
        slots = self._slots.get(states.device)
        if slots is None:
            lengths = torch.tensor(self._lengths, device=states.device)[:, None]
            rows = torch.arange(len(lengths), device=states.device)[:, None]
            slots = rows, lengths + torch.arange(states.shape[2], device=states.device)
            self._slots[states.device] = slots
        return slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(self.layer_class_to_replicate())
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        return keys, values

    @staticmethod
    def _kind(entries: Tensor) -> object:
        return entries.shape[2], entries.shape[4], entries.dtype, entries.device
