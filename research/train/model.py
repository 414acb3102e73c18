"""A compact Llama whose parameter names are those of transformers' ``LlamaForCausalLM``.

The training loop needs neither caches nor attention masks, so a module of a hundred lines is faster and
easier to compile than the general one. Because names, shapes and the half-rotation layout of the rotary
embedding are the same, a state dict moves over unchanged; :func:`check_export` asserts equal logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; everything else about the architecture is fixed."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.heads

    def llama_config(self, eos_token_id: int) -> dict[str, Any]:
        """Return ``config.json`` for transformers, llama.cpp's converter and vLLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": eos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": eos_token_id,
            # Stored in bfloat16, computed in float32: it holds the weights exactly, and texts are equal in it.
            "torch_dtype": "float32",
        }


def rotary_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine tables for positions ``0 .. length - 1``, both ``[length, head_dim]``."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), 1.0 / shape.rope_theta**half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding in the half-rotation layout of transformers."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.groups = shape.heads // shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.groups > 1:
            k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """The SwiGLU feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """Embedding, layers and final norm; a module of its own so that parameter names start with ``model.``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class TinyLlama(nn.Module):
    """The model that is trained; the output matrix is the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        cos, sin = rotary_tables(shape, shape.max_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Start small, and the matrices that write to the residual stream smaller still."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = 0.02 if "embed" in name else 0.5 / math.sqrt(weight.shape[1])
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * self.shape.layers)
                nn.init.normal_(weight, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        hidden = self.model(ids, self.cos[:length], self.sin[:length])
        return F.linear(hidden, self.model.embed_tokens.weight)

    def parameter_count(self) -> int:
        """Return the number of weights; the tied embedding counts once."""
        return sum(weight.numel() for weight in self.parameters())


def check_export(model: TinyLlama, folder: Path, tolerance: float = 1e-3) -> None:
    """Assert that transformers computes the logits of ``model`` from the exported ``folder``.

    Both are compared in float32 on the same bfloat16-rounded weights, so only a difference in architecture
    can show.
    """
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = TinyLlama(model.shape).eval()
    ours.load_state_dict({key: value.bfloat16().float() for key, value in model.state_dict().items()})
    ids = torch.randint(model.shape.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gap = (exported(ids).logits - ours(ids)).abs().max().item()
    if gap > tolerance:
        raise AssertionError(f"exported model differs from the trained one by {gap}")
