"""Chains for models with recurrent layers: a draft that is not accepted whole is read again with the next one.

    step 1    a b | c d e f         a, b are committed and read; c is the root, d e f the draft
              accepted: d           the states after f are dropped, those after b are kept; `replay` is now 2
    step 2    a b | c d e' x y z    c and d ride at the head of the next forward; e', the bonus token, is the new root
              accepted: x y z       all of it: the states after z are the ones to go on from, and `replay` is 0

So a rejection costs rows of the next forward, and no forward of its own. Only when rejections in a row have left more
than `MOST_REPLAYED` tokens are these read by themselves.

Sequences that go through the model together must have equally many rows, since a padding token behind a row's own
tokens would enter its states. While some of them draft, shorter rows are filled up with tokens that cannot be accepted,
so that all are one forward; their states are dropped, and their tokens are replayed. While none of them drafts, rows of
one length are one forward, after which nothing is left to replay.

While one session runs alone, its draft may have a few branches. Each path from the root to a leaf is a row of the batch
then, over copies of the states, and all of them share the entries of the committed tokens:

    c ┬ d ── e        rows   c d e        nothing is shared between branches but what is committed, so that a branch
      └ f                    c f .        costs as many rows as the longest one

Without compiled kernels Transformers pads a forward to whole chunks of the recurrence, of 64 or 256 tokens, whose
attention-like part then costs as much as a prompt. So drafts are given to the model in chunks of 8, which changes
nothing but rounding. And some Mamba-2 models bound the time step of their recurrence in forwards of several tokens and
not in those of one; for drafts, which must give what forwards of one token give, it is not bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from leapahead.core.tree import TokenTree
from leapahead.models.base import BRANCHES, CHAIN, LOGITS, TOP_K
from leapahead.models.transformers.arguments import accepts, returned_cache
from leapahead.models.transformers.families import RECURRENT_LAYERS, Pattern
from leapahead.models.transformers.forward import (
    Batch,
    CachedState,
    Layers,
    MaskedExecutor,
    Outputs,
    inputs,
    side_by_side,
)
from leapahead.models.transformers.kv_cache import Row
from leapahead.models.transformers.masks import Inputs
from leapahead.models.transformers.states import Place, StatefulCache, StatefulRow, stateful_cache

CHUNK = 8  # tokens of a short chunk
MOST_REPLAYED = 16  # tokens; another forward on a CPU takes about as long as so many more rows in each of two
NO_BOUNDS = (0.0, math.inf)  # of the time step of a recurrence


class ReplayState(CachedState):
    """A sequence whose states may lag behind its committed tokens."""

    cache: StatefulCache
    row: StatefulRow

    @property
    def length(self) -> int:
        return self.row.length + self.row.replay

    @property
    def replay(self) -> int:
        return self.row.replay

    def commit(self, path: Sequence[int]) -> None:
        row, count = self.row, self.row.replay + len(path)
        if row.branches:
            branch = next((at for at, each in enumerate(row.paths) if each == list(path)), None)
            is_whole = branch is not None and count * len(row.branches) == row.pending
        else:
            branch, is_whole = None, count == row.pending
        if is_whole:
            self.cache.settle(row, count, branch)
        else:
            self.cache.lag(row, len(path))


class ReplayExecutor(MaskedExecutor):
    """See the module.

    Args:
        model: the model.
        cache: made for it.
        patterns: the attention patterns of its attention layers.
        boolean: whether masks are boolean; else they are added to the scores.
        config: of the language model, whose attention is computed by `grouped` then; None for the model's own.
        masked: whether the model is given masks, so that several sequences of different lengths share a forward.
            Otherwise it makes its own mask, and there is one forward a session.
        settings: whether a draft is read with other settings than a prompt: short chunks on a CPU, and time steps
            without bounds. Where these are attributes of modules (`own_settings`), nobody else may run the model.
    """

    cache: StatefulCache

    def __init__(
        self,
        model: Any,
        cache: StatefulCache,
        patterns: dict[str, Pattern],
        boolean: bool = True,
        config: Any = None,
        masked: bool = True,
        settings: bool = False,
    ) -> None:
        super().__init__(model, cache, patterns, boolean, config)
        self.masked, self.settings = masked, settings
        self.capabilities = frozenset({CHAIN, LOGITS, TOP_K, *([BRANCHES] if masked else [])})
        self._reads_prompt = False
        self._attends = accepts(model, "position_ids")  # state-space models alone take no positions
        self._chunked = own_settings(model)
        self._bounded = [(each, "time_step_limit", NO_BOUNDS) for each in model.modules() if bounds_time_step(each)]

    def another(self, model: Any) -> ReplayExecutor:
        boolean, cache = self.dtype is None, stateful_cache(model)
        return ReplayExecutor(model, cache, self.patterns, boolean, self.config, self.masked, self.settings)

    def open(self, tokens: list[int], reuse: int = 0, reserve: int = 0, owner: str = "") -> ReplayState:
        row = self.cache.take(tokens, min(reuse, len(tokens) - 1), reserve, owner)
        assert isinstance(row, StatefulRow)
        return ReplayState(self.cache, row, tokens)

    def fork(self, state: CachedState, tokens: list[int]) -> ReplayState:
        assert isinstance(state, ReplayState)
        fork = self.open(tokens, state.row.length, state.row.reserved, state.row.owner)
        fork.row.replay = state.length - fork.row.length
        return fork

    def prefill(self, state: CachedState, count: int, rows: int = 1, layers: Layers = ()) -> Outputs:
        self._reads_prompt = True
        try:
            outputs = super().prefill(state, count, rows, layers)
        finally:
            self._reads_prompt = False
        if isinstance(state, ReplayState) and state.length == len(state.tokens) - 1:
            state.row.keep_states()  # for a prompt that continues this one in another way
        return outputs

    def run(
        self,
        rows: Sequence[Row],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
        **options: Any,
    ) -> list[Outputs]:
        if self._has_branches(trees):
            assert not any(num_computed or ()), "a draft with branches does not grow"
            return [self._branched(rows[0], trees[0], layers, **options)]
        num_computed = num_computed or [0] * len(rows)
        for row, first in zip(rows, num_computed, strict=True):
            if first == 0 and isinstance(row, StatefulRow) and row.replay > MOST_REPLAYED:
                self._catch_up(row)
        chains = [_Chain(*each) for each in zip(rows, trees, num_computed, strict=True)]
        found: dict[int, Outputs] = {}
        for group in self._groups(chains):
            some = [chains[at] for at in group]
            n = max(chain.new for chain in some)
            filled, computed = [chain.filled(n) for chain in some], [chain.computed for chain in some]
            batch = self.ready([chain.row for chain in some], filled, computed)
            if any(chain.new < n for chain in some):
                # Some rotary embeddings scale all positions by the greatest, which must not be one behind a text's end.
                last = torch.tensor([some[at].last for at in batch.order], device=self.device)
                batch.inputs.positions.clamp_(max=last[:, None])
            unread = min(chain.ahead for chain in some)  # rows before the first whose logits are wanted
            given = options or {name: n - unread for name in self.few_logits}
            logits, hidden = self.call(self.model, batch, layers, **given)
            skipped = n - logits.shape[1]
            states = [None] * len(some) if hidden is None else batch.apart(hidden)
            for at, chain, mine, state in zip(group, some, batch.apart(logits), states, strict=True):
                own = slice(max(0, chain.ahead - skipped), chain.ahead + chain.size - skipped)
                wanted = slice(chain.ahead, chain.ahead + chain.size)
                found[at] = Outputs(mine[own], None if state is None else state[wanted])
        return [found[at] for at in range(len(rows))]

    def _has_branches(self, trees: Sequence[TokenTree]) -> bool:
        """Whether it is the draft of one sequence, with branches that this model can be given."""
        return self.masked and len(trees) == 1 and not trees[0].is_chain

    def _branched(self, row: Row, tree: TokenTree, layers: Layers, **options: Any) -> Outputs:
        """One forward over the paths of a tree, each of which is a row of the batch."""
        assert isinstance(row, StatefulRow)
        if row.replay > MOST_REPLAYED:
            self._catch_up(row)
        ahead, paths = row.replay, [tree.path(leaf) for leaf in tree.leaf_list]
        n, branches = ahead + max(map(len, paths)), len(paths)
        replayed = row.tokens[row.length : row.length + ahead]
        tokens = [replayed + [tree.token_list[node] for node in path] for path in paths]
        self.cache.begin_branches(row, branches, n)
        padded = torch.tensor([each + each[-1:] * (n - len(each)) for each in tokens], device=self.device)
        positions = (row.length + torch.arange(n, device=self.device)).repeat(branches, 1)
        slots = row.length + torch.arange(branches * n, device=self.device).view(branches, n)
        lengths = torch.full((branches,), row.length, device=self.device)
        earlier = torch.ones(n, n, dtype=torch.bool, device=self.device).tril().repeat(branches, 1, 1)
        end = row.length + branches * n
        batch = Batch(
            Inputs(padded, positions, lengths, slots, positions, earlier, end), [*range(branches)], [n] * branches
        )
        given = options or dict.fromkeys(self.few_logits, n - ahead)
        logits, hidden = self.call(self.model, batch, layers, **given)
        row.paths = paths
        place = {
            node: (at, ahead + depth) for at, path in reversed([*enumerate(paths)]) for depth, node in enumerate(path)
        }
        at, depth = torch.tensor([place[node] for node in range(len(tree))], device=self.device).T
        states = None if hidden is None else hidden[at, depth]
        return Outputs(logits[at, depth - (n - logits.shape[1])], states)

    def _catch_up(self, row: StatefulRow) -> None:
        """Reads the tokens that would be replayed, and nothing else."""
        tokens = row.tokens[row.length : row.length + row.replay]
        batch = self.ready([row], [TokenTree.chain(tokens[0], tokens[1:])])
        self.call(self.model, batch, (), **dict.fromkeys(self.few_logits, 1))
        self.cache.settle(row, len(tokens))

    def call(self, model: Any, batch: Batch, layers: Layers = (), **options: Any) -> Outputs:
        rows = batch.inputs.tokens.shape[1]
        if not self.settings or self._reads_prompt or rows == 1:
            return self._call(model, batch, layers, **options)
        is_short = self.device.type == "cpu"
        if is_short and not self._chunked:
            options["chunk_size"] = CHUNK  # which the model hands down to the function that computes the recurrence
        chunked = [(module, "chunk_size", CHUNK) for module in self._chunked] if is_short else []
        with _settings([*chunked, *self._bounded]):
            return self._call(model, batch, layers, **options)

    def _call(self, model: Any, batch: Batch, layers: Layers = (), **options: Any) -> Outputs:
        if self.masked and self._attends:
            return super().call(model, batch, layers, **options)
        if layers:
            options["output_hidden_states"] = list(layers)
        given = inputs(model, batch.inputs.tokens.numpy(force=True), int(batch.inputs.lengths[0]), self.device)
        if "position_ids" in given:
            given["position_ids"] = batch.inputs.positions
        output = self.model_output(model, given, **options)
        self.cache.end()
        return Outputs(output.logits, side_by_side(output.hidden_states, layers) if layers else None)

    def model_output(self, model: Any, given: dict[str, Tensor], **options: Any) -> Any:
        """Of a model that makes its mask itself, which may take states in a form of its own instead of a `Cache`."""
        name = self.cache_name
        if name == "state":  # RWKV: a list of tensors of all layers
            states = self._states(("recurrent", number, 0) for number in count())
            output = model(**given, state=states or None, use_cache=True, **options)
            for number, state in enumerate(output.state):
                self.cache.put(("recurrent", number, 0), state)
        elif type(self.cache) is StatefulCache and not model._supports_default_dynamic_cache():
            # xLSTM, whose module defines no `Cache`: an object with some tensors for each layer, written in place
            layers = range(model.config.num_hidden_layers)
            of_layers = {layer: self._states(("recurrent", layer, number) for number in count()) for layer in layers}
            kept = SimpleNamespace(rnn_state=of_layers, seqlen_offset=0) if of_layers[0] else None
            output = model(**given, **{name: kept}, use_cache=True, **options)
            for layer, states in returned_cache(output, name).rnn_state.items():
                for number, state in enumerate(states):
                    self.cache.put(("recurrent", layer, number), state)
        else:
            output = model(**given, **{name: self.cache}, use_cache=True, **options)
        return output

    def _states(self, places: Iterable[Place]) -> list[Tensor]:
        """As many of them as there are; none at the beginning of a text."""
        found = []
        for place in places:
            if (state := self.cache.get(place)) is None:
                break
            found.append(state)
        return found

    def masks(self, batch: Batch) -> Any:
        """Layers that keep a state need none, since what fills a row up enters no state that is kept."""
        masks = super().masks(batch)
        if not isinstance(masks, dict):
            return masks
        return {**{kind: masks.get(beside) for kind, beside in RECURRENT_LAYERS.items()}, **masks}

    def states_after(self, prompt: Sequence[int], drafts: Sequence[Sequence[int]]) -> dict[Place, Tensor]:
        """The recurrent states after a prompt and drafts that are all accepted, for tests."""
        state = self.open([*prompt, drafts[0][0]])
        try:
            self.prefill(state, len(prompt))
            for draft in drafts:
                self.forward([state], [TokenTree.chain(draft[0], draft[1:])])
                state.commit(range(len(draft)))
            return self.cache.before(state.row)
        finally:
            state.close()

    def rows(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> int:
        if self._has_branches(trees):
            (state,), (tree,) = states, trees
            return int(len(tree.leaf_list) * (state.replay + 1 + max(tree.depth_list)))
        chains = [_Chain(state.row, tree, 0) for state, tree in zip(states, trees, strict=True)]
        return sum(len(group) * max(chains[at].new for at in group) for group in self._groups(chains))

    @property
    def pads(self) -> bool:
        return self.masked

    def _groups(self, chains: Sequence[_Chain]) -> list[list[int]]:
        """The forwards of a step: which sequences go through the model together."""
        if not self.masked:
            return [[at] for at in range(len(chains))]
        drafting = any(len(chain.tree) > 1 for chain in chains)
        groups: dict[object, list[int]] = {}
        for at, chain in enumerate(chains):
            began = bool(chain.computed or chain.row.length)
            groups.setdefault((began, chain.computed > 0, 0 if drafting else chain.new), []).append(at)
        return list(groups.values())


def own_settings(model: Any) -> list[Any]:
    """The modules that have the size of their chunks as an attribute. Others are told it in each forward."""
    return [each for each in model.modules() if isinstance(vars(each).get("chunk_size"), int)]


def bounds_time_step(module: Any) -> bool:
    """Whether it is a Mamba-2 layer that bounds the time step of its recurrence.

    In Transformers 5.23 and 5.24 all of them do so where several tokens are read, and none where one is. A state that
    hardly changes is forgotten then, after enough tokens, in any precision.
    """
    low, high = vars(module).get("time_step_limit") or NO_BOUNDS
    return bool(low > 0 or high < math.inf)


@contextmanager
def _settings(values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Gives attributes of objects other values within the block: the object, the attribute, the value."""
    before = [getattr(module, name) for module, name, _ in values]
    try:
        for module, name, value in values:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(values, before, strict=True):
            setattr(module, name, value)


class _Chain:
    """What goes through the model for one sequence: the tokens that are replayed, then those of a chain.

    Attributes:
        computed: pending nodes that are continued.
        size: rows whose logits are wanted.
        ahead: rows before them.
        new: rows.
        last: the position of the last of them.
    """

    def __init__(self, row: Row, tree: TokenTree, first: int) -> None:
        assert isinstance(row, StatefulRow)
        assert tree.is_chain, "this target takes chains only"
        self.row, self.tree = row, tree
        self._replayed = row.tokens[row.length : row.length + row.replay]
        pending = row.replay + first if first else 0
        self.computed = pending if pending == row.pending else 0  # there are no states before tokens that fill a row up
        self.size = len(tree) - first
        self.ahead = row.replay + first - self.computed
        self.new = self.size + self.ahead
        self.last = row.length + self.computed + self.new - 1

    def filled(self, rows: int) -> TokenTree:
        """All of it as a chain, with so many rows behind the computed ones."""
        tokens = self._replayed + self.tree.token_list
        tokens += tokens[-1:] * (rows - self.new)
        return TokenTree.chain(tokens[0], tokens[1:])
