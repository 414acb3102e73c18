"""Devices: which there are, how a model's layers are divided among several, and which of them can capture forwards."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from leapahead.core.errors import BadParameter, Refused

# Accelerate's ways to divide the layers among all accelerators, which Transformers takes as `device_map`.
DIVIDED = ("balanced", "balanced_low_0", "sequential")
KINDS = ("cpu", "cuda", "mps", "xpu")


def count(kind: str) -> int:
    """How many devices of a kind torch can use here."""
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "xpu":
        return torch.xpu.device_count() if torch.xpu.is_available() else 0
    return int(kind == "cpu" or (kind == "mps" and torch.backends.mps.is_available()))


def checked_device(device: str | torch.device) -> torch.device | str:
    """A device that exists, or a name of `DIVIDED`; "auto" is an accelerator if there is one.

    Raises:
        BadParameter: no such device, or no devices to divide a model among.
    """
    there = f"there are auto, cpu, cuda, cuda:N, mps, xpu, and, for the layers of a model on all GPUs, {DIVIDED[0]}"
    if device == "auto":
        return torch.device(next(kind for kind in ("cuda", "xpu", "mps", "cpu") if count(kind)))
    if isinstance(device, str) and device in DIVIDED:
        if not (count("cuda") or count("xpu")):
            raise BadParameter(f"device {device!r} divides a model among GPUs, and torch sees none; use auto or cpu")
        if find_spec("accelerate") is None:
            raise BadParameter(f"device {device!r} needs the package accelerate: pip install accelerate")
        return device
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:  # the latter two of what is neither text nor a number
        raise BadParameter(f"device {str(device)!r} is not possible; {there}") from error
    if found.type not in KINDS:
        raise BadParameter(f"device {str(device)!r} is not possible; {there}")
    if found.type == "mps" and not count("mps"):
        raise BadParameter("device 'mps' is not there: this is no Apple GPU, or torch was built without it")
    if found.type in ("cuda", "xpu") and (found.index or 0) >= count(found.type):
        raise BadParameter(
            f"device {str(device)!r} is not there: torch sees {count(found.type)} {found.type.upper()} devices"
        )
    return found


def of(model: Any) -> list[torch.device]:
    """The devices of a model's parameters, in the order of the forward."""
    return list(dict.fromkeys(each.device for each in model.parameters()))


def hooks(part: torch.nn.Module) -> Sequence[Any]:
    """The hooks of Accelerate on a part of a model, which move its inputs and load what is offloaded of it."""
    hook = vars(part).get("_hf_hook")
    return getattr(hook, "hooks", () if hook is None else (hook,))


def eager_because(found: Sequence[torch.device]) -> str:
    """Why forwards of a model on these devices run operation by operation; "" where they can be captured."""
    if len(found) > 1:
        return f"its layers lie on {len(found)} devices ({', '.join(map(str, found))}), and a graph is of one"
    if found[0].type != "cuda":
        return f"torch captures graphs on CUDA devices only, and this model is on {found[0]}"
    return ""


def processes_of(model: Any) -> int:
    """Among how many processes a model's weights are divided (tensor parallelism); 1 for none others."""
    return getattr(model, "tp_size", None) or 1


def refuse_parallel(model: Any) -> None:
    """Refuses a model whose tensors are divided among processes.

    Raises:
        Refused: each process would plan its drafts by its own clock, and their forwards would not fit together.
    """
    if (count := processes_of(model)) > 1:
        raise Refused(
            f"{type(model).__name__} is divided by tensor parallelism among {count} processes, whose drafts would "
            "differ, since each process measures its own time; give its name to "
            'leapahead.LLM(name, devices="cuda:0,cuda:1", tensor_parallel=True), which starts them itself'
        )


def check_parallel(source: str, config: Any, count: int) -> None:
    """Refuses a model whose weights cannot be divided among so many processes.

    Raises:
        Refused: Transformers has no plan for it, or its heads cannot be shared evenly.
    """
    text = config.get_text_config()
    if not (getattr(config, "base_model_tp_plan", None) or getattr(text, "base_model_tp_plan", None)):
        raise Refused(
            f"Transformers has no plan by which the weights of {source} ({config.model_type}) are divided; leave out "
            'tensor_parallel, or divide its layers with device="balanced"'
        )
    for what, name in (("attention heads", "num_attention_heads"), ("key-value heads", "num_key_value_heads")):
        if (heads := getattr(text, name, None)) and heads % count:
            raise Refused(
                f"{source} has {heads} {what}, which {count} devices cannot share evenly; use a number of devices that "
                "divides it"
            )
