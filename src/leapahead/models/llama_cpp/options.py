"""The options of a GGUF file: how llama.cpp loads it and runs it. This module does not import llama_cpp."""

from __future__ import annotations

from dataclasses import dataclass

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import flag

# Types of the KV cache, by their numbers in llama.cpp's `enum ggml_type`.
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8}
BLOCK = 32  # numbers that share a scale in q8_0
SMALLEST_CONTEXT = 256  # llama.cpp rounds the size of a cache up to a multiple of this
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
MOST = 2**31 - 1  # llama.cpp would take the remainder of a larger number


@dataclass(frozen=True, kw_only=True)
class LlamaCppOptions:
    """How llama.cpp loads and runs a GGUF file, by llama.cpp's own names.

    Attributes:
        n_ctx: cells of the KV cache, shared by all sequences, and so the greatest length of one; of each sequence's
            cache where it has its own. At least 256, and rounded up to a multiple of 256; 0 for the length that the
            model was trained with; by default the same, but at most 4,096, and more cells for several texts: see
            `form`.
        n_batch: greatest number of tokens in one call, all trees of a step together.
        n_ubatch: number of those tokens that are computed at once.
        n_threads: threads for forwards of one token; by default one per physical core, and no more than a container's
            limit of processors.
        n_threads_batch: threads for all other forwards; by default `n_threads`.
        n_gpu_layers: layers to put on a GPU; -1 for all; by default llama.cpp's own choice.
        use_mmap: map the file into memory instead of reading it.
        use_mlock: keep the model in memory.
        use_extra_bufts: let llama.cpp rearrange quantised weights for the processor when it loads them, which takes
            memory beside the mapped file. Q4_0, IQ4_NL and K types then have kernels for several tokens at once.
        flash_attn: whether to use flash attention; by default llama.cpp's own choice, but not over a cache in f32,
            whose values it would round to f16.
        type_k, type_v: types of the cached keys and values: f32, f16, bf16 or q8_0; by default f16, and f32 where the
            weights are f32.
        n_seq_max: sequence ids, of which every leaf of every tree of a step takes one; at most 256; by default 64, and
            8 for recurrent and hybrid models, which have a state for each; a draft takes a second one for the state
            before it.
        kv_unified: one cache for all sequences, in which the branches of a tree share cells. False gives every sequence
            `n_ctx` cells of its own, and `n_seq_max` is the number of sequences, by default 8: forwards of many
            sequences take less time, and drafts have no branches. None chooses by the number of sequences, see `form`.
            In exact mode every sequence has its own in any case, and True is refused.
        kept_tokens: greatest number of tokens of earlier texts whose keys and values are kept in the machine's memory
            when others need their cells, for prompts that begin with the same tokens; by default as many as the KV
            cache has cells; 0 for none.

    Raises:
        BadParameter: a value is not possible.
    """

    n_ctx: int | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_gpu_layers: int | None = None
    use_mmap: bool = True
    use_mlock: bool = False
    use_extra_bufts: bool = True
    flash_attn: bool | None = None
    type_k: str | None = None
    type_v: str | None = None
    n_seq_max: int | None = None
    kv_unified: bool | None = None
    kept_tokens: int | None = None

    def __post_init__(self) -> None:
        self._check("n_ctx", 0)
        self._check("n_batch", 1)
        self._check("n_ubatch", 1)
        self._check("n_threads", 1, 4096)
        self._check("n_threads_batch", 1, 4096)
        self._check("n_gpu_layers", -1)
        self._check("n_seq_max", 1, MOST_SEQUENCES)
        self._check("kept_tokens", 0)
        for name in ("use_mmap", "use_mlock", "use_extra_bufts", "flash_attn", "kv_unified"):
            value, field = getattr(self, name), type(self).__dataclass_fields__[name]
            if value is not None or field.default is not None:
                object.__setattr__(self, name, flag(name, value))
        if self.n_ctx is not None and 0 < self.n_ctx < SMALLEST_CONTEXT:
            raise BadParameter(
                f"n_ctx={self.n_ctx} is not possible: llama.cpp's smallest context has {SMALLEST_CONTEXT} tokens; give "
                f"{SMALLEST_CONTEXT} or more, or 0 for the length that the model was trained with"
            )
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in (None, *CACHE_TYPES):
                raise BadParameter(
                    f"{name}={getattr(self, name)!r} is not possible; choose one of {', '.join(CACHE_TYPES)}"
                )

        if self.type_v == "q8_0" and self.flash_attn is False:
            raise BadParameter(
                "type_v='q8_0' is not possible with flash_attn=False: llama.cpp reads quantised values by flash "
                "attention only; leave one of them out"
            )

    def check_types(self, types: tuple[str, str], head_lengths: tuple[int, int], path: str) -> None:
        """Refuses types of keys and values that a model cannot have. With some of them, llama.cpp ends the process.

        Args:
            types: of keys and values.
            head_lengths: numbers of a head's key and of its value.
            path: of the model, for messages.
        """
        for name, kind, length in zip(("type_k", "type_v"), types, head_lengths, strict=True):
            if kind == "q8_0" and length % BLOCK:
                raise BadParameter(
                    f"{name}='q8_0' is not possible for {path!r}: it divides a head into blocks of {BLOCK} numbers, "
                    f"and a head has {length} here; use f16"
                )
        if types == ("f32", "q8_0") and not self.flash_attn:
            raise BadParameter(
                f"type_v='q8_0' is not possible beside keys in f32, over which {path!r} has no flash attention by "
                "default; give type_k='q8_0' or 'f16' too, or flash_attn=True"
            )

    def _check(self, name: str, low: int, high: int = MOST) -> None:
        """Refuses what is no whole number from `low` to `high`; None is possible where it is the default."""
        value = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not low <= value <= high:
            raise BadParameter(f"{name}={value!r} is not possible: it must be a whole number, from {low} to {high}")
