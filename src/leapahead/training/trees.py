"""A forward over whole texts with what branches from them, each a token tree from its first token on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from leapahead.core.tree import TokenTree
from leapahead.models.transformers import families
from leapahead.models.transformers.forward import MaskedExecutor
from leapahead.models.transformers.masks import Inputs


class TreeForward:
    """Computes the logits of trees; gradients flow to the model.

    Args:
        model: of Transformers.
        executor: how it, or the model that it is a copy of, is run over trees.
    """

    def __init__(self, model: Any, executor: MaskedExecutor) -> None:
        self.model, self.patterns = model, executor.patterns
        self.mask_dtype = None if families.MASKS[families.attention_implementation(model)] else model.dtype
        self.device: torch.device = executor.device

    def logits(self, trees: Sequence[TokenTree], embed: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """[trees, nodes, vocabulary], in one forward.

        Args:
            trees: without probes; see `TokenTree.computed`.
            embed: gives the embeddings of token ids; None for the model's own.
        """
        inputs = Inputs.of(trees, [0] * len(trees), self.device)
        given = {"input_ids": inputs.tokens} if embed is None else {"inputs_embeds": embed(inputs.tokens)}
        found: Tensor = self.model(
            **given,
            position_ids=inputs.positions,
            attention_mask=inputs.masks(self.patterns, self.mask_dtype),
            use_cache=False,
        ).logits
        return found
