"""Texts side by side, and which of their rows are trained.

    text 0     p p p p|a a a a a .        p the prompt, a the answer, of which the first token is at `begin`
    text 1     . . p p|a a a . . .        . filled up
    row i      has token i + 1, the newest committed one, and the target's states up to position i
    depth s    of row i predicts token i + 2 + s

A row is trained where one drafts: its token is the last of the prompt, or of the answer. All kinds of heads share this.
The answers begin at the same place, so that what is needed of their rows alone is computed for few others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leapahead.training.features import Features
from leapahead.training.texts import Text

CLASS = 16  # tokens by which the lengths of answers side by side may differ


@dataclass(frozen=True)
class Batch:
    """Texts side by side, filled up at both ends.

    Attributes:
        tokens: int64 [texts, tokens].
        states: float32 [texts, tokens, layers * hidden_size], the target's hidden states.
        last: float32 [texts, tokens, hidden_size], the target's last hidden state, which gives its logits.
        begin: the position of the first token of every answer.
        starts, ends: of each text, the position of its first token, and the one behind its last.
        drawn: bool [texts, tokens], the rows of which some are trained; None for all.
    """

    tokens: Tensor
    states: Tensor
    last: Tensor
    begin: int
    starts: Tensor
    ends: Tensor
    drawn: Tensor | None = None

    @property
    def first(self) -> int:
        """No row before this one is trained."""
        return max(0, self.begin - 2)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Text and position of the rows that are trained: at least one token of the answer is below each."""
        row = torch.arange(self.tokens.shape[1], device=self.tokens.device)[None]
        is_trained = (row >= self.first) & (row >= self.starts[:, None]) & (row + 2 < self.ends[:, None])
        if self.drawn is not None:
            is_trained &= self.drawn
        text, position = is_trained.nonzero(as_tuple=True)
        return text, position

    def rows_at(self, depth: int) -> tuple[Tensor, Tensor]:
        """Of `rows`, those whose prediction at this depth is within the text."""
        text, position = self.rows
        inside = position + 2 + depth < self.ends[text]
        return text[inside], position[inside]

    @property
    def visible(self) -> Tensor:
        """bool [texts, rows, rows]: a row sees those of its text up to itself, and always itself."""
        row = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        causal = row[:, None] >= row
        own = row[:, None] == row
        return (causal & (row >= self.starts[:, None])[:, None]) | own


def batch_of(texts: Sequence[Text], features: Features, prompt_tokens: int, width: int) -> Batch:
    """A batch on the target's device.

    Args:
        texts: at least one.
        features: gives their hidden states, the last of which is the target's last one.
        prompt_tokens: the last tokens of each prompt that it holds.
        width: of the target's hidden states.
    """
    found = features.of(texts)
    device = found[0].device
    begin = min(prompt_tokens, max(len(text.prompt) for text in texts))
    size = begin + max(len(text.answer) for text in texts)
    tokens = torch.zeros(len(texts), size, dtype=torch.long)
    states = torch.zeros(len(texts), size, found[0].shape[-1], device=device)
    starts, ends = [], []
    for row, (text, own) in enumerate(zip(texts, found, strict=True)):
        kept = min(begin, len(text.prompt))
        starts.append(begin - kept)
        ends.append(begin + len(text.answer))
        cut = len(text.prompt) - kept
        tokens[row, starts[-1] : ends[-1]] = torch.tensor(text.tokens[cut:])
        states[row, starts[-1] : ends[-1]] = own[cut:]
    return Batch(
        tokens.to(device),
        states,
        states[..., states.shape[-1] - width :],
        begin,
        torch.tensor(starts, device=device),
        torch.tensor(ends, device=device),
    )


class Order:
    """The order in which texts are trained: every epoch another one, with texts of similar length side by side.

    A batch is a function of its number and the seed, so that a resumed training goes on with the batch that follows.

    Args:
        texts: to train on.
        size: texts of a batch.
        seed: of the order.
    """

    def __init__(self, texts: Sequence[Text], size: int, seed: int) -> None:
        self.texts, self.size, self.seed = texts, min(size, len(texts)), seed
        self._epoch, self._batches = -1, list[list[int]]()

    def __getitem__(self, number: int) -> list[Text]:
        """The texts of the batch with this number, from 0 on without end."""
        each = len(self.texts) // self.size
        epoch, place = divmod(number, each)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return [self.texts[index] for index in self._batches[place]]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch; the texts that fill no batch are left to later epochs."""
        draw = random.Random(f"{self.seed} {epoch}")
        indexes = draw.sample(range(len(self.texts)), len(self.texts) // self.size * self.size)
        indexes.sort(key=lambda index: self._size(self.texts[index], draw))
        batches = [indexes[start : start + self.size] for start in range(0, len(indexes), self.size)]
        draw.shuffle(batches)
        return batches

    @staticmethod
    def _size(text: Text, draw: random.Random) -> tuple[int, float]:
        """What texts are sorted by: about the length of the answer, whose rows take most time, then of the prompt."""
        return int(len(text.answer) / CLASS + draw.random()), len(text.prompt) + CLASS * draw.random()
