"""LayerSkip's self-speculation (2404.16710): the first layers draft, the others go on from where those have left off.

    draft     tokens ─ first E layers ─┬─ norm ─ head ─ what may come next
                       │  keys, values └─ hidden states, kept
                       v        (the first E layers' part of the target's own cache)
    verify    nodes that nobody has drafted from: first E layers
              all nodes: kept hidden states ─ layers E ... L ─ norm ─ head ─ what the target says

The draft reads no prompt and has no cache: it looks from the target's row, whose commit is its own. What it has
computed of a node, the target does not compute again. Two twins of the model (`layers.twin`) do it, one that ends early
and one that begins late; that together they are the model is tested when the exit is made (`selftest`).

For an engine with masks of our own; a model that takes only its own drafts from a view with a cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.self_draft.layer_skip import Form, Skip, SubLayers, sub_layers
from leapahead.models.transformers import selftest
from leapahead.models.transformers.forward import Batch, CachedState, Engine, MaskedEngine, See, State
from leapahead.models.transformers.kv_cache import Row
from leapahead.models.transformers.model import TransformersSession, TransformersTarget


class Begun(NamedTuple):
    """What the first layers have computed behind the committed tokens of a row.

    Attributes:
        halves: whose layers.
        tokens: of the row, the list itself, which tells the sequence.
        length: committed entries of then.
        tree: of the nodes; node i has the pending entries in slot i.
        hidden: [nodes, width], which the next layer is to be given.
    """

    halves: Halves
    tokens: Sequence[int]
    length: int
    tree: TokenTree
    hidden: Tensor


class Handed(NamedTuple):
    """One row's nodes, those that were begun first.

    Attributes:
        tree: in that order.
        place: of every node of the tree that was asked for in this one.
        slots: where the entries of the first ones lie.
    """

    tree: TokenTree
    place: list[int]
    slots: list[int]

    @classmethod
    def of(cls, tree: TokenTree, begun: TokenTree | None) -> Handed:
        slot: dict[int, int] = {}  # of the nodes that were begun
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
    """What was begun of an engine's rows; see `engines.Exits`."""

    def __init__(self, engine: MaskedEngine) -> None:
        self.engine = engine
        self.rows: dict[Row, Begun] = {}

    @classmethod
    def of(cls, engine: MaskedEngine) -> Handover:
        """The engine's, one for all exits."""
        if not isinstance(engine.exits, cls):
            engine.exits = cls(engine)
        return engine.exits

    def row_of(self, tokens: Sequence[int]) -> Row | None:
        """The row of the open session that has this very list."""
        return next((row for row in self.engine.cache.rows if row.busy and row.tokens is tokens), None)

    def begun(self, rows: Sequence[Row]) -> dict[Row, Begun]:
        found = {row: each for row in rows if (each := self.rows.pop(row, None)) is not None}
        return {row: each for row, each in found.items() if each.tokens is row.tokens and each.length == row.length}

    def verify(self, rows: Sequence[Row], trees: Sequence[TokenTree], begun: dict[Row, Begun]) -> list[Tensor]:
        engine = self.engine
        halves = next(iter(begun.values())).halves
        mine = {row: each for row, each in begun.items() if each.halves is halves}
        handed = [
            Handed.of(tree, mine[row].tree if row in mine else None) for row, tree in zip(rows, trees, strict=True)
        ]
        ordered, known = [each.tree for each in handed], [len(each.slots) for each in handed]
        for row, each in zip(rows, handed, strict=True):
            engine.cache.gather(row, each.slots)
        hidden = [[mine[row].hidden[each.slots]] if row in mine else [] for row, each in zip(rows, handed, strict=True)]
        if any(len(tree) > first for tree, first in zip(ordered, known, strict=True)):
            batch = engine.ready(rows, ordered, known)
            _, seen = halves.begin(batch, **dict.fromkeys(engine.few_logits, 1))
            for parts, new in zip(hidden, batch.apart(seen), strict=True):
                parts.append(new)
        batch = engine.ready(rows, ordered)
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
        layers: that the first half has.
        engine: that runs the model.
    """

    def __init__(self, parts: SubLayers, layers: int, engine: MaskedEngine) -> None:
        self.first = parts.without(Skip.layers(range(layers, parts.count)))
        self.rest = parts.without(Skip.layers(range(layers)))
        self.attach(engine)
        self._seen: Tensor | None = None  # what the next layer is to be given, flat
        self._watched = False
        self._given: Tensor | None = None
        parts.layer(self.first, layers - 1).register_forward_hook(self._see(parts.form(layers - 1)))
        parts.layer(self.rest, 0).register_forward_hook(self._give(parts.form(0)))

    def attach(self, engine: MaskedEngine) -> None:
        """From now on beside this engine's rows."""
        self.engine, self.handover = engine, Handover.of(engine)

    def _see(self, form: Form) -> Any:
        def see(module: nn.Module, args: Any, output: Any) -> None:
            if self._watched:
                self._seen = output if form.length is None else output[form.at]

        return see

    def _give(self, form: Form) -> Any:
        def give(module: nn.Module, args: Any, output: Any) -> Any:
            assert self._given is not None, "the second half runs behind the first"
            old = output if form.length is None else output[form.at]
            new = self._given.reshape(old.shape).to(old)
            return new if form.length is None else tuple(new if at == form.at else o for at, o in enumerate(output))

        return give

    def begin(self, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
        """Logits [batch, n, vocab] behind the first layers, and hidden states [batch, n, width]."""
        self._watched = True
        try:
            logits = self.engine.call(self.first, batch, **options)
            assert self._seen is not None
            return logits, self._seen.reshape(*batch.inputs.tokens.shape, -1)
        finally:
            self._watched, self._seen = False, None

    def end(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Logits [batch, n, vocab] of the model, from what `begin` gave."""
        self._given = hidden
        try:
            return self.engine.call(self.rest, batch)
        finally:
            self._given = None

    def look(self, rows: Sequence[Row], trees: Sequence[TokenTree], known: Sequence[int] | None = None) -> list[Tensor]:
        """Logits behind the first layers, [nodes - known, vocab] of each tree; see `Target.step`.

        Raises:
            LeapaheadError: what was known is lost, since another exit has looked meanwhile.
        """
        known = known or [0] * len(trees)
        before = self.handover.begun(rows)
        for row, first in zip(rows, known, strict=True):
            if first and (row not in before or before[row].halves is not self):
                raise LeapaheadError("two early exits of one target cannot draft for one text; use one of them")
        batch = self.engine.ready(rows, trees, known)
        logits, seen = self.begin(batch)
        for row, tree, first, new in zip(rows, trees, known, batch.apart(seen), strict=True):
            hidden = torch.cat((before[row].hidden[:first], new)) if first else new
            self.handover.rows[row] = Begun(self, row.tokens, row.length, tree, hidden)
        return batch.apart(logits)


class BesideSession(TransformersSession):
    """A text of the target, as the exit follows it: its tokens are the target's, live."""

    def commit(self, verdict: Verdict) -> None:
        """The target has committed already, whatever was drafted."""
        self.sampler.committed()

    def close(self) -> None:
        """The row is the target's."""


class ExitEngine:
    """An exit beside the target's rows, or, for a text that the target does not have, in a cache of its own."""

    def __init__(self, own: Engine, halves: Halves) -> None:
        self.own, self.halves = own, halves
        self.capabilities = own.capabilities

    def open(self, tokens: list[int], see: See | None = None) -> tuple[State, int, int]:
        return self.own.open(tokens, see)

    def forward(
        self, states: Sequence[Any], trees: Sequence[TokenTree], known: Sequence[int] | None = None
    ) -> list[Tensor]:
        beside = [state.cache is self.halves.engine.cache for state in states]
        assert all(beside) or not any(beside), "a step is for texts of the target or for others"
        if all(beside):
            return self.halves.look([state.row for state in states], trees, known)
        return self.own.forward(states, trees, known)

    def forget(self) -> None:
        self.own.forget()


class EarlyExit(TransformersTarget):
    """The target's first layers, then its final norm and head, as a draft that shares the target's cache.

    Args:
        target: that it drafts for.
        layers: so many.

    Raises:
        Refused: the layers of the model cannot be left out, or do not give its own logits in two halves.
        BadParameter: fewer layers than one, or more than the model has.
    """

    def __init__(self, target: TransformersTarget, layers: int) -> None:
        parts = sub_layers(target)
        if not 1 <= layers <= parts.count:
            raise BadParameter(
                f"layers={layers} is not possible: {target.name} has {parts.count}; give 1 to {parts.count}"
            )
        halves = Halves(parts, layers, target.engine.another()) if isinstance(target.engine, MaskedEngine) else None
        super().__init__(
            halves.first if halves is not None else parts.without(Skip.layers(range(layers, parts.count))),
            max_batch=target.max_batch,
            name=f"{target.name} first {layers} layers",
            eager_choice=target._eager_choice,
        )
        self.fingerprint = f"{target.fingerprint} first {layers} layers"
        self.halves = halves
        if halves is not None:
            self._rehearse(target, halves)
            halves.attach(target.engine)
            self.engine = ExitEngine(self.engine, halves)

    def _rehearse(self, target: TransformersTarget, halves: Halves) -> None:
        rehearsal, ids = Rehearsal(halves.engine, halves), target._ordinary_ids()
        with torch.no_grad():
            result = selftest.run(rehearsal, target.model, ids, target._test_prompts())
        if not result.passed:
            raise Refused(
                f"{self.name} and the layers behind them do not give the logits of {target.name}: they differ by "
                f"{result.error:.2g} standard deviations"
            )

    def shares(self, tokens: Sequence[int]) -> bool:
        """Whether these are the live tokens of a session of the target, so that to open it costs nothing."""
        return self.halves is not None and self.halves.handover.row_of(tokens) is not None

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        stats: Stats | None = None,
        reserve: int = 0,
        top_k: int = 0,
    ) -> TransformersSession:
        if self.halves is None or (row := self.halves.handover.row_of(tokens)) is None:
            return super().open(tokens, params, stats, reserve, top_k)
        state = CachedState(self.halves.engine.cache, row)
        return BesideSession(row.tokens, state, self._sampler(params, row.tokens))


class Rehearsal(ExitEngine):
    """An engine of the whole model, some of whose nodes were begun by the exit, in two looks."""

    def forward(
        self, states: Sequence[CachedState], trees: Sequence[TokenTree], known: Sequence[int] | None = None
    ) -> list[Tensor]:
        rows = [state.row for state in states]
        self.halves.look(rows, [TokenTree.root(int(tree.tokens[0])) for tree in trees])
        self.halves.look(rows, [some_of(tree) for tree in trees], [1] * len(trees))
        return self.own.forward(states, trees, known)


def some_of(tree: TokenTree) -> TokenTree:
    """Its root, the last child of that, and what of the nodes below hangs together."""
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
