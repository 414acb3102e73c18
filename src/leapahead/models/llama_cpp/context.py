"""llama.cpp's C interface, as much of it as a target needs: a model file, a context, batches of many sequence ids.

Knows tokens, positions and sequence ids; neither trees, nor sampling, nor text. What llama.cpp logs goes to the logger
"leapahead.llama_cpp", which is silent until it is given a handler.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp as c
import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter, CacheFull, LeapaheadError, Refused

FloatArray = npt.NDArray[np.float32]

MAGIC = b"GGUF"
USUAL_CONTEXT = 4096  # tokens, where none are asked for: the cache of a long context can outgrow the model
CACHE_TYPES = {
    "f32": c.GGML_TYPE_F32,
    "f16": c.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, which llama_cpp does not name
    "q8_0": c.GGML_TYPE_Q8_0,
}

STEPS = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7, "q8_0": 2.0**-7}

log = logging.getLogger("leapahead.llama_cpp")
log.addHandler(logging.NullHandler())
LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # of ggml_log_level
_said: deque[str] = deque(maxlen=50)  # llama.cpp's last errors and warnings, for our own messages
_line: list[Any] = [logging.INFO, ""]  # the level and the beginning of an unfinished line


@c.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _: Any) -> None:
    if level in LEVELS:  # else it goes on with the line before
        _line[0] = LEVELS[level]
    *lines, _line[1] = (_line[1] + text.decode("utf-8", "replace")).split("\n")
    for line in lines:
        if line.strip():
            log.log(_line[0], "%s", line)
            if _line[0] >= logging.WARNING:
                _said.append(line.strip())


c.llama_log_set(_on_log, ctypes.c_void_p(0))


@dataclass(frozen=True, kw_only=True)
class LlamaCppOptions:
    """How llama.cpp loads and runs a GGUF file, by its own names.

    Attributes:
        n_ctx: cells of the KV cache, shared by all sequences, and so the greatest length of one; 0 for as many as the
            model was trained with; by default the same, but at most 4,096.
        n_batch: greatest number of tokens in one call, all trees of a step together.
        n_ubatch: of which so many are computed at once.
        n_threads: for steps of one token; by default one per physical core.
        n_threads_batch: for all others; by default `n_threads`.
        n_gpu_layers: layers to put on a GPU; -1 for all; by default llama.cpp's own choice.
        use_mmap: map the file into memory instead of reading it.
        use_mlock: keep it in memory.
        flash_attn: whether to use flash attention; by default llama.cpp's own choice, but not over a cache in f32,
            which it would round to f16.
        type_k, type_v: of the KV cache: f32, f16, bf16 or q8_0; by default f16, and f32 where the weights are f32.
        n_seq_max: sequence ids, of which every leaf of every tree of a step takes one; at most 256; by default 64, and
            8 for recurrent and hybrid models, which keep a state for each.
    """

    n_ctx: int | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_gpu_layers: int | None = None
    use_mmap: bool = True
    use_mlock: bool = False
    flash_attn: bool | None = None
    type_k: str | None = None
    type_v: str | None = None
    n_seq_max: int | None = None

    def __post_init__(self) -> None:
        def demand(name: str, low: int, high: int | None, optional: bool) -> None:
            value = getattr(self, name)
            if value is None and optional:
                return
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < low or (high is not None and value > high):
                rule = f"at least {low}" if high is None else f"from {low} to {high}"
                raise BadParameter(f"{name}={value!r} is not possible: it must be a whole number, {rule}")

        demand("n_ctx", 0, None, True)
        demand("n_batch", 1, None, False)
        demand("n_ubatch", 1, None, False)
        demand("n_threads", 1, 4096, True)
        demand("n_threads_batch", 1, 4096, True)
        demand("n_gpu_layers", -1, None, True)
        demand("n_seq_max", 1, c.llama_max_parallel_sequences(), True)
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in (None, *CACHE_TYPES):
                raise BadParameter(
                    f"{name}={getattr(self, name)!r} is not possible; there are {', '.join(CACHE_TYPES)}"
                )


class Model:
    """The weights and the vocabulary of a GGUF file.

    Attributes:
        precision: relative step of the numbers that go into its products. Whatever the bits of quantised weights, they
            are multiplied with activations of 8 bits.
        stateful: it has a recurrent state, which cannot forget its last tokens.
        cells: a token takes a cell of the cache.

    Raises:
        BadParameter: no such file, or one that llama.cpp cannot load; the message has llama.cpp's reason.
        Refused: not a causal language model.
    """

    def __init__(self, path: str | Path, options: LlamaCppOptions) -> None:
        self.path = str(path)
        file = Path(path).expanduser()
        if not file.is_file():
            raise BadParameter(f"there is no file {self.path!r}; give the path of a GGUF file")
        with file.open("rb") as opened:
            if opened.read(4) != MAGIC:
                raise BadParameter(f"{self.path!r} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        c.llama_backend_init()
        params = c.llama_model_default_params()
        params.load_mode = (
            (c.LLAMA_LOAD_MODE_MMAP_MLOCK if options.use_mlock else c.LLAMA_LOAD_MODE_MMAP)
            if options.use_mmap
            else (c.LLAMA_LOAD_MODE_MLOCK if options.use_mlock else c.LLAMA_LOAD_MODE_NONE)
        )
        if options.n_gpu_layers is not None:
            params.n_gpu_layers = options.n_gpu_layers
        _said.clear()
        self.pointer = c.llama_model_load_from_file(str(file).encode(), params)
        if not self.pointer:
            raise BadParameter(f"the GGUF file {self.path!r} cannot be loaded: {_reason()}")
        self._free = weakref.finalize(self, c.llama_model_free, self.pointer)
        self.vocab = c.llama_model_get_vocab(self.pointer)
        self.vocab_size: int = c.llama_vocab_n_tokens(self.vocab)
        self.n_ctx_train: int = c.llama_model_n_ctx_train(self.pointer)
        kinds = {c.LLAMA_FTYPE_ALL_F32: "f32", c.LLAMA_FTYPE_MOSTLY_F16: "f16", c.LLAMA_FTYPE_MOSTLY_BF16: "bf16"}
        self.precision = STEPS[kinds.get(c.llama_model_ftype(self.pointer), "q8_0")]
        self.fingerprint = " ".join(
            str(part)
            for part in (
                *(self.meta(key) for key in ("general.architecture", "general.file_type")),
                f"{c.llama_model_n_params(self.pointer)} parameters in {c.llama_model_size(self.pointer)} bytes",
                f"{c.llama_model_n_layer(self.pointer)} layers of {c.llama_model_n_embd(self.pointer)}",
            )
        )
        self.cells = not c.llama_model_is_recurrent(self.pointer) or bool(c.llama_model_is_hybrid(self.pointer))
        self.stateful = bool(c.llama_model_is_recurrent(self.pointer) or c.llama_model_is_hybrid(self.pointer))
        for wrong, what in (
            (c.llama_vocab_type(self.vocab) == c.LLAMA_VOCAB_TYPE_NONE, "a model without a vocabulary"),
            (c.llama_model_has_encoder(self.pointer), "an encoder-decoder model"),
            (not c.llama_model_has_decoder(self.pointer), "a model without a decoder"),
            (c.llama_model_is_diffusion(self.pointer), "a diffusion model"),
        ):
            if wrong:
                raise Refused(f"{self.path!r} is {what}; leapahead decodes causal language models")

    def meta(self, key: str) -> str | None:
        """A value of the file's metadata, as text."""
        size = c.llama_model_meta_val_str(self.pointer, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        c.llama_model_meta_val_str(self.pointer, key.encode(), buffer, size + 1)
        return buffer.value.decode("utf-8", "replace")


class Context:
    """A KV cache over a model, and the batches that go through both.

    Attributes:
        n_ctx: cells of the cache.
        n_step: greatest number of nodes in a step.
        windowed: some layers have a sliding window.
        precision: of the coarser of model and cache, see `Model`.
        seconds: spent inside llama.cpp for forwards whose logits were wanted.
    """

    def __init__(self, model: Model, options: LlamaCppOptions) -> None:
        self.model = model
        params = c.llama_context_default_params()
        wanted = min(model.n_ctx_train, USUAL_CONTEXT) if options.n_ctx is None else options.n_ctx
        params.n_ctx = wanted or model.n_ctx_train
        params.n_batch = options.n_batch
        params.n_ubatch = min(options.n_ubatch, options.n_batch)
        params.n_seq_max = options.n_seq_max or min(8 if model.stateful else 64, params.n_ubatch)
        if params.n_seq_max > params.n_ubatch:  # llama.cpp would end the process
            raise BadParameter(
                f"n_seq_max={params.n_seq_max} sequences do not fit a batch of {params.n_ubatch} tokens; "
                "use a smaller n_seq_max, or a larger n_batch and n_ubatch"
            )
        params.n_threads = options.n_threads or physical_cores()
        params.n_threads_batch = options.n_threads_batch or params.n_threads
        params.kv_unified = True  # one cell may belong to many sequences
        params.swa_full = True  # a rejected draft must not have pushed anything out of a sliding window
        params.no_perf = True
        usual = "f32" if model.precision == STEPS["f32"] else "f16"
        types = (options.type_k or usual, options.type_v or usual)
        params.type_k, params.type_v = (CACHE_TYPES[each] for each in types)
        if options.flash_attn is not None:
            params.flash_attn_type = int(options.flash_attn)
        elif c.GGML_TYPE_F32 in (params.type_k, params.type_v):
            params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        _said.clear()
        self.pointer = c.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise LeapaheadError(
                f"llama.cpp cannot make a context of {params.n_ctx} tokens for {model.path!r} ({_reason()}); "
                "use a smaller n_ctx"
            )
        self._free = weakref.finalize(self, c.llama_free, self.pointer)
        self.precision = max(model.precision, *(STEPS[each] for each in types))
        self.memory = c.llama_get_memory(self.pointer)
        if not self.memory:
            raise Refused(f"{model.path!r} is a model without a cache; leapahead decodes causal language models")
        self.n_ctx: int = c.llama_n_ctx(self.pointer)
        self.n_batch: int = c.llama_n_batch(self.pointer)
        # Computed in parts, a step would move a sliding window on with its first part, and llama.cpp write the next
        # over what has left the window: gone for good, even if the draft is rejected.
        self.windowed = c.llama_model_n_swa(model.pointer) > 0
        self.n_step: int = c.llama_n_ubatch(self.pointer) if self.windowed else self.n_batch
        self.n_seq_max: int = c.llama_n_seq_max(self.pointer)
        self.fingerprint = (
            f"{params.n_threads} threads {params.n_threads_batch} for batches cache {types[0]} {types[1]} "
            f"flash_attn {options.flash_attn} n_gpu_layers {options.n_gpu_layers}"
        )
        self.seconds = 0.0
        self._make_batch(4 * self.n_batch)

    def _make_batch(self, n_ids: int) -> None:
        """One batch for ever: llama.cpp reads our arrays in place."""
        n = self.n_batch
        self._tokens, self._positions = (c.llama_token * n)(), (c.llama_pos * n)()
        self._counts, self._wanted = (ctypes.c_int32 * n)(), (ctypes.c_int8 * n)()
        self._ids, self._rows = (c.llama_seq_id * n_ids)(), (ctypes.c_size_t * n)()
        self._ids_at = ctypes.addressof(self._ids)
        self._batch = c.llama_batch(
            n_tokens=0,
            token=self._tokens,
            embd=None,
            pos=self._positions,
            n_seq_id=self._counts,
            seq_id=ctypes.cast(self._rows, ctypes.POINTER(ctypes.POINTER(c.llama_seq_id))),
            logits=self._wanted,
        )

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], ids: Sequence[Sequence[int]], logits: int
    ) -> FloatArray | None:
        """One forward.

        Args:
            tokens, positions: of n <= n_batch tokens.
            ids: the sequences that each belongs to.
            logits: of how many tokens, the last ones, they are wanted.

        Returns:
            float32 [logits, vocab], valid until the next call; None for none.

        Raises:
            LeapaheadError: it failed; the cache may hold some of the tokens.
        """
        n, end = len(tokens), 0
        unwanted = n - logits
        total = sum(map(len, ids))
        if total > len(self._ids):
            self._make_batch(2 * total)
        for i in range(n):  # quicker than numpy, which has to be woken for each array
            own = ids[i]
            begin, end = end, end + len(own)
            self._ids[begin:end] = list(own)
            self._tokens[i], self._positions[i], self._counts[i] = tokens[i], positions[i], end - begin
            self._rows[i], self._wanted[i] = self._ids_at + 4 * begin, i >= unwanted
        self._batch.n_tokens = n
        began = perf_counter()
        code = c.llama_decode(self.pointer, self._batch)
        if code != 0:
            kind = CacheFull if code == 1 else LeapaheadError
            raise kind(f"llama.cpp could not decode a batch of {n} tokens (code {code}): {_reason()}")
        if not logits:
            return None
        address = ctypes.addressof(c.llama_get_logits(self.pointer).contents)  # waits for the result
        self.seconds += perf_counter() - began
        return np.asarray(_Borrowed(address, (logits, self.model.vocab_size)))

    def remove(self, sequence: int, start: int = 0) -> bool:
        """Takes the sequence out of its cells from position `start` on; False where the model cannot forget."""
        return bool(c.llama_memory_seq_rm(self.memory, sequence, start, -1))

    def copy(self, source: int, goal: int, start: int, end: int) -> None:
        """Lets the cells of `source` at positions [start, end) belong to `goal` as well; nothing is moved."""
        c.llama_memory_seq_cp(self.memory, source, goal, start, end)

    def first_position(self, sequence: int) -> int:
        """The lowest that is still in the cache, -1 for none."""
        return int(c.llama_memory_seq_pos_min(self.memory, sequence))


class _Borrowed:
    """Memory of llama.cpp's as numpy takes it."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<f4", "version": 3}


def physical_cores() -> int:
    """As many threads as pay: a second one on the same core slows matrix work down."""
    allowed = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else range(os.cpu_count() or 1)
    siblings = set()
    for cpu in allowed:
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(file.read_text() if file.is_file() else str(cpu))
    return max(1, len(siblings))


def _reason() -> str:
    """The most telling of llama.cpp's last complaints."""
    for sign in ("error loading model", "failed", "error", ""):
        for line in _said:
            if sign in line:
                return line.split(": ", 1)[-1] if sign == "error loading model" else line
    return "it does not say why"
