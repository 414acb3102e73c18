"""How a model is asked for the logits of trees: three ways, from the most able to the least.

    MaskedEngine     our cache, our masks, our positions; all sessions in one forward          trees
    ChainEngine      our cache, the model's own mask; one forward a session; slot = position   chains
    NativeEngine     the model's own state, one token at a time                                plain decoding

Knows models and caches, neither sampling nor drafts' meaning. Which engine a model gets is decided by a test of it, see
`selftest`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from leapahead.core.errors import Refused
from leapahead.core.tree import IntArray, TokenTree
from leapahead.models.base import CHAIN, LOGITS, PROMPT_ROWS, TOP_K, TREE
from leapahead.models.transformers.families import Pattern
from leapahead.models.transformers.kv_cache import KVCache, Row
from leapahead.models.transformers.masks import Inputs

CHUNK = 512  # prompt tokens in one forward
See = Callable[[Tensor], None]  # is shown the logits of a prompt's next rows


class State(Protocol):
    """What an engine keeps of one sequence."""

    @property
    def length(self) -> int:
        """Committed tokens that it holds: all but the last."""

    def commit(self, path: Sequence[int]) -> None:
        """Keeps the nodes `path` of the last tree and forgets the others."""

    def close(self) -> None:
        """Gives it back. Closing twice is harmless."""


class Engine(Protocol):
    """One way to run a model."""

    capabilities: frozenset[str]

    def open(self, tokens: list[int], see: See | None = None) -> tuple[State, int, int]:
        """Reads `tokens[:-1]`. Returns the state, forwards taken, and tokens that need not be read.

        `see` is shown the logits of the last `PROMPT_ROWS` of them, those that had to be read.
        """

    def forward(
        self, states: Sequence[Any], trees: Sequence[TokenTree], known: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Logits [nodes - known, vocab] of each tree, over its state's tokens; see `Target.step`."""

    def forget(self) -> None:
        """Gives memory back that is kept for sequences to come."""


def accepts(model: Any, *names: str) -> bool:
    """Whether the model's forward names these parameters."""
    return all(name in inspect.signature(model.forward).parameters for name in names)


def inputs(model: Any, tokens: IntArray, start: int, device: torch.device) -> dict[str, Tensor]:
    """What `generate` gives a model for tokens [batch, n] after `start` others: positions too, where it takes them.

    Some models count from an offset of their own, or from zero in every call, when they are left alone.
    """
    given = {"input_ids": torch.from_numpy(tokens).to(device)}
    if accepts(model, "position_ids"):
        given["position_ids"] = torch.arange(start, start + tokens.shape[1], device=device).repeat(len(tokens), 1)
    return given


class CachedState:
    """A row of our cache."""

    def __init__(self, cache: KVCache, row: Row) -> None:
        self.cache = cache
        self.row = row

    @property
    def length(self) -> int:
        return self.row.length

    def commit(self, path: Sequence[int]) -> None:
        self.cache.keep(self.row, path)

    def close(self) -> None:
        if self.row.busy:
            self.cache.release(self.row)


class CachedEngine:
    """What the engines over our cache share: prompts read in chunks, the part that is known already not at all."""

    capabilities: frozenset[str]

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.few_logits = ["logits_to_keep"] if accepts(model, "logits_to_keep") else []

    def open(self, tokens: list[int], see: See | None = None) -> tuple[CachedState, int, int]:
        row = self.cache.take(tokens, len(tokens) - 1)
        state, reused, forwards = CachedState(self.cache, row), row.length, 0
        try:
            while row.length < len(tokens) - 1:
                chunk = tokens[row.length : min(row.length + CHUNK, len(tokens) - 1)]
                wanted = row.length + len(chunk) + PROMPT_ROWS - (len(tokens) - 1) if see is not None else 0
                keep = {name: max(1, min(wanted, len(chunk))) for name in self.few_logits}
                logits = self.run([row], [TokenTree.chain(chunk[0], chunk[1:])], None, **keep)[0]
                if see is not None and wanted > 0:
                    see(logits[-wanted:])
                self.cache.keep(row, range(len(chunk)))
                forwards += 1
        except BaseException:
            state.close()
            raise
        return state, forwards, reused

    def run(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], known: Sequence[int] | None = None, **options: Any
    ) -> list[Tensor]:
        """One forward, or as many as it takes."""
        raise NotImplementedError

    def forward(
        self, states: Sequence[CachedState], trees: Sequence[TokenTree], known: Sequence[int] | None = None
    ) -> list[Tensor]:
        return self.run([state.row for state in states], trees, known)

    def forget(self) -> None:
        self.cache.forget()


class Exits(Protocol):
    """Who has run the first layers of a model over nodes that the whole of it is to judge; see `targets.exits`."""

    def begun(self, rows: Sequence[Row]) -> dict[Row, Any]:
        """Takes what was begun of these rows, which is of no use after the forward to come."""

    def verify(self, rows: Sequence[Row], trees: Sequence[TokenTree], begun: dict[Row, Any]) -> list[Tensor]:
        """What `run` gives, from there."""

    def forget(self) -> None:
        """Gives it up."""


class Batch(NamedTuple):
    """One forward's rows.

    Attributes:
        inputs: of the model, in the order of the cache.
        order: which of the rows asked for lies where.
        new: nodes of each of the rows asked for.
    """

    inputs: Inputs
    order: list[int]
    new: list[int]

    def apart(self, found: Tensor) -> list[Tensor]:
        """[batch, n, ...] -> [nodes, ...] of each row, in the order asked for."""
        place = {i: at for at, i in enumerate(self.order)}
        return [found[place[i], :count] for i, count in enumerate(self.new)]

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """The reverse; what is missing repeats a row's first node, as padding does."""
        n = max(self.new)
        ordered = [parts[i] for i in self.order]
        return torch.stack([torch.cat((part, part[:1].expand(n - len(part), -1))) for part in ordered])


class MaskedEngine(CachedEngine):
    """Trees of any shape, all sessions in one forward.

    Args:
        patterns: the attention patterns of the model's layers.
        boolean: whether masks are boolean; else they are added to the scores.
    """

    capabilities = frozenset({CHAIN, TREE, LOGITS, TOP_K})

    def __init__(self, model: Any, cache: KVCache, patterns: dict[str, Pattern], boolean: bool) -> None:
        super().__init__(model, cache)
        self.patterns = patterns
        self.dtype = None if boolean else model.dtype
        self.exits: Exits | None = None

    def another(self) -> MaskedEngine:
        """One with a cache of its own, for tests that shall not touch this one's."""
        return MaskedEngine(self.model, KVCache(), self.patterns, self.dtype is None)

    def run(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], known: Sequence[int] | None = None, **options: Any
    ) -> list[Tensor]:
        if self.exits is not None and (begun := self.exits.begun(rows)) and not any(known or ()):
            return self.exits.verify(rows, trees, begun)
        batch = self.ready(rows, trees, known)
        return batch.apart(self.call(self.model, batch, **options))

    def ready(self, rows: Sequence[Row], trees: Sequence[TokenTree], known: Sequence[int] | None = None) -> Batch:
        """Makes the cache ready for a forward of the nodes behind the `known` ones."""
        known = known or [0] * len(trees)
        new = [len(tree) - first for tree, first in zip(trees, known, strict=True)]
        order = self.cache.begin(rows, max(new), known)
        inputs = Inputs.of(
            [trees[i] for i in order], [rows[i].length for i in order], self.device, [known[i] for i in order]
        )
        return Batch(inputs, order, new)

    def call(self, model: Any, batch: Batch, **options: Any) -> Tensor:
        """Logits [batch, n, vocab] by this model, which is the engine's own or a part of it."""
        logits: Tensor = model(
            input_ids=batch.inputs.tokens,
            position_ids=batch.inputs.positions,
            attention_mask=batch.inputs.masks(self.patterns, self.dtype),
            past_key_values=self.cache,
            use_cache=True,
            **options,
        ).logits
        self.cache.end()
        return logits

    def forget(self) -> None:
        super().forget()
        if self.exits is not None:
            self.exits.forget()


class ChainEngine(CachedEngine):
    """For models that make their mask and their positions themselves, from the number of cached tokens."""

    capabilities = frozenset({CHAIN, LOGITS, TOP_K})

    def run(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], known: Sequence[int] | None = None, **options: Any
    ) -> list[Tensor]:
        logits = []
        for row, tree, first in zip(rows, trees, known or [0] * len(trees), strict=True):
            assert tree.is_chain, "this target takes chains only"
            self.cache.begin([row], len(tree) - first, [first])
            given = inputs(self.model, tree.tokens[None, first:], row.length + first, self.device)
            logits.append(self.model(**given, past_key_values=self.cache, use_cache=True, **options).logits[0])
            self.cache.end()
        return logits


class NativeState:
    """The model's own state after the committed tokens but the last; once it has been asked, after the last too.

    Attributes:
        tokens: of the sequence, live.
        length: committed tokens that the state holds.
        memory: the state.
        broken: a forward failed half way, so that the memory is of no use.
        logits: after the root [1, vocab], from the step to the commit.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.length = 0
        self.memory: Any = None
        self.broken = False
        self.logits: Tensor | None = None

    def commit(self, path: Sequence[int]) -> None:
        assert list(path) == [0], "this target keeps the root alone"
        assert self.logits is not None, "commit without a step"
        self.length += 1
        self.logits = None

    def close(self) -> None:
        self.memory = self.logits = None


class NativeEngine:
    """For models whose state cannot forget: the root alone, by the state that the model itself makes.

    Args:
        config: of the language part.
        shared: the state lies in the model's modules, so that a session which follows another reads its tokens again.
    """

    capabilities: frozenset[str] = frozenset()

    def __init__(self, model: Any, config: Any, shared: bool) -> None:
        self.model = model
        self.config = config
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.shared = shared
        self.owner: NativeState | None = None
        self.name = next((name for name in ("past_key_values", "cache_params", "state") if accepts(model, name)), None)
        if self.name is None:
            raise Refused("its forward takes no cache")

    def open(self, tokens: list[int], see: See | None = None) -> tuple[NativeState, int, int]:
        state = NativeState(tokens)
        self._begin(state)
        if len(tokens) == 1:
            return state, 0, 0
        self._read(state, tokens[:-1])  # in one forward: a recurrence in chunks need not be exact
        state.length = len(tokens) - 1
        return state, 1, 0

    def forward(
        self, states: Sequence[NativeState], trees: Sequence[TokenTree], known: Sequence[int] | None = None
    ) -> list[Tensor]:
        assert not any(known or ()), "this target takes no drafts"
        logits = []
        for state, tree in zip(states, trees, strict=True):
            assert len(tree) == 1, "this target takes no drafts"
            if state.logits is None:  # a root that was read already cannot be read twice
                if state.broken or (self.shared and self.owner is not state):
                    self._read_again(state)
                state.logits = self._read(state, [int(tree.tokens[0])])
            logits.append(state.logits)
        return logits

    def _read_again(self, state: NativeState) -> None:
        """Makes the memory of a session anew from its tokens."""
        length, state.length, state.broken = state.length, 0, True
        try:
            self._begin(state)
            if length:
                self._read(state, state.tokens[:length])
        finally:
            state.length = length

    def forget(self) -> None:
        self.owner = None

    def _begin(self, state: NativeState) -> None:
        # Some models make their state themselves, the others use the one of Transformers.
        own = not self.model._supports_default_dynamic_cache()
        state.memory = None if own else DynamicCache(config=self.config)
        if self.shared:
            self.owner = state
            one = inputs(self.model, np.zeros((1, 1), dtype=np.int64), 0, self.device)
            self.model(**one, use_cache=False)  # empties the modules' state

    def _read(self, state: NativeState, tokens: list[int]) -> Tensor:
        given = inputs(self.model, np.array([tokens]), state.length, self.device)
        state.broken = True
        output = self.model(**given, **{str(self.name): state.memory}, use_cache=True)
        state.broken = False
        if not isinstance(state.memory, DynamicCache):
            state.memory = output[self.name]
        last: Tensor = output.logits[0, -1:]
        return last
