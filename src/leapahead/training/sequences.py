"""Whole texts side by side, for the training of whole models, which read tokens and nothing else.

    text 0     p p p|a a a a        p the prompt, a the answer
    text 1     p p|a a a . .        . filled up at the end, which no earlier token sees

Row i of a text predicts token i + 1. The rows that predict tokens of the answer are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leapahead.models.transformers.forward import inputs
from leapahead.training.texts import Text


@dataclass(frozen=True)
class Sequences:
    """Texts side by side.

    Attributes:
        texts: at least one.
        device: of the tensors.
    """

    texts: Sequence[Text]
    device: torch.device

    @cached_property
    def ids(self) -> Any:
        """int64 [texts, tokens], an array of numpy."""
        found = np.zeros((len(self.texts), max(len(text.tokens) for text in self.texts)), dtype=np.int64)
        for row, text in enumerate(self.texts):
            found[row, : len(text.tokens)] = text.tokens
        return found

    @cached_property
    def tokens(self) -> Tensor:
        """int64 [texts, tokens]."""
        return torch.from_numpy(self.ids).to(self.device)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Text and position of the rows that predict the tokens of the answers, int64 [rows] each."""
        row = torch.arange(self.tokens.shape[1], device=self.device)
        starts = torch.tensor([len(text.prompt) - 1 for text in self.texts], device=self.device)
        ends = torch.tensor([len(text.tokens) - 1 for text in self.texts], device=self.device)
        text, position = ((row >= starts[:, None]) & (row < ends[:, None])).nonzero(as_tuple=True)
        return text, position

    @cached_property
    def next(self) -> Tensor:
        """int64 [rows], the tokens that the rows predict."""
        text, position = self.rows
        return self.tokens[text, position + 1]

    @cached_property
    def weights(self) -> Tensor:
        """float32 [rows], which weigh every text alike, whatever its length; their sum is 1."""
        lengths = torch.tensor([len(text.answer) for text in self.texts], device=self.device)
        return 1 / (lengths[self.rows[0]] * len(self.texts))

    def logits(self, model: Any) -> Tensor:
        """float32 [rows, vocabulary] of a model, as Transformers runs it."""
        output = model(**inputs(model, self.ids, 0, self.device), use_cache=False)
        found: Tensor = output.logits[self.rows].float()
        return found
