"""Tiny random encoder-decoder models of several architectures."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from architectures import VOCABULARY, sharpen

SPECIAL: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART: dict[str, Any] = {
    **SPECIAL,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,  # tied ones make a random model repeat its last token
}
T5: dict[str, Any] = {
    **SPECIAL,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    # Small, so that distances in a text reach every kind of bucket.
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
# Configuration class, options, and fields of the generation config.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "t5": ("T5Config", T5, {}),
    "mt5": ("MT5Config", {**T5, "feed_forward_proj": "gated-gelu"}, {}),
    "bart": (
        "BartConfig",
        {**BART, "decoder_start_token_id": 2},
        {"forced_bos_token_id": 1, "forced_eos_token_id": 2, "bad_words_ids": [[7], [8, 9]]},
    ),
    "mbart": ("MBartConfig", {**BART, "decoder_start_token_id": 5}, {"forced_bos_token_id": 6}),
    "marian": (
        "MarianConfig",
        {**BART, "decoder_start_token_id": 0, "scale_embedding": True},
        {"bad_words_ids": [[0]], "forced_eos_token_id": 2, "suppress_tokens": [11, 12]},
    ),
    "pegasus": ("PegasusConfig", {**BART, "decoder_start_token_id": 0}, {}),
    "blenderbot": ("BlenderbotConfig", {**BART, "decoder_start_token_id": 1}, {}),
    "umt5": ("UMT5Config", T5, {}),  # a bias of positions in every layer: chains
    "m2m": ("M2M100Config", {**BART, "decoder_start_token_id": 2}, {}),  # positions cannot be named: chains
}


def build(
    name: str, dtype: torch.dtype = torch.float32, attention: str | None = None, seed: int = 1, **options: Any
) -> Any:
    """A model of this name."""
    kind, config, generation = MODELS[name]
    torch.manual_seed(seed)
    made = getattr(transformers, kind)(**{**config, **options})
    model = transformers.AutoModelForSeq2SeqLM.from_config(made, attn_implementation=attention).eval()
    model = sharpen(model)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.ndim >= 2:  # texts that repeat themselves less
                parameter.mul_(6.0 if "embed_positions" in part else 1.6)
    for field, value in generation.items():
        setattr(model.generation_config, field, value)
    return model.to(dtype)


def own_text(model: Any, prompt: list[int], length: int, **options: Any) -> list[int]:
    """The new tokens of Transformers' greedy `generate`."""
    with torch.no_grad():
        found = model.generate(torch.tensor([prompt]), max_new_tokens=length, num_beams=1, do_sample=False, **options)
    return [int(token) for token in found[0, 1:]]
