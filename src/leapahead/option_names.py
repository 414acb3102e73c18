"""Refuses options that do not exist, and tells which one was meant: here, or in the library that has the name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import meant, similar
from leapahead.drafters import registry
from leapahead.inputs import Options
from leapahead.models import loading

# Names in vLLM, Transformers, llama-cpp-python and OpenAI's API that no similar name here would lead to the right one.
_BEAMS = "there is no beam search; temperature and n give samples"
_SAMPLING = "there are temperature, top_k, top_p and min_p; logits_processors may change the logits in other ways"
_SCHEMA = "use grammar=leapahead.Grammar.json_schema(...)"
_GRAMMAR = "use grammar=, see leapahead.Grammar"
OTHERS_OF_TEXT = {
    "max_length": "use max_new_tokens, which does not count the prompt",
    "n_predict": "use max_new_tokens",
    "num_return_sequences": "use n",
    "do_sample": "a temperature above 0 samples; 0, the default, is greedy",
    **dict.fromkeys(("num_beams", "best_of", "early_stopping", "length_penalty", "use_beam_search"), _BEAMS),
    **dict.fromkeys(("typical_p", "mirostat", "tfs_z", "no_repeat_ngram_size", "top_n_sigma"), _SAMPLING),
    **dict.fromkeys(("guided_json", "json_schema", "response_format"), _SCHEMA),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex"), _GRAMMAR),
    "speculative": "the drafter decides what is drafted; drafter='plain' decodes without drafts",
    "prompt_lookup_num_tokens": "use drafter='prompt_lookup'",
    "assistant_model": "give LLM the name of a smaller model as draft=",
    "stop_strings": "use stop",
    "skip_special_tokens": "special tokens are never part of the text, and always of the tokens",
    "echo": "the prompt is not part of the text; the server's completions can repeat it",
    "prompt_logprobs": "logprobs are those of new tokens; the server's completions give those of a prompt with echo",
    "stream": "use LLM.stream",
    "streamer": "use LLM.stream",
    "use_cache": "the KV cache is always used",
    "generation_config": "give its values as options",
    "sampling_params": "give its values as options",
    "pad_token_id": "prompts are not padded",
}
_CACHE = "the context is as long as the model's; cache_tokens, or n_ctx of a GGUF file, limits the KV cache"
_QUANTIZED = "give a model that Transformers loaded so, a GGUF file, or engine='openvino' with weights='int8' or 'int4'"
_LAYERS = "device='balanced' divides the layers among GPUs"
_TENSORS = "use devices='cuda:0,cuda:1' and tensor_parallel=True"
_DRAFT = "use draft=, the name of a smaller model"
_NODES = "drafters choose how much to draft; those that can draft a fixed number have nodes"
OTHERS_OF_LLM = {
    **dict.fromkeys(("max_model_len", "max_seq_len", "max_seq_length", "gpu_memory_utilization", "swap_space"), _CACHE),
    **dict.fromkeys(("quantization", "quantization_config", "load_in_4bit", "load_in_8bit"), _QUANTIZED),
    **dict.fromkeys(("pipeline_parallel_size", "device_map"), _LAYERS),
    **dict.fromkeys(("tensor_parallel_size", "tp_plan", "tp_size"), _TENSORS),
    **dict.fromkeys(("speculative_model", "draft_model", "assistant_model"), _DRAFT),
    **dict.fromkeys(("num_speculative_tokens", "num_assistant_tokens"), _NODES),
    "speculative_config": "use drafter= and draft=",
    "max_num_seqs": "use max_batch",
    "max_num_batched_tokens": "use prefill_chunk",
    "enable_prefix_caching": "cached entries of earlier prompts are always used again",
    "enforce_eager": "use static='off'",
    "attn_implementation": "give a model that Transformers loaded so",
    "model_path": "the model comes first: LLM('model.gguf')",
}


def check_names(options: Mapping[str, Any], of_llm: Iterable[str] = ()) -> None:
    """Refuses an option of a text that does not exist.

    Args:
        of_llm: names that `LLM` has.

    Raises:
        BadParameter: there is one.
    """
    known = list(Options.__annotations__)
    for name in options:
        if name in known:
            continue
        if name in of_llm:
            raise BadParameter(f"there is no option {name!r} of a text; give it to LLM")
        hint = (
            f": {use}" if (use := OTHERS_OF_TEXT.get(name)) else f"{meant(name, known)}; there are {', '.join(known)}"
        )
        raise BadParameter(f"there is no option {name!r}{hint}")


def check_spelling(options: Iterable[str], drafter: str | registry.DrafterClass, of_llm: Iterable[str]) -> None:
    """Refuses an option that the drafter does not have where it is one of `generate`, where one of `LLM` or of an
    engine has the most similar name, or where another library has it.

    Args:
        of_llm: names that `LLM` has.

    Raises:
        BadParameter: there is one; or the drafter is unknown.
    """
    of_drafter = registry.options(registry.kind_of(drafter))
    others = [*of_llm, *loading.ENGINE_OPTIONS]
    for name in options:
        if name in {*Options.__annotations__} - {*of_drafter, "drafter_options"}:
            raise BadParameter(f"LLM has no option {name!r}; give it to generate or stream")
        if name in of_drafter:
            continue
        if name not in others and (use := OTHERS_OF_LLM.get(name)):
            raise BadParameter(f"LLM has no option {name!r}: {use}")
        if (found := similar(name, [*of_drafter, *others], cutoff=0.75)) in others:
            raise BadParameter(f"LLM has no option {name!r} (did you mean {found!r}?)")
