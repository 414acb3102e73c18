"""The modes of torch in which a model is run, whatever those of the calling thread are.

One thread reads and writes what another one's forwards have left in a cache. A tensor of torch's inference mode cannot
be written outside of it, and autocast leaves entries of another precision. So every forward of a model runs outside of
inference mode, and with the autocast that there was when its target was made: usually none. Tensors that name no device
are made on the CPU there, as models and caches expect it, whatever `torch.set_default_device` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from leapahead.models.transformers.devices import KINDS
from leapahead.models.transformers.memory import out_of_memory_in

Autocast = dict[str, torch.dtype]  # by kind of device


def autocast() -> Autocast:
    """The autocast of this thread; empty for none."""
    return {kind: torch.get_autocast_dtype(kind) for kind in KINDS if torch.is_autocast_enabled(kind)}


def precision(model: Any, forward: Callable[[], Tensor]) -> torch.dtype:
    """In which a model computes: that of its weights or, where they are float32, of the autocast of its output layer.

    Accelerate begins autocast within a model's forward, so that it is looked up there.

    Args:
        forward: gives some logits of the model.
    """
    found, weights, last = autocast(), model.dtype, model.get_output_embeddings()
    if weights != torch.float32:
        return weights  # type: ignore[no-any-return]
    hook = None if last is None else last.register_forward_pre_hook(lambda *_: found.update(autocast()))
    try:
        return found.get(forward().device.type, torch.float32)
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def computing(wanted: Autocast | None = None) -> Iterator[None]:
    """Within the block, or as a decorator: no gradients, no inference mode, the CPU as the default device, and this
    autocast; by default none."""
    wanted, found = wanted or {}, autocast()
    with ExitStack() as modes:
        if torch.empty(0).device.type != "cpu":  # `torch.get_default_device` takes several times as long
            modes.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        for kind in {**found, **wanted} if found != wanted else ():
            modes.enter_context(torch.autocast(kind, wanted.get(kind), enabled=kind in wanted))
        modes.enter_context(torch.no_grad())
        yield


@contextmanager
def casting_anew() -> Iterator[None]:
    """Within the block, autocast keeps no copies of weights. It drops them at its end, and a forward that was recorded
    with them would read memory of others."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def forwards(what: str, batch: int, device: torch.device, wanted: Autocast) -> Iterator[None]:
    """`computing` with this autocast, and `out_of_memory_in`."""
    with computing(wanted), out_of_memory_in(what, batch, device):
        yield
