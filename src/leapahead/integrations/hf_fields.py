"""Which settings, processors and inputs of Transformers' `generate` leapahead honours, and which it refuses by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from leapahead.core.errors import Refused
from leapahead.models.transformers import changes, families

# Every field of GenerationConfig is in exactly one of HONOURED, WITHOUT_EFFECT and REFUSED. A test fails where a new
# release of Transformers adds one.

HONOURED = frozenset(
    """
    max_length max_new_tokens min_length min_new_tokens max_time stop_strings eos_token_id pad_token_id
    bos_token_id do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff
    renormalize_logits repetition_penalty encoder_repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias watermarking_config
    decoder_start_token_id num_return_sequences output_scores output_logits return_dict_in_generate
    """.split()  # noqa: SIM905
)

_ASSISTANT = "configures an assistant model of Transformers, which is not called"
_BEAMS = "applies to beam search only"
_COMPILE = "changes how Transformers runs a forward; leapahead runs its own"
WITHOUT_EFFECT: Mapping[str, str] = {
    "use_cache": "the text is the same without a KV cache; leapahead always uses its own",
    "max_cache_len": "the KV cache of leapahead grows as needed",
    "prefill_chunk_size": "leapahead chooses the size of the chunks in which it reads prompts",
    "compile_config": _COMPILE,
    "disable_compile": _COMPILE,
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "low_memory": "applies to contrastive search only",
    "num_assistant_tokens": _ASSISTANT,
    "num_assistant_tokens_schedule": _ASSISTANT,
    "assistant_confidence_threshold": _ASSISTANT,
    "assistant_lookbehind": _ASSISTANT,
    "target_lookbehind": _ASSISTANT,
    "max_matching_ngram_size": _ASSISTANT,
    "speculation_type": _ASSISTANT,
    "transformers_version": "names the release that wrote the file",
}


@dataclass(frozen=True)
class Refusal:
    """Why a field of the generation config cannot be honoured.

    Attributes:
        why: the reason and the remedy.
        inactive: the values other than None that leave the field inactive.
    """

    why: str
    inactive: tuple[Any, ...] = (False,)


_NO_BEAMS = "beam search keeps several texts per row, and leapahead decodes one; use num_beams=1"
REFUSED: Mapping[str, Refusal] = {
    "num_beams": Refusal(_NO_BEAMS, (1,)),
    "num_beam_groups": Refusal(_NO_BEAMS, (1,)),
    "diversity_penalty": Refusal(_NO_BEAMS, (0.0,)),
    "constraints": Refusal(_NO_BEAMS, ()),
    "force_words_ids": Refusal(_NO_BEAMS, ()),
    "penalty_alpha": Refusal("contrastive search compares the hidden states of candidates; leave it out", (0.0,)),
    "dola_layers": Refusal("DoLa contrasts the logits of several layers; leave it out", ()),
    "guidance_scale": Refusal("classifier-free guidance needs a second forward for every token; leave it out", (1,)),
    "use_mtp": Refusal("it is another method of speculative decoding; choose a drafter instead"),
    "prompt_lookup_num_tokens": Refusal("use drafter='prompt_lookup', num_tokens=... instead", ()),
    "assistant_early_exit": Refusal("use drafter='draft_model', draft='self:first=N' instead", ()),
    "assistant_ensemble_weight": Refusal(
        "it mixes the distribution of the assistant into that of the model, which changes the text; leave it out", ()
    ),
    "is_assistant": Refusal("a model that decodes with leapahead cannot assist another one; leave it out"),
    "token_healing": Refusal(
        "it changes the prompt before decoding; call model.heal_tokens(input_ids, tokenizer) yourself"
    ),
    "output_attentions": Refusal(
        "a forward over a token tree does not give the attention weights of the text; leave it out"
    ),
    "output_hidden_states": Refusal(
        "a forward over a token tree also has hidden states of rejected drafts; leave it out"
    ),
    "cache_implementation": Refusal(
        "leapahead uses its own KV cache, in the memory and the precision of the model; leave it out",
        ("dynamic", "static"),
    ),
    "cache_config": Refusal("it configures a KV cache that leapahead does not use; leave it out", ()),
    "continuous_batching_config": Refusal("continuous batching is another decoding loop; leave it out", ()),
}

FIELDS = HONOURED | WITHOUT_EFFECT.keys() | REFUSED.keys()

# Processors that do not read the prefix, so that one call serves nodes of all depths.
PREFIX_FREE = frozenset(
    """
    TemperatureLogitsWarper TopPLogitsWarper TopKLogitsWarper TopHLogitsWarper MinPLogitsWarper
    TypicalLogitsWarper EpsilonLogitsWarper EtaLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization
    SuppressTokensLogitsProcessor BarkEosPrioritizerLogitsProcessor
    """.split()  # noqa: SIM905
)

_STATE = "it counts its calls, and leapahead also calls processors for drafts that are rejected; leave it out"
_SECOND = "it needs a second forward for every token; leave it out"
_LAYOUT = "it combines several rows of a batch, and leapahead decodes each row by itself; leave it out"
REFUSED_PROCESSORS: Mapping[str, str] = {
    "SynthIDTextWatermarkLogitsProcessor": _STATE,
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": _SECOND,
    "WhisperNoSpeechDetection": _SECOND,
    "ClassifierFreeGuidanceLogitsProcessor": _LAYOUT,
    "DiaClassifierFreeGuidanceLogitsProcessor": _LAYOUT,
    "DiaEOSChannelFilterLogitsProcessor": _LAYOUT,
    "DiaEOSDelayPatternLogitsProcessor": _LAYOUT,
}

# Inputs of the model's forward that Transformers adds by itself, or takes and never passes on (labels). Others are for
# the prompt alone in models that take images, video or sound, see `hf_images`; any other model would have to be given
# them in every forward.
CACHES = ("past_key_values", "cache_params", "cache")
MODEL_INPUTS = frozenset(
    """
    attention_mask position_ids past_key_values cache_params cache use_cache logits_to_keep output_attentions
    output_hidden_states labels
    """.split()  # noqa: SIM905
)

MULTIMODAL = "mm_encoder_outputs"  # by "image" and "video", made by Transformers 5.24; empty for text alone
TEXT = ("text", ("text",), ["text"])  # what `input_modalities` of a model says that takes nothing else
TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")  # by processors of images; 0 for text
EMBEDDED = ("inputs_embeds",)  # instead of token ids
ENCODED = "encoder_outputs"  # of an encoder-decoder model, computed by Transformers

SYNCED = (
    "synced_gpus (FSDP, DeepSpeed ZeRO-3) is not supported by leapahead.hf: the processes would run different numbers "
    "of forwards, so that one would wait for the others forever; generate in one process"
)


def refuse_field(name: str, value: Any) -> None:
    """Refuses a field of the generation config that is set to a value other than those that leave it inactive."""
    if value is not None and value not in REFUSED[name].inactive:
        raise Refused(f"{name}={value!r} is not supported by leapahead.hf: {REFUSED[name].why}")


def refuse_cache(name: str) -> NoReturn:
    """Refuses a KV cache that the user gave under this name."""
    raise Refused(f"{name} is not supported by leapahead.hf, which uses its own KV cache; leave it out")


def refuse(model: Any, config: Any, processors: Sequence[Any], model_kwargs: Mapping[str, Any]) -> None:
    """Refuses the first thing that cannot be honoured.

    Args:
        model, config, processors, model_kwargs: as Transformers prepared them.

    Raises:
        Refused: by name.
    """
    for name in REFUSED:
        refuse_field(name, getattr(config, name, None))
    for processor in processors:
        _refuse_processor(processor)
    for name in CACHES:  # Transformers always makes one, and marks those that users give
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            refuse_cache("cache (or past_key_values, its older name)" if name == "cache" else name)
    is_both = model.config.is_encoder_decoder
    for name in inputs_read_once(model_kwargs):
        if name != ENCODED if is_both else model.input_modalities in TEXT or name in EMBEDDED:
            raise Refused(
                f"the model input {name!r} is not supported by leapahead.hf, which takes input_ids and attention_mask, "
                "and images, video and sound of decoder-only models that read them with the prompt"
            )
    if _is_sharded(model):
        raise Refused(SYNCED)
    _refuse_adapters(model)
    if any(changes.drops(part) for part in model.modules()):
        raise Refused(changes.DROPS)


def inputs_read_once(model_kwargs: Mapping[str, Any]) -> list[str]:
    """The names of what a prompt consists of beside its tokens, as Transformers prepared it."""
    encoded = [name for name, value in model_kwargs.get(MULTIMODAL, {}).items() if value is not None]
    others = [name for name, value in model_kwargs.items() if value is not None and name not in MODEL_INPUTS]
    return [*encoded, *(name for name in others if name != MULTIMODAL)]


def is_text_alone(model_kwargs: Mapping[str, Any]) -> bool:
    """Whether a prompt has no images or sounds, so that tokens are all there is to it.

    Args:
        model_kwargs: as Transformers prepared them, of a model for which they were not refused.
    """
    names = inputs_read_once(model_kwargs)
    return all(name in TYPES for name in names) and not any(bool(model_kwargs[name].any()) for name in names)


def _refuse_processor(processor: Any) -> None:
    for kind in type(processor).__mro__:
        if kind.__name__ in REFUSED_PROCESSORS:
            raise Refused(
                f"the logits processor {type(processor).__name__} is not supported by leapahead.hf: "
                f"{REFUSED_PROCESSORS[kind.__name__]}"
            )


def _refuse_adapters(model: Any) -> None:
    """Refuses PEFT adapters that are no part of the layers, and those whose effect depends on the row.

    While it generates, PEFT has the model prepare its inputs by the wrapper's method, and passes the adapters of rows
    by hooks of the layers.
    """
    wrapper = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if wrapper is not model:
        families.language_model(wrapper)
    for part in model.modules():
        for hook in part._forward_pre_hooks.values():
            given = hook.keywords if isinstance(hook, partial) else {}
            if "adapter_names" in given:
                raise Refused(
                    "adapter_names of PEFT, which applies adapters by row, is not supported by leapahead.hf; use one "
                    "adapter for all rows"
                )


def _is_sharded(model: Any) -> bool:
    """Whether every forward of the model needs several processes; Transformers sets `synced_gpus` then."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_world_size() == 1:
        return False
    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
