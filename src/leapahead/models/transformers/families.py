"""What a model's configuration says of its attention: windows, context, state. Knows configurations, not tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leapahead.core.errors import Refused
from leapahead.core.tree import UNLIMITED


@dataclass(frozen=True)
class Pattern:
    """Which committed tokens a layer's attention reaches back to, by the distance of positions.

    Attributes:
        window: only positions less than this far away; None for all.
        chunk: only positions in the same chunk of this size; None for all.
    """

    window: int | None = None
    chunk: int | None = None


# Attention implementations that take a mask of our own making, and whether they want it boolean.
MASKS = {"sdpa": True, "eager": False}

# Layers without attention: they keep nothing, so they need no mask and no cache.
STATELESS_LAYERS = {"moe", "mlp", "dummy"}


def text_config(model: Any) -> Any:
    """The configuration of the language part of a model."""
    return model.config.get_text_config(decoder=True)


def attention_implementation(model: Any) -> str:
    """The name of the attention implementation.

    Raises:
        Refused: one that cannot be given a tree mask.
    """
    name = str(text_config(model)._attn_implementation)
    if name not in MASKS:
        raise Refused(
            f"attention implementation {name!r} cannot be told which tokens of a tree see each other; load the model "
            'with attn_implementation="sdpa", or call model.set_attn_implementation("sdpa")'
        )
    return name


def patterns(config: Any) -> dict[str, Pattern] | None:
    """The attention patterns of the layers by name, or None if some layer is not plain attention over a KV cache.

    The same rule as Transformers' `create_masks_for_generate`: by `layer_types` where there are some, else one for all.
    """
    window, chunk = _get(config, "sliding_window"), _get(config, "attention_chunk_size")
    known = {
        "full_attention": Pattern(),
        "sliding_attention": Pattern(window=window),
        "chunked_attention": Pattern(chunk=chunk),
    }
    types = _get(config, "layer_types")
    if types is not None:
        kinds = dict.fromkeys(kind for kind in types if kind not in STATELESS_LAYERS)
        return {kind: known[kind] for kind in kinds} if set(kinds) <= set(known) else None
    if window is not None:
        return {"sliding_attention": known["sliding_attention"]}
    if chunk is not None:
        return {"chunked_attention": known["chunked_attention"]}
    return {"full_attention": known["full_attention"]}


def context_length(config: Any) -> int:
    """Greatest number of tokens of a sequence; `UNLIMITED` where positions are only distances (ALiBi)."""
    if config.model_type == "bloom" or (config.model_type == "falcon" and config.alibi):
        return UNLIMITED
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length")
    length = next((int(value) for name in names if (value := _get(config, name)) is not None), UNLIMITED)
    rope = _get(config, "rope_parameters") or {}
    for parameters in [rope, *(each for each in rope.values() if isinstance(each, dict))]:
        if parameters.get("rope_type") == "longrope":
            # Beyond this length every position's rotation changes, that of cached tokens included, so that neither
            # a cache nor a draft across the border has a meaning.
            length = min(length, int(parameters.get("original_max_position_embeddings", length)))
    return length


def counts_slots(config: Any) -> bool:
    """Whether attention layers take distances or scales from cache slots, where only long texts would show it.

    In a chain slot and position are the same; in a tree they are not.
    """
    if config.model_type == "gpt_neo":  # its local layers' window
        return True
    return config.model_type == "llama4_text" and bool(config.attn_temperature_tuning)


def _get(config: Any, name: str) -> Any:
    return getattr(config, name, None)
