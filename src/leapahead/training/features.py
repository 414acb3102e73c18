"""The target's hidden states of its own texts, computed by the model as Transformers runs it.

    Online    computes them for every batch
    Stored    has computed all of them once, into files of some texts each, in 16 bits

A text's features are [tokens, layers * hidden_size]: the hidden states of the layers side by side, numbered as in
`Capture.hidden`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from leapahead.core.errors import BadParameter, Refused
from leapahead.models.base import HIDDEN, Target
from leapahead.models.transformers.arguments import accepts
from leapahead.models.transformers.families import text_config
from leapahead.models.transformers.forward import inputs, side_by_side
from leapahead.models.transformers.linears import weight_of
from leapahead.models.transformers.model import TransformersTarget
from leapahead.training.texts import Progress, Text, digest_of

SHARD = 64  # texts of a file
TOGETHER = 4096  # tokens of a forward of the target
CLOSE = 0.05  # of the logits' spread: rounding of bfloat16 is below, a scale or a cap is above
PROBED = 16  # tokens whose logits are compared


@dataclass(frozen=True)
class TrainingTarget:
    """What training needs of a target.

    Attributes:
        model: as Transformers loaded it.
        name: of the model.
        vocab_size, hidden_size, layers: as in `TargetInfo`.
        embedding: [vocabulary, hidden_size], that of tokens.
        output: [vocabulary, hidden_size]; the logits are `output @ state` of the last hidden state.
    """

    model: Any
    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    embedding: Tensor
    output: Tensor

    @property
    def device(self) -> torch.device:
        return self.output.device

    @property
    def config(self) -> Any:
        """The configuration of the language part."""
        return text_config(self.model)

    def logits(self, states: Tensor) -> Tensor:
        """float [..., vocabulary] of last hidden states."""
        return F.linear(states.to(self.output.dtype), self.output)

    @torch.no_grad()
    def hidden(self, texts: Sequence[Sequence[int]], layers: Sequence[int]) -> list[Tensor]:
        """Hidden states of texts, which are read side by side: [tokens, layers * hidden_size] of each.

        The texts are filled up at their ends, which no earlier token sees.
        """
        tokens = np.zeros((len(texts), max(map(len, texts))), dtype=np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        few = {"logits_to_keep": 1} if accepts(self.model, "logits_to_keep") else {}
        given = inputs(self.model, tokens, 0, self.device)
        output = self.model(**given, **few, use_cache=False, output_hidden_states=sorted(set(layers)))
        found = side_by_side(output.hidden_states, tuple(layers))
        assert found is not None, "layers are wanted"
        return [states[: len(text)] for states, text in zip(found, texts, strict=True)]


def training_target(target: Target) -> TrainingTarget:
    """What training needs of a target.

    Raises:
        Refused: it gives no hidden states, or its logits are not the product of its last one and a matrix.
    """
    info = target.info
    if not isinstance(target, TransformersTarget):
        raise Refused(
            f"no head can be trained for {info.name}, which is no model of Transformers, as a head needs; "
            "give the folder that it was made from"
        )
    if HIDDEN not in info.capabilities:
        raise Refused(
            f"no head can be trained for {info.name}, which gives no hidden states; train a draft model with "
            "`leapahead train-draft`"
        )
    layers = [target.model.get_input_embeddings(), target.model.get_output_embeddings()]
    weights = [weight for layer in layers if (weight := weight_of(layer)) is not None]
    shape = (info.vocab_size, info.hidden_size)
    if [tuple(weight.shape) for weight in weights] != [shape, shape]:
        raise Refused(
            f"no head can be trained for {info.name}: its embedding and its output layer must be matrices of shape "
            f"{list(shape)}"
        )
    embedding, output = (weight.detach() for weight in weights)
    if embedding.device != output.device or output.is_meta:
        raise Refused(
            f"no head can be trained for {info.name}, whose embedding and output layer lie on {embedding.device} and "
            f"{output.device}, since it is divided or offloaded; load it on one device"
        )
    found = TrainingTarget(target.model, info.name, *shape, info.layers, embedding, output)
    _check_output(found)
    return found


@torch.no_grad()
def _check_output(target: TrainingTarget) -> None:
    tokens = np.arange(PROBED)[None] % target.vocab_size
    given = inputs(target.model, tokens, 0, target.device)
    output = target.model(**given, use_cache=False, output_hidden_states=[target.layers])
    logits = output.logits.float()
    difference = (target.logits(output.hidden_states[target.layers]).float() - logits).abs().max()
    if not difference <= CLOSE * logits.std():
        raise Refused(
            f"no head can be trained for {target.name}: its logits are not its last hidden state times its output "
            "layer (they are scaled, capped or shifted)"
        )


class Features(ABC):
    """Gives the hidden states of texts.

    Args:
        target: the model.
        layers: the hidden states that are wanted, side by side.
    """

    def __init__(self, target: TrainingTarget, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)

    @abstractmethod
    def of(self, texts: Sequence[Text]) -> list[Tensor]:
        """Of each text, [tokens, layers * hidden_size]."""


class Online(Features):
    """Computes the hidden states when they are wanted."""

    def of(self, texts: Sequence[Text]) -> list[Tensor]:
        found: list[Tensor] = []
        for group in grouped(texts, TOGETHER):
            found += self.target.hidden([text.tokens for text in group], self.layers)
        return found


class Stored(Features):
    """Computes the hidden states of all texts once and keeps them in files, in float16 or bfloat16.

    Args:
        folder: of the files. Those that an earlier run has written there are used.
        texts: all of them.
        progress: is called after every file.

    Raises:
        BadParameter: a file cannot be written.
    """

    def __init__(
        self,
        target: TrainingTarget,
        layers: Sequence[int],
        folder: Path,
        texts: Sequence[Text],
        progress: Progress,
    ) -> None:
        super().__init__(target, layers)
        ordered = sorted(texts, key=lambda text: text.index)
        shards = [ordered[start : start + SHARD] for start in range(0, len(ordered), SHARD)]
        self._files = {text.index: folder / _name(shard) for shard in shards for text in shard}
        for done, shard in enumerate(shards):
            progress("hidden states", done * SHARD, len(ordered))
            if not (folder / _name(shard)).exists():
                self._write(folder / _name(shard), shard)

    def of(self, texts: Sequence[Text]) -> list[Tensor]:
        found = []
        for text in texts:
            path = self._files[text.index]
            try:
                with safe_open(path, framework="pt") as file:
                    found.append(file.get_tensor(str(text.index)).to(self.target.device))
            except (OSError, SafetensorError) as error:
                raise BadParameter(f"{path} cannot be read: {error}; remove it, and go on with --resume") from None
        return found

    def _write(self, path: Path, shard: Sequence[Text]) -> None:
        """Writes beside the place and renames, so that an interrupt leaves no part of a file."""
        states: list[Tensor] = []
        for group in grouped(shard, TOGETHER):
            states += [_halved(each).cpu() for each in self.target.hidden([text.tokens for text in group], self.layers)]
        part = path.with_suffix(".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({str(text.index): each for text, each in zip(shard, states, strict=True)}, part)
            part.replace(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):  # half of it would fill the disk
                part.unlink()
            raise BadParameter(f"{path} cannot be written: {error}; give --features online") from None


def grouped(texts: Sequence[Text], tokens: int) -> list[list[Text]]:
    """The texts in order, in groups that have at most so many tokens when filled up to one length; at least one."""
    groups: list[list[Text]] = []
    for text in texts:
        longest = max((len(each.tokens) for each in (*groups[-1], text)), default=0) if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(text)
        else:
            groups.append([text])
    return groups


def _name(shard: Sequence[Text]) -> str:
    return f"{shard[0].index:06d}-{digest_of(shard)}.safetensors"  # other texts may have these numbers later


def _halved(states: Tensor) -> Tensor:
    """In 16 bits: float16 has the finer steps, bfloat16 holds values of any size."""
    if states.dtype in (torch.float16, torch.bfloat16):
        return states.contiguous()
    half = states.half()
    return half.contiguous() if bool(half.isfinite().all()) else states.bfloat16().contiguous()
