"""LayerSkip's self-speculation (2404.16710): the first layers draft, the others continue from their hidden states.

    draft     tokens ─ first E layers ─┬─ norm ─ head ─ logits of the draft
                       │  keys, values └─ hidden states, kept until the target's forward
                       v        (the entries of the first E layers in the target's own cache)
    verify    nodes that were not drafted from: first E layers
              all nodes: kept hidden states ─ layers E ... L ─ norm ─ head ─ logits of the target

The draft reads no prompt and has no cache: its nodes are pending entries of the target's row, which the target's commit
keeps or discards. What it has computed of a node, the target does not compute again. Two copies of the model
(`twin`, shared weights) do it, one that ends early and one that begins late; that together they are the
model is tested when the exit is made (`selftest`).

For a `MaskedExecutor`; a model that takes chains only drafts from a view with a cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import proxy

import numpy as np
import torch
from torch import Tensor, nn

from leapahead.core.errors import BadParameter, CacheFull, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models.base import Capture
from leapahead.models.self_draft.layer_skip import Form, Skip, SubLayers, sub_layers
from leapahead.models.self_draft.sharing import SharedSession, SharedState, SharingExecutor, SharingTarget
from leapahead.models.transformers import selftest
from leapahead.models.transformers.forward import Batch, CachedState, Executor, Layers, MaskedExecutor, Outputs
from leapahead.models.transformers.kv_cache import Row
from leapahead.models.transformers.model import TransformersSession, TransformersTarget
from leapahead.models.transformers.modes import computing


class Begun(NamedTuple):
    """What the first layers have computed behind the committed tokens of a row.

    Attributes:
        halves: whose layers.
        tokens: of the row; the list itself identifies the sequence.
        length: committed entries at that time.
        tree: of the nodes; node i has the pending entries in slot i.
        hidden: [nodes, hidden_size], the input of the next layer.
    """

    halves: Halves
    tokens: Sequence[int]
    length: int
    tree: TokenTree
    hidden: Tensor


class Handed(NamedTuple):
    """One row's nodes, those that the first layers have computed first.

    Attributes:
        tree: in that order.
        place: where every node of the original tree is in this one.
        slots: where the entries of the computed ones lie.
    """

    tree: TokenTree
    place: list[int]
    slots: list[int]

    @classmethod
    def of(cls, tree: TokenTree, begun: TokenTree | None) -> Handed:
        """Orders the nodes of `tree`, given the tree that the first layers have computed."""
        slot: dict[int, int] = {}  # of the computed nodes
        if begun is not None:
            slot[0] = 0
            for node in range(1, len(tree)):
                parent = slot.get(int(tree.parents[node]))
                found = None if parent is None else begun.child(parent, int(tree.tokens[node]))
                if found is not None:
                    slot[node] = found
        order = [*slot, *(node for node in range(len(tree)) if node not in slot)]
        place = np.argsort(order)
        parents = tree.parents[order]
        parents[1:] = place[parents[1:]]
        return cls(TokenTree(tree.tokens[order], parents), place.tolist(), list(slot.values()))


class Handover:
    """What the first layers have computed of an executor's rows; see `forward.Exits`."""

    def __init__(self, executor: MaskedExecutor) -> None:
        self.executor: MaskedExecutor = proxy(executor)  # which refers to this
        self.rows: dict[Row, Begun] = {}

    @classmethod
    def of(cls, executor: MaskedExecutor) -> Handover:
        """The executor's own, one for all exits."""
        if not isinstance(executor.exits, cls):
            executor.exits = cls(executor)
        return executor.exits

    def has(self, rows: Sequence[Row]) -> bool:
        return any(row in self.rows for row in rows)

    def begun(self, rows: Sequence[Row]) -> dict[Row, Begun]:
        found = {row: each for row in rows if (each := self.rows.pop(row, None)) is not None}
        return {
            row: each
            for row, each in found.items()
            if each.tokens is row.tokens and each.length == row.length and row.pending >= len(each.tree)
        }

    def verify(self, rows: Sequence[Row], trees: Sequence[TokenTree], begun: dict[Row, Begun]) -> list[Tensor]:
        executor = self.executor
        halves = next(iter(begun.values())).halves
        mine = {row: each for row, each in begun.items() if each.halves is halves}
        handed = [
            Handed.of(tree, mine[row].tree if row in mine else None) for row, tree in zip(rows, trees, strict=True)
        ]
        ordered, computed = [each.tree for each in handed], [len(each.slots) for each in handed]
        for row, each in zip(rows, handed, strict=True):
            executor.cache.gather(row, each.slots)
        hidden = [[mine[row].hidden[each.slots]] if row in mine else [] for row, each in zip(rows, handed, strict=True)]
        if any(len(tree) > first for tree, first in zip(ordered, computed, strict=True)):
            batch = executor.ready(rows, ordered, computed)
            _, states = halves.begin(batch, **dict.fromkeys(executor.few_logits, 1))
            for parts, new in zip(hidden, batch.apart(states), strict=True):
                parts.append(new)
        batch = executor.ready(rows, ordered)
        logits = batch.apart(halves.end(batch, batch.together([torch.cat(parts) for parts in hidden])))
        for at, (row, each) in enumerate(zip(rows, handed, strict=True)):
            if each.place != list(range(len(each.place))):
                row.slots, logits[at] = each.place, logits[at][each.place]
        return logits

    def forget(self) -> None:
        self.rows.clear()


class Halves:
    """A model in two: one that ends behind its first layers, one that begins behind them.

    Args:
        parts: of the model.
        layers: the number of layers of the first half.
        executor: that runs the model.
    """

    def __init__(self, parts: SubLayers, layers: int, executor: MaskedExecutor) -> None:
        self.first = parts.without(Skip.layers(range(layers, parts.count)))
        self.rest = parts.without(Skip.layers(range(layers)))
        self.attach(executor)
        self._output: Tensor | None = None  # of the first half's last layer
        self._recording = False
        self._input: Tensor | None = None  # of the second half's first layer
        parts.layer(self.first, layers - 1).register_forward_hook(self._record(parts.form(layers - 1)))
        parts.layer(self.rest, 0).register_forward_hook(self._replace(parts.form(0)))

    def attach(self, executor: MaskedExecutor) -> None:
        """From now on uses the rows of this executor."""
        self.executor, self.handover = executor, Handover.of(executor)

    def _record(self, form: Form) -> Any:
        halves = proxy(self)  # a hook that refers to what has the module would keep both in a cycle

        def record(module: nn.Module, args: Any, output: Any) -> None:
            if halves._recording:
                halves._output = output if form.length is None else output[form.at]

        return record

    def _replace(self, form: Form) -> Any:
        halves = proxy(self)

        def give(module: nn.Module, args: Any, output: Any) -> Any:
            assert halves._input is not None, "the second half runs behind the first"
            old = output if form.length is None else output[form.at]
            new = halves._input.reshape(old.shape).to(old)
            return new if form.length is None else tuple(new if at == form.at else o for at, o in enumerate(output))

        return give

    def begin(self, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
        """Logits [batch, n, vocab], or packed, behind the first layers, and hidden states [batch, n, hidden_size]."""
        self._recording = True
        try:
            logits = self.executor.call(self.first, batch, **options).logits
            assert self._output is not None
            return logits, self._output.reshape(*batch.pack(batch.inputs.tokens).shape, -1)
        finally:
            self._recording, self._output = False, None

    def end(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Logits [batch, n, vocab] of the model, from the hidden states of `begin`."""
        self._input = hidden
        try:
            return self.executor.call(self.rest, batch).logits
        finally:
            self._input = None

    def draft(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], num_computed: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Logits behind the first layers, [nodes - num_computed, vocab] of each tree; see `Target.step`.

        Raises:
            CacheFull: the computed nodes are lost, since the target found no room for its step.
            LeapaheadError: they are, since another exit has drafted meanwhile.
        """
        num_computed = num_computed or [0] * len(trees)
        before = self.handover.begun(rows)
        for row, first in zip(rows, num_computed, strict=True):
            if first and row not in before:
                raise CacheFull("the draft was lost, since the KV cache was full; it is begun anew")
            if first and before[row].halves is not self:
                raise LeapaheadError("two early exits of one target cannot draft for one text; use one of them")
        try:
            batch = self.executor.ready(rows, trees, num_computed)
            logits, states = self.begin(batch)
        except BaseException:
            self.executor.discard(rows)
            raise
        for row, tree, first, new in zip(rows, trees, num_computed, batch.apart(states), strict=True):
            hidden = torch.cat((before[row].hidden[:first], new)) if first else new
            self.handover.rows[row] = Begun(self, row.tokens, row.length, tree, hidden)
        return batch.apart(logits)


class ExitExecutor(SharingExecutor):
    """Drafts in the target's rows, or, for a sequence that the target does not have, in a cache of its own."""

    def __init__(self, own: Executor, halves: Halves) -> None:
        super().__init__(own)
        self.halves = halves

    def shares(self, state: Any) -> bool:
        return state.cache is self.halves.executor.cache

    def draft(
        self, states: Sequence[Any], trees: Sequence[TokenTree], num_computed: Sequence[int] | None
    ) -> list[Outputs]:
        return [Outputs(logits) for logits in self.halves.draft([state.row for state in states], trees, num_computed)]


class EarlyExit(SharingTarget):
    """The target's first layers, then its final norm and head, as a draft model that shares the target's cache.

    Args:
        target: that it drafts for.
        layers: the number of layers.

    Raises:
        Refused: the layers of the model cannot be left out, or do not give its own logits in two halves.
        BadParameter: fewer layers than one, or more than the model has.
    """

    def __init__(self, target: TransformersTarget, layers: int) -> None:
        parts = sub_layers(target)
        if not 1 <= layers <= parts.count:
            raise BadParameter(
                f"draft='self:first={layers}' is not possible: {target.info.name} has {parts.count} layers; "
                f"give self:first=1 to self:first={parts.count}"
            )
        own = target.executor
        halves = Halves(parts, layers, own.another(target.model)) if isinstance(own, MaskedExecutor) else None
        what = f"first {layers} layers"
        super().__init__(
            halves.first if halves is not None else parts.without(Skip.layers(range(layers, parts.count))),
            name=f"{target.info.name} {what}",
            eager_choice=target.eager_choice,
            hidden_states=False,  # it has none of a sequence that it shares
        )
        self.share(target, what)
        self.halves, self._made_of = halves, self.parts.objects()
        if halves is not None and isinstance(own, MaskedExecutor):
            self._rehearse(target, halves)
            halves.attach(own)
            self.executor = ExitExecutor(self.executor, halves)
            self.shared = own.cache

    def _rehearse(self, target: TransformersTarget, halves: Halves) -> None:
        """Tests on the model that the exit and the layers behind it together are the model."""
        rehearsal = Rehearsal(halves.executor, halves)
        with computing(target.autocast):
            own = selftest.OwnOutputs(target.model)
            result = selftest.run(rehearsal, own, target.ordinary_ids(), target.test_prompts())
        if not result.passed:
            raise Refused(
                f"{self.info.name} and the layers behind them do not give the logits of {target.info.name}: they "
                f"differ by {result.error:.2g} standard deviations"
            )

    def session(self, row: Row, params: SamplingParams, capture: Capture) -> TransformersSession:
        assert self.halves is not None
        if self.parts.objects() != self._made_of:  # of which the halves, that verify as well, have the former ones
            raise self.changed("weights or hooks of the model were replaced, or its adapters switched,")
        state = SharedState(self.halves.executor.cache, row, row.tokens)
        return SharedSession(row.tokens, state, self._sampler(params, row.tokens), capture)


class Rehearsal(ExitExecutor):
    """An executor of the whole model, some of whose nodes the exit has computed, in two draft forwards."""

    def forward(
        self,
        states: Sequence[CachedState],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
    ) -> list[Outputs]:
        rows = [state.row for state in states]
        self.halves.draft(rows, [TokenTree.root(int(tree.tokens[0])) for tree in trees])
        self.halves.draft(rows, [some_of(tree) for tree in trees], [1] * len(trees))
        return self.own.forward(states, trees, num_computed, layers)


def some_of(tree: TokenTree) -> TokenTree:
    """A part of a tree: its root, the last child of the root, and all nodes below that child."""
    place = {0: 0}
    for node in range(len(tree) - 1, 0, -1):
        if tree.parents[node] == 0:
            place[node] = 1
            break
    for node in range(1, len(tree)):
        if node not in place and int(tree.parents[node]) in place and tree.parents[node] != 0:
            place[node] = len(place)
    kept = list(place)
    parents = [-1, *(place[int(tree.parents[node])] for node in kept[1:])]
    return TokenTree(tree.tokens[kept], np.array(parents))
