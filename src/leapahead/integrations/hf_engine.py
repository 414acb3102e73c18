"""The engine of a Transformers model: made at its first call, shared by all threads, released with the model.

`model.generate` passes nothing but the model to a `custom_generate` callable, so that the engine is looked up by the
model itself, in a table that refers to it weakly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch

from leapahead.core.errors import BadParameter
from leapahead.core.forks import Mutex
from leapahead.core.text import unnamed
from leapahead.drafters import cache_sections
from leapahead.drafters.cache import DrafterCache
from leapahead.engine.scheduler import Engine
from leapahead.engine.turn import LOST
from leapahead.models.transformers import changes
from leapahead.models.transformers.encoder_decoder import new_target
from leapahead.models.transformers.modes import autocast

ALL_ROWS = 1 << 16  # the rows of a call are decoded together, however many they are


class ModelEngine:
    """What is kept for one model between calls: its engine and its drafter cache.

    The target refers to the model weakly, so that both are released with the model. The KV cache is released when no
    call is running, so that the model's weights may change between calls.

    Args:
        model: of Transformers.
        state: what the engine was made for, see `_state`.
    """

    def __init__(self, model: Any, state: object) -> None:
        config = model.config.get_text_config(decoder=True)
        name = config.name_or_path or type(model).__name__
        self.target = new_target(proxy(model), name=name, watched=False, as_configured=False)
        self.engine = Engine(self.target, max_batch=ALL_ROWS)
        self.state = state
        self._drafter_cache = DrafterCache()
        self._nested: ModelEngine | None = None
        self._calls = set[object]()
        self._training: list[torch.nn.Module] = []

    def drafter_cache(self, given: DrafterCache | bool) -> DrafterCache | None:
        """The drafter cache of a call.

        Args:
            given: True for the one that is kept with the engine, False for none, or the user's own.

        Raises:
            BadParameter: it is none of these, or belongs to another vocabulary.
        """
        if not isinstance(given, (bool, DrafterCache)):
            raise BadParameter(
                f"drafter_cache={given!r} is not possible: it must be True, False, or a leapahead.DrafterCache"
            )
        found = self._drafter_cache if given is True else cache_sections.given(given)
        if found is not None:
            size = self.target.info.vocab_size
            found.belong(found.tokenizer or unnamed(size), size)  # the tokenizer itself is not known here
        return found

    def idle(self, model: Any) -> ModelEngine:
        """This engine, or, for a call from within one of its steps, a second one.

        A criterion or processor may call `generate` itself. It runs inside a step, which cannot wait for another step.
        """
        if not self.engine.is_stepping:
            return self
        if self._nested is None:
            self._nested = ModelEngine(model, self.state)
        return self._nested.idle(model)

    def enter(self, call: object, training: list[torch.nn.Module]) -> None:
        """Counts a call. `training` are the modules that were in training mode before it."""
        if not self._calls:
            self._training = training
            self.target.forget()
        self._calls.add(call)

    def leave(self, call: object) -> None:
        """Counts the end of a call. The last one releases the KV cache and restores training mode.

        Leaving again, or without having entered, is harmless, as after an interrupt.
        """
        if self._calls <= {call}:
            self.target.forget()
            _restore(self._training)
            self._training = []
        self._calls.discard(call)


_kept: WeakKeyDictionary[torch.nn.Module, ModelEngine] = WeakKeyDictionary()
_locks: WeakKeyDictionary[torch.nn.Module, Mutex] = WeakKeyDictionary()  # one for each model, held while it is tested
_lock = Mutex()  # of these locks


@contextmanager
def engine_of(model: Any) -> Iterator[ModelEngine]:
    """The model's engine, for one call. The model is in evaluation mode meanwhile.

    Raises:
        Refused: the model cannot be decoded exactly.
    """
    state, call = _state(model), object()
    with _lock:
        lock = _locks.setdefault(model, Mutex())
    found: ModelEngine | None = None
    try:
        with lock:
            training = [part for part in model.modules() if part.training]
            try:
                model.eval()
                found = _engine(model, state).idle(model)
                found.enter(call, training)
            except BaseException:
                _restore(training)
                raise
        yield found
    finally:
        if found is not None:
            _leave(found, call, lock)


def _engine(model: Any, state: object) -> ModelEngine:
    """The model's engine, made where there is none for this state. A new one goes on with the drafter cache."""
    found = _kept.get(model)
    if found is not None and found.target.lock is LOST:
        found = None  # its drafter cache may be half written
    if found is not None and found.state == state:
        return found
    made = _kept[model] = ModelEngine(model, state)
    if found is not None and found.target.info.vocab_size == made.target.info.vocab_size:
        made._drafter_cache = found._drafter_cache
    return made


def _leave(found: ModelEngine, call: object, lock: Mutex) -> None:
    """Counts the end of a call, also where Ctrl-C interrupts the wait for the lock, which is raised afterwards."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            with lock:
                found.leave(call)
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _restore(training: list[torch.nn.Module]) -> None:
    for part in training:
        part.training = True


def _state(model: Any) -> object:
    """What an engine depends on: device, dtype, autocast, attention, configuration, modules, tensors, adapters, hooks.

    The values of weights may change, since drafts that are made of the model ("self:first=8") share them. Other
    modules, parameter objects and hooks would not be shared. Offloaded parameters are new objects after each forward,
    and what shares them has the hooks that load them.
    """
    config = model.config.get_text_config(decoder=True)
    modules = list(model.modules())
    lasting = (each for part in modules if not changes.offloads(part) for each in part.parameters(recurse=False))
    parts = tuple(map(id, (*modules, *lasting)))
    layers = changes.adapters(changes.adapter_layers(modules))
    modes = model.device, model.dtype, autocast(), config._attn_implementation
    return modes, config.to_json_string(), parts, layers, changes.hooks(map(vars, modules))
