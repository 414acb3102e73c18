"""A digest of a module's weights, for what is stored about a model and must not be used for a fine-tune of it."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch

PIECES, LENGTH = 4, 64  # of each parameter, so many pieces of so many values are part of the digest
REMEMBERED = "leapahead_digest"  # attribute of a model whose weights cannot be read any more


def digest(model: Any) -> str:
    """16 hex digits of the names, the shapes and some values of all parameters; "" where they cannot be read.

    The values are rounded to bfloat16, so a model that is loaded in float32 and in bfloat16 has one digest. Takes some
    milliseconds, whatever the size of the model.
    """
    if REMEMBERED in vars(model):
        return str(vars(model)[REMEMBERED])
    found = sha256()
    try:
        for name, parameter in model.named_parameters():
            if parameter.is_meta:  # offloaded weights
                return ""
            found.update(f"{name} {tuple(parameter.shape)} ".encode())
            own = getattr(parameter, "_local_tensor", parameter)  # of weights that are divided among processes
            found.update(_some(own.detach()).view(torch.int16).numpy(force=True).tobytes())
    except (RuntimeError, NotImplementedError, TypeError):  # parameters of a kind that cannot be read piece by piece
        return ""
    return found.hexdigest()[:16]


def remember(model: Any, known: str) -> None:
    """Sets the digest of a model whose weights are about to be laid out otherwise (`linears`)."""
    setattr(model, REMEMBERED, known)


def forget(model: Any) -> None:
    """Takes back `remember`."""
    vars(model).pop(REMEMBERED, None)


def _some(values: torch.Tensor) -> torch.Tensor:
    """Some values of a parameter in bfloat16, from its beginning to its end, without a copy of the whole."""
    flat = values.reshape(-1)
    if len(flat) > PIECES * LENGTH:
        starts = [index * (len(flat) - LENGTH) // (PIECES - 1) for index in range(PIECES)]
        flat = torch.cat([flat[start : start + LENGTH] for start in starts])
    return flat.to(torch.bfloat16)
