"""Packs the linear layers of a loaded model, if its logits stay the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leapahead.models.transformers import selftest
from leapahead.models.transformers.families import unchanged_attention
from leapahead.models.transformers.linears import can_pack, fits, pack, unpack

TESTED = 8  # tokens, for which a packed model must give the logits that it gave before


def packed(model: Any) -> bool:
    """Packs a model of Transformers where that is possible and its logits are the same then, up to rounding."""
    if not can_pack() or not any(fits(each) for each in model.modules()):
        return False
    try:
        before = _logits(model)
    except Exception:  # a model that does not run on token ids alone is refused later, by name
        return False
    pack(model)
    try:
        floor = selftest.MARGIN * selftest.FLOOR[torch.bfloat16]
        if selftest.distances(_logits(model), [before], floor, selftest.CEILING, False).small:
            return True
    except RuntimeError:  # a layer whose weight is read by others
        pass
    unpack(model)
    return False


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """Of a few tokens, float32 [tokens, vocab]."""
    tokens = torch.arange(TESTED)[None]
    decoder = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with unchanged_attention(model):
        found: Tensor = model(input_ids=tokens, **decoder, use_cache=False).logits[0]
    return found.float()
