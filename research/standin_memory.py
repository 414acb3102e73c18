"""Stand-in models built in memory, on the device that they are measured on: no file is written.

A stand-in at the cost of a 7B model has 13.5 GB of weights. They are made on the device one after another, each from a
small tensor of the source, so that neither the disk nor the host's memory must hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from leapahead.core.errors import Refused
from research.standin import DTYPES, Plan, planned
from research.widening import Shapes


def build(
    cost: str | Shapes,
    device: torch.device,
    dtype: str = "bfloat16",
    source: str | Path | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Any:
    """A stand-in, see `research.standin.standin`, which explains the arguments.

    Args:
        device: where it is made. Its random numbers, which change no logits, are those of this kind of device.

    Returns:
        A `LlamaForCausalLM` in evaluation mode.

    Raises:
        BadParameter: see `research.standin.standin`.
        Refused: a hybrid, or a device without the memory for its weights.
    """
    plan = planned(source, cost, dtype, seed, device)
    if plan.shapes.recurrent:
        raise Refused(
            f"{cost} has recurrent layers, and only a Llama is built in memory; write it with research standin"
        )
    model = _empty(plan, device, DTYPES[dtype])
    places = dict(model.named_parameters())
    with torch.no_grad():
        for done, tensor in enumerate(plan.tensors):
            if progress is not None:
                progress(f"building {cost}", done, len(plan.tensors))
            places[tensor.name].copy_(tensor.make(*(plan.weights[origin].to(device) for origin in tensor.origins)))
    if progress is not None:
        progress("built", len(plan.tensors), len(plan.tensors))
    return model


def _empty(plan: Plan, device: torch.device, dtype: torch.dtype) -> Any:
    """The model with uninitialised weights."""
    config = LlamaConfig.from_dict(plan.config)
    try:
        with torch.device(device), no_init_weights():
            model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    except torch.OutOfMemoryError as error:
        raise Refused(
            f"a stand-in of {plan.size / 1e9:.1f} GB does not fit on {device}; choose a smaller --cost"
        ) from error
    model.tie_weights()  # which is part of the initialisation
    return model.requires_grad_(False).eval()
