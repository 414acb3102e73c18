"""The network of Hydra (2402.05109): heads like Medusa's that also read the tokens drafted before theirs.

    head k:  lm_head_k(block_k([h, e(x), e(d_1), ..., e(d_k)]))    x the last committed token, d_1 ... the drafted ones
    block_k: y = R v + SiLU(W v), v all of them side by side; then y = y + SiLU(W y)    (section 3)

h is the target's last hidden state, e its embedding. Hydra++ (section 4) has deeper blocks, and a decoder layer over
the target's states of all committed tokens, whose output takes the place of h.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from leapahead.drafters.heads.config import HYDRA_PREFIX, BlocksConfig, HeadConfig
from leapahead.drafters.heads.modules import Attend, DecoderLayer


class HydraLayer(nn.Module):
    """R x + SiLU(W x), where R is the identity unless several vectors become one.

    W is zero at first. Of several vectors, R then takes the first one, so that a new head predicts what its output
    layer does.

    Args:
        size: of a vector.
        vectors: that it reads side by side.
        bias: of W and R.
    """

    def __init__(self, size: int, vectors: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(vectors * size, size, bias=bias)
        self.residual = nn.Linear(vectors * size, size, bias=bias) if vectors > 1 else nn.Identity()
        nn.init.zeros_(self.linear.weight)
        if vectors > 1:
            nn.init.eye_(self.residual.weight)  # type: ignore[arg-type]
        for each in (self.linear, self.residual):
            if isinstance(each, nn.Linear) and each.bias is not None:
                nn.init.zeros_(each.bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.residual(x) + F.silu(self.linear(x))
        return found


class Prefix(nn.Module):
    """One Llama layer and a norm over the target's states, of Hydra++."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        assert config.decoder is not None, "Hydra++ has a decoder layer"
        llama = LlamaConfig(**{**config.decoder, "hidden_size": config.hidden_size, "num_hidden_layers": 1})
        self.rotary = LlamaRotaryEmbedding(llama)
        self.layers = nn.ModuleList([DecoderLayer(llama, config.hidden_size)])
        self.norm = LlamaRMSNorm(config.hidden_size, llama.rms_norm_eps)

    def forward(self, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        layer = self.layers[0]
        x = layer.input_layernorm(states)  # type: ignore[operator]
        found: Tensor = self.norm(layer(0, states, x, self.rotary(states, positions), attend))
        return found


class Hydra(nn.Module):
    """See the module."""

    def __init__(self, config: BlocksConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(HydraLayer(size, k + 2 if layer == 0 else 1, config.bias) for layer in range(config.blocks))
            )
            for k in range(config.depths)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(size, config.draft_vocab_size, bias=config.output_bias) for _ in range(config.depths)
        )
        if config.kind == HYDRA_PREFIX:
            self.prefix = Prefix(config)

    @property
    def has_attention(self) -> bool:
        """Whether it reads the states of all committed tokens; else the newest one alone."""
        return self.config.kind == HYDRA_PREFIX

    def read(self, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What the heads read of the target's states.

        Args:
            states: float [batch, rows, hidden_size].
            positions: int64 [batch, rows].
            attend: as of `RowModule.forward`.

        Returns:
            float [batch, rows, hidden_size].
        """
        found: Tensor = self.prefix(states, positions, attend) if self.has_attention else states
        return found

    def hidden(self, k: int, states: Tensor, tokens: Tensor) -> Tensor:
        """What the output layer of head k reads, float [..., hidden_size].

        Args:
            k: number of drafted tokens.
            states: float [..., hidden_size], `read`.
            tokens: int64 [..., k + 1], the last committed one and the drafted ones, in order.
        """
        found: Tensor = self.blocks[k](torch.cat((states, self.embed_tokens(tokens).flatten(-2)), dim=-1))
        return found

    def one(self, k: int, states: Tensor, tokens: Tensor) -> Tensor:
        """Logits of head k, float [..., draft vocabulary]; arguments as of `hidden`."""
        found: Tensor = self.lm_heads[k](self.hidden(k, states, tokens))
        return found
