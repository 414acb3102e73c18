"""Gradient steps of a loaded model on a few positions of texts, between its forwards; see `drafters.learning`.

Parameters are updated in place, from copies in float32, since small steps vanish in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leapahead.models.base import KeepsPrefixes
from leapahead.models.transformers.decoder_view import DecoderView
from leapahead.models.transformers.forward import inputs
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.pretrained import save

USUAL_RATE = 0.05  # of learning, divided by the hidden size
MOST_GRADIENT = 1.0
NO_SOURCE = np.zeros(0, dtype=np.int32)


class Positions(NamedTuple):
    """A text and what should be predicted at some of its positions.

    Attributes:
        tokens: int32 [tokens].
        places: int32 [positions], the index of the token after which is predicted.
        following: int32 [positions, k], the tokens that should be likely there.
        logits: float32 [positions, k], theirs.
        source: int32 [source], the encoder's input, of a text of an encoder-decoder model.
    """

    tokens: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    following: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]
    source: npt.NDArray[np.int32] = NO_SOURCE

    @property
    def longest(self) -> int:
        """The length of the text or of its source, whichever is longer."""
        return max(len(self.tokens), len(self.source))

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return sum(each.nbytes for each in self)


class OnlineTraining:
    """Trains a model that is loaded as a target.

    Args:
        target: whose model is trained. Its lock is taken for every step.
        rate: the learning rate; 0 for the usual one.
    """

    def __init__(self, target: TransformersTarget, rate: float = 0.0) -> None:
        self.target, self._module = target, target.model
        self._parameters = list(self._module.parameters())
        width = self._module.get_input_embeddings().weight.shape[-1]
        with torch.inference_mode(False):  # tensors of that mode cannot be trained
            self._masters = [each.detach().float().clone() for each in self._parameters]
            self._optimizer = torch.optim.AdamW(self._masters, lr=rate or USUAL_RATE / width, weight_decay=0.0)

    def step(self, texts: Sequence[Positions]) -> float:
        """One step of the optimizer; returns the loss before it.

        Where the loss or its gradient is not a finite number, nothing changes, and what is returned is none.
        """
        with self.target.lock, torch.inference_mode(False), torch.enable_grad():
            self._module.zero_grad()  # of a step that failed
            self._follow()
            loss = self.loss(texts)
            value: float = loss.item()
            if not np.isfinite(value):
                return value
            loss.backward()  # type: ignore[no-untyped-call]
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            if not np.isfinite(norm := torch.nn.utils.clip_grad_norm_(self._masters, MOST_GRADIENT).item()):
                return norm
            self._optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(self._parameters, self._masters, strict=True):
                    parameter.copy_(master)
        return value

    @torch.no_grad()
    def _follow(self) -> None:
        """Takes over parameters that something else has changed, such as the training of another drafter."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if not torch.equal(parameter, master.to(parameter.dtype)):
                master.copy_(parameter)

    def loss(self, texts: Sequence[Positions]) -> Tensor:
        """The cross entropy with the given tokens, in proportion to exp(logits), as a mean over all positions."""
        tokens = np.zeros((len(texts), max(len(text.tokens) for text in texts)), dtype=np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens)] = text.tokens
        device = self._parameters[0].device
        if isinstance(self._module, DecoderView):
            sources = [text.source.tolist() for text in texts]
            output = self._module.from_beginning(torch.from_numpy(tokens).to(device), sources)
        else:
            output = self._module(**inputs(self._module, tokens, 0, device), use_cache=False)
        rows = np.concatenate([np.full(len(text.places), row) for row, text in enumerate(texts)])
        places, following, logits = (
            torch.from_numpy(np.concatenate(each)).to(device)
            for each in zip(*((text.places, text.following, text.logits) for text in texts), strict=True)
        )
        logq = output.logits[torch.from_numpy(rows).to(device), places.long()].float().log_softmax(-1)
        known = following < logq.shape[-1]  # the other vocabulary may be the larger one
        p = logits.masked_fill(~known, -torch.inf).softmax(-1).nan_to_num()
        found: Tensor = -(p * logq.gather(1, following.long().where(known, 0))).sum(-1).mean()
        return found

    def forget(self) -> None:
        """Drops the cache entries that the target keeps for later prompts, which are of the weights before."""
        if isinstance(self.target, KeepsPrefixes):
            with self.target.lock:
                self.target.forget()

    def save(self, folder: str | Path, tokenizer: Any) -> None:
        """Writes the model as a folder of Transformers, with a tokenizer of Transformers if that is one.

        Raises:
            BadParameter: the folder cannot be written.
        """
        with self.target.lock:
            save(self._module.model if isinstance(self._module, DecoderView) else self._module, tokenizer, folder)
