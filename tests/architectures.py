"""Tiny random models of many architectures, and what leapahead must make of each.

Seeded; weights large enough that logits are not flat and greedy text is not one token. Windows are smaller than the
texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCABULARY = 120

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = {"head_dim": 8}
SLIDING = {"sliding_window": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
ALL_HEADS = {"num_key_value_heads": 4}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
DECODER = {"is_decoder": True}
BART = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "forced_eos_token_id": None,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
LINEAR_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
KDA = {"linear_head_dim": 8, "linear_num_heads": 4}
SHARED_EXPERT = {"shared_expert_intermediate_size": 16}
NOPE = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
BOTH_WINDOWS = {"layer_types": ["hybrid_sliding", "hybrid"]}
RELATIVE = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@dataclass(frozen=True)
class Architecture:
    """A tiny model.

    Attributes:
        config: name of the configuration class, without "Config".
        expect: what the target must be capable of: "tree", "chain", "replay" (chains, by `replay`) or "plain".
        options: for the configuration, beyond `SIZES`.
    """

    name: str
    config: str
    expect: str = "tree"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        """Whether the installed Transformers has the family."""
        return f"{self.config}Config" in INSTALLED

    def build(self, dtype: torch.dtype = torch.float32, attention: str | None = None, seed: int = 0) -> Any:
        config = getattr(transformers, f"{self.config}Config")(**{**SIZES, **self.options})
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        return sharpen(model).to(dtype)


def sharpen(model: Any) -> Any:
    """The model with matrices whose logits are not flat."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not name.endswith(("A_log", "conv1d.weight")):
                fan = 1 if "embed" in name or "wte" in name or "wpe" in name else parameter.shape[-1]
                parameter.normal_(std=(0.1 if fan == 1 else 1.5) * fan**-0.5)
    return model


def _of(name: str, config: str, *options: dict[str, Any], expect: str = "tree", **more: Any) -> Architecture:
    merged: dict[str, Any] = {}
    for each in (*options, more):
        merged.update(each)
    return Architecture(name, config, expect, merged)


EVERY = [
    _of("llama", "Llama"),
    _of("llama_mqa", "Llama", num_key_value_heads=1, tie_word_embeddings=True),
    _of("mistral", "Mistral", SLIDING),
    _of("ministral", "Ministral", SLIDING, MIXED, HEAD),
    _of("qwen2", "Qwen2"),
    _of("qwen2_sliding", "Qwen2", SLIDING, use_sliding_window=True, max_window_layers=1),
    _of("qwen2_moe", "Qwen2Moe", EXPERTS, shared_expert_intermediate_size=16),
    _of("qwen3", "Qwen3", HEAD),
    _of("qwen3_moe", "Qwen3Moe", EXPERTS, HEAD),
    _of("gemma", "Gemma", HEAD),
    _of("gemma2", "Gemma2", SLIDING, HEAD),
    _of("gemma3", "Gemma3Text", SLIDING, HEAD, MIXED),
    _of(
        "gemma3n",
        "Gemma3nText",
        SLIDING,
        HEAD,
        num_hidden_layers=4,
        intermediate_size=[48] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    _of(
        "gemma4",
        "Gemma4Text",
        SLIDING,
        HEAD,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        global_head_dim=8,
    ),
    _of("phi", "Phi", partial_rotary_factor=0.5),
    _of("phi3", "Phi3", SLIDING),
    _of("phimoe", "Phimoe", LOCAL_EXPERTS, SLIDING),
    _of("gpt2", "GPT2", OLD),
    _of(
        "gpt_neo",
        "GPTNeo",
        expect="chain",
        attention_types=[[["global", "local"], 1]],
        num_layers=2,
        num_heads=4,
        window_size=8,
    ),
    _of("gpt_neox", "GPTNeoX"),
    _of("gptj", "GPTJ", OLD, rotary_dim=4),
    _of("gpt_bigcode", "GPTBigCode", OLD),
    _of("codegen", "CodeGen", OLD, rotary_dim=4, n_ctx=256),
    _of("opt", "OPT", ffn_dim=48, word_embed_proj_dim=32),
    _of("bloom", "Bloom", expect="chain", n_layer=2, n_head=4),
    _of("falcon", "Falcon"),
    _of("falcon_new", "Falcon", new_decoder_architecture=True, num_kv_heads=2),
    _of("falcon_alibi", "Falcon", expect="chain", alibi=True, multi_query=False, bias=True, parallel_attn=False),
    _of("mpt", "Mpt", expect="chain", d_model=32, n_heads=4, n_layers=2, max_seq_len=256),
    _of("stablelm", "StableLm"),
    _of("starcoder2", "Starcoder2", SLIDING),
    _of("olmo", "Olmo"),
    _of("olmo2", "Olmo2"),
    _of("olmo3", "Olmo3", SLIDING, MIXED),
    _of("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _of("cohere", "Cohere"),
    _of("cohere2", "Cohere2", SLIDING, MIXED),
    _of("granite", "Granite"),
    _of("granitemoe", "GraniteMoe", LOCAL_EXPERTS),
    _of("glm", "Glm", HEAD),
    _of("glm4", "Glm4", HEAD),
    _of("glm4_moe", "Glm4Moe", ROUTED, HEAD),
    _of("deepseek_v2", "DeepseekV2", ROUTED, LATENT, ALL_HEADS),
    _of("deepseek_v3", "DeepseekV3", ROUTED, LATENT, ALL_HEADS),
    _of("mixtral", "Mixtral", LOCAL_EXPERTS, SLIDING),
    _of(
        "dbrx",
        "Dbrx",
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=256,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    ),
    _of("gpt_oss", "GptOss", LOCAL_EXPERTS, SLIDING, HEAD, MIXED),
    _of("smollm3", "SmolLM3", no_rope_layers=[1, 0]),
    _of(
        "llama4",
        "Llama4Text",
        LOCAL_EXPERTS,
        HEAD,
        attention_chunk_size=8,
        intermediate_size_mlp=48,
        num_experts_per_tok=1,
        layer_types=["chunked_attention", "full_attention"],
        attn_temperature_tuning=False,
    ),
    _of(
        "llama4_tuned",
        "Llama4Text",
        LOCAL_EXPERTS,
        HEAD,
        expect="chain",
        attention_chunk_size=8,
        intermediate_size_mlp=48,
        num_experts_per_tok=1,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        floor_scale=8,
    ),
    _of("persimmon", "Persimmon", ALL_HEADS),
    _of("helium", "Helium", HEAD),
    _of("ernie4_5", "Ernie4_5", HEAD),
    _of("exaone4", "Exaone4", SLIDING, MIXED),
    _of("nemotron", "Nemotron"),
    _of("arcee", "Arcee"),
    _of("seed_oss", "SeedOss", HEAD),
    _of(
        "modernbert_decoder",
        "ModernBertDecoder",
        local_attention=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _of("biogpt", "BioGpt"),
    _of("xglm", "XGLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=48),
    _of("bert", "Bert", DECODER),
    _of("roberta", "Roberta", DECODER),
    _of("bart", "Bart", BART, expect="chain"),
    _of("mamba", "Mamba", expect="plain", state_size=8),
    _of("mamba2", "Mamba2", expect="replay", state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    _of("falcon_mamba", "FalconMamba", expect="plain", state_size=8),
    _of(
        "jamba",
        "Jamba",
        expect="plain",
        mamba_d_state=8,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
    ),
    _of(
        "qwen3_next",
        "Qwen3Next",
        HYBRID,
        EXPERTS,
        HEAD,
        LINEAR_HEADS,
        SHARED_EXPERT,
        expect="replay",
    ),
    _of(
        "recurrent_gemma",
        "RecurrentGemma",
        expect="plain",
        num_hidden_layers=3,
        lru_width=32,
        attention_window_size=8,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    _of("rwkv", "Rwkv", expect="replay", attention_hidden_size=32, context_length=256),
    _of(
        "falcon_h1",
        "FalconH1",
        expect="replay",
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
        head_dim=8,
    ),
    _of("bamba", "Bamba", MAMBA, expect="replay", attn_layer_indices=[1]),
    _of("lfm2", "Lfm2", expect="replay", layer_types=["conv", "full_attention"]),
    _of(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        MAMBA,
        LOCAL_EXPERTS,
        expect="replay",
        layer_types=["mamba", "attention"],
        shared_intermediate_size=16,
    ),
    _of(
        "minimax",
        "MiniMax",
        LOCAL_EXPERTS,
        HEAD,
        expect="replay",
        layer_types=["linear_attention", "full_attention"],
        block_size=8,
    ),
    _of(
        "zamba2",
        "Zamba2",
        expect="plain",  # bounds its time steps, but not in a forward of one token
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=1,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        num_key_value_heads=4,
        attention_head_dim=16,
        chunk_size=8,
        use_shared_attention_adapter=False,
    ),
    _of("qwen3_5", "Qwen3_5Text", HYBRID, HEAD, LINEAR_HEADS, expect="replay"),
    _of("qwen3_5_moe", "Qwen3_5MoeText", HYBRID, HEAD, LINEAR_HEADS, EXPERTS, SHARED_EXPERT, expect="replay"),
    _of(
        "olmo_hybrid",
        "OlmoHybrid",
        HYBRID,
        LINEAR_HEADS,
        expect="replay",
        linear_num_key_heads=4,
        linear_value_head_dim=16,
    ),
    _of("lfm2_moe", "Lfm2Moe", EXPERTS, expect="replay", layer_types=["conv", "full_attention"], num_dense_layers=1),
    _of(
        "lfm3",
        "Lfm3",
        HEAD,
        SLIDING,
        expect="replay",
        num_hidden_layers=3,
        layer_types=["conv", "sliding_attention", "full_attention"],
    ),
    _of("kimi_linear", "KimiLinear", HYBRID, ALL_HEADS, KDA, LOCAL_EXPERTS, NOPE, expect="replay", n_group=1),
    _of(
        "bailing_hybrid",
        "BailingHybrid",
        HYBRID,
        HEAD,
        ALL_HEADS,
        LOCAL_EXPERTS,
        NOPE,
        expect="replay",
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_mtp_layers=0,
    ),
    _of(
        "zaya",
        "Zaya",
        HEAD,
        SLIDING,
        BOTH_WINDOWS,
        expect="replay",
        num_experts=4,
        moe_intermediate_size=16,
        router_hidden_size=16,
    ),
    _of("xlstm", "xLSTM", expect="replay", hidden_size=128, num_heads=4, chunk_size=8),
    _of(
        "inkling",
        "InklingText",
        HEAD,
        RELATIVE,
        BOTH_WINDOWS,
        expect="replay",
        mlp_layer_types=["dense", "sparse"],
        n_shared_experts=1,
        logits_mup_width_multiplier=1.0,
    ),
    _of("inkling2", "Inkling2Text", HEAD, RELATIVE, BOTH_WINDOWS, expect="replay", unpadded_vocab_size=VOCABULARY),
    _of(
        "nemotron_h",
        "NemotronH",
        HEAD,
        expect="plain",  # as Zamba2
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=1,
        chunk_size=8,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    _of(
        "zamba",
        "Zamba",
        ALL_HEADS,
        expect="plain",  # its forward of several tokens begins with an empty state, as that of all of Mamba-1
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        mamba_d_state=8,
    ),
    _of(
        "qwen4_exp",
        "Qwen4ExpText",
        HEAD,
        LINEAR_HEADS,
        EXPERTS,
        SHARED_EXPERT,
        expect="plain",
        layer_types=["linear_attention", "indexed_attention"],
        hc_count=2,
        hc_lowrank=8,
        ple_layer_ids=[1],
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=1,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
    ),
    _of(
        "deepseek_v4",
        "DeepseekV4",
        expect="plain",
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        hc_mult=2,
        sliding_window=8,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=4,
        partial_rotary_factor=0.5,
    ),
    _of(
        "deepseek_v32",
        "DeepseekV32",
        ROUTED,
        LATENT,
        ALL_HEADS,
        expect="plain",
        index_topk=8,
        index_n_heads=16,  # with few, scores are often all zero, and ties are broken by the length of the cache
        index_head_dim=16,
    ),
    _of("exaone", "Exaone"),
    _of("sarvam_moe", "SarvamMoE", ROUTED, HEAD),
    _of("sarvam_mla", "SarvamMLA", ROUTED, LATENT, ALL_HEADS, q_lora_rank=None),
    _of("apertus1p5", "Apertus1p5Text"),
    _of(
        "dory",  # layers that are run twice, with entries of their own each time
        "Dory",
        HEAD,
        SLIDING,
        num_hidden_layers=4,
        n_input_layers=1,
        n_recurrent_layers=2,
        n_output_layers=1,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    _of(
        "lara_mini",
        "LaraMini",
        SLIDING,
        HEAD,
        EXPERTS,
        LINEAR_HEADS,
        SHARED_EXPERT,
        expect="replay",
        num_hidden_layers=3,
        layer_types=["linear_attention", "sliding_attention", "full_attention"],
    ),
    _of(
        "inkling2_loop",
        "Inkling2LoopText",
        HEAD,
        RELATIVE,
        expect="replay",
        num_hidden_layers=4,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
        unpadded_vocab_size=VOCABULARY,
        loop_layer_index_start=1,
        loop_layer_index_end=3,
        loop_num_passes=2,
        n_layers_per_attn_res_block=1,
    ),
]

# A family may be missing in the oldest supported version of Transformers. Names, so that no family is imported here.
INSTALLED = frozenset(dir(transformers))
ARCHITECTURES = [each for each in EVERY if each.installed]
BY_NAME = {each.name: each for each in ARCHITECTURES}

# One of each kind, for tests that need not run on all: plain attention, a window, two kinds of layers with soft caps,
# learned positions, ALiBi, windows by slot, experts, latent attention, chunks, and states of several kinds.
FAST = ("llama", "gemma2", "gpt2", "bloom", "gpt_neo", "mixtral", "llama4", "mamba", "qwen3_next", "deepseek_v32")
