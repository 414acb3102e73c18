"""How a model computes the logits of trees. There are four executors, from the most able to the least:

    MaskedExecutor     our cache, our masks, our positions; all sessions in one forward          trees
    ChainExecutor      our cache, the model's own mask; one forward a session; slot = position   chains
    ReplayExecutor     the same with recurrent states, which cannot discard tokens (`replay`)    chains
    NativeExecutor     the model's own state, one token at a time (`recurrent`)                  plain decoding

Knows models and caches; knows neither sampling nor drafters. Which executor a model gets is decided by a test of the
model, see `selftest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from leapahead.core.tree import IntArray, TokenTree
from leapahead.models.base import CHAIN, EMBEDDINGS, LOGITS, TOP_K, TREE
from leapahead.models.transformers import grouped
from leapahead.models.transformers.arguments import accepts, cache_name
from leapahead.models.transformers.embeddings import AddedEmbeddings
from leapahead.models.transformers.families import Pattern, text_config
from leapahead.models.transformers.grouped import Packing
from leapahead.models.transformers.kv_cache import KVCache, Row
from leapahead.models.transformers.masks import Inputs

Layers = tuple[int, ...]  # hidden states: 0 the embedding, i the output of layer i, the last after the final norm


class Outputs(NamedTuple):
    """What a forward gives of one sequence's rows, on the device.

    Attributes:
        logits: [rows, vocab].
        hidden: [rows, layers * hidden_size], the layers asked for side by side; None where none were.
    """

    logits: Tensor
    hidden: Tensor | None = None


class State(Protocol):
    """What an executor keeps of one sequence.

    Attributes:
        tokens: of the sequence, live.
    """

    tokens: list[int]

    @property
    def length(self) -> int:
        """Committed tokens that it holds or will replay: all but the last, once the prompt is read."""

    @property
    def replay(self) -> int:
        """See `Session.replay`."""

    def commit(self, path: Sequence[int]) -> None:
        """Keeps the nodes `path` of the last tree and discards the others."""

    def close(self) -> None:
        """Releases it. Closing twice is harmless."""


class Executor(Protocol):
    """One way to run a model."""

    capabilities: frozenset[str]

    def open(self, tokens: list[int], reuse: int = 0, reserve: int = 0, owner: str = "") -> State:
        """A state for a sequence, of which at most the first `reuse` tokens are taken from other sequences' entries.

        Args:
            reserve: the length that the sequence is expected to grow to.
            owner: see `Target.open`.
        """

    def prefill(self, state: Any, count: int, rows: int = 1, layers: Layers = ()) -> Outputs:
        """ONE forward over the next `count` tokens of the sequence, its last token excluded.

        Returns:
            The logits of the last `rows` of them at least, and the hidden states of all of them.
        """

    def fork(self, state: Any, tokens: list[int]) -> State:
        """A second state with the same entries; `tokens` are a copy of the state's."""

    def forward(
        self,
        states: Sequence[Any],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
    ) -> list[Outputs]:
        """Of the nodes behind the computed ones of each tree, over its state's tokens; see `Target.step`."""

    def rows(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> int:
        """The token rows of that forward, padding and replay included."""

    def forget(self) -> None:
        """Releases the memory that is kept for later sequences."""


def inputs(model: Any, tokens: IntArray, start: int, device: torch.device) -> dict[str, Tensor]:
    """What `generate` gives a model for tokens [batch, n] after `start` others: positions too, where it takes them.

    Without positions some models count from an offset of their own, or from zero in every call.
    """
    given = {"input_ids": torch.from_numpy(tokens).to(device)}
    if accepts(model, "position_ids"):
        given["position_ids"] = torch.arange(start, start + tokens.shape[1], device=device).repeat(len(tokens), 1)
    return given


def side_by_side(hidden_states: Sequence[Tensor], layers: Layers) -> Tensor | None:
    """[batch, n, layers * hidden_size] of a model's output; None for no layers."""
    if len(layers) <= 1:
        return hidden_states[layers[0]] if layers else None
    return torch.cat([hidden_states[layer] for layer in layers], dim=-1)


class CachedState:
    """A sequence whose entries are a row of our cache."""

    def __init__(self, cache: KVCache, row: Row, tokens: list[int]) -> None:
        self.cache, self.row, self.tokens = cache, row, tokens

    @property
    def length(self) -> int:
        return self.row.length

    @property
    def replay(self) -> int:
        return 0

    def commit(self, path: Sequence[int]) -> None:
        self.cache.keep(self.row, path)

    def close(self) -> None:
        if self.row.tokens is self.tokens:  # else the row has another owner already
            self.cache.release(self.row)


class CachedExecutor:
    """What the executors over our cache have in common."""

    capabilities: frozenset[str]

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.cache_name = cache_name(model)
        self.few_logits = ["logits_to_keep"] if accepts(model, "logits_to_keep") else []

    def open(self, tokens: list[int], reuse: int = 0, reserve: int = 0, owner: str = "") -> CachedState:
        return CachedState(self.cache, self.cache.take(tokens, min(reuse, len(tokens) - 1), reserve, owner), tokens)

    def prefill(self, state: CachedState, count: int, rows: int = 1, layers: Layers = ()) -> Outputs:
        start = state.length
        chunk = state.tokens[start : start + count]
        keep = {name: max(1, min(rows, count)) for name in self.few_logits}
        try:
            (outputs,) = self.run([state.row], [TokenTree.chain(chunk[0], chunk[1:])], None, layers, **keep)
            state.commit(range(count))
        except BaseException:
            self.discard([state.row])
            raise
        return outputs

    def fork(self, state: CachedState, tokens: list[int]) -> CachedState:
        return self.open(tokens, state.length, state.row.reserved, state.row.owner)

    def forward(
        self,
        states: Sequence[CachedState],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
    ) -> list[Outputs]:
        rows = [state.row for state in states]
        try:
            return self.run(rows, trees, num_computed, layers)
        except BaseException:
            self.discard(rows)
            raise

    def another(self, model: Any) -> CachedExecutor:
        """The same for this model or a copy of it, with an empty cache of its own; for tests."""
        raise NotImplementedError

    def run(
        self,
        rows: Sequence[Row],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
        **options: Any,
    ) -> list[Outputs]:
        """One forward, or as many as it takes; `options` are the model's."""
        raise NotImplementedError

    def rows(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> int:
        return sum(map(len, trees))

    def forget(self) -> None:
        self.cache.forget()

    def discard(self, rows: Sequence[Row]) -> None:
        """Drops all but the committed entries, when a forward of these rows has failed or was interrupted."""
        for row in rows:
            self.cache.discard(row)


class Exits(Protocol):
    """The part of a forward that early exits have computed already, see `self_draft.early_exit`."""

    def has(self, rows: Sequence[Row]) -> bool:
        """Whether something was computed of one of these rows."""

    def begun(self, rows: Sequence[Row]) -> dict[Row, Any]:
        """Takes what was computed of these rows, which is of no use after the next forward."""

    def verify(self, rows: Sequence[Row], trees: Sequence[TokenTree], begun: dict[Row, Any]) -> list[Tensor]:
        """The logits that `run` gives, from there."""

    def forget(self) -> None:
        """Drops it."""


class Batch(NamedTuple):
    """The rows of one forward.

    Attributes:
        inputs: of the model, in the order of the cache, padded.
        order: which of the rows asked for lies where.
        new: nodes of each of the rows asked for.
        packing: where all nodes go through the model as one sequence, [1, nodes] instead of [batch, n].
    """

    inputs: Inputs
    order: list[int]
    new: list[int]
    packing: Packing | None = None

    def pack(self, padded: Tensor) -> Tensor:
        """[batch, n] as the model is given it."""
        return padded if self.packing is None else padded.flatten()[self.packing.padded][None]

    def apart(self, found: Tensor) -> list[Tensor]:
        """[batch, n, ...] or [1, nodes, ...] -> [nodes, ...] of each row, in the order asked for."""
        if self.packing is None:
            parts: Sequence[Tensor] = [found[at, : self.new[i]] for at, i in enumerate(self.order)]
        else:
            parts = torch.split(found[0], [self.new[i] for i in self.order])
        return [part for _, part in sorted(zip(self.order, parts, strict=True), key=itemgetter(0))]

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """The reverse; what is missing repeats a row's first node, as padding does."""
        ordered = [parts[i] for i in self.order]
        if self.packing is not None:
            return torch.cat(ordered)[None]
        n = max(self.new)
        return torch.stack([torch.cat((part, part[:1].expand(n - len(part), -1))) for part in ordered])


class MaskedExecutor(CachedExecutor):
    """Trees of any shape, all sessions in one forward.

    Args:
        patterns: the attention patterns of the model's layers.
        boolean: whether masks are boolean; else they are added to the scores.
        config: of the language model, whose attention is computed by `grouped` then, without padding of trees of
            different sizes; None for the model's own.
    """

    capabilities = frozenset({CHAIN, TREE, LOGITS, TOP_K})
    attention = grouped.NAME  # what `grouped.attention` is asked for

    def __init__(
        self, model: Any, cache: KVCache, patterns: dict[str, Pattern], boolean: bool, config: Any = None
    ) -> None:
        super().__init__(model, cache)
        self.patterns, self.config = patterns, config
        self.dtype = None if boolean else model.dtype
        if TREE in self.capabilities and accepts(model, "inputs_embeds"):
            self.capabilities |= {EMBEDDINGS}
        self.exits: Exits | None = None
        self.added: AddedEmbeddings | None = None

    def another(self, model: Any) -> MaskedExecutor:
        return MaskedExecutor(model, KVCache(), self.patterns, self.dtype is None, self.config)

    def run(
        self,
        rows: Sequence[Row],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
        **options: Any,
    ) -> list[Outputs]:
        begun = self.exits.begun(rows) if self.exits is not None else {}
        has_probes = self.added is not None and self.added.used_by(trees)
        if begun and self.exits is not None and not (layers or has_probes or any(num_computed or ())):
            return [Outputs(logits) for logits in self.exits.verify(rows, trees, begun)]
        batch = self.ready(rows, trees, num_computed)
        if has_probes and self.added is not None:
            options["inputs_embeds"] = self.added.look_up(batch.pack(batch.inputs.tokens))
        logits, hidden = self.call(self.model, batch, layers, **options)
        parts = [None] * len(rows) if hidden is None else batch.apart(hidden)
        return [Outputs(*each) for each in zip(batch.apart(logits), parts, strict=True)]

    def ready(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], num_computed: Sequence[int] | None = None
    ) -> Batch:
        """Prepares the cache and the inputs of a forward of the nodes behind the computed ones."""
        num_computed = num_computed or [0] * len(trees)
        new = [len(tree) - first for tree, first in zip(trees, num_computed, strict=True)]
        pack = self.config is not None and min(new) < max(new)
        order = self.cache.begin(rows, new, num_computed, pack)
        of_rows = [(rows[i].length, num_computed[i], rows[i].left_out, rows[i].offset) for i in order]
        lengths, computed, left_out, offsets = map(list, zip(*of_rows, strict=True))
        inputs = Inputs.of([trees[i] for i in order], lengths, self.device, computed, left_out, offsets)
        packing = Packing.of([new[i] for i in order], self.device) if pack else None
        return Batch(inputs, order, new, packing)

    def call(self, model: Any, batch: Batch, layers: Layers = (), **options: Any) -> Outputs:
        """[batch, n, ...] or [1, nodes, ...] by this model, which is the executor's own or a part of it.

        The options are the model's; with `inputs_embeds`, it is not given the tokens.
        """
        if layers:
            options["output_hidden_states"] = list(layers)
        config = None if self.config is None else text_config(model)
        with nullcontext() if config is None else grouped.attention(config, batch.packing, self.attention):
            if "inputs_embeds" not in options:
                options["input_ids"] = batch.pack(batch.inputs.tokens)
            output = model(
                position_ids=batch.pack(batch.inputs.told),
                attention_mask=self.masks(batch),
                use_cache=True,
                **{self.cache_name: self.cache},
                **options,
            )
        self.cache.end()
        return Outputs(output.logits, side_by_side(output.hidden_states, layers) if layers else None)

    def masks(self, batch: Batch) -> Any:
        """As the model takes them: one tensor, or one for each kind of layers."""
        return batch.inputs.masks(self.patterns, self.dtype)

    def rows(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> int:
        return len(trees) * max(map(len, trees)) if self.pads else super().rows(states, trees)

    @property
    def pads(self) -> bool:
        """Whether all sequences of a forward take as many rows as the longest."""
        return self.config is None

    def forget(self) -> None:
        super().forget()
        if self.exits is not None:
            self.exits.forget()


class ChainExecutor(CachedExecutor):
    """For models that make their mask and their positions themselves, from the number of cached tokens."""

    capabilities = frozenset({CHAIN, LOGITS, TOP_K})

    def another(self, model: Any) -> ChainExecutor:
        return ChainExecutor(model, KVCache())

    def run(
        self,
        rows: Sequence[Row],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
        **options: Any,
    ) -> list[Outputs]:
        if layers:
            options["output_hidden_states"] = list(layers)
        found = []
        for row, tree, first in zip(rows, trees, num_computed or [0] * len(trees), strict=True):
            assert tree.is_chain, "this target takes chains only"
            self.cache.begin([row], [len(tree) - first], [first])
            given = inputs(self.model, tree.tokens[None, first:], row.length + row.offset + first, self.device)
            output = self.model(**given, **{self.cache_name: self.cache}, use_cache=True, **options)
            hidden = side_by_side(output.hidden_states, layers) if layers else None
            found.append(Outputs(output.logits[0], None if hidden is None else hidden[0]))
            self.cache.end()
        return found
