"""Whether the sequences of a GGUF file share one KV cache or have one each, where the user names neither.

One cache for all allows branches in drafts, and the attention of every row passes over the cells of all sequences. So
a cache for each is faster where many are decoded together, which docs/research/serving.md measures, and is chosen by
their number, as far as model, drafter and memory allow it. A server's request that names no length may take the whole
length of a text. So a cache for all has room for several such texts, where the number of sequences is known.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import llama_cpp as c

from leapahead.core.errors import BadParameter
from leapahead.models.llama_cpp.context import Model, cache_types, context_size
from leapahead.models.llama_cpp.file import has_tensor
from leapahead.models.llama_cpp.log import log
from leapahead.models.llama_cpp.model import LlamaCppTarget
from leapahead.models.llama_cpp.options import MOST_SEQUENCES, LlamaCppOptions
from leapahead.models.llama_cpp.separate import MOST_NODES, SeparateLlamaCppTarget
from leapahead.models.llama_cpp.tokenizer import GgufTokenizer
from leapahead.models.memory import free_host_bytes

FEW = 8  # sequences up to which they share one cache
# Of the free memory, what the caches may take: earlier texts that are kept beside them can take as much again.
MOST_MEMORY = 0.25
VALUE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}


def load(
    path: str | Path, options: LlamaCppOptions, sequences: int | None = None, branching: str = "", cells: int = 0
) -> tuple[LlamaCppTarget, GgufTokenizer]:
    """Loads a GGUF file with the form of the KV cache that is named, or else with the one that is chosen here.

    Args:
        path: the file; of a model in several files the first.
        options: how; `kv_unified` names the form.
        sequences: greatest number that is decoded together; None where it is not known.
        branching: name of the drafter, if it needs branches in its drafts.
        cells: of one KV cache for all sequences, see `LlamaCppTarget`.

    Returns:
        The target, whose `TargetInfo.kv_cache` tells what was chosen and why, and the tokenizer that the file holds.

    Raises:
        LeapaheadError: whatever is wrong with the file or the options, in one sentence.
    """
    if options.n_gpu_layers and not c.llama_supports_gpu_offload():
        warnings.warn(
            f"n_gpu_layers={options.n_gpu_layers} (--gpu-layers) has no effect, because llama.cpp was built without "
            "support for GPUs; leave it out, or install a build of llama-cpp-python that has it",
            UserWarning,
            stacklevel=2,
        )
    separate = options.kv_unified is False
    if separate and options.n_seq_max is None and (sequences or 0) > MOST_SEQUENCES:
        raise BadParameter(
            f"max_batch={sequences} is not possible with kv_unified=False, since llama.cpp has at most "
            f"{MOST_SEQUENCES} sequences; give a smaller one, or kv_unified=True"
        )
    model, chosen = Model(path, options), ""
    if options.kv_unified is None and sequences is not None:
        against = against_separate(model, options, sequences, branching)
        separate, chosen = not against, f"one KV cache for all sequences, since {against}"
        if separate:
            chosen = (
                f"a KV cache of {context_size(model, options)} tokens for each of {sequences} sequences, since steps "
                f"of more than {FEW} take less time so; kv_unified=True (--kv-unified) gives one for all, and drafts "
                "with branches"
            )
    if not separate:
        if not cells and (texts := room(model, options, sequences)) > 1:
            cells = texts * context_size(model, options)
            chosen += f"; it has room for {texts} texts of {context_size(model, options)} tokens"
        target = LlamaCppTarget(model, options, cells=cells)
    else:
        target = SeparateLlamaCppTarget(model, replace(options, n_seq_max=options.n_seq_max or sequences))
    target.has_threads = may_offload(options)
    if chosen:
        log.info("%s: %s", target.info.name, chosen)
        target.info = replace(target.info, kv_cache=chosen)
    return target, GgufTokenizer(model)


def may_offload(options: LlamaCppOptions) -> bool:
    """Whether layers may lie on a GPU."""
    return options.n_gpu_layers != 0 and bool(c.llama_supports_gpu_offload())


def against_separate(model: Model, options: LlamaCppOptions, sequences: int, branching: str) -> str:
    """What speaks against a cache for each sequence, as the end of a sentence; "" for nothing."""
    if sequences <= FEW:
        return f"no more than {FEW} are decoded together"
    if model.stateful:
        return "the model has a recurrent state for each anyway"
    if branching:
        return f"the drafter {branching!r} drafts branches"
    if options.n_seq_max is not None:
        return f"n_seq_max={options.n_seq_max} sets the number of branches"
    if may_offload(options):
        return "one for each was measured on CPUs only"
    if sequences > (most := min(MOST_SEQUENCES, options.n_ubatch, options.n_batch, context_size(model, options))):
        return f"llama.cpp computes at most {most} sequences with one each"
    needed, free = sequences * cache_bytes(model, options), free_host_bytes()
    if needed > MOST_MEMORY * free:
        return (
            f"one for each of {sequences} would take {needed / 1e9:.1f} of {free / 1e9:.1f} GB free memory; a smaller "
            "n_ctx (--ctx-size) takes less"
        )
    return ""


def room(model: Model, options: LlamaCppOptions, sequences: int | None) -> int:
    """For how many texts of the greatest length one cache of all sequences is made, where the user does not name it.

    Where a model has factors of its rotary positions for short and for long contexts, llama.cpp chooses between them by
    the size of the cache, which therefore stays the usual one.
    """
    named = (options.kv_unified, options.n_ctx, options.n_seq_max) != (None, None, None)
    if sequences is None or named or model.stateful or may_offload(options):
        return 1
    needed = cache_bytes(model, options)  # 0 where the first layer has no attention
    if not needed or has_tensor(Path(model.path).expanduser(), "rope_factors_long.weight"):
        return 1
    return max(1, min(sequences, int(MOST_MEMORY * free_host_bytes() / needed)))


def cache_bytes(model: Model, options: LlamaCppOptions) -> int:
    """An estimate of the memory of one sequence's cache."""
    sizes = [VALUE_BYTES[each] for each in cache_types(model, options)]
    heads = int(c.llama_model_n_head_kv(model.pointer))
    row = sum(length * size for length, size in zip(model.head_lengths, sizes, strict=True)) * heads
    return round((context_size(model, options) + MOST_NODES) * row * model.layers)
