"""The distillation of a draft model: it is trained to have the target's distribution (DistillSpec, 2310.08461).

    L = E over texts (x, y) of 1/|y| sum over t of D( p(. | x, y_<t) || q(. | x, y_<t) )        (section 3)

p is the target's distribution, q the draft model's, and D one of the divergences of `leapahead.training.losses`. The
total variation distance is the one that acceptance depends on: a draft of speculative sampling is accepted with the
probability 1 - TVD (corollary 3.6 of 2211.17192). The answers y are the target's own, or the draft model's ("on-policy
data", section 3), sampled at temperature 1 when they are needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.text import Tokenizer
from leapahead.drafters.draft_models import BUNDLED, SELF, check_kind
from leapahead.models import loading
from leapahead.models.base import Target
from leapahead.models.transformers.model import TransformersTarget
from leapahead.training import losses
from leapahead.training.recipe import Found
from leapahead.training.sequences import Sequences
from leapahead.training.settings import DIVERGENCES, DraftSettings
from leapahead.training.student import Student
from leapahead.training.texts import Text


def load(name: str, target: Target, tokenizer: Tokenizer | None, trust_remote_code: bool = False) -> Student:
    """Loads the draft model that is trained.

    Args:
        name: of a model of Transformers or its folder; "bundled" for the bundled draft model.
        target: that it will draft for.
        tokenizer: the target's; None where there is none.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        BadParameter: there is no such model, or it has another tokenizer than the target.
        Refused: the target, or the draft model, is no model of Transformers, or one is an encoder-decoder model and the
            other one is not.
    """
    if not isinstance(target, TransformersTarget):
        raise Refused(
            f"no draft model can be trained for {target.info.name}, whose logits torch does not compute; use the model "
            "of Transformers that it was made from, and draft for both with the result"
        )
    if name.startswith(SELF):
        raise BadParameter(f"--draft {name} is made of the target, which is not changed; name a smaller model")
    path = loading.bundled("tiny-draft") if name == BUNDLED else name
    student = Student.load(path, name, target.device, trust_remote_code)
    check_kind(student.name, student.is_encoder_decoder, target.info)
    student.check_tokenizer(tokenizer)
    return student


def fitting(student: Student, texts: Sequence[Text]) -> list[Text]:
    """The texts that a draft model can read; a warning tells how many it cannot.

    Raises:
        BadParameter: there are texts, and it can read none of them.
    """
    room, known = student.context_length, student.vocab_size
    readable = [text for text in texts if max(text.tokens) < known]  # the target's logits may have more rows
    found = [text for text in readable if student.is_encoder_decoder or len(text.tokens) <= room]
    if texts and not found:
        raise BadParameter(
            f"none of the texts fits the context of the draft model {student.name}, {room} tokens, and its vocabulary "
            f"of {known}; give shorter prompts, or a smaller max_new_tokens"
        )
    if left_out := len(texts) - len(found):
        warnings.warn(
            f"{left_out} of {len(texts)} texts left out of the training: they exceed the context of the draft model "
            f"{student.name}, {room} tokens, or its vocabulary of {known}",
            UserWarning,
            stacklevel=2,
        )
    return found


class DraftRecipe:
    """Trains a draft model, see the module.

    Args:
        student: the draft model.
        target: the model that it drafts for; it is not changed.
        settings: complete.
        ends: the token ids that end a text.

    Attributes:
        AGREEMENT: what `Found.agreement` holds.
        module: the draft model, in float32.
    """

    AGREEMENT: tuple[str, ...] = ("likeliest token is the text's", "1 - total variation distance")

    def __init__(self, student: Student, target: TransformersTarget, settings: DraftSettings, ends: Sequence[int]):
        self.module, self.target, self.ends = student.model, target.model, tuple(ends)
        self.context_length = student.context_length
        self._unknown = [*range(target.info.vocab_size, student.vocab_size)]  # tokens that the target has no row of
        self.device: torch.device = target.device
        self.on_policy = settings.on_policy
        self.divergence = losses.LOSSES[DIVERGENCES[settings.divergence]]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def batch(self, texts: Sequence[Text]) -> Sequences:
        """The batch of some texts."""
        return Sequences(texts, self.device)

    def loss(self, batch: Sequences, generator: torch.Generator | None = None) -> Found:
        """The loss of a batch, whose answers are the draft model's own in a share of the batches."""
        batch = self.with_answers(batch, generator)
        with torch.no_grad():
            p = batch.logits(self.target)
        q = batch.logits(self.module)
        size = min(p.shape[-1], q.shape[-1])  # one of them may have rows for no token
        p, q = p[:, :size], q[:, :size]
        loss = (batch.weights * self.divergence(q, p, batch.next)).sum()
        with torch.no_grad():
            right = (q.argmax(-1) == batch.next).float()
            accepted = 1 - losses.tv(q, p, batch.next)
            agreement = torch.stack([(batch.weights * each).sum() for each in (right, accepted)])
        return Found(loss, agreement)

    def with_answers(self, batch: Sequences, generator: torch.Generator | None) -> Sequences:
        """The batch, or in a share of the batches the same prompts with answers of the draft model."""
        if generator is not None and float(torch.rand((), generator=generator)) < self.on_policy:
            return self.own_answers(batch, int(torch.randint(1 << 62, (), generator=generator)))
        return batch

    @torch.no_grad()
    def own_answers(self, batch: Sequences, seed: int) -> Sequences:
        """The same prompts with answers that the draft model samples at temperature 1.

        Args:
            batch: of texts. The answers are at most as long as its longest one, and as the context has room for.
            seed: of the answers.
        """
        size = max(len(text.prompt) for text in batch.texts)
        rows = [[0] * (size - len(text.prompt)) + text.prompt for text in batch.texts]
        seen = [[0] * (size - len(text.prompt)) + [1] * len(text.prompt) for text in batch.texts]
        self.module.eval()
        with (
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
            _without_generation_config(self.module),
        ):
            torch.manual_seed(seed)
            found: Tensor = self.module.generate(
                input_ids=torch.tensor(rows, device=self.device),
                attention_mask=torch.tensor(seen, device=self.device),
                max_new_tokens=min(max(len(text.answer) for text in batch.texts), self.context_length - size),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=list(self.ends) or None,
                pad_token_id=self.ends[0] if self.ends else 0,
                suppress_tokens=self._unknown or None,
            )
        self.module.train()
        torch.clear_autocast_cache()  # in older torch, it would give the loss weights as cast here, without gradients
        answers = [self._ended(row) for row in found[:, size:].tolist()]
        own = [Text(text.index, text.prompt, new, 1.0) for text, new in zip(batch.texts, answers, strict=True)]
        return Sequences(own, self.device)

    def _ended(self, tokens: list[int]) -> list[int]:
        """The tokens up to the first that ends a text."""
        length = next((place + 1 for place, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tokens[:length]


@contextmanager
def _without_generation_config(model: Any) -> Iterator[None]:
    """Within the block, `generate` of a model of Transformers applies what it is told alone, such as no penalties."""
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before
