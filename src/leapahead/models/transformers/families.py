"""Reads from a model's configuration what kind of model it is: attention, windows, context length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.parameters import is_whole
from leapahead.core.tree import UNLIMITED, IntArray
from leapahead.models.transformers import compacted, devices, grouped, linears, ordered, packed


@dataclass(frozen=True)
class Pattern:
    """Which earlier positions a layer attends to.

    Attributes:
        window: only positions less than this far away; None for all.
        chunk: only positions in the same chunk of this size; None for all.
    """

    window: int | None = None
    chunk: int | None = None


# Attention implementations that take a 4-D mask, and whether it is boolean.
MASKS = {"sdpa": True, "eager": False}

TUNED = "leapahead_tuned"  # field of config.json: {"method": "cllm" or "space", "from": the name of the model before}

# Layers without attention: they need neither a mask nor a cache.
STATELESS_LAYERS = {"moe", "mlp", "dummy"}
# Layers with a state that cannot discard tokens, and the attention that they have beside it.
RECURRENT_LAYERS = {
    "linear_attention": None,
    "conv": None,
    "mamba": None,
    "hybrid": "full_attention",
    "hybrid_sliding": "sliding_attention",
}


def language_model(model: Any, is_divided: bool = False) -> PreTrainedModel:
    """The Transformers model that an object is, or, with PEFT adapters, wraps.

    Adapters such as LoRA are part of the wrapped model's layers; the wrapper only passes arguments on.

    Args:
        model: the object.
        is_divided: whether its weights may be divided among processes, see `TransformersTarget`.

    Raises:
        BadParameter: it is no model of Transformers.
        Refused: an adapter adds tokens to the prompt or is applied by PEFT's own forward, or the model is divided among
            processes.
    """
    if any(each.__module__.partition(".")[0] == "peft" for each in type(model).__mro__):
        active = getattr(model, "active_peft_config", None)  # a model with adapters of several kinds has no such field
        if active is not None and active.is_prompt_learning:
            raise Refused(
                f"the PEFT adapter of this model ({active.peft_type}) adds virtual tokens to the "
                "prompt, which leapahead does not support; use an adapter of the layers such as LoRA, or merge it"
            )
        model = model.base_model.model
    if isinstance(getattr(model, "_orig_mod", None), PreTrainedModel):
        raise BadParameter(
            "a model that torch.compile has wrapped is compiled anew for every number of tokens; give the model itself "
            "(model._orig_mod), whose forwards static='compiled' compiles for those in use"
        )
    if not isinstance(model, PreTrainedModel):
        raise BadParameter(
            f"a {type(model).__name__} is not a Transformers model; give what "
            "AutoModelForCausalLM.from_pretrained returns"
        )
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():  # all, since another may become active
        if getattr(adapter, "alora_invocation_tokens", None) or adapter.peft_type == "XLORA":
            kind = "X-LoRA" if adapter.peft_type == "XLORA" else "activated LoRA"
            raise Refused(
                f"the PEFT adapter {name!r} of this model ({kind}) is applied by PEFT's own forward, which leapahead "
                "does not run; delete it, or use an adapter of the layers such as LoRA"
            )
    if not is_divided:
        devices.refuse_parallel(model)
    if not model.dtype.is_floating_point:
        raise Refused(f"{type(model).__name__} computes in {model.dtype}, which leapahead does not support")
    return model


def fingerprint(model: Any, device: torch.device) -> str:
    """What the time of a forward depends on: model, precision, attention, device, threads."""
    config = text_config(model)
    parts = [
        f"transformers {type(model).__name__} {sum(each.numel() for each in model.parameters())} parameters",
        *(getattr(config, name, "") for name in ("num_hidden_layers", "hidden_size", "vocab_size")),
        model.dtype,
        attention_implementation(model) if not model._is_stateful else "stateful",
        device.type,
    ]
    if device.type == "cpu":
        parts.append(torch.get_num_threads())
    elif device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    if (count := len(devices.of(model))) > 1:
        parts.append(f"{count} devices")
    if linears.is_packed(model):
        parts.append("packed")
    return " ".join(map(str, parts))


def text_config(model: Any) -> Any:
    """The configuration of the language part of a model."""
    return model.config.get_text_config(decoder=True)


def attention_implementation(model: Any) -> str:
    """The name of the attention implementation.

    Raises:
        Refused: one that cannot be given a tree mask.
    """
    name = str(text_config(model)._attn_implementation)
    # A forward runs in another thread, of the target that this model is a draft of.
    if name in (grouped.NAME, ordered.NAME, packed.NAME, compacted.NAME):
        return "sdpa"
    if name not in MASKS:
        best = "sdpa" if model._supports_sdpa else "eager"  # which Gemma 2 and gpt-oss have instead
        raise Refused(
            f'attention implementation {name!r} takes no tree mask; load the model with attn_implementation="{best}", '
            f'or call model.set_attn_implementation("{best}")'
        )
    return name


def tuned_from(config: Any) -> str:
    """The model that a checkpoint was tuned from by this package, by its configuration; "" for others."""
    found = getattr(config, TUNED, None)
    return str(found.get("from", "")) if isinstance(found, dict) else ""


def mask_token(config: Any) -> int:
    """The mask token of a draft model that predicts several tokens in one forward (PARD, 2504.18583); -1 for others."""
    found = getattr(config, "pard_token", None)
    return found if isinstance(found, int) and found >= 0 else -1


def suppressed(model: Any, vocab_size: int) -> tuple[int, ...]:
    """The tokens that no text may have, by `suppress_tokens` of the generation config."""
    found = getattr(getattr(model, "generation_config", None), "suppress_tokens", None)
    listed = found if isinstance(found, list) else []
    return tuple(token for token in listed if is_whole(token) and 0 <= token < vocab_size)


def patterns(config: Any, recurrent: bool = False) -> dict[str, Pattern] | None:
    """The attention patterns of the layers by name, or None if some layer is not plain attention over a KV cache.

    The same rule as Transformers' `create_masks_for_generate`: by `layer_types` where there are some, else one for all.

    Args:
        recurrent: leave out what keeps a state instead of entries.
    """
    window, chunk = _get(config, "sliding_window"), _get(config, "attention_chunk_size")
    known = {
        "full_attention": Pattern(),
        "sliding_attention": Pattern(window=window),
        "chunked_attention": Pattern(chunk=chunk),
    }
    types = _get(config, "layer_types")
    if _keeps_some(config):
        return None
    if types is not None:
        if recurrent:
            types = [beside for kind in types if (beside := RECURRENT_LAYERS.get(kind, kind)) is not None]
        kinds = dict.fromkeys(kind for kind in types if kind not in STATELESS_LAYERS)
        return {kind: known[kind] for kind in kinds} if set(kinds) <= set(known) else None
    if window is not None:
        return {"sliding_attention": known["sliding_attention"]}
    if chunk is not None:
        return {"chunked_attention": known["chunked_attention"]}
    return {"full_attention": known["full_attention"]}


def other_layers(config: Any) -> list[str]:
    """The kinds of layers that are neither plain attention over a KV cache nor recurrent, nor without a cache."""
    known = {"full_attention", "sliding_attention", "chunked_attention", *RECURRENT_LAYERS, *STATELESS_LAYERS}
    kinds = set(_get(config, "layer_types") or ()) - known
    return sorted(kinds | {"dynamic_mask_attention"} if _keeps_some(config) else kinds)


def _keeps_some(config: Any) -> bool:
    """Whether layers attend to some of the earlier tokens by rank, in texts too long for the self-test (Doge).

    Equal tokens have equal ranks, and which of them is taken depends on the shape of the forward.
    """
    most = _get(config, "keep_window_size")
    return most is not None and most < context_length(config)


def is_recurrent(model: Any) -> bool:
    """Whether some layer keeps a state that cannot discard tokens."""
    return bool(model._is_stateful) or not RECURRENT_LAYERS.keys().isdisjoint(
        _get(text_config(model), "layer_types") or ()
    )


def context_length(config: Any) -> int:
    """Greatest number of tokens of a sequence; `UNLIMITED` where positions are only distances (ALiBi)."""
    if config.model_type == "bloom" or (config.model_type == "falcon" and config.alibi):
        return UNLIMITED
    names = (
        "max_decoder_position_embeddings",
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "n_ctx",
        "max_sequence_length",
    )
    length = next((int(value) for name in names if (value := _get(config, name)) is not None), UNLIMITED)
    rope = _get(config, "rope_parameters") or {}
    if rope.get("rope_type") == "yarn":
        # Its frequencies are the same at every length. Many configurations leave the length before scaling above, as
        # cards of Qwen say. Those with linear scaling have that or the scaled one, and do not tell which.
        length = max(length, int((rope.get("factor") or 1) * rope.get("original_max_position_embeddings", 0)))
    for parameters in [rope, *(each for each in rope.values() if isinstance(each, dict))]:
        if parameters.get("rope_type") == "longrope":
            # Beyond this length the rotation of every position changes, cached tokens included, so that cached
            # entries are wrong, and a draft across the border cannot be verified.
            length = min(length, int(parameters.get("original_max_position_embeddings", length)))
    return length


@contextmanager
def unchanged_attention(model: Any) -> Iterator[None]:
    """Undoes changes of the kind of attention that forwards make within the block.

    The encoder of BigBird-Pegasus changes from block-sparse to full attention for good once it has read a short input.
    The text of a long one would depend on what was read before it then, if only by the self-test.
    """
    parts = [part for part in model.modules() if hasattr(part, "set_attention_type")]
    before = [(part, part.attention_type, getattr(part, "self", None)) for part in parts]
    try:
        yield
    finally:
        for part, kind, layer in before:
            part.attention_type = kind
            if layer is not None:
                part.self = layer


def counts_slots(config: Any) -> bool:
    """Whether attention layers derive distances or scales from cache slots where short texts do not show it.

    In a chain slot and position are the same; in a tree they are not.
    """
    if config.model_type == "gpt_neo":  # its local layers' window
        return True
    return config.model_type == "llama4_text" and bool(config.attn_temperature_tuning)


def _get(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def ordinary_ids(model_config: Any, text_config: Any, vocab_size: int) -> IntArray:
    """Token ids without a special meaning, by the configurations; some of the lowest ones."""
    special = {
        value
        for config in (model_config, text_config)
        for key, value in config.to_dict().items()
        if key.endswith(("token_id", "token_index"))
        for value in (value if isinstance(value, list) else [value])
    }
    return np.array([token for token in range(min(vocab_size, 4096)) if token not in special] or [0], dtype=np.int64)
