"""The encoder's output that Transformers has computed for a batch, row by row.

Transformers runs the encoder before it calls a decoding loop. Cross-attention does not depend on the order of what it
reads, so the states of tokens, without those of padding, are all that a row needs, wherever its padding is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leapahead.core.errors import BadParameter
from leapahead.integrations.hf_fields import ENCODED


@dataclass(frozen=True)
class EncoderInput:
    """What the encoder read for one row.

    Attributes:
        tokens: its input; zeros where only the output is known.
        states: its output, [tokens, width].
    """

    tokens: list[int]
    states: Tensor


def encoder_inputs(model_kwargs: Mapping[str, Any], inputs: Tensor | None) -> list[EncoderInput]:
    """Of every row of the batch.

    Args:
        model_kwargs: as Transformers prepared them.
        inputs: what the encoder was given, int64 [prompts, length]; each prompt has equally many rows.

    Raises:
        BadParameter: a row is all padding.
    """
    states: Tensor = model_kwargs[ENCODED][0]
    mask = model_kwargs.get("attention_mask")
    kept = torch.ones(states.shape[:2], dtype=torch.bool, device="cpu") if mask is None else mask.bool().cpu()
    if not bool(kept.any(dim=1).all()):
        raise BadParameter("a row of the batch is all padding; give at least one token")
    ids = torch.zeros(states.shape[:2], dtype=torch.int64, device="cpu")
    if inputs is not None and inputs.ndim == 2 and inputs.shape[1] == len(ids[0]) and int(inputs.min()) >= 0:
        ids = inputs.cpu().repeat_interleave(len(states) // len(inputs), dim=0)
    return [
        EncoderInput(ids[row, kept[row]].tolist(), states[row, kept[row].to(states.device)])
        for row in range(len(states))
    ]
