"""Whether a target records its forwards: by the user's option, the device, and the test of the model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.tree import IntArray
from leapahead.models.transformers import devices
from leapahead.models.transformers.exact import ExactExecutor
from leapahead.models.transformers.forward import CachedExecutor, Executor, MaskedExecutor
from leapahead.models.transformers.static import exact, gate
from leapahead.models.transformers.static.compiled import Compiler
from leapahead.models.transformers.static.exact import CapturedExactExecutor
from leapahead.models.transformers.static.executor import StaticExecutor
from leapahead.models.transformers.static.graphs import Calls, CudaGraphs, GraphBackend

STATIC = "static"  # among the refusals of a target
COMPILED = "compiled"
RECORDING = (StaticExecutor, CapturedExactExecutor)
MODES = ("auto", "off", "graphs", COMPILED)


def checked_mode(mode: Any) -> str | GraphBackend:
    """The option, if it is one.

    Raises:
        BadParameter: it is not.
    """
    if isinstance(mode, str) and mode not in MODES:
        raise BadParameter(f"static={mode!r} is not possible; choose one of {', '.join(MODES)}")
    checked: str | GraphBackend = mode
    return checked


def upgraded(
    executor: Executor, name: str, ids: IntArray, prompts: Sequence[int], mode: str | GraphBackend, exclusive: bool
) -> tuple[Executor, dict[str, str]]:
    """An executor that records its forwards, or the given one and why.

    Args:
        executor: that was tested on the model.
        name: of the model, for messages.
        ids, prompts: see `gate.tested`.
        mode: "off"; "graphs" for CUDA graphs; "compiled" to compile forwards beside that, on a CPU without graphs;
            "auto" for graphs where nobody else runs the model, it is on a CUDA device, and it passes; or what records
            forwards.
        exclusive: whether nobody else runs the model.

    Raises:
        BadParameter: there is no such mode.
        Refused: the mode is neither "auto" nor "off", and the model or its device is not able to.
    """
    checked_mode(mode)
    device = getattr(executor, "device", None)
    is_cuda = device is not None and device.type == "cuda"
    if mode == "auto" and (reason := _eager_because(executor)):
        return executor, {STATIC: reason}
    alone = exclusive or isinstance(executor, ExactExecutor)  # which has a copy of a model that others run
    if mode == "off" or (mode == "auto" and not (is_cuda and alone)):
        return executor, {}
    try:
        if not isinstance(executor, (MaskedExecutor, ExactExecutor)):
            raise Refused("it takes no token trees")
        if (count := devices.processes_of(executor.model)) > 1:
            raise Refused(f"its weights are divided among {count} processes")
        if isinstance(executor, ExactExecutor) and mode == COMPILED:
            raise Refused("those of exact mode are not compiled")
        if isinstance(mode, str) and not is_cuda and (mode != COMPILED or executor.device.type != "cpu"):
            raise Refused(f"CUDA graphs need a CUDA device, and the model is on {executor.device}")
        backend = mode if not isinstance(mode, str) else CudaGraphs(executor.device) if is_cuda else Calls()
        if isinstance(executor, ExactExecutor):
            return exact.tested(executor, ids, prompts, backend), {}
        found = gate.tested(executor, ids, prompts, backend)
        found.compiler = Compiler() if mode == COMPILED else None
        return found, {}
    except (Refused, torch.OutOfMemoryError) as error:
        # The test keeps two caches, each larger than what a short text takes without captures.
        why = str(error) if isinstance(error, Refused) else f"its test does not fit the memory of {device}"
        if mode != "auto":
            raise Refused(f"the forwards of {name} cannot be captured ({why}); leave out static") from error
        warnings.warn(
            f"the forwards of {name} are not captured as CUDA graphs, so they take longer ({why})",
            UserWarning,
            stacklevel=2,
        )
        return executor, {STATIC: why}


def _eager_because(executor: Executor) -> str:
    """Why forwards on an accelerator are not captured, where no test of the model is needed to know; else ""."""
    if not isinstance(executor, CachedExecutor) or executor.device.type == "cpu":
        return ""
    if (count := devices.processes_of(executor.model)) > 1:
        return f"its weights are divided among {count} processes"
    return devices.eager_because([executor.device])
