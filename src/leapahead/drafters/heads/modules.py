"""The networks of trained heads, for inference and for training. Parameters have the names of the published weights.

    Medusa   head k: lm_head_k(x + SiLU(W_k x) ...), x the target's last hidden state     (2401.10774, section 2.1)
    Eagle    fc([embedding, state]) -> one Llama layer without its first norm             (2401.15077, figure 6)
    Eagle3   fc([low, middle, high states]) = state; the layer reads [embedding, state]   (2503.01840, section 3.1)

`Eagle` and `Eagle3` are `RowModule`s: row i has token i + 1 and the state of position i, and its output predicts token
i + 2. The output of a row is the state of the row that is drafted below it. Attention is a function that is passed in,
so that the same layers serve a cache with a token tree, and training over whole texts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from leapahead.drafters.heads.config import BlocksConfig, EagleConfig

# (layer, q [batch, heads, rows, dim], k and v [batch, key heads, rows, dim]) -> [batch, heads, rows, dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Angles = tuple[Tensor, Tensor]  # cosine and sine, each [batch, rows, dim]


class ResidualBlock(nn.Module):
    """x + SiLU(W x), several times. W is zero at first, so that a new head predicts what its output layer does."""

    def __init__(self, size: int, count: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(count))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class Medusa(nn.Module):
    """Head k predicts the token k + 1 positions after the next one, from the target's last hidden state alone."""

    def __init__(self, config: BlocksConfig) -> None:
        super().__init__()
        self.config = config
        blocks = (ResidualBlock(config.hidden_size, config.blocks, config.bias) for _ in range(config.depths))
        self.blocks = nn.ModuleList(blocks)
        outputs = 1 if config.shared_output else config.depths
        shape = config.hidden_size, config.draft_vocab_size
        self.lm_heads = nn.ModuleList(nn.Linear(*shape, bias=False) for _ in range(outputs))

    def forward(self, states: Tensor, depths: int | None = None) -> Tensor:
        """Logits of the first `depths` heads.

        Args:
            states: float [rows, hidden_size].

        Returns:
            float [rows, depths, draft vocabulary].
        """
        count = len(self.blocks) if depths is None else depths
        return torch.stack([self.one(k, states) for k in range(count)], dim=-2)

    def one(self, k: int, states: Tensor) -> Tensor:
        """Logits of head k, float [..., draft vocabulary]."""
        output = self.lm_heads[min(k, len(self.lm_heads) - 1)]
        found: Tensor = output(self.blocks[k](states))
        return found


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than the residual stream.

    Args:
        config: of the layer.
        width: of the input.
        norms_heads: whether queries and keys are normed, as Qwen3's are.
    """

    def __init__(self, config: LlamaConfig, width: int, norms_heads: bool = False) -> None:
        super().__init__()
        self.dim = config.head_dim
        self.scale = self.dim**-0.5
        size, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.dim, size, bias=bias)
        self.q_norm: nn.Module = LlamaRMSNorm(self.dim, config.rms_norm_eps) if norms_heads else nn.Identity()
        self.k_norm: nn.Module = LlamaRMSNorm(self.dim, config.rms_norm_eps) if norms_heads else nn.Identity()

    def forward(self, layer: int, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        q, k, v = self.projected(x, angles)
        found: Tensor = self.o_proj(attend(layer, q, k, v).transpose(1, 2).flatten(-2))
        return found

    def projected(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows, [batch, heads or key heads, rows, dim] each."""
        shape = (*x.shape[:-1], -1, self.dim)
        q, k, v = (each(x).view(shape) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), *angles)
        return q, k, v.transpose(1, 2)


class DecoderLayer(nn.Module):
    """A Llama layer. The first one of a head has an input of its own, which its module has prepared.

    Args:
        config: of the layer.
        width: of the attention's input.
        norms_input: whether the layer norms what it reads, as all but EAGLE-1's first one do.
        norms_heads: whether its queries and keys are normed: a Qwen3 layer.
    """

    def __init__(self, config: LlamaConfig, width: int, norms_input: bool = True, norms_heads: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(config, width, norms_heads)
        self.mlp = LlamaMLP(config)
        if norms_input:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, layer: int, residual: Tensor, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Adds attention over `x`, and the MLP, to the residual stream, [batch, rows, hidden_size]."""
        h = residual + self.self_attn(layer, x, angles, attend)
        found: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return found


class RowModule(nn.Module):
    """Base of the heads that compute one row for every committed token and drafted node.

    Attributes:
        llama: the configuration of its layers.
        embed_tokens: the target's embedding, or one of its own.
        lm_head: the target's output layer, or one of its own.
        d2t: int64 [draft vocabulary], what is added to a draft token's id to get the target's; None for nothing.
    """

    d2t: Tensor | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        assert config.decoder is not None, "EAGLE has decoder layers"
        self.llama = llama = LlamaConfig(**{**config.decoder, "hidden_size": config.hidden_size})
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama)
        self.layers = nn.ModuleList()

    @property
    def has_attention(self) -> bool:
        """Whether rows read those before them, so that keys and values of all committed tokens are needed."""
        return len(self.layers) > 0

    def fuse(self, states: Tensor) -> Tensor:
        """The target's hidden states, float [..., layers * target_hidden_size], as the state of a row."""
        return states

    @abstractmethod
    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and the first layer's input, of rows with these tokens and states."""

    def leave(self, states: Tensor) -> Tensor:
        """What the output layer reads of a row's state."""
        return states

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The states of rows after the last layer.

        Args:
            tokens: int64 [batch, rows].
            states: float [batch, rows, hidden_size], `fuse`d, or the outputs of earlier rows.
            positions: int64 [batch, rows].
            attend: computes the attention, and keeps keys and values where that is wanted.
        """
        residual, x = self.enter(tokens, states)
        angles = self.rotary(residual, positions)
        for index, layer in enumerate(self.layers):
            residual = layer(index, residual, x if index == 0 else layer.input_layernorm(residual), angles, attend)  # type: ignore[operator]
        return residual

    def logits(self, states: Tensor) -> Tensor:
        """float [..., draft vocabulary]."""
        found: Tensor = self.lm_head(self.leave(states))
        return found


class Eagle(RowModule):
    """EAGLE and EAGLE-2: a row's state is the target's last hidden state, which the layer learns to continue."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size, count = config.hidden_size, self.llama.num_hidden_layers
        self.fc = nn.Linear(size + config.target_hidden_size, size, bias=config.bias)
        self.layers = nn.ModuleList(DecoderLayer(self.llama, size, norms_input=index > 0) for index in range(count))

    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((self.embed_tokens(tokens), states), dim=-1))
        return x, x


class Eagle3(RowModule):
    """EAGLE-3, and 3.1: states of three layers are fused, and the first layer reads the embedding beside the state."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, self.llama.rms_norm_eps
        width = (len(config.layers) or 3) * config.target_hidden_size
        self.fc = nn.Linear(width, size, bias=config.bias)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(width, eps)
        if config.fc_norm:
            count, own = len(config.layers) or 3, config.target_hidden_size
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(own, eps) for _ in range(count))
        widths = [2 * size] + [size] * (self.llama.num_hidden_layers - 1)
        self.layers = nn.ModuleList(DecoderLayer(self.llama, each, norms_heads=config.norms_heads) for each in widths)
        self.layers[0].hidden_norm = LlamaRMSNorm(size, eps)
        self.norm = LlamaRMSNorm(size, eps)

    def fuse(self, states: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            each = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(own) for norm, own in zip(self.fc_norm, each, strict=True)], dim=-1)
        found: Tensor = self.fc(states)
        return found

    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        first: Any = self.layers[0]
        normed = first.hidden_norm(states)
        x = torch.cat((first.input_layernorm(self.embed_tokens(tokens)), normed), dim=-1)
        return normed if self.config.norm_before_residual else states, x

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        found = super().forward(tokens, states, positions, attend)
        return self.norm(found) if self.config.norm_output else found

    def leave(self, states: Tensor) -> Tensor:
        return states if self.config.norm_output else self.norm(states)


class ParallelEagle(Eagle3):
    """P-EAGLE (2602.01469): an EAGLE-3 whose drafted rows have a mask token and one learned state instead of a parent's
    output, so that one forward computes the rows of all depths."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def masked(self) -> Tensor:
        """The `fuse`d state of a drafted row, float [1, 1, hidden_size]."""
        return self.fuse(self.mask_hidden)
