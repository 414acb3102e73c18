"""What of Transformers' `generate` is honoured by `leapahead.hf`, and what is refused, by name.

Knows neither models' forwards nor text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from leapahead.core.errors import Refused

# Every field of GenerationConfig is in exactly one of the next three; a test says when a new one appears.

HONOURED = frozenset(
    """
    max_length max_new_tokens min_length min_new_tokens max_time stop_strings eos_token_id pad_token_id
    bos_token_id do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff
    renormalize_logits repetition_penalty encoder_repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias watermarking_config
    num_return_sequences output_scores output_logits return_dict_in_generate
    """.split()  # noqa: SIM905
)

_ASSISTANT = "sets up an assistant model of Transformers, which is never called here"
_BEAMS = "is read by beam search only"
_COMPILE = "changes how a forward is run, and the target runs its own"
WITHOUT_EFFECT: Mapping[str, str] = {
    "use_cache": "the text is the same without a cache; the target always has its own",
    "max_cache_len": "the target's cache grows by itself",
    "prefill_chunk_size": "the target reads prompts in chunks of its own size",
    "compile_config": _COMPILE,
    "disable_compile": _COMPILE,
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "low_memory": "is read by contrastive search only",
    "decoder_start_token_id": "is read by encoder-decoder models only",
    "num_assistant_tokens": _ASSISTANT,
    "num_assistant_tokens_schedule": _ASSISTANT,
    "assistant_confidence_threshold": _ASSISTANT,
    "assistant_lookbehind": _ASSISTANT,
    "target_lookbehind": _ASSISTANT,
    "max_matching_ngram_size": _ASSISTANT,
    "speculation_type": _ASSISTANT,
    "transformers_version": "says who wrote the file",
}


@dataclass(frozen=True)
class Refusal:
    """Why a field cannot be honoured, and the values (other than None) that leave it inactive."""

    why: str
    inactive: tuple[Any, ...] = (False,)


_NO_BEAMS = "beam search keeps several texts at once, and leapahead decodes one text a row; use num_beams=1"
REFUSED: Mapping[str, Refusal] = {
    "num_beams": Refusal(_NO_BEAMS, (1,)),
    "num_beam_groups": Refusal(_NO_BEAMS, (1,)),
    "diversity_penalty": Refusal(_NO_BEAMS, (0.0,)),
    "constraints": Refusal(_NO_BEAMS, ()),
    "force_words_ids": Refusal(_NO_BEAMS, ()),
    "penalty_alpha": Refusal("contrastive search needs the hidden states of all candidates; leave it out", (0.0,)),
    "dola_layers": Refusal("DoLa compares the logits of several layers; leave it out", ()),
    "guidance_scale": Refusal("classifier-free guidance needs a second forward a token; leave it out", (1,)),
    "use_mtp": Refusal("it is another speculative decoding; choose a drafter instead"),
    "prompt_lookup_num_tokens": Refusal("use drafter='prompt_lookup', num_tokens=... instead", ()),
    "assistant_early_exit": Refusal("use draft='self:first=N' instead, which shares the cache too", ()),
    "assistant_ensemble_weight": Refusal("it mixes an assistant's distribution into the text, so it is lossy", ()),
    "is_assistant": Refusal("a model that decodes with leapahead cannot be Transformers' assistant"),
    "token_healing": Refusal("it needs a tokenizer before decoding; call model.heal_tokens yourself"),
    "output_attentions": Refusal("attentions of a tree of drafts are not those of the text; leave it out"),
    "output_hidden_states": Refusal("hidden states of rejected drafts are not those of the text; leave it out"),
    "cache_implementation": Refusal(
        "the target has its own cache, in the memory and the precision of the model; leave it out",
        ("dynamic", "static"),
    ),
    "cache_config": Refusal("it configures a cache that is not used here; leave it out", ()),
    "continuous_batching_config": Refusal("continuous batching is another loop; leave it out", ()),
}

FIELDS = HONOURED | WITHOUT_EFFECT.keys() | REFUSED.keys()

# Processors that do not read the prefix, so that one call serves nodes of every depth.
PREFIX_FREE = frozenset(
    """
    TemperatureLogitsWarper TopPLogitsWarper TopKLogitsWarper TopHLogitsWarper MinPLogitsWarper
    TypicalLogitsWarper EpsilonLogitsWarper EtaLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization
    SuppressTokensLogitsProcessor BarkEosPrioritizerLogitsProcessor
    """.split()  # noqa: SIM905
)

_STATE = "it counts its calls, and here it would also be called for drafts that are rejected"
_SECOND = "it needs a second forward a token"
_LAYOUT = "it expects several rows of a batch to belong together, and leapahead decodes each row by itself"
REFUSED_PROCESSORS: Mapping[str, str] = {
    "SynthIDTextWatermarkLogitsProcessor": _STATE,
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": _SECOND,
    "WhisperNoSpeechDetection": _SECOND,
    "ClassifierFreeGuidanceLogitsProcessor": _LAYOUT,
    "DiaClassifierFreeGuidanceLogitsProcessor": _LAYOUT,
    "DiaEOSChannelFilterLogitsProcessor": _LAYOUT,
    "DiaEOSDelayPatternLogitsProcessor": _LAYOUT,
}

# Inputs of the model's forward that Transformers adds by itself. Any other would have to reach every forward.
CACHES = ("past_key_values", "cache_params")
MODEL_INPUTS = frozenset(
    """
    attention_mask position_ids past_key_values cache_params use_cache logits_to_keep output_attentions
    output_hidden_states
    """.split()  # noqa: SIM905
)

SYNCED = (
    "synced_gpus (FSDP, DeepSpeed ZeRO-3) is not supported by leapahead.hf: the processes would run different numbers "
    "of forwards and wait for each other forever; generate on one process"
)


def refuse_field(name: str, value: Any) -> None:
    if value is not None and value not in REFUSED[name].inactive:
        raise Refused(f"{name}={value!r} is not supported by leapahead.hf: {REFUSED[name].why}")


def refuse(model: Any, config: Any, processors: Sequence[Any], model_kwargs: Mapping[str, Any]) -> None:
    """Raises for the first thing that cannot be honoured."""
    if model.config.is_encoder_decoder:
        raise Refused(f"{type(model).__name__} is an encoder-decoder model; leapahead decodes decoder-only models")
    for name in REFUSED:
        refuse_field(name, getattr(config, name, None))
    for processor in processors:
        for base in type(processor).__mro__:
            if base.__name__ in REFUSED_PROCESSORS:
                raise Refused(
                    f"the logits processor {type(processor).__name__} is not supported by leapahead.hf: "
                    f"{REFUSED_PROCESSORS[base.__name__]}"
                )
    for name, value in model_kwargs.items():
        if value is not None and name not in MODEL_INPUTS:
            raise Refused(
                f"the model input {name!r} is not supported by leapahead.hf: only input_ids and attention_mask are"
            )
    for name in CACHES:
        if getattr(
            model_kwargs.get(name), "_is_user_defined", False
        ):  # Transformers always makes one, and marks others
            raise Refused(f"{name} is not supported by leapahead.hf: the target has its own cache; leave it out")
    if _is_sharded(model):
        raise Refused(SYNCED)
    if any(_drops(part) for part in model.modules()):
        raise Refused(
            "the model is in training mode and its dropout makes every text different; call model.eval() first"
        )


def _is_sharded(model: Any) -> bool:
    """Whether every forward of the model needs several processes; Transformers sets `synced_gpus` then."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_world_size() == 1:
        return False
    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def _drops(part: torch.nn.Module) -> bool:
    """Whether a part of a model in training mode drops values at random."""
    rate = part.p if isinstance(part, torch.nn.Dropout) else getattr(part, "attention_dropout", 0.0)
    return part.training and isinstance(rate, float) and rate > 0
