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

from leapahead.core.errors import BadParameter, Refused
from leapahead.integrations.hf_fields import ENCODED
from leapahead.models.transformers.encoder_decoder import refuse_other_inputs


@dataclass(frozen=True)
class EncoderInput:
    """What the encoder read for one row.

    Attributes:
        tokens: its input; zeros where only the output is known.
        states: its output, [tokens, width].
    """

    tokens: list[int]
    states: Tensor


def encoder_inputs(model: Any, model_kwargs: Mapping[str, Any], inputs: Tensor | None) -> list[EncoderInput]:
    """Of every row of the batch.

    Args:
        model, model_kwargs: as Transformers prepared them.
        inputs: what the encoder was given, int64 [prompts, length]; each prompt has equally many rows.

    Raises:
        Refused: the encoder reads something else than token ids, or the mask is for other inputs.
        BadParameter: a row is all padding.
    """
    refuse_other_inputs(model)
    states: Tensor = model_kwargs[ENCODED][0]
    mask = model_kwargs.get("attention_mask")
    kept = torch.ones(states.shape[:2], dtype=torch.bool, device="cpu") if mask is None else mask.bool().cpu()
    if kept.shape != states.shape[:2]:
        raise Refused(
            f"an attention_mask of shape {tuple(kept.shape)} for an encoder's output of shape {tuple(states.shape)} is "
            "not supported by leapahead.hf: it must have one entry for each token of the encoder's input"
        )
    if not bool(kept.any(dim=1).all()):
        raise BadParameter("a row of the batch is all padding; give at least one token")
    ids = torch.zeros(states.shape[:2], dtype=torch.int64, device="cpu")
    if inputs is not None and inputs.ndim == 2 and inputs.shape[1] == len(ids[0]) and int(inputs.min()) >= 0:
        ids = inputs.cpu().repeat_interleave(len(states) // len(inputs), dim=0)
    return [
        EncoderInput(ids[row, kept[row]].tolist(), states[row, kept[row].to(states.device)])
        for row in range(len(states))
    ]
