"""The conditions of a measurement: package versions, commit, machine, and the description of a target."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from leapahead import __version__
from leapahead.models.base import Target
from leapahead.planner.profile import processor

PACKAGES = ("numpy", "torch", "transformers", "llama-cpp-python", "openvino")

Data = dict[str, Any]  # what a measurement returns: plain types, ready for JSON
Tokens = Sequence[int]
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def conditions(target: Target | None = None, **more: Any) -> Data:
    """The conditions to be stored beside a measurement, as plain types.

    Two runs on one installation and machine have the same ones.

    Args:
        target: is described as well, see `describe`.
        more: added by the caller. A `device` is that of the models, whose GPU is named where no target is given.
    """
    described = {} if target is None else describe(target)
    found: Data = {
        "versions": {"leapahead": __version__, "python": platform.python_version(), **_packages()},
        "commit": commit(),
        "system": platform.platform(),
        "cpu": processor(),
        "gpu": gpu(described.get("device", more.get("device"))),
    }
    if target is not None:
        found |= {"target": target.info.name, "precision": target.info.precision, **described}
    return {**found, **more}


def describe(target: Target) -> Data:
    """How a target computes: `backend`, `dtype` and `threads`, and `device` of a Transformers model.

    The dtype of a GGUF file is the type that llama.cpp reports for it, such as "llama 7B Q8_0". Empty for other
    targets.
    """
    # A target of either kind exists only if its module has been imported.
    if (llama := sys.modules.get("leapahead.models.llama_cpp.model")) and isinstance(target, llama.LlamaCppTarget):
        import llama_cpp

        buffer = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(target.model.pointer, buffer, len(buffer))
        dtype = buffer.value.decode("utf-8", "replace")
        return {"backend": "llama.cpp", "dtype": dtype, "threads": llama_cpp.llama_n_threads(target.context.pointer)}
    openvino = sys.modules.get("leapahead.models.openvino.model")
    if openvino is not None and isinstance(target, openvino.OpenVinoTarget):
        model = target.model
        dtype = f"{model.weights}, computed in {model.computed_in}, cache in {model.cached_in}"
        return {"backend": "openvino", "dtype": dtype, "threads": model.threads}
    hf = sys.modules.get("leapahead.models.transformers.model")
    if hf is not None and isinstance(target, hf.TransformersTarget):
        import torch

        model = target.model
        dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
        return {"backend": "transformers", "dtype": dtype, "device": device, "threads": torch.get_num_threads()}
    return {}


def commit() -> str | None:
    """The commit of the checkout that runs, with "-dirty" appended where files were changed; None outside of one."""
    here = Path(__file__).resolve()
    if not _git(here.parent, "ls-files", "--error-unmatch", "__init__.py"):
        return None  # installed, perhaps inside another project's checkout
    return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def gpu(device: str | None = None) -> str | None:
    """The name of a CUDA device; None of the CPU. Of other names, and of none, that of the GPU that torch would use."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    kind, _, number = (device or "").partition(":")
    if kind == "cpu" or not torch.cuda.is_available():
        return None
    if kind != "cuda" or not number.isdecimal():
        return torch.cuda.get_device_name()
    return torch.cuda.get_device_name(int(number)) if int(number) < torch.cuda.device_count() else None


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _packages() -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
