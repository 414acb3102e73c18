"""What the training of all kinds of heads shares: what their rows should predict, and the loss of a batch.

The loss of a later depth has a smaller weight, `DECAY` to the power of the depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leapahead.drafters.heads import networks
from leapahead.drafters.heads.config import FUSED, HeadConfig
from leapahead.training import losses
from leapahead.training.batches import Batch
from leapahead.training.features import TrainingTarget
from leapahead.training.settings import Settings

DECAY = 0.8
SMALL = 0.01  # standard deviation of the weights of a new layer's outputs, which change the residual stream little


class Goal(NamedTuple):
    """What the rows of one depth should predict.

    Attributes:
        tokens: int64 [rows], of the text, as ids of the draft vocabulary; -1 outside of it.
        before: int64 [rows], the tokens of the text in front of them, as ids of the target's vocabulary.
        logits: float [rows, draft vocabulary], the target's; without columns where the loss does not read them.
        states: float [rows, hidden_size], the target's last hidden states, which give these logits.
    """

    tokens: Tensor
    before: Tensor
    logits: Tensor
    states: Tensor


class Found(NamedTuple):
    """The loss of a batch.

    Attributes:
        loss: a number, with its gradient.
        agreement: [depths], how often the likeliest token was that of the text, at each depth alone.
    """

    loss: Tensor
    agreement: Tensor


class Recipe(ABC):
    """Trains one kind of head.

    Args:
        target: that the head is for.
        config: of the head.
        settings: complete.
        vocabulary: int64, the target's ids of the tokens that the head can propose, in order; None for all.

    Attributes:
        module: the network, in float32, on the target's device.
        depths: that one row is trained to predict.
    """

    AGREEMENT: tuple[str, ...] = ()

    def __init__(
        self, target: TrainingTarget, config: HeadConfig, settings: Settings, vocabulary: Tensor | None
    ) -> None:
        self.target, self.config, self.vocabulary = target, config, vocabulary
        self.depths = settings.depths
        self.loss_of = losses.LOSSES[settings.loss]
        torch.manual_seed(settings.seed)
        self.module: Any = networks.make(config).float().to(target.device)
        self._draft_ids = None
        if vocabulary is not None:
            self._draft_ids = torch.full((target.vocab_size,), -1, device=target.device)
            self._draft_ids[vocabulary] = torch.arange(len(vocabulary), device=target.device)
        self.start()

    @property
    def layers(self) -> tuple[int, ...]:
        """The hidden states that training reads: the head's, then the target's last one, which gives its logits."""
        count = self.target.layers
        own = self.config.layers_of(count) if self.config.kind in FUSED else ()
        return (*own, count)

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        return self.target.device

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    @abstractmethod
    def start(self) -> None:
        """Sets the weights that are not random at the start, and those that are not trained."""

    @abstractmethod
    def states(self, batch: Batch, generator: torch.Generator | None) -> Iterator[Tensor]:
        """For each depth, what the output layer reads of the rows from `batch.first` on: [texts, rows, hidden_size].

        Args:
            batch: of texts.
            generator: of noise; None for none.
        """

    @abstractmethod
    def logits(self, depth: int, states: Tensor) -> Tensor:
        """Of `states` of a depth, float [..., draft vocabulary]."""

    def row_loss(self, depth: int, states: Tensor, goal: Goal) -> tuple[Tensor, Tensor]:
        """The loss of every row of a depth, and its likeliest token."""
        logits = self.logits(depth, states).float()
        return self.loss_of(logits, goal.logits, goal.tokens), logits.max(-1).indices  # on a CPU faster than argmax

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Found:
        """The loss of a batch. Rows whose token the head cannot propose count as misses, and are not trained."""
        goals, place = self._goals(batch)
        total, agreement = batch.states.new_zeros(()), []
        for depth, states in enumerate(self.states(batch, generator)):
            text, position = batch.rows_at(depth)
            chosen = place[text, position + 1 + depth]
            known = goals.tokens[chosen] >= 0
            if not known.any():
                break
            goal = Goal(*(each[chosen[known]] for each in goals))
            loss, best = self.row_loss(depth, states[text, position - batch.first][known], goal)
            total = total + DECAY**depth * loss.mean()
            agreement.append((best == goal.tokens).sum() / len(text))
        agreement += [torch.zeros_like(total)] * (self.depths - len(agreement))
        return Found(total, torch.stack(agreement).detach())

    @torch.no_grad()
    def _goals(self, batch: Batch) -> tuple[Goal, Tensor]:
        """What the target predicts after the positions that a row of any depth predicts after, drawn or not.

        Returns:
            The goals, and int64 [texts, tokens], the place of each position among them.
        """
        text, position = replace(batch, drawn=None).rows
        position = position + 1
        place = torch.zeros_like(batch.tokens)
        place[text, position] = torch.arange(len(text), device=place.device)
        tokens, before = batch.tokens[text, position + 1], batch.tokens[text, position]
        states = batch.last[text, position]
        logits = states.new_zeros(len(states), 0)
        if self.loss_of is not losses.ce:
            with torch.autocast(self.target.device.type, enabled=False):
                logits = self.target.logits(states).float()
            logits = logits if self.vocabulary is None else logits[:, self.vocabulary]
        if self._draft_ids is not None:
            tokens = self._draft_ids[tokens]
        return Goal(tokens, before, logits, states), place

    @staticmethod
    def start_layer(layer: Any) -> None:
        """Makes a new decoder layer one that changes little."""
        nn.init.normal_(layer.self_attn.o_proj.weight, std=SMALL)
        nn.init.normal_(layer.mlp.down_proj.weight, std=SMALL)

    def rows_of_output(self) -> Tensor:
        """A copy of the rows of the target's output layer that belong to the draft vocabulary."""
        output = self.target.output.float()
        return output.clone() if self.vocabulary is None else output[self.vocabulary]
