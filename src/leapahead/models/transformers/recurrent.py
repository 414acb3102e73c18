"""Models that decode plainly: the root alone goes through, by the state that the model itself makes.

Their prompt is read in one forward, whatever the size of a chunk: the formulas of a recurrence over a chunk that begins
in the middle of a text need not be exact, and some of these models ignore the state that they are given with it. Of
that forward the logits of the last token alone are computed, where the model takes `logits_to_keep`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from leapahead.core.forks import Mutex
from leapahead.core.tree import TokenTree
from leapahead.models.base import LOGITS
from leapahead.models.transformers.arguments import accepts, cache_name, returned_cache
from leapahead.models.transformers.forward import Layers, Outputs, inputs, side_by_side


class NativeState:
    """The model's own state after the committed tokens but the last; between a step and its commit, after the last too.

    Attributes:
        tokens: of the sequence, live.
        length: committed tokens that the state holds.
        memory: the state; None where it is kept in the model's modules, or not made yet.
        broken: the memory must be computed from the tokens: nothing was read yet, a forward failed, or the session was
            forked.
        outputs: of the root, from the step to the commit.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.length = 0
        self.memory: Any = None
        self.broken = True
        self.outputs: Outputs | None = None
        self.replay = 0

    def commit(self, path: Sequence[int]) -> None:
        assert list(path) == [0], "this target keeps the root alone"
        assert self.outputs is not None, "commit without a step"
        self.length += 1
        self.outputs = None

    def close(self) -> None:
        self.memory = self.outputs = None


# Of models that keep the state in their modules: the right to run them, for all targets of a model in all threads.
RUNNING: WeakKeyDictionary[Any, Mutex] = WeakKeyDictionary()


class NativeExecutor:
    """One token at a time, one forward a session.

    Args:
        config: of the language part.
        shared: the state is kept in the model's modules, so that a session which follows another one in time, or
            somebody else's forward of the model, reads its tokens again.
    """

    capabilities = frozenset({LOGITS})

    def __init__(self, model: Any, config: Any, shared: bool) -> None:
        self.model = model
        self.config = config
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.shared = shared
        itself = model.get_input_embeddings.__self__  # `leapahead.hf` gives a weak proxy, which is no key
        self._turn = RUNNING.setdefault(itself, Mutex()) if shared else Mutex()
        self.owner: NativeState | None = None
        self._left: list[Tensor] = []  # in the modules, by the last forward of the owner
        self.few_logits = {"logits_to_keep": 1} if accepts(model, "logits_to_keep") else {}
        self.cache_name = cache_name(model)

    def open(self, tokens: list[int], reuse: int = 0, reserve: int = 0, owner: str = "") -> NativeState:
        return NativeState(tokens)

    def prefill(self, state: NativeState, count: int, rows: int = 1, layers: Layers = ()) -> Outputs:
        """All tokens but the last in one forward, whatever `count` is; logits of the last one read."""
        assert not layers, "this target has no hidden states"
        tokens, state.length, state.outputs = state.tokens[:-1], 0, None
        with self._turn:
            self._begin(state)
            outputs = self._read(state, tokens)
        state.length, state.broken = len(tokens), False
        return outputs

    def fork(self, state: NativeState, tokens: list[int]) -> NativeState:
        """Copies the state; where it is kept in the modules, the tokens are read again when the fork is stepped."""
        other = NativeState(tokens)
        other.length = state.length
        if not (self.shared or state.broken) and state.outputs is None:
            other.memory, other.broken = copy.deepcopy(state.memory), False
        return other

    def forward(
        self,
        states: Sequence[NativeState],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        layers: Layers = (),
    ) -> list[Outputs]:
        assert not any(num_computed or ()), "this target takes no drafts"
        found = []
        for state, tree in zip(states, trees, strict=True):
            assert len(tree) == 1, "this target takes no drafts"
            if state.outputs is None:  # a root that was read already cannot be read twice
                with self._turn:
                    if self._lost(state):
                        self._read_again(state)
                    outputs = self._read(state, [int(tree.tokens[0])], layers)
                state.outputs, state.broken = outputs, False  # an interrupt before this has all read again
            found.append(state.outputs)
        return found

    def rows(self, states: Sequence[NativeState], trees: Sequence[TokenTree]) -> int:
        lost = [state for at, state in enumerate(states) if self._lost(state) or (self.shared and at)]
        return len(trees) + sum(state.length for state in lost)

    def forget(self) -> None:
        self.owner, self._left = None, []

    def _lost(self, state: NativeState) -> bool:
        """Whether the memory must be computed again."""
        return state.broken or (self.shared and not (self.owner is state and self._is_as_left()))

    def _is_as_left(self) -> bool:
        """Whether nobody else has run the model since the last forward."""
        found = _kept_in_modules(self.model)
        return len(found) == len(self._left) and all(map(is_, found, self._left))

    def _read_again(self, state: NativeState) -> None:
        """Makes the memory of a session again from its tokens."""
        length, state.length, state.broken = state.length, 0, True
        try:
            self._begin(state)
            if length:
                self._read(state, state.tokens[:length])
        finally:
            state.length = length

    def _begin(self, state: NativeState) -> None:
        # Some models make their state themselves, the others use the one of Transformers.
        own = not self.model._supports_default_dynamic_cache()
        state.memory, self.owner = None if own else DynamicCache(config=self.config), None
        if self.shared:
            one = inputs(self.model, np.zeros((1, 1), dtype=np.int64), 0, self.device)
            self.model(**one, use_cache=False)  # empties the modules' state
            self.owner = state

    def _read(self, state: NativeState, tokens: list[int], layers: Layers = ()) -> Outputs:
        given = inputs(self.model, np.array([tokens]), state.length, self.device)
        options = {**self.few_logits, **({"output_hidden_states": True} if layers else {})}
        state.broken = True
        output = self.model(**given, **{self.cache_name: state.memory}, use_cache=True, **options)
        if self.shared:
            self._left = _kept_in_modules(self.model)
        if not isinstance(state.memory, DynamicCache):
            state.memory = returned_cache(output, self.cache_name)
        hidden = side_by_side(output.hidden_states, layers) if layers else None
        return Outputs(output.logits[0, -1:], None if hidden is None else hidden[0, -1:])


def _kept_in_modules(model: Any) -> list[Tensor]:
    """The tensors of a model's modules that are neither parameters nor buffers. A forward replaces those of a state."""
    return [each for part in model.modules() for each in vars(part).values() if isinstance(each, Tensor)]
