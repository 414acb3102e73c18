"""The cache of a model with recurrent layers: rows of keys and values, each with the states that those layers keep.

    row 0      c c c c c c c c|r r r n n n|        c  entries of the first `length` tokens, which the states have read
               states: after the last c            r  committed tokens that the states have not read, `replay` of them
                                                   n  nodes of the next draft

A recurrent state cannot discard tokens. So a forward computes new states beside those that are kept, and gives the
model copies, since some kernels write into the state that they are given. If all tokens of the forward are committed
the new states take the place of the kept ones (`settle`). If not, the new ones are dropped, and the committed tokens
go through the model again at the head of the next forward (`lag`): attention layers write the same entries once more.

Conv states, the last inputs of a short convolution, and recurrent states are treated alike.

Knows Transformers' `Cache` interface for such layers; knows neither models nor trees.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from leapahead.core.tree import UNLIMITED
from leapahead.models.transformers.kv_cache import KVCache, Row
from leapahead.models.transformers.modes import computing

MOST_KEPT = 2  # states of earlier moments, of one row

Place = tuple[str, int, int]  # the kind of a state, its layer, its number within the layer


class States(NamedTuple):
    """The recurrent states of one row; never written once they are made.

    Attributes:
        length: tokens that they have read.
        tensors: [1, ...] each.
    """

    length: int
    tensors: dict[Place, Tensor]


class StatefulRow(Row):
    """A row with recurrent states.

    Attributes:
        states: after the first `length` tokens; of no use where their length is another one.
        pending_states: after all pending nodes.
        kept: states of earlier moments, the latest last, for sequences that begin with the same tokens.
        replay: committed tokens behind the first `length`.
        branches: after each path of a tree with branches, which went through as a row of the batch; empty otherwise.
        paths: the nodes of these.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.states: States | None = None
        self.pending_states: dict[Place, Tensor] = {}
        self.kept: list[States] = []
        self.replay = 0
        self.branches: list[dict[Place, Tensor]] = []
        self.paths: list[list[int]] = []

    def common(self, prefix: list[int]) -> int:
        """As many of the first tokens of `prefix` as the row has both their entries and the states after them."""
        return max((each.length for each in self.usable(super().common(prefix))), default=0)

    def usable(self, length: int) -> list[States]:
        """The states after at most so many of its tokens."""
        return [each for each in (*self.kept, self.states) if each is not None and 0 < each.length <= length]

    def keep_states(self) -> None:
        """Keeps the present states for later sequences."""
        if self.states is not None and self.states.length == self.length:
            self.states = apart(self.states)
            others = [each for each in self.kept if each.length < self.length]
            self.kept = [*others, self.states][-MOST_KEPT:]


def apart(states: States) -> States:
    """The same without the states of other rows, of which a forward computes all in one tensor."""
    tensors = {
        place: each.clone() if each.untyped_storage().nbytes() > each.nbytes else each
        for place, each in states.tensors.items()
    }
    return States(states.length, tensors)


class StatefulCache(KVCache):
    """See the module."""

    row_class = StatefulRow
    rows: list[StatefulRow]  # type: ignore[assignment]

    def __init__(self, usual_length: int = UNLIMITED) -> None:
        self._stepping: list[StatefulRow] = []  # the rows of the current forward, in its order
        self._given: list[dict[Place, Tensor]] = []  # the states that they begin with
        self._working: dict[Place, Tensor] = {}  # [batch, ...]; what the model has made of them
        self._branches = 0  # rows of the batch that one row of the cache stands for; 0 where each has its own
        super().__init__(usual_length)

    def forget(self) -> None:
        super().forget()
        for row in self.rows:
            if not row.busy:
                row.states, row.kept = None, []

    # Rows

    def share(self, row: Row, source: Row, shared: int) -> None:
        super().share(row, source, shared)
        assert isinstance(row, StatefulRow)
        assert isinstance(source, StatefulRow)
        usable = source.usable(shared)
        row.kept = usable[-MOST_KEPT:]
        row.states = max(usable, key=lambda each: each.length, default=None)
        row.pending_states, row.replay = {}, 0
        assert shared == (row.states.length if row.states else 0), "entries without states"

    def release(self, row: Row) -> None:
        assert isinstance(row, StatefulRow)
        try:
            with computing():  # sessions are closed in whatever mode the calling thread has
                row.keep_states()
        finally:
            row.pending_states, row.replay = {}, 0
            super().release(row)

    def settle(self, row: StatefulRow, count: int, branch: int | None = None) -> None:
        """Commits all `count` pending nodes, replayed ones included, with the states after them.

        Args:
            branch: those of this branch.
        """
        if branch is None:
            assert count == row.pending, "states after other nodes than the committed ones"
            states = row.pending_states
        else:
            rows = row.pending // len(row.branches)
            assert count == rows, "states after other nodes than the committed ones"
            self.gather(row, range(branch * rows, branch * rows + rows))
            states = row.branches[branch]
        length = row.length
        # An interrupt between these leaves a row of length 0, whose tokens are read again.
        row.length, row.replay, row.pending, row.slots, row.pending_states, row.branches = 0, 0, 0, None, {}, []
        row.states = States(length + count, states)
        row.length = length + count

    def lag(self, row: StatefulRow, count: int) -> None:
        """Drops the pending nodes; `count` more of the committed tokens are read at the head of the next forward."""
        self.discard(row)
        if row.replay == 0 and row.states is not None:  # the rows beside it go on to newer ones
            row.states = apart(row.states)
        row.replay += count

    def discard(self, row: Row) -> None:
        assert isinstance(row, StatefulRow)
        row.pending_states, row.branches = {}, []
        super().discard(row)

    # The forward

    def begin(
        self, rows: Sequence[Row], new: Sequence[int], num_computed: Sequence[int] | None = None, packed: bool = False
    ) -> list[int]:
        order = super().begin(rows, new, num_computed, packed)
        self._stepping, self._given, self._working, self._branches = [], [], {}, 0
        for at in order:
            row = rows[at]
            assert isinstance(row, StatefulRow)
            self._stepping.append(row)
            self._given.append(row.pending_states if num_computed and num_computed[at] else self.before(row))
        return order

    def begin_branches(self, row: StatefulRow, branches: int, new: int) -> None:
        """Prepares a forward of several rows of `new` tokens, all of which continue one row of the cache.

        Their entries lie one branch after the other behind those of the row.
        """
        self.begin([row], [branches * new])
        self._branches, self._given = branches, self._given * branches

    def write(self, place: tuple[int, int], states: Tensor) -> Tensor:
        if not self._branches:
            return super().write(place, states)
        branches, heads, new, dim = states.shape
        together = states.transpose(0, 1).reshape(1, heads, branches * new, dim)
        return super().write(place, together).expand(branches, -1, -1, -1)

    @staticmethod
    def before(row: StatefulRow) -> dict[Place, Tensor]:
        """The states after the first `length` tokens; none at the beginning of a text."""
        if row.length == 0:
            return {}
        assert row.states is not None, "entries without states"
        assert row.states.length == row.length, "states after other tokens"
        return row.states.tensors

    def end(self) -> None:
        super().end()
        batch = max(self._branches, len(self._stepping))
        states = [{place: each[at : at + 1] for place, each in self._working.items()} for at in range(batch)]
        for at, row in enumerate(self._stepping):
            row.pending_states, row.branches = ({}, states) if self._branches else (states[at], [])
        self._stepping, self._given, self._working, self._branches = [], [], {}, 0

    def get(self, place: Place) -> Tensor | None:
        """[batch, ...], which the model may write into; None at the beginning of the texts."""
        if place not in self._working and self._given and place in self._given[0]:
            self._working[place] = torch.cat([each[place] for each in self._given])
        return self._working.get(place)

    def put(self, place: Place, state: Tensor) -> Tensor:
        """Takes the state after the tokens of this forward."""
        before = self.get(place)
        self._working[place] = state if before is None else state.to(before.dtype)
        return self._working[place]

    # Transformers' interface for linear attention, state-space layers and short convolutions

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self._given and self._given[0])

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.get(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.get(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Of the inputs [batch, channels, n] of a convolution; returns them behind the last ones before."""
        place = ("conv", layer_idx, state_idx)
        before = self.get(place)
        if before is not None:
            size, everything = before.shape[-1], torch.cat([before, conv_states], dim=-1)
        else:
            size, everything = conv_kernel_size or conv_states.shape[-1], conv_states
            if conv_states.shape[-1] < size:
                everything = torch.nn.functional.pad(conv_states, (size - conv_states.shape[-1], 0))
        self._working[place] = everything[..., -size:].contiguous()
        return everything

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self.put(("recurrent", layer_idx, state_idx), recurrent_states)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Of models with a cache class of their own (MiniMax), as the next one."""
        return self.get(("linear", layer_idx, 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.put(("linear", layer_idx, 0), linear_cache)

    def __len__(self) -> int:
        return len(self.layers)


def stateful_cache(model: Any, usual_length: int = UNLIMITED) -> StatefulCache:
    """A cache that a model's forward takes, which may ask for a class that its module defines."""
    module = sys.modules[type(model).__module__]
    for each in vars(module).values():
        if isinstance(each, type) and issubclass(each, Cache) and each.__module__ == module.__name__:
            made: StatefulCache = type(f"Stateful{each.__name__}", (StatefulCache, each), {})(usual_length)
            return made
    return StatefulCache(usual_length)
