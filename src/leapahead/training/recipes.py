"""What each kind of head predicts, and the weights that it starts with.

    Medusa    head k predicts token i + 2 + k from the target's last state alone         (2401.10774, section 2.2)
    EAGLE     one row continues the target's states; they and the tokens are its goals   (2401.15077, section 3.2)
    EAGLE-3   the row is continued from its own state several times                      (2503.01840, section 3.2)
    P-EAGLE   it is continued by masks, at every place of a text                         (2602.01469)

Hydra, DFlash and DFlash 2 are in `block_recipes`. The embedding is the target's and is not trained, and so is EAGLE's
output layer.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leapahead.core.errors import BadParameter
from leapahead.drafters.heads.config import (
    DFLASH,
    DFLASH2,
    EAGLE,
    EAGLE3,
    FUSED,
    HYDRA,
    HYDRA_PREFIX,
    HYDRAS,
    MEDUSA,
    PEAGLE,
    BlocksConfig,
    DFlash2Config,
    DFlashConfig,
    EagleConfig,
    HeadConfig,
)
from leapahead.training import losses
from leapahead.training.attention import DraftedAttention
from leapahead.training.batches import Batch
from leapahead.training.block_recipes import DFlash2Recipe, DFlashRecipe, HydraRecipe
from leapahead.training.features import TrainingTarget
from leapahead.training.recipe import Goal, Recipe
from leapahead.training.settings import Settings
from leapahead.training.texts import Text

LOGITS_SHARE = 0.1  # of EAGLE's loss, beside that of the states
NOISE = 0.2  # width of the uniform noise that is added to EAGLE's states


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
            self.start_layer(layer)

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
            states = self.module(*self.drafted(shown, states), positions[:, first:] + depth, attend)
            yield states

    def drafted(self, tokens: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens and the states of drafted rows, [texts or places, rows] and [texts or places, rows, hidden_size].

        Args:
            tokens: int64 [..., rows], those that are drafted.
            above: float [..., rows, hidden_size], the outputs of the rows above them.
        """
        return tokens, above

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


class ParallelRecipe(Eagle3Recipe):
    """See the module."""

    config: EagleConfig

    def drafted(self, tokens: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(tokens, self.config.mask_token), self.module.masked().expand_as(above)


RECIPES: dict[str, type[Recipe]] = {
    MEDUSA: MedusaRecipe,
    EAGLE: EagleRecipe,
    EAGLE3: Eagle3Recipe,
    PEAGLE: ParallelRecipe,
    HYDRA: HydraRecipe,
    HYDRA_PREFIX: HydraRecipe,
    DFLASH: DFlashRecipe,
    DFLASH2: DFlash2Recipe,
}
PREFIX_BLOCKS = 4  # residual layers of each head of Hydra++ (2402.05109, section 4)
MOST_LAYERS = 5  # of DFlash, which has a third of the target's
TAPS, GROUP, SELECTED, RANK = 2, 16, 16, 256  # of DFlash 2, as published; the rank is at most the hidden size


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
    return RECIPES[settings.kind](target, config_of(target, settings, size), settings, vocabulary)


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


def config_of(target: TrainingTarget, settings: Settings, size: int) -> HeadConfig:
    """The configuration of a head that proposes `size` tokens.

    Raises:
        BadParameter: layers that the target does not have.
    """
    common: dict[str, Any] = {
        "kind": settings.kind,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": size,
        "target": target.name,
    }
    if settings.kind == MEDUSA:
        return BlocksConfig(**common, depths=settings.depths)
    if settings.kind in HYDRAS:
        is_prefixed = settings.kind == HYDRA_PREFIX
        return BlocksConfig(
            **common,
            depths=settings.depths,
            blocks=PREFIX_BLOCKS if is_prefixed else 1,
            bias=True,
            decoder=_decoder(target) if is_prefixed else None,
        )
    common["decoder"] = decoder = _decoder(target)
    if settings.kind in FUSED:
        common["layers"] = settings.layers or _usual_layers(target.layers)
    if settings.kind in (PEAGLE, DFLASH, DFLASH2):
        common |= {"depths": settings.depths, "mask_token": target.vocab_size - 1}
    if settings.kind in (DFLASH, DFLASH2):
        decoder["num_hidden_layers"] = max(1, min(MOST_LAYERS, target.layers // 3))
        decoder["model_type"] = "qwen3"
    config: HeadConfig
    if settings.kind == DFLASH2:
        config = DFlash2Config(
            **common,
            taps=TAPS,
            group=math.gcd(GROUP, target.hidden_size),
            candidates=min(SELECTED, size),
            selector_rank=min(RANK, target.hidden_size),
        )
    elif settings.kind == DFLASH:
        config = DFlashConfig(**common)
    else:
        config = EagleConfig(**common, bias=settings.kind == EAGLE)
    config.layers_of(target.layers, "give others, as layers=I,J,K")  # refuses what the target does not have
    return config


def _usual_layers(count: int) -> tuple[int, ...]:
    """Three hidden states of a target with so many layers: EAGLE-3's own where the target is deep enough.

    Raises:
        BadParameter: it has a single layer.
    """
    if count < 2:
        raise BadParameter("the target has a single layer, and the head reads three hidden states; train medusa")
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
