"""Whole models that are trained: how they are loaded, and written as folders of Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.text import Tokenizer, difference
from leapahead.models import loading
from leapahead.models.transformers import families
from leapahead.models.transformers.pretrained import load_files, save


@dataclass(frozen=True)
class Student:
    """A whole model that is trained.

    Attributes:
        model: as Transformers loaded it, in float32.
        tokenizer: its own; None where there is none.
        dtype: that it was saved in, and will be.
        name: it was loaded by.
    """

    model: Any
    tokenizer: Any
    dtype: torch.dtype
    name: str

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads its prompts."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    @property
    def hidden_size(self) -> int:
        """The width of its hidden states."""
        return int(self.model.get_input_embeddings().weight.shape[-1])

    @property
    def vocab_size(self) -> int:
        """Tokens that it reads; a model of the same tokenizer may have more rows for none."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def context_length(self) -> int:
        """Greatest number of tokens of a sequence; of an encoder-decoder model, of the decoder's."""
        return families.context_length(families.text_config(self.model))

    def save(self, folder: Path) -> None:
        """Writes it as a folder of Transformers, with its tokenizer.

        Raises:
            BadParameter: it cannot be written.
        """
        save(self.model.to(self.dtype), self.tokenizer, folder)
        self.model.float()

    @classmethod
    def load(cls, path: str, name: str, device: torch.device, trust_remote_code: bool = False) -> Student:
        """Loads a model of Transformers for training.

        Args:
            path: a folder or a hub id.
            name: for messages and model cards.
            device: it is trained on.
            trust_remote_code: whether Python code that comes with the model may run.

        Raises:
            BadParameter: there is no such model, or it is none of Transformers.
            Refused: it is no causal language model, its weights are quantised, or it has an adapter.
        """
        if loading.engine_of(path) != "transformers":
            raise BadParameter(f"{name} cannot be trained; give the folder of Transformers that it was made from")
        model, tokenizer, _ = load_files(path, "auto", trust_remote_code)
        if getattr(model, "is_quantized", False):
            raise Refused(f"{name} cannot be trained, since its weights are quantised; give one whose weights are not")
        if getattr(model, "peft_config", None):  # all but the adapter would be left as it is, and not be written
            raise Refused(
                f"{name} cannot be trained, since its folder has an adapter beside the weights; save the result of "
                "PEFT's merge_and_unload as a model, and give that"
            )
        dtype = model.dtype
        return cls(model.float().to(device), tokenizer, dtype, name)

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Refuses a model whose tokenizer is not the target's, where both are known.

        Raises:
            BadParameter: naming the first difference.
        """
        if tokenizer is not None and self.tokenizer is not None and (unlike := difference(tokenizer, self.tokenizer)):
            raise BadParameter(
                f"the draft model {self.name} has another vocabulary than the target: {unlike}; use one with the "
                "target's tokenizer"
            )
