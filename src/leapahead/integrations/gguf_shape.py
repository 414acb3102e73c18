"""The shape of a Llama, from the config.json of a Hugging Face folder, and the tensors that a GGUF file of it has.

What llama.cpp would compute differently from Transformers is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leapahead.core.errors import BadParameter, Refused
from leapahead.integrations.gguf_vocabulary import ELSEWHERE, read_json

ARCHITECTURE = "LlamaForCausalLM"


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file.

    Attributes:
        heads: the number of heads whose rows are reordered, see `gguf`; 0 where the rows stay as they are.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0


@dataclass(frozen=True)
class Shape:
    """The sizes and the rotary embedding in config.json, with the defaults of Transformers for what it leaves out.

    Attributes:
        vocab, hidden, intermediate: rows of the embedding, width of a hidden state, width of the feed-forward layers.
        heads, kv_heads, head_dim: query heads, key-value heads, width of a head.
        context: greatest number of positions.
        norm_eps: epsilon of the norms.
        tied: whether the embedding is the output matrix too.
        rope: `rope_type`, `rope_theta`, and the parameters of the type.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    tied: bool
    rope: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Reads the config.json of a folder.

        Raises:
            BadParameter: there is none, or it is broken.
            Refused: it is of another architecture, or has a feature that a GGUF file of a Llama cannot express.
        """
        config = read_json(folder / "config.json", required=True)
        names = config.get("architectures") or [config.get("model_type") or "unnamed"]
        if ARCHITECTURE not in names:
            raise Refused(f"{folder} holds a {names[0]}, and only {ARCHITECTURE} can be exported: {ELSEWHERE}")
        for key, want in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("quantization_config", None),
            ("partial_rotary_factor", 1.0),
        ):
            found = config.get(key, want)
            if found != want and found is not None:
                what = key if isinstance(found, dict) else f"{key} {found!r}"
                raise Refused(f"{folder} has {what} in config.json, which cannot be exported: {ELSEWHERE}")
        try:
            heads = int(config["num_attention_heads"])
            shape = cls(
                vocab=int(config["vocab_size"]),
                hidden=int(config["hidden_size"]),
                intermediate=int(config["intermediate_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
                context=int(config.get("max_position_embeddings", 2048)),
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                tied=bool(config.get("tie_word_embeddings", False)),
                rope=_rope(folder, config),
            )
        except KeyError as error:
            raise BadParameter(f"{folder / 'config.json'} lacks {error.args[0]}: save the model again") from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise BadParameter(f"{folder / 'config.json'} is broken ({error}): save the model again") from None
        if shape.head_dim % 2 or shape.heads % shape.kv_heads:
            raise BadParameter(
                f"{folder / 'config.json'} cannot be right: {shape.heads} heads of {shape.head_dim} numbers for "
                f"{shape.kv_heads} key-value heads"
            )
        return shape

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The name of every tensor in the folder and the tensor of the file, in the order of the file."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", Tensor("token_embd.weight", (self.vocab, hidden))
        for layer in range(self.layers):
            for source, name, shape, heads in (
                ("input_layernorm", "attn_norm", (hidden,), 0),
                ("self_attn.q_proj", "attn_q", (queries, hidden), self.heads),
                ("self_attn.k_proj", "attn_k", (keys, hidden), self.kv_heads),
                ("self_attn.v_proj", "attn_v", (keys, hidden), 0),
                ("self_attn.o_proj", "attn_output", (hidden, queries), 0),
                ("post_attention_layernorm", "ffn_norm", (hidden,), 0),
                ("mlp.gate_proj", "ffn_gate", (self.intermediate, hidden), 0),
                ("mlp.up_proj", "ffn_up", (self.intermediate, hidden), 0),
                ("mlp.down_proj", "ffn_down", (hidden, self.intermediate), 0),
            ):
                yield f"model.layers.{layer}.{source}.weight", Tensor(f"blk.{layer}.{name}.weight", shape, heads)
        yield "model.norm.weight", Tensor("output_norm.weight", (hidden,))
        if not self.tied:
            yield "lm_head.weight", Tensor("output.weight", (self.vocab, hidden))

    def rope_factors(self) -> Any:
        """The divisors of the rotary frequencies in Llama 3's scaling, float32 [head_dim / 2]; None for other types.

        Wavelengths up to L / high are kept, and those from L / low on are stretched by `factor`; between them the
        frequency is interpolated, linearly in L / wavelength. L is the context length of the pretraining.
        """
        if self.rope["rope_type"] != "llama3":
            return None
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        wavelengths = 2 * math.pi * self.rope["rope_theta"] ** exponents
        low, high = self.rope["low_freq_factor"], self.rope["high_freq_factor"]
        turns = self.rope["original_max_position_embeddings"] / wavelengths
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)  # share of the original frequency
        return (1 / (kept + (1 - kept) / self.rope["factor"])).astype(np.float32)


def _rope(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the rotary embedding, in either of the forms that Transformers has used."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    needs = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }.get(kind)
    if needs is None:
        raise Refused(f"{folder} has a rope of type {kind!r}, and only default, linear and llama3 can be exported")
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise Refused(f"{folder} has partial_rotary_factor {given['partial_rotary_factor']}, which cannot be exported")
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {"rope_type": kind, "rope_theta": float(theta), **{key: float(given[key]) for key in needs}}
