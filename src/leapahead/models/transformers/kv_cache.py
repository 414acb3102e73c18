"""The KV cache: one row per sequence, each with its own length; accepted entries move in place.

    slots ->   0 . . . . . . . . . . . . . . . . . . . capacity
    row 0      c c c c c c c c|n n n n n|                          c  entries of committed tokens
    row 1      c c c c|n n n n n|. . . .                           n  pending entries, of the nodes of the last tree:
    row 2      f f f f f f . . . . . . .                              the commit moves the path together and discards
    row 3      c c c c c c c|n n n n n|. .                            the others
               `------- a view of rows and slots -------´          f  entries of a closed sequence, kept for a sequence
                                                                      that begins with the same tokens

A forward of the rows [first, first + batch) writes n new entries of every row at that row's own [length, length + n)
and reads the view [first, first + batch) x [0, longest + n) without copying it: the attention mask hides what does not
belong to a row. For that, rows that step together are neighbours; rows are exchanged only when the set of rows changes.
Sliding-window layers keep all entries as well: the window is part of the mask.

A forward never writes into committed entries, so that one which fails loses pending entries only (`discard`).

Knows Transformers' `Cache` interface and tensors; knows neither models nor trees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import proxy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from leapahead.core.errors import CacheFull
from leapahead.core.tree import UNLIMITED
from leapahead.models.captured import TopK
from leapahead.models.prefix import common_prefix
from leapahead.models.transformers.planes import Planes, Views, kind

FIRST_CAPACITY = 256
# Planes of one shape are stacked in so many tensors at most, of so many planes at least: moving entries takes one
# operation for each of them, and growing needs memory for one of them beside the cache.
STACKS, LEAST_STACK = 2, 16


@dataclass(eq=False)
class Row:
    """One sequence's part of the cache.

    Attributes:
        index: which row of the tensors; it changes when rows are exchanged.
        tokens: of the sequence, live; the row holds the entries of the first `length`.
        length: committed entries.
        pending: entries behind them that the last forward wrote.
        slots: where the entry of each pending node lies, counted from `length`; None if each at its own number.
        left_out: entries of committed tokens that it does not hold, so that the next token is at the position
            `length + left_out`; 0 but where a part of another row is copied (`retrieval`).
        offset: what the model counts beyond the tokens: it is told their positions plus this. 0 but behind images whose
            positions are counted otherwise.
        extent: no slot from here on was ever written.
        busy: whether an open session owns it.
        reserved: the length that its sequence is expected to grow to.
        top_k: what was captured of the sequence's prompt, of positions below `length`.
        owner: see `Target.open`.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    pending: int = 0
    slots: Sequence[int] | None = None
    left_out: int = 0
    offset: int = 0
    extent: int = 0
    busy: bool = False
    reserved: int = 0
    top_k: TopK | None = None
    owner: str = ""

    def common(self, prefix: list[int]) -> int:
        """How many of the first tokens of `prefix`, a list, have their entries in this row."""
        return common_prefix(self.tokens, prefix, self.length)


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cache, as a model uses it."""

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
        usual_length: doubling stops at this many slots, where they suffice.
        block: a forward reads a multiple of so many slots.

    Attributes:
        limit: greatest number of rows times slots; the nodes of a step come on top.
        bytes_per_token: of one slot of one row on each device, also while the memory is released; empty before the
            first forward.
    """

    row_class: type[Row] = Row
    first_capacity = FIRST_CAPACITY

    def __init__(self, usual_length: int = UNLIMITED, block: int = 1) -> None:
        Cache.__init__(self, layer_class_to_replicate=partial(Layer, proxy(self)))  # type: ignore[arg-type]
        self.limit, self.usual_length, self.block = UNLIMITED, usual_length, block
        self.rows: list[Row] = []
        self.bytes_per_token = Counter[torch.device]()
        self.forget()

    def forget(self) -> None:
        """Drops the entries of closed sessions, and releases all memory unless a session is open."""
        if any(row.busy for row in self.rows):
            self.clear()
            return
        self.rows = [self.row_class(0)]
        self.capacity = min(self.first_capacity, self.limit)
        self.longest = 0  # entries, of the longest row of the current forward, that were there before it
        self.groups: list[Planes] = []
        self._place: dict[tuple[int, int], tuple[Planes, int]] = {}  # (layer, 0 key or 1 value) -> plane
        self._stacked = 0  # planes
        self._first_row = self._end = 0  # of the current forward, and the end of the slots that it reads
        self._lengths: list[int] = [0]  # of its rows, computed nodes included
        self._new, self._packed = [0], False  # nodes of its rows, and whether they come as one sequence
        self._views: dict[Planes, Views] = {}

    def clear(self) -> None:
        """Drops the entries of closed sessions, which may be NaN. The memory stays, with zeros, see `Planes.resize`."""
        for row in self.rows:
            if not row.busy:
                row.tokens, row.length, row.top_k = [], 0, None
                for group in self.groups:
                    group.entries[:, row.index, :, : row.extent] = 0

    def plane(self, layer: int, part: int) -> Tensor:
        """[rows, heads, capacity, dim]: all entries of one layer, its keys (part 0) or its values (part 1)."""
        group, plane = self._place[layer, part]
        return group.entries[plane]

    # Rows

    def row_of(self, tokens: Sequence[int]) -> Row | None:
        """The row of the open sequence that has this very list of tokens."""
        return next((row for row in self.rows if row.busy and row.tokens is tokens), None)

    def take(self, tokens: list[int], reuse: int, reserve: int = 0, owner: str = "") -> Row:
        """A row for a new sequence, with the entries of as many of its first `reuse` tokens as any row has.

        Args:
            reserve: the length that the sequence is expected to grow to.
            owner: see `Target.open`.

        Raises:
            CacheFull: it does not fit beside the open sequences.
        """
        reserve = max(len(tokens), reserve)
        self._admit(len(tokens), reserve)
        wanted = tokens[:reuse]
        common = {row: row.common(wanted) if row.owner == owner else 0 for row in self.rows}
        free = [row for row in self.rows if not row.busy]
        if not free:
            self._make_room(len(self.rows) + 1, 0)
            free = [row for row in self.rows if not row.busy]
        # Of rows that have equally much in common, the one that keeps the fewest entries.
        row = max(free, key=lambda each: (common.get(each, 0), -each.length))
        source = max(common, key=lambda each: common[each])
        shared, own = common[source], common.get(row, 0)
        self.share(row, source if shared > own else row, shared)
        row.tokens, row.pending, row.slots, row.reserved = tokens, 0, None, reserve
        row.length, row.extent, row.busy, row.owner = shared, max(row.extent, shared), True, owner
        return row

    def share(self, row: Row, source: Row, shared: int) -> None:
        """Gives a free row what another one, or itself, has of its first `shared` tokens."""
        row.length, row.offset = 0, source.offset if shared else 0
        if source is not row:
            for group in self.groups:
                group.entries[:, row.index, :, :shared] = group.entries[:, source.index, :, :shared]
        row.top_k = source.top_k.between(0, shared) if source.top_k is not None else None

    def release(self, row: Row) -> None:
        """Called when the sequence is closed; its entries are kept for a sequence that begins with the same tokens."""
        row.tokens, row.pending, row.slots, row.busy = row.tokens[: row.length], 0, None, False

    def keep(self, row: Row, path: Sequence[int]) -> None:
        """Commits the pending entries of the nodes `path`, moved to follow each other, and discards the others."""
        assert path[-1] < row.pending, "commit without a step"
        slots = [row.slots[node] for node in path] if row.slots is not None else path
        row.pending, row.slots = 0, None
        self.gather(row, slots)
        row.length += len(path)

    def discard(self, row: Row) -> None:
        """Drops the pending entries, as after a forward that failed."""
        row.pending, row.slots = 0, None

    def gather(self, row: Row, slots: Sequence[int]) -> None:
        """Moves the pending entries at these slots, in any order, to follow the committed ones; still pending."""
        self._move(row, [(row.length + slot, row.length + at) for at, slot in enumerate(slots) if slot != at])

    def _move(self, row: Row, moves: Sequence[tuple[int, int]]) -> None:
        """Moves entries of a row: (from, to) of each, all of which are read before the first one is written."""
        indices: dict[torch.device, Tensor] = {}
        for group in self.groups if moves else ():
            entries = group.entries[:, row.index]  # [planes, heads, capacity, dim]
            if entries.device not in indices:
                indices[entries.device] = torch.tensor(moves, device=entries.device).T
            source, goal = indices[entries.device]
            entries.index_copy_(2, goal, entries.index_select(2, source))

    def _admit(self, length: int, reserve: int) -> None:
        """Refuses a sequence that could make open ones run out of slots. Alone it is refused for its prompt only."""
        busy = [row for row in self.rows if row.busy]
        longest = max([reserve, *(max(row.reserved, row.length) for row in busy)])
        if self.limit != UNLIMITED and (length > self.limit or (busy and (len(busy) + 1) * longest > self.limit)):
            raise self._full(len(busy) + 1, longest if busy else length)

    def _full(self, count: int, length: int) -> CacheFull:
        return CacheFull(
            f"the cache holds {self.limit} tokens, too few for {count} sequence{'s' if count > 1 else ''} of up to "
            f"{length}; use a shorter prompt, fewer new tokens or sequences, or load the model with larger cache_tokens"
        )

    def _make_room(self, count: int, need: int) -> None:
        """Grows the tensors to `count` rows and `need` slots at least; rows of closed sequences give way to the limit.

        Rows and slots are doubled where the limit allows it; else all slots that it allows are taken at once.
        """
        if count <= len(self.rows) and need <= self.capacity:
            return
        busy = [row for row in self.rows if row.busy]
        need = max(need, 1, *(row.length + row.pending for row in busy))
        rows, capacity = max(count, len(self.rows)), max(need, self.capacity)
        doubled = 2 * len(self.rows) if count > len(self.rows) else rows
        if need > self.capacity:
            capacity = max(need, min(1 << (need - 1).bit_length(), self.usual_length))
        least = max(len(busy) + (count > len(self.rows)), 1)
        most = {some: max(need, min(capacity, self._most(some))) for some in (rows, least)}
        sizes = ((doubled, capacity), (rows, capacity), (rows, most[rows]), (least, capacity), (least, most[least]))
        count, capacity = next((size for size in sizes if size[0] * size[1] <= self.limit), sizes[-1])
        if len(self.rows) > count:  # of closed sequences the longest are kept
            kept = sorted(self.rows, key=lambda each: (not each.busy, -each.length))[:count]
            for row in [each for each in kept if each.index >= count]:
                self._exchange(row, next(each for each in self.rows[:count] if each not in kept))
            del self.rows[count:]
        for row in self.rows:
            row.length, row.extent = min(row.length, capacity), min(row.extent, capacity)
        self.capacity = min(self.capacity, capacity)
        self._views = {}
        for group in self.groups:
            group.resize(count, capacity)  # the old tensor is released before the next one is made
        self.rows += [self.row_class(index) for index in range(len(self.rows), count)]
        self.capacity = capacity

    def _most(self, rows: int) -> int:
        """How many slots the limit allows to so many rows."""
        return self.limit // rows // self.block * self.block

    def _side_by_side(self, rows: Sequence[Row], windows: Sequence[int] = ()) -> int:
        """Exchanges rows until `rows` are neighbours, in any order; returns where they begin, one of `windows`."""
        taken = {row.index for row in rows}
        windows = windows or range(len(self.rows) - len(rows) + 1)
        before = list(accumulate((row.index in taken for row in self.rows), initial=0))  # of them, before each index
        first = max(windows, key=lambda at: before[at + len(rows)] - before[at])
        window = set(range(first, first + len(rows)))
        for here, there in zip(sorted(taken - window), sorted(window - taken), strict=True):
            self._exchange(self.rows[here], self.rows[there])
        return first

    def _exchange(self, one: Row, other: Row) -> None:
        extent = max(one.extent, other.extent)
        lengths = one.length, other.length
        one.length = other.length = 0  # an interrupt between two groups leaves nothing valid in either row
        for group in self.groups:
            here, there = (group.entries[:, row.index, :, :extent] for row in (one, other))
            here[:], there[:] = there, here.clone()  # a list of both as an index would be copied to the device
        one.index, other.index = other.index, one.index
        self.rows[one.index], self.rows[other.index] = one, other
        one.length, other.length = lengths

    # The forward

    def begin(
        self, rows: Sequence[Row], new: Sequence[int], num_computed: Sequence[int] | None = None, packed: bool = False
    ) -> list[int]:
        """Prepares a forward that writes `new` entries behind each of `rows`.

        Args:
            rows: of the sequences.
            new: nodes of each.
            num_computed: pending entries of each row that stay; the new ones come behind them.
            packed: whether the nodes of all rows come as one sequence. Otherwise they are padded to the longest.

        Returns:
            The order in which they lie in the cache, which is the batch's: indices into `rows`.

        Raises:
            CacheFull: the sequences have grown beyond the limit.
        """
        num_computed = num_computed or [0] * len(rows)
        ends, n = self._ends(rows, num_computed), max(new)
        self._end = -(-(max(ends) + n) // self.block) * self.block
        self._make_room(len(self.rows), self._end)
        self._first_row = self._side_by_side(rows)
        order = sorted(range(len(rows)), key=lambda i: rows[i].index)
        self._lengths, self._new = [ends[i] for i in order], [new[i] for i in order]
        self._packed, self._views, self.longest = packed, {}, max(ends)
        self._await(rows, num_computed, n)
        return order

    def _ends(self, rows: Sequence[Row], num_computed: Sequence[int]) -> list[int]:
        """Where the new entries of a forward begin. Raises `CacheFull`, see `begin`."""
        assert all(kept <= row.pending for row, kept in zip(rows, num_computed, strict=True)), "entries never written"
        longest = max(row.length for row in rows)
        if longest >= self.limit or longest * self._open_rows > self.limit:
            raise self._full(self._open_rows, longest + 1)
        return [row.length + kept for row, kept in zip(rows, num_computed, strict=True)]

    def _await(self, rows: Sequence[Row], num_computed: Sequence[int], n: int) -> None:
        """Notes the `n` entries that a forward writes behind the computed ones of each row."""
        for row, kept in zip(rows, num_computed, strict=True):
            row.pending, row.slots, row.extent = kept + n, None, max(row.extent, row.length + kept + n)

    @property
    def _open_rows(self) -> int:
        return sum(row.busy for row in self.rows)

    def end(self) -> None:
        """Called after a forward: planes that were new in it are stacked with those of their shape."""
        self._views = {}
        if len(self._place) == self._stacked:
            return
        kinds: dict[object, list[tuple[int, int]]] = {}
        for place, (group, plane) in self._place.items():
            kinds.setdefault(kind(group.entries[plane]), []).append(place)
        groups = []
        for places in kinds.values():
            size = max(LEAST_STACK, -(-len(places) // STACKS))
            for some in (places[at : at + size] for at in range(0, len(places), size)):
                stack = Planes(torch.stack([self._place[each][0].entries[self._place[each][1]] for each in some]))
                groups.append(stack)
                self._place.update({each: (stack, plane) for plane, each in enumerate(some)})
        self.groups, self._stacked = groups, len(self._place)
        self.bytes_per_token = Counter()
        for group in groups:
            self.bytes_per_token[group.entries.device] += group.bytes_per_token

    def write(self, place: tuple[int, int], states: Tensor) -> Tensor:
        """Puts [batch, heads, n, dim] or [1, heads, nodes, dim] in its slots.

        Returns:
            The view [batch, heads, kv, dim] of all entries.
        """
        if place not in self._place:
            group = Planes(states.new_zeros(1, len(self.rows), states.shape[1], self.capacity, states.shape[3]))
            self.groups.append(group)
            self._place[place] = group, 0
        group, plane = self._place[place]
        views = self._views.get(group)
        if views is None:
            views = self._views[group] = group.views(self._first_row, self._lengths, self._new, self._packed, self._end)
        if views.at is None:
            views.written[plane].copy_(states)
        else:
            views.written[plane].index_copy_(0, views.at, states.transpose(1, 2).reshape(-1, states.shape[3]))
        return views.read[plane]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(self.layer_class_to_replicate())
        return self.layers[layer_idx].update(key_states, value_states)  # type: ignore[no-any-return]
