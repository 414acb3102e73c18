"""What each kind of head predicts, and the weights that it starts with.

    Medusa    head k predicts token i + 2 + k from the target's last state alone         (2401.10774, section 2.2)
    EAGLE     one row continues the target's states; they and the tokens are its goals   (2401.15077, section 3.2)
    EAGLE-3   the row is continued from its own state several times                      (2503.01840, section 3.2)

The loss of a later depth has a smaller weight, `DECAY` to the power of the depth. The embedding is the target's and is
not trained, and so is EAGLE's output layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leapahead.core.errors import BadParameter
from leapahead.drafters.heads import modules
from leapahead.drafters.heads.config import EAGLE, EAGLE3, MEDUSA, HeadConfig
from leapahead.training import losses
from leapahead.training.attention import DraftedAttention
from leapahead.training.batches import Batch
from leapahead.training.features import TrainingTarget
from leapahead.training.settings import Settings
from leapahead.training.texts import Text

DECAY = 0.8
LOGITS_SHARE = 0.1  # of EAGLE's loss, beside that of the states
NOISE = 0.2  # width of the uniform noise that is added to EAGLE's states
SMALL = 0.01  # standard deviation of the weights of a new layer's outputs, which change the residual stream little


class Goal(NamedTuple):
    """What the rows of one depth should predict.

    Attributes:
        tokens: int64 [rows], of the text, as ids of the draft vocabulary; -1 outside of it.
        logits: float [rows, draft vocabulary], the target's.
        states: float [rows, hidden_size], the target's last hidden states, which give these logits.
    """

    tokens: Tensor
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

    def __init__(
        self, target: TrainingTarget, config: HeadConfig, settings: Settings, vocabulary: Tensor | None
    ) -> None:
        self.target, self.config, self.vocabulary = target, config, vocabulary
        self.depths = settings.depths
        self.loss_of = losses.LOSSES[settings.loss]
        torch.manual_seed(settings.seed)
        self.module: Any = modules.make(config).float().to(target.device)
        self._draft_ids = None
        if vocabulary is not None:
            self._draft_ids = torch.full((target.vocab_size,), -1, device=target.device)
            self._draft_ids[vocabulary] = torch.arange(len(vocabulary), device=target.device)
        self.start()

    @property
    def layers(self) -> tuple[int, ...]:
        """The hidden states that training reads: the head's, then the target's last one, which gives its logits."""
        count = self.target.layers
        own = self.config.layers_of(count) if self.config.kind == EAGLE3 else ()
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
        return self.loss_of(logits, goal.logits, goal.tokens), logits.argmax(-1)

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
        """What the target predicts after the positions that a row of any depth predicts after.

        Returns:
            The goals, and int64 [texts, tokens], the place of each position among them.
        """
        text, position = batch.rows[0], batch.rows[1] + 1
        place = torch.zeros_like(batch.tokens)
        place[text, position] = torch.arange(len(text), device=place.device)
        tokens, states = batch.tokens[text, position + 1], batch.last[text, position]
        with torch.autocast(self.target.device.type, enabled=False):
            logits = self.target.logits(states).float()
        if self.vocabulary is not None and self._draft_ids is not None:
            tokens, logits = self._draft_ids[tokens], logits[:, self.vocabulary]
        return Goal(tokens, logits, states), place

    def rows_of_output(self) -> Tensor:
        """A copy of the rows of the target's output layer that belong to the draft vocabulary."""
        output = self.target.output.float()
        return output.clone() if self.vocabulary is None else output[self.vocabulary]


class MedusaRecipe(Recipe):
    """See the module."""

    def start(self) -> None:
        for layer in self.module.lm_heads:
            layer.weight = nn.Parameter(self.rows_of_output())

    def states(self, batch: Batch, generator: torch.Generator | None) -> Iterator[Tensor]:
        for block in self.module.blocks:
            yield block(batch.last[:, batch.first :])

    def logits(self, depth: int, states: Tensor) -> Tensor:
        found: Tensor = self.module.lm_heads[depth](states)
        return found


class RowRecipe(Recipe):
    """What EAGLE and EAGLE-3 share: a row for every token, continued from its own state at later depths."""

    def start(self) -> None:
        self.module.embed_tokens.weight = nn.Parameter(self.target.embedding, requires_grad=False)
        for layer in self.module.layers:
            nn.init.normal_(layer.self_attn.o_proj.weight, std=SMALL)
            nn.init.normal_(layer.mlp.down_proj.weight, std=SMALL)

    @abstractmethod
    def read(self, states: Tensor) -> Tensor:
        """The target's states that the head reads, as those of its rows; of a batch or of one text."""

    def states(self, batch: Batch, generator: torch.Generator | None) -> Iterator[Tensor]:
        states = self.read(batch.states)
        if generator is not None:
            states = self.noisy(states, generator)
        count, first, visible = states.shape[1], batch.first, batch.visible
        tokens = F.pad(batch.tokens, (0, self.depths))
        positions = torch.arange(count, device=states.device)[None]
        attend = DraftedAttention(visible)
        states = self.module(tokens[:, 1 : 1 + count], states, positions, attend)[:, first:]
        yield states
        attend.select(visible[:, first:])
        for depth in range(1, self.depths):
            attend.descend()
            shown = tokens[:, 1 + depth + first : 1 + depth + count]
            states = self.module(shown, states, positions[:, first:] + depth, attend)
            yield states

    def noisy(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """The states with what is added to them in training."""
        return states

    def logits(self, depth: int, states: Tensor) -> Tensor:
        found: Tensor = self.module.logits(states)
        return found


class EagleRecipe(RowRecipe):
    """See the module."""

    def start(self) -> None:
        super().start()
        self.module.lm_head.weight = nn.Parameter(self.target.output, requires_grad=False)

    def read(self, states: Tensor) -> Tensor:
        return states

    def noisy(self, states: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.rand(states.shape, generator=generator, device=generator.device).to(states.device)
        return states + (noise - 0.5) * NOISE

    def logits(self, depth: int, states: Tensor) -> Tensor:
        return self.target.logits(states)

    def row_loss(self, depth: int, states: Tensor, goal: Goal) -> tuple[Tensor, Tensor]:
        loss, best = super().row_loss(depth, states, goal)
        return losses.smooth_l1(states.float(), goal.states) + LOGITS_SHARE * loss, best


class Eagle3Recipe(RowRecipe):
    """See the module."""

    def start(self) -> None:
        super().start()
        self.module.lm_head.weight = nn.Parameter(self.rows_of_output())

    def read(self, states: Tensor) -> Tensor:
        found: Tensor = self.module.fuse(states[..., : -self.target.hidden_size])
        return found


RECIPES: dict[str, type[Recipe]] = {MEDUSA: MedusaRecipe, EAGLE: EagleRecipe, EAGLE3: Eagle3Recipe}


def recipe(target: TrainingTarget, settings: Settings, texts: Sequence[Text]) -> Recipe:
    """The recipe of a kind of head.

    Args:
        target: that the head is for.
        settings: complete.
        texts: to train on; the draft vocabulary has their most frequent tokens.

    Raises:
        BadParameter: layers that the target does not have.
    """
    vocabulary = draft_vocabulary(texts, settings.draft_vocab, target)
    size = target.vocab_size if vocabulary is None else len(vocabulary)
    return RECIPES[settings.kind](target, _config(target, settings, size), settings, vocabulary)


def draft_vocabulary(texts: Sequence[Text], size: int, target: TrainingTarget) -> Tensor | None:
    """The target's ids of the most frequent tokens of the answers, in order; None for all tokens.

    Where the answers have fewer than `size` tokens, the first ids of the vocabulary fill it up.
    """
    if not size or size >= target.vocab_size:
        return None
    counts = Counter(token for text in texts for token in text.answer)
    frequent = [token for token, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0]))]
    chosen = list(dict.fromkeys((*frequent, *range(target.vocab_size))))[:size]
    return torch.tensor(sorted(chosen), device=target.device)


def _config(target: TrainingTarget, settings: Settings, size: int) -> HeadConfig:
    common: dict[str, Any] = {
        "kind": settings.kind,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": size,
        "target": target.name,
    }
    if settings.kind == MEDUSA:
        return HeadConfig(**common, depths=settings.depths)
    layers = (settings.layers or _usual_layers(target.layers)) if settings.kind == EAGLE3 else ()
    config = HeadConfig(**common, layers=layers, bias=settings.kind == EAGLE, decoder=_decoder(target))
    config.layers_of(target.layers)  # refuses what the target does not have
    return config


def _usual_layers(count: int) -> tuple[int, ...]:
    """Three hidden states of a target with so many layers: EAGLE-3's own where the target is deep enough.

    Raises:
        BadParameter: it has a single layer.
    """
    if count < 2:
        raise BadParameter("the target has a single layer, and EAGLE-3 reads three hidden states; train medusa")
    if count >= 8:
        return 2, count // 2, count - 3
    return (1, count // 2, count - 1) if count >= 4 else (0, 1, 2)


def _decoder(target: TrainingTarget) -> dict[str, Any]:
    """The fields of the head's Llama layer, of the target's shape where the target has such layers."""
    config = target.config
    size = target.hidden_size
    heads = getattr(config, "num_attention_heads", None) or max(1, size // 64)
    dim = getattr(config, "head_dim", None) or size // heads
    width = getattr(config, "intermediate_size", None)
    rope = getattr(config, "rope_parameters", None) or {}
    theta = float(rope.get("rope_theta") or 10000.0) if isinstance(rope, dict) else 10000.0
    return {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": size,
        "intermediate_size": width if isinstance(width, int) else 4 * size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-6),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 4096,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
