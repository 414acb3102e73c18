"""Tiny random GGUF files of many architectures of llama.cpp, written tensor by tensor.

Seeded; f32; weights large enough that logits are not flat and greedy text is not one token. Windows are smaller than
the texts. Shapes are in llama.cpp's order: inputs first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_models import folder

WINDOW = 8
CONTEXT = 256
WIDTH, INNER = 32, 64  # hidden size, feed-forward size; whole blocks of quantised types
HEADS, KV_HEADS, HEAD = 4, 2, 8
EXPERTS = 4
STATE, KERNEL = 16, 4  # of state-space layers, which are twice as wide
END = "<|end|>"


def _letters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [
        chr(byte if byte in plain else 256 + [b for b in range(256) if b not in plain].index(byte))
        for byte in range(256)
    ]


TOKENS = [*_letters(), "ab", END]
VOCABULARY = len(TOKENS)


class Maker:
    """Writes one file. Names of keys are given without the architecture."""

    def __init__(
        self, arch: str, file: Path, layers: int = 2, width: int = WIDTH, words: bool = True, **keys: Any
    ) -> None:
        self.arch, self.layers, self.width, self.rng = arch, layers, width, np.random.default_rng(7)
        self.writer = gguf.GGUFWriter(file, arch)
        self.writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        if words:
            self._add_vocabulary()
        else:
            self.writer.add_tokenizer_model("no_vocab")
            self.writer.add_vocab_size(VOCABULARY)
        self.keys(context_length=CONTEXT, embedding_length=width, block_count=layers)
        self.keys(**{"feed_forward_length": INNER, "attention__head_count": HEADS, **keys})

    def _add_vocabulary(self) -> None:
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("default")
        self.writer.add_token_list(TOKENS)
        self.writer.add_token_types([gguf.TokenType.NORMAL] * (VOCABULARY - 1) + [gguf.TokenType.CONTROL])
        self.writer.add_token_merges(["a b"])
        self.writer.add_eos_token_id(VOCABULARY - 1)
        self.writer.add_add_bos_token(False)

    def keys(self, **values: Any) -> None:
        """Adds keys; two underscores of a name stand for a dot."""
        for name, value in values.items():
            key = f"{self.arch}.{name.replace('__', '.')}"
            if isinstance(value, list):
                self.writer.add_array(key, value)
            elif isinstance(value, bool):
                self.writer.add_bool(key, value)
            elif isinstance(value, int):
                self.writer.add_uint32(key, value)
            else:
                self.writer.add_float32(key, value)

    def put(self, name: str, values: np.ndarray[Any, Any]) -> None:
        self.writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))

    def weight(self, name: str, *shape: int, gain: float = 1.5) -> None:
        """A random matrix, or a stack of them."""
        self.put(f"{name}.weight", self.rng.normal(0, gain * shape[0] ** -0.5, shape[::-1]))

    def vector(self, name: str, *shape: int, around: float = 0.0, spread: float = 0.3) -> None:
        self.put(name, self.rng.normal(around, spread, shape[::-1]))

    def norm(self, name: str, size: int | None = None, bias: bool = False, around: float = 1.0) -> None:
        size = size or self.width
        self.vector(f"{name}.weight", size, around=around)
        if bias:
            self.vector(f"{name}.bias", size)

    def ends(self, bias: bool = False, output: bool = True, embedding: float = 0.3, norm: str = "output_norm") -> None:
        """The embedding, the last norm and the output matrix; without `output` the embedding is used for both."""
        self.put("token_embd.weight", self.rng.normal(0, embedding, (VOCABULARY, self.width)))
        self.norm(norm, bias=bias)
        if output:
            self.weight("output", self.width, VOCABULARY, gain=3.0)

    def blocks(self) -> Iterator[str]:
        for index in range(self.layers):
            yield f"blk.{index}."

    def attention(self, at: str, kv: int = KV_HEADS, head: int = HEAD, bias: bool = False, norms: bool = False) -> None:
        for name, size in (("q", HEADS * head), ("k", kv * head), ("v", kv * head)):
            self.weight(f"{at}attn_{name}", WIDTH, size)
            if bias:
                self.vector(f"{at}attn_{name}.bias", size)
        self.weight(f"{at}attn_output", HEADS * head, WIDTH)
        if norms:
            self.norm(f"{at}attn_q_norm", head)
            self.norm(f"{at}attn_k_norm", head)

    def fused_attention(self, at: str, kv: int = HEADS, bias: bool = False) -> None:
        size = WIDTH + 2 * kv * HEAD
        self.weight(f"{at}attn_qkv", WIDTH, size, gain=2.5)
        self.weight(f"{at}attn_output", WIDTH, WIDTH)
        if bias:
            self.vector(f"{at}attn_qkv.bias", size)
            self.vector(f"{at}attn_output.bias", WIDTH)

    def feed_forward(
        self, at: str, gate: bool = True, bias: bool = False, suffix: str = "", inner: int = INNER
    ) -> None:
        if gate:
            self.weight(f"{at}ffn_gate{suffix}", WIDTH, inner)
        self.weight(f"{at}ffn_up{suffix}", WIDTH, inner)
        self.weight(f"{at}ffn_down{suffix}", inner, WIDTH)
        if bias:
            self.vector(f"{at}ffn_up{suffix}.bias", inner)
            self.vector(f"{at}ffn_down{suffix}.bias", WIDTH)

    def experts(self, at: str, inner: int = INNER, bias: bool = False) -> None:
        self.weight(f"{at}ffn_gate_inp", WIDTH, EXPERTS, gain=3.0)
        self.weight(f"{at}ffn_gate_exps", WIDTH, inner, EXPERTS)
        self.weight(f"{at}ffn_up_exps", WIDTH, inner, EXPERTS)
        self.weight(f"{at}ffn_down_exps", inner, WIDTH, EXPERTS)
        if bias:
            self.vector(f"{at}ffn_gate_inp.bias", EXPERTS)
            self.vector(f"{at}ffn_gate_exps.bias", inner, EXPERTS)
            self.vector(f"{at}ffn_up_exps.bias", inner, EXPERTS)
            self.vector(f"{at}ffn_down_exps.bias", WIDTH, EXPERTS)

    def mamba(self, at: str, rank: int, norms: bool = False) -> None:
        wide = 2 * WIDTH
        self.weight(f"{at}ssm_in", WIDTH, 2 * wide)
        self.weight(f"{at}ssm_conv1d", KERNEL, wide)
        self.vector(f"{at}ssm_conv1d.bias", wide)
        self.weight(f"{at}ssm_x", wide, rank + 2 * STATE)
        self.weight(f"{at}ssm_dt", rank, wide)
        self.vector(f"{at}ssm_dt.bias", wide)
        self.put(f"{at}ssm_a", -np.exp(self.rng.normal(-1, 1, (wide, STATE))))
        self.vector(f"{at}ssm_d", wide, around=1.0)
        self.weight(f"{at}ssm_out", wide, WIDTH)
        if norms:
            self.norm(f"{at}ssm_dt_norm", rank)
            self.norm(f"{at}ssm_b_norm", STATE)
            self.norm(f"{at}ssm_c_norm", STATE)

    def mamba2(self, at: str, heads: int, groups: int) -> None:
        wide, convolved = 2 * WIDTH, 2 * WIDTH + 2 * groups * STATE
        self.weight(f"{at}ssm_in", WIDTH, wide + convolved + heads)
        self.weight(f"{at}ssm_conv1d", KERNEL, convolved)
        self.vector(f"{at}ssm_conv1d.bias", convolved)
        self.vector(f"{at}ssm_dt.bias", heads)
        self.put(f"{at}ssm_a", -np.exp(self.rng.normal(-1, 1, (heads, 1))))
        self.vector(f"{at}ssm_d", 1, heads, around=1.0)
        self.vector(f"{at}ssm_norm.weight", wide // groups, groups, around=1.0)
        self.weight(f"{at}ssm_out", wide, WIDTH)


# ---------------------------------------------------------------------------------------------------- attention

RMS: dict[str, Any] = {"attention__layer_norm_rms_epsilon": 1e-6}
LAYER: dict[str, Any] = {"attention__layer_norm_epsilon": 1e-5}
GROUPED: dict[str, Any] = {"attention__head_count_kv": KV_HEADS}
ROTARY: dict[str, Any] = {"rope__dimension_count": HEAD, "rope__freq_base": 10000.0}
SIZED: dict[str, Any] = {"attention__key_length": HEAD, "attention__value_length": HEAD}
SLIDING: dict[str, Any] = {"attention__sliding_window": WINDOW}
ROUTED: dict[str, Any] = {"expert_count": EXPERTS, "expert_used_count": 2}


def llama(file: Path, **options: Any) -> Maker:
    m = Maker("llama", file, **RMS, **GROUPED, **ROTARY, **options)
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.attention(at)
        m.norm(f"{at}ffn_norm")
        m.feed_forward(at)
    return m


def mixtral(file: Path) -> Maker:
    m = Maker("llama", file, **RMS, **GROUPED, **ROTARY, **ROUTED)
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.attention(at)
        m.norm(f"{at}ffn_norm")
        m.experts(at)
    return m


def qwen2vl(file: Path) -> Maker:
    """Multi-axis rotary positions."""
    m = Maker("qwen2vl", file, **RMS, **GROUPED, **ROTARY, rope__dimension_sections=[2, 1, 1, 0])
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.attention(at, bias=True)
        m.norm(f"{at}ffn_norm")
        m.feed_forward(at)
    return m


def qwen2moe(file: Path) -> Maker:
    m = Maker("qwen2moe", file, **RMS, **GROUPED, **ROTARY, **ROUTED)
    m.keys(expert_feed_forward_length=16, expert_shared_feed_forward_length=24)
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.attention(at, bias=True)
        m.norm(f"{at}ffn_norm")
        m.experts(at, 16)
        m.vector(f"{at}ffn_gate_inp_shexp.weight", WIDTH)
        m.feed_forward(at, suffix="_shexp", inner=24)
    return m


def qwen3(file: Path) -> Maker:
    m = Maker("qwen3", file, **RMS, **GROUPED, **ROTARY, **SIZED)
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.attention(at, norms=True)
        m.norm(f"{at}ffn_norm")
        m.feed_forward(at)
    return m


def gemma2(file: Path) -> Maker:
    """Sliding windows in every other layer; soft-capped logits."""
    m = Maker("gemma2", file, 4, **RMS, **GROUPED, **SIZED, **SLIDING)
    m.keys(attn_logit_softcapping=5.0, final_logit_softcapping=10.0)
    m.ends(output=False)
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.attention(at)
        m.norm(f"{at}post_attention_norm", around=4.0)
        m.norm(f"{at}ffn_norm")
        m.feed_forward(at)
        m.norm(f"{at}post_ffw_norm", around=4.0)
    return m


def gemma3(file: Path) -> Maker:
    """Sliding windows, with other rotary frequencies than the full layers."""
    m = Maker("gemma3", file, 4, **RMS, **GROUPED, **SIZED, **SLIDING, rope__freq_base=1e6)
    m.keys(attention__sliding_window_pattern=[True, True, False, True])
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.attention(at, norms=True)
        m.norm(f"{at}post_attention_norm", around=2.0)
        m.norm(f"{at}ffn_norm")
        m.feed_forward(at)
        m.norm(f"{at}post_ffw_norm", around=2.0)
    return m


def gemma4(file: Path) -> Maker:
    """Sliding windows; heads of two sizes; per-layer inputs; the last two layers share keys and values of others."""
    m = Maker("gemma4", file, 4, **RMS, **GROUPED, **SLIDING, rope__freq_base=1e6)
    m.keys(
        attention__sliding_window_pattern=[True, False, True, False],
        attention__shared_kv_layers=2,
        attention__key_length=2 * HEAD,
        attention__value_length=2 * HEAD,
        attention__key_length_swa=HEAD,
        attention__value_length_swa=HEAD,
        rope__dimension_count=2 * HEAD,
        rope__dimension_count_swa=HEAD,
        embedding_length_per_layer_input=8,
        final_logit_softcapping=10.0,
    )
    m.ends()
    m.put("per_layer_token_embd.weight", m.rng.normal(0, 0.5, (VOCABULARY, 4 * 8)))
    m.weight("per_layer_model_proj", WIDTH, 4 * 8)
    m.norm("per_layer_proj_norm", 8)
    m.vector("rope_freqs.weight", HEAD, around=1.0, spread=0.1)
    for index, at in enumerate(m.blocks()):
        m.norm(f"{at}attn_norm")
        m.attention(at, head=2 * HEAD if index % 2 else HEAD, norms=True)
        m.norm(f"{at}post_attention_norm", around=2.0)
        m.norm(f"{at}ffn_norm")
        m.feed_forward(at)
        m.norm(f"{at}post_ffw_norm", around=2.0)
        m.weight(f"{at}inp_gate", WIDTH, 8)
        m.weight(f"{at}proj", 8, WIDTH)
        m.norm(f"{at}post_norm")
    return m


def cohere2(file: Path) -> Maker:
    """Sliding windows, no rotary positions in full layers, parallel blocks."""
    m = Maker("cohere2", file, 4, **LAYER, **GROUPED, **ROTARY, **SLIDING, logit_scale=1.0)
    m.ends(output=False)
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.attention(at)
        m.feed_forward(at)
    return m


def gpt_oss(file: Path) -> Maker:
    """Sliding windows in every other layer, attention sinks, experts with biases."""
    m = Maker("gpt-oss", file, 4, **RMS, **GROUPED, **ROTARY, **SIZED, **SLIDING, **ROUTED)
    m.keys(expert_feed_forward_length=32)
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.attention(at, bias=True)
        m.vector(f"{at}attn_output.bias", WIDTH)
        m.vector(f"{at}attn_sinks.weight", HEADS)
        m.norm(f"{at}post_attention_norm")
        m.experts(at, 32, bias=True)
    return m


def phi3(file: Path) -> Maker:
    """A sliding window in the metadata, which llama.cpp ignores."""
    m = Maker("phi3", file, **RMS, **GROUPED, **ROTARY, **SLIDING)
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.fused_attention(at, KV_HEADS)
        m.norm(f"{at}ffn_norm")
        m.weight(f"{at}ffn_up", WIDTH, 2 * INNER)
        m.weight(f"{at}ffn_down", INNER, WIDTH)
    return m


def mpt(file: Path) -> Maker:
    """ALiBi."""
    m = Maker("mpt", file, **LAYER, attention__max_alibi_bias=8.0, attention__clamp_kqv=4.0)
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.fused_attention(at)
        m.norm(f"{at}ffn_norm")
        m.feed_forward(at, gate=False)
    return m


def bloom(file: Path) -> Maker:
    """ALiBi."""
    m = Maker("bloom", file, **LAYER)
    m.ends(bias=True)
    m.norm("token_embd_norm", bias=True)
    for at in m.blocks():
        m.norm(f"{at}attn_norm", bias=True)
        m.fused_attention(at, bias=True)
        m.norm(f"{at}ffn_norm", bias=True)
        m.feed_forward(at, gate=False, bias=True)
    return m


def gpt2(file: Path) -> Maker:
    """Learned position embeddings."""
    m = Maker("gpt2", file, **LAYER)
    m.ends(bias=True)
    m.put("position_embd.weight", m.rng.normal(0, 0.3, (CONTEXT, WIDTH)))
    for at in m.blocks():
        m.norm(f"{at}attn_norm", bias=True)
        m.fused_attention(at, bias=True)
        m.norm(f"{at}ffn_norm", bias=True)
        m.feed_forward(at, gate=False, bias=True)
    return m


def gptneox(file: Path) -> Maker:
    """Parallel blocks; rotary positions in half of each head."""
    m = Maker("gptneox", file, **LAYER, use_parallel_residual=True, rope__dimension_count=HEAD // 2)
    m.ends(bias=True)
    for at in m.blocks():
        m.norm(f"{at}attn_norm", bias=True)
        m.fused_attention(at, bias=True)
        m.norm(f"{at}ffn_norm", bias=True)
        m.feed_forward(at, gate=False, bias=True)
    return m


def falcon(file: Path) -> Maker:
    """Parallel blocks; multi-query attention."""
    m = Maker("falcon", file, **LAYER, attention__head_count_kv=1)
    m.ends(bias=True)
    for at in m.blocks():
        m.norm(f"{at}attn_norm", bias=True)
        m.fused_attention(at, kv=1)
        m.feed_forward(at, gate=False)
    return m


LATENT, NARROW, ROTATED, PLAIN, VALUE = 16, 16, 8, 8, 12  # of keys and values, of queries; parts of a key; a value


def _latent(arch: str, file: Path) -> Maker:
    m = Maker(arch, file, **RMS, **ROUTED, attention__head_count_kv=1, rope__dimension_count=ROTATED)
    m.keys(
        attention__q_lora_rank=NARROW,
        attention__kv_lora_rank=LATENT,
        attention__key_length=LATENT + ROTATED,
        attention__value_length=LATENT,
        attention__key_length_mla=PLAIN + ROTATED,
        attention__value_length_mla=VALUE,
        leading_dense_block_count=1,
        expert_feed_forward_length=16,
        expert_shared_count=1,
        expert_weights_scale=1.0,
        expert_weights_norm=True,
        expert_gating_func=2,
    )
    m.ends()
    for index, at in enumerate(m.blocks()):
        m.norm(f"{at}attn_norm")
        m.weight(f"{at}attn_q_a", WIDTH, NARROW)
        m.norm(f"{at}attn_q_a_norm", NARROW)
        m.weight(f"{at}attn_q_b", NARROW, HEADS * (PLAIN + ROTATED))
        m.weight(f"{at}attn_kv_a_mqa", WIDTH, LATENT + ROTATED)
        m.norm(f"{at}attn_kv_a_norm", LATENT)
        m.weight(f"{at}attn_k_b", PLAIN, LATENT, HEADS)
        m.weight(f"{at}attn_v_b", LATENT, VALUE, HEADS)
        m.weight(f"{at}attn_output", HEADS * VALUE, WIDTH)
        m.norm(f"{at}ffn_norm")
        if index == 0:
            m.feed_forward(at)
        else:
            m.experts(at, 16)
            m.vector(f"{at}exp_probs_b.bias", EXPERTS)
            m.feed_forward(at, suffix="_shexp", inner=16)
    return m


def deepseek2(file: Path) -> Maker:
    """Multi-head latent attention; experts."""
    return _latent("deepseek2", file)


def deepseek32(file: Path) -> Maker:
    """The same, with sparse attention: an indexer selects `WINDOW` tokens for each token."""
    m, heads, size = _latent("deepseek32", file), 16, 64
    m.keys(attention__indexer__head_count=heads, attention__indexer__key_length=size, attention__indexer__top_k=WINDOW)
    for at in m.blocks():
        m.norm(f"{at}indexer.k_norm", size, bias=True)
        m.weight(f"{at}indexer.proj", WIDTH, heads)
        m.weight(f"{at}indexer.attn_k", WIDTH, size)
        m.weight(f"{at}indexer.attn_q_b", NARROW, heads * size)
    return m


# ---------------------------------------------------------------------------------------------------- recurrent


def mamba(file: Path) -> Maker:
    m = Maker("mamba", file, **RMS, attention__head_count=0)
    m.keys(ssm__conv_kernel=KERNEL, ssm__inner_size=2 * WIDTH, ssm__state_size=STATE, ssm__time_step_rank=4)
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.mamba(at, 4)
    return m


MAMBA2: dict[str, Any] = {
    "ssm__conv_kernel": KERNEL,
    "ssm__inner_size": 2 * WIDTH,
    "ssm__state_size": STATE,
    "ssm__time_step_rank": 4,
    "ssm__group_count": 2,
}


def mamba2(file: Path) -> Maker:
    m = Maker("mamba2", file, **RMS, **MAMBA2, attention__head_count=0)
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.mamba2(at, 4, 2)
    return m


def rwkv6(file: Path) -> Maker:
    m = Maker("rwkv6", file, **LAYER, attention__head_count=0, wkv__head_size=16)
    m.keys(time_mix_extra_dim=8, time_decay_extra_dim=8)
    m.ends(bias=True)
    m.norm("token_embd_norm", bias=True)
    for at in m.blocks():
        m.norm(f"{at}attn_norm", bias=True)
        m.norm(f"{at}attn_norm_2", bias=True)
        m.weight(f"{at}time_mix_w1", WIDTH, 5 * 8)
        m.weight(f"{at}time_mix_w2", 8, WIDTH, 5)
        m.vector(f"{at}time_mix_lerp_x.weight", WIDTH, 1, 1, around=0.5)
        m.vector(f"{at}time_mix_lerp_fused.weight", WIDTH, 1, 1, 5, around=0.5)
        m.vector(f"{at}time_mix_first.weight", 16, WIDTH // 16)
        m.vector(f"{at}time_mix_decay.weight", WIDTH, around=-2.0)
        m.weight(f"{at}time_mix_decay_w1", WIDTH, 8)
        m.weight(f"{at}time_mix_decay_w2", 8, WIDTH)
        for name in ("key", "value", "receptance", "gate", "output"):
            m.weight(f"{at}time_mix_{name}", WIDTH, WIDTH)
        m.norm(f"{at}time_mix_ln", bias=True)
        m.vector(f"{at}channel_mix_lerp_k.weight", WIDTH, 1, 1, around=0.5)
        m.vector(f"{at}channel_mix_lerp_r.weight", WIDTH, 1, 1, around=0.5)
        m.weight(f"{at}channel_mix_key", WIDTH, INNER)
        m.weight(f"{at}channel_mix_value", INNER, WIDTH)
        m.weight(f"{at}channel_mix_receptance", WIDTH, WIDTH)
    return m


def rwkv7(file: Path) -> Maker:
    """The head size is a multiple of 64, which llama.cpp requires."""
    ranks, width = {"decay": "w", "iclr": "a", "value_residual_mix": "v", "gate": "g"}, 64
    m = Maker("rwkv7", file, 2, width, **LAYER, attention__head_count=0, wkv__head_size=width)
    m.keys(**{f"attention__{name}_lora_rank": 8 for name in ranks})
    m.ends(bias=True)
    m.norm("token_embd_norm", bias=True)
    for at in m.blocks():
        m.norm(f"{at}attn_norm", bias=True)
        m.norm(f"{at}attn_norm_2", bias=True)
        for letter in ranks.values():
            if letter != "g":
                m.vector(f"{at}time_mix_{letter}0.weight", width)
            m.weight(f"{at}time_mix_{letter}1", width, 8)
            m.weight(f"{at}time_mix_{letter}2", 8, width)
        m.vector(f"{at}time_mix_lerp_fused.weight", width, 1, 1, 6, around=0.5)
        for name in ("k_k", "k_a", "r_k"):
            m.vector(f"{at}time_mix_{name}.weight", width, around=0.7)
        for name in ("key", "value", "receptance", "output"):
            m.weight(f"{at}time_mix_{name}", width, width)
        m.norm(f"{at}time_mix_ln", bias=True)
        m.vector(f"{at}channel_mix_lerp_k.weight", width, 1, 1, around=0.5)
        m.weight(f"{at}channel_mix_key", width, INNER)
        m.weight(f"{at}channel_mix_value", INNER, width)
    return m


# ---------------------------------------------------------------------------------------------------- hybrid


def _lfm2(file: Path, **keys: Any) -> Maker:
    m = Maker("lfm2", file, **RMS, **ROTARY, attention__head_count_kv=[0, KV_HEADS], shortconv__l_cache=3, **keys)
    m.ends(norm="token_embd_norm")
    for index, at in enumerate(m.blocks()):
        m.norm(f"{at}attn_norm")
        if index % 2:
            m.attention(at, norms=True)
        else:
            m.weight(f"{at}shortconv.conv", 3, WIDTH)
            m.weight(f"{at}shortconv.in_proj", WIDTH, 3 * WIDTH)
            m.weight(f"{at}shortconv.out_proj", WIDTH, WIDTH)
        m.norm(f"{at}ffn_norm")
        m.feed_forward(at)
    return m


def lfm2(file: Path) -> Maker:
    """Short convolutions."""
    return _lfm2(file)


def lfm2_sliding(file: Path) -> Maker:
    return _lfm2(file, **SLIDING)


def jamba(file: Path) -> Maker:
    m = Maker("jamba", file, **RMS, attention__head_count_kv=[0, KV_HEADS], **ROUTED)
    m.keys(ssm__conv_kernel=KERNEL, ssm__inner_size=2 * WIDTH, ssm__state_size=STATE, ssm__time_step_rank=4)
    m.ends()
    for index, at in enumerate(m.blocks()):
        m.norm(f"{at}attn_norm")
        if index % 2:
            m.attention(at)
        else:
            m.mamba(at, 4, norms=True)
        m.norm(f"{at}ffn_norm")
        if index % 2:
            m.experts(at)
        else:
            m.feed_forward(at)
    return m


def granitehybrid(file: Path) -> Maker:
    m = Maker("granitehybrid", file, **RMS, **MAMBA2, **ROTARY, attention__head_count_kv=[0, KV_HEADS])
    m.ends()
    for index, at in enumerate(m.blocks()):
        m.norm(f"{at}attn_norm")
        if index % 2:
            m.attention(at)
        else:
            m.mamba2(at, 4, 2)
        m.norm(f"{at}ffn_norm")
        m.feed_forward(at)
    return m


def falcon_h1(file: Path) -> Maker:
    """Attention and a state in every layer."""
    m = Maker("falcon-h1", file, **RMS, **MAMBA2, **GROUPED, **ROTARY)
    m.ends()
    for at in m.blocks():
        m.norm(f"{at}attn_norm")
        m.attention(at)
        m.mamba2(at, 4, 2)
        m.vector(f"{at}ffn_norm", WIDTH, around=1.0)
        m.feed_forward(at)
    return m


def qwen35(file: Path) -> Maker:
    """Gated delta rule; gated attention."""
    m = Maker("qwen35", file, **RMS, **GROUPED, **ROTARY, **SIZED, rope__dimension_sections=[2, 1, 1, 0])
    groups, heads = 2, 4
    wide = 2 * groups * STATE + heads * STATE
    m.keys(**MAMBA2, full_attention_interval=2)
    m.ends()
    for index, at in enumerate(m.blocks()):
        m.norm(f"{at}attn_norm")
        m.norm(f"{at}post_attention_norm")
        if index % 2:
            m.weight(f"{at}attn_q", WIDTH, 2 * HEADS * HEAD)
            m.weight(f"{at}attn_k", WIDTH, KV_HEADS * HEAD)
            m.weight(f"{at}attn_v", WIDTH, KV_HEADS * HEAD)
            m.weight(f"{at}attn_output", HEADS * HEAD, WIDTH)
            m.norm(f"{at}attn_q_norm", HEAD)
            m.norm(f"{at}attn_k_norm", HEAD)
        else:
            m.weight(f"{at}attn_qkv", WIDTH, wide)
            m.weight(f"{at}attn_gate", WIDTH, heads * STATE)
            m.weight(f"{at}ssm_conv1d", KERNEL, wide)
            m.vector(f"{at}ssm_dt.bias", heads)
            m.put(f"{at}ssm_a", -np.exp(m.rng.normal(-1, 1, heads)))
            m.weight(f"{at}ssm_beta", WIDTH, heads)
            m.weight(f"{at}ssm_alpha", WIDTH, heads)
            m.norm(f"{at}ssm_norm", STATE)
            m.weight(f"{at}ssm_out", heads * STATE, WIDTH)
        m.feed_forward(at)
    return m


def qwen3next(file: Path) -> Maker:
    """Gated delta rule; gated attention; experts."""
    m = Maker("qwen3next", file, **RMS, **GROUPED, **ROTARY, **SIZED, **ROUTED, **MAMBA2)
    m.keys(full_attention_interval=2, expert_feed_forward_length=16, expert_shared_feed_forward_length=24)
    groups, heads = 2, 4
    wide = 2 * groups * STATE + heads * STATE
    m.ends()
    for index, at in enumerate(m.blocks()):
        m.norm(f"{at}attn_norm")
        m.norm(f"{at}post_attention_norm")
        if index % 2:
            m.weight(f"{at}attn_q", WIDTH, 2 * HEADS * HEAD)
            m.weight(f"{at}attn_k", WIDTH, KV_HEADS * HEAD)
            m.weight(f"{at}attn_v", WIDTH, KV_HEADS * HEAD)
            m.weight(f"{at}attn_output", HEADS * HEAD, WIDTH)
            m.norm(f"{at}attn_q_norm", HEAD)
            m.norm(f"{at}attn_k_norm", HEAD)
        else:
            m.weight(f"{at}attn_qkv", WIDTH, wide)
            m.weight(f"{at}attn_gate", WIDTH, heads * STATE)
            m.weight(f"{at}ssm_conv1d", KERNEL, wide)
            m.vector(f"{at}ssm_dt.bias", heads)
            m.put(f"{at}ssm_a", -np.exp(m.rng.normal(-1, 1, heads)))
            m.weight(f"{at}ssm_ba", WIDTH, 2 * heads)
            m.norm(f"{at}ssm_norm", STATE)
            m.weight(f"{at}ssm_out", heads * STATE, WIDTH)
        m.experts(at, 16)
        m.vector(f"{at}ffn_gate_inp_shexp.weight", WIDTH)
        m.feed_forward(at, suffix="_shexp", inner=24)
    return m


def nemotron_h(file: Path) -> Maker:
    """Each layer is one of a state, attention and a feed-forward block."""
    counts = {"attention__head_count_kv": [0, KV_HEADS, 0, 0], "feed_forward_length": [0, 0, INNER, 0]}
    m = Maker("nemotron_h", file, 4, **LAYER, **RMS, **MAMBA2, **SIZED, **ROTARY, **counts)
    m.ends()
    for index, at in enumerate(m.blocks()):
        m.norm(f"{at}attn_norm")
        if index == 1:
            m.attention(at)
        elif index == 2:
            m.feed_forward(at, gate=False)
        else:
            m.mamba2(at, 4, 2)
    return m


def plamo2(file: Path) -> Maker:
    m = Maker("plamo2", file, **RMS, **ROTARY, **SIZED, attention__head_count_kv=[0, KV_HEADS])
    rank, heads, wide = 64, 4, 2 * WIDTH
    m.keys(**{**MAMBA2, "ssm__group_count": 0})
    m.ends()
    for index, at in enumerate(m.blocks()):
        m.norm(f"{at}attn_norm")
        if index % 2:
            m.weight(f"{at}attn_qkv", WIDTH, (HEADS + 2 * KV_HEADS) * HEAD)
            m.weight(f"{at}attn_output", HEADS * HEAD, WIDTH)
            m.vector(f"{at}attn_q_norm.weight", HEAD, HEADS, around=1.0)
            m.vector(f"{at}attn_k_norm.weight", HEAD, KV_HEADS, around=1.0)
        else:
            m.weight(f"{at}ssm_in", WIDTH, 2 * wide)
            m.weight(f"{at}ssm_conv1d", KERNEL, wide)
            m.weight(f"{at}ssm_x", wide, rank + 2 * STATE)
            m.weight(f"{at}ssm_dt", rank, heads)
            m.vector(f"{at}ssm_dt.bias", heads)
            m.put(f"{at}ssm_a", -np.exp(m.rng.normal(-1, 1, heads)))
            m.vector(f"{at}ssm_d", heads, around=1.0)
            m.weight(f"{at}ssm_out", wide, WIDTH)
            for name, size in (("dt", rank), ("b", STATE), ("c", STATE)):
                m.vector(f"{at}ssm_{name}_norm", size, around=1.0)
        m.vector(f"{at}post_attention_norm", WIDTH, around=1.0)
        m.norm(f"{at}ffn_norm")
        m.weight(f"{at}ffn_up", WIDTH, 2 * INNER)
        m.weight(f"{at}ffn_down", INNER, WIDTH)
        m.vector(f"{at}post_ffw_norm", WIDTH, around=1.0)
    return m


def minimax_01(file: Path) -> Maker:
    """Lightning attention, which is linear; experts."""
    m = Maker("minimax-01", file, **RMS, **GROUPED, **ROTARY, **SIZED, **ROUTED, full_attention_interval=2)
    m.keys(residual_scale=1.0)
    m.ends()
    for index, at in enumerate(m.blocks()):
        m.norm(f"{at}attn_norm")
        if index % 2:
            m.attention(at)
        else:
            m.norm(f"{at}attn_norm_2", HEADS * HEAD)
            m.weight(f"{at}attn_qkv", WIDTH, 3 * HEADS * HEAD)
            m.weight(f"{at}attn_gate", WIDTH, HEADS * HEAD)
            m.weight(f"{at}attn_output", HEADS * HEAD, WIDTH)
        m.norm(f"{at}ffn_norm")
        m.experts(at)
    return m


# ---------------------------------------------------------------------------------------------------- not causal models


def bert(file: Path) -> Maker:
    """An encoder without an output matrix."""
    m = Maker("bert", file, **LAYER, attention__causal=False)
    m.writer.add_token_type_count(2)
    m.put("token_embd.weight", m.rng.normal(0, 0.3, (VOCABULARY, WIDTH)))
    m.put("position_embd.weight", m.rng.normal(0, 0.3, (CONTEXT, WIDTH)))
    m.put("token_types.weight", m.rng.normal(0, 0.3, (2, WIDTH)))
    m.norm("token_embd_norm", bias=True)
    for at in m.blocks():
        m.attention(at, kv=HEADS, bias=True)
        m.norm(f"{at}attn_output_norm", bias=True)
        m.feed_forward(at, gate=False, bias=True)
        m.norm(f"{at}layer_output_norm", bias=True)
    return m


def bidirectional(file: Path) -> Maker:
    """A Llama with bidirectional attention."""
    return llama(file, attention__causal=False)


def wordless(file: Path) -> Maker:
    """A Llama without a vocabulary."""
    return llama(file, words=False)


@dataclass(frozen=True)
class Architecture:
    """A small model.

    Attributes:
        stateful: it has a recurrent state, which cannot discard tokens.
        alone: llama.cpp computes one sequence at a time.
    """

    make: Callable[[Path], Maker]
    stateful: bool = False
    alone: bool = False

    @property
    def name(self) -> str:
        return self.make.__name__

    def path(self) -> Path:
        return written(self.make)


@cache
def written(make: Callable[[Path], Maker]) -> Path:
    path = folder() / f"{make.__name__}.gguf"
    writer = make(path).writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ARCHITECTURES = [
    *map(Architecture, (llama, mixtral, qwen2vl, qwen2moe, qwen3, gemma2, gemma3, gemma4, cohere2, gpt_oss, phi3)),
    *map(Architecture, (mpt, bloom, gpt2, gptneox, falcon, deepseek2, deepseek32)),
    *(Architecture(make, stateful=True) for make in (mamba, mamba2, rwkv6, rwkv7)),
    *(Architecture(make, stateful=True) for make in (lfm2, lfm2_sliding, jamba, granitehybrid, falcon_h1, qwen35)),
    *(Architecture(make, stateful=True) for make in (qwen3next, nemotron_h, minimax_01)),
    Architecture(plamo2, stateful=True, alone=True),
]
BY_NAME = {each.name: each for each in ARCHITECTURES}
