"""llama.cpp's C interface, as much of it as a target needs: a model file, a context, batches of many sequence ids.

This module knows tokens, positions and sequence ids; neither trees, nor sampling, nor text.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import llama_cpp as c
import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter, CacheFull, LeapaheadError, Refused
from leapahead.core.processor import physical_cores
from leapahead.models.llama_cpp import log
from leapahead.models.llama_cpp.borrowed import borrowed
from leapahead.models.llama_cpp.file import check_file, has_tensor
from leapahead.models.llama_cpp.options import CACHE_TYPES, MOST, SMALLEST_CONTEXT, LlamaCppOptions

FloatArray = npt.NDArray[np.float32]
State = npt.NDArray[np.uint8]  # a copy of a recurrent state

USUAL_CONTEXT = 4096  # tokens, where none are asked for: the cache of a long context can outgrow the model
USUAL_SEQUENCES, USUAL_STATES = 64, 8  # sequence ids, where none are asked for
ID_BYTES = ctypes.sizeof(c.llama_seq_id)
# llama.cpp writes the states of several sequences of PLaMo-2 to wrong places, and ends the process where there is none
# (`kv_head * n_seqs` in plamo2.cpp). Sequences of DeepSeek-V4 share no cells: a copy copies all of it.
ALONE, COPIES_ALL = frozenset({"plamo2"}), frozenset({"deepseek4"})
STEPS = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7, "q8_0": 2.0**-7}  # relative steps of these types


class Model:
    """The weights and the vocabulary of a GGUF file.

    Args:
        path: of the file; of a model in several files the first.
        options: how it is loaded.
        vocab_only: load no weights: the object has a vocabulary and metadata, and cannot be run.

    Attributes:
        precision: relative step of the numbers that go into its products. Whatever the bits of quantised weights, they
            are multiplied with activations of 8 bits.
        layers, hidden_size: number of layers, and width of a hidden state.
        suppressed: tokens that no text may have.
        learned_positions: it has an embedding for each of its first `n_ctx_train` positions and none for others.
        stateful: it has a recurrent state, which cannot discard tokens.
        alone: llama.cpp computes one sequence of it at a time.
        keeps: its state may be kept, if the test of the model finds it right.
        cells: a token takes a cell of the cache; false where there is a state only.
        head_lengths: numbers of a head's key and of its value.

    Raises:
        BadParameter: no such file, an incomplete one, or one that llama.cpp cannot load; the message has the reason.
        Refused: not a causal language model.
    """

    def __init__(self, path: str | Path, options: LlamaCppOptions, vocab_only: bool = False) -> None:
        self.path = str(path)
        file = Path(path).expanduser()
        check_file(file)
        log.install()
        c.llama_backend_init()
        params = c.llama_model_default_params()
        mode = "_".join(["MMAP"] * options.use_mmap + ["MLOCK"] * options.use_mlock) or "NONE"
        params.load_mode = getattr(c, f"LLAMA_LOAD_MODE_{mode}")
        params.use_extra_bufts, params.vocab_only = options.use_extra_bufts, vocab_only
        if options.n_gpu_layers is not None:
            params.n_gpu_layers = options.n_gpu_layers
        with log.watched(params):
            self.pointer = c.llama_model_load_from_file(os.fsencode(file), params)
            self._free = weakref.finalize(self, c.llama_model_free, self.pointer)  # before an interrupt is raised
        if not self.pointer:
            raise BadParameter(
                f"the GGUF file {self.path!r} cannot be loaded: {log.reason()}; download or copy it again if it is "
                "damaged, or install a newer llama-cpp-python if the architecture is new"
            )
        self.vocab = c.llama_model_get_vocab(self.pointer)
        self.vocab_size: int = c.llama_vocab_n_tokens(self.vocab)
        count = ctypes.c_int32()
        suppressed = c.llama_vocab_get_suppress_tokens(self.vocab, count)
        self.suppressed = tuple(token for token in suppressed[: count.value] if 0 <= token < self.vocab_size)
        self.n_ctx_train: int = c.llama_model_n_ctx_train(self.pointer)
        self.layers: int = c.llama_model_n_layer(self.pointer)
        self.hidden_size: int = c.llama_model_n_embd_out(self.pointer)
        kinds = {c.LLAMA_FTYPE_ALL_F32: "f32", c.LLAMA_FTYPE_MOSTLY_F16: "f16", c.LLAMA_FTYPE_MOSTLY_BF16: "bf16"}
        self.precision = STEPS[kinds.get(c.llama_model_ftype(self.pointer), "q8_0")]
        self.fingerprint = " ".join(
            (
                *(str(self.meta(key)) for key in ("general.architecture", "general.file_type")),
                f"{c.llama_model_n_params(self.pointer)} parameters in {c.llama_model_size(self.pointer)} bytes",
                f"{self.layers} layers of {c.llama_model_n_embd(self.pointer)}",
            )
        )
        recurrent, hybrid = (bool(ask(self.pointer)) for ask in (c.llama_model_is_recurrent, c.llama_model_is_hybrid))
        self.cells, self.stateful = hybrid or not recurrent, hybrid or recurrent
        architecture = self.meta("general.architecture")
        usual = c.llama_model_n_embd(self.pointer) // max(1, 0 if vocab_only else c.llama_model_n_head(self.pointer))
        key, value = (int(self.meta(f"{architecture}.attention.{each}_length") or usual) for each in ("key", "value"))
        self.head_lengths = key, value
        self.alone, self.keeps = architecture in ALONE, architecture not in COPIES_ALL
        self._refuse_other_kinds(architecture)
        rotary = c.llama_model_rope_type(self.pointer) != c.LLAMA_ROPE_TYPE_NONE
        self.learned_positions = not (rotary or self.stateful) and has_tensor(file, "position_embd.weight")

    def _refuse_other_kinds(self, architecture: str | None) -> None:
        for wrong, what in (
            (c.llama_vocab_type(self.vocab) == c.LLAMA_VOCAB_TYPE_NONE, "a model without a vocabulary"),
            (c.llama_model_has_encoder(self.pointer), "an encoder-decoder model"),
            (not c.llama_model_has_decoder(self.pointer), "a model without a decoder"),
            (c.llama_model_is_diffusion(self.pointer), "a diffusion model"),
            (self.meta(f"{architecture}.attention.causal") == "false", "a model whose tokens attend to later ones"),
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


class Outputs(NamedTuple):
    """What a forward gives of its last rows, in memory that the next forward overwrites.

    Attributes:
        logits: float32 [rows, vocab]; None where no rows were asked for.
        hidden: float32 [rows, hidden_size], the last layer's states after the final norm; None unless asked for.
    """

    logits: FloatArray | None
    hidden: FloatArray | None


class Context:
    """A KV cache over a model, and the batches that go through both.

    Attributes:
        n_ctx: cells of the cache.
        longest: greatest number of tokens of a sequence.
        may_grow: whether a larger `n_ctx` would raise it.
        n_batch: greatest number of tokens in a forward.
        n_step: greatest number of nodes in a step.
        n_seq_max: number of sequence ids.
        unified: one cache for all sequences, whose cells may belong to several; else each has a cache of its own.
        copies_states: without a unified cache, whether `copy` goes through the machine's memory, which is done at once
            and copies used cells only.
        windowed: some layers have a sliding window.
        shares_states: two sequence ids may share a recurrent state until one of them goes on; set after a test.
        saves_states: a recurrent state may be copied out and back; set after a test.
        precision: of the coarser of model and cache, see `Model`.
        seconds: spent inside llama.cpp for forwards whose logits were asked for.

    Args:
        model: the file.
        options: of the cache and the forwards.
        beyond: where given, every sequence has `n_ctx` cells of its own, and so many more for rows behind its end.
        cells: where given, all sequences share at least so many, and each is no longer than `n_ctx`.

    Raises:
        BadParameter: the options do not fit together.
        LeapaheadError: llama.cpp cannot make the context; the message has its reason.
        Refused: the model has no cache.
    """

    def __init__(self, model: Model, options: LlamaCppOptions, beyond: int = 0, cells: int = 0) -> None:
        if options.kv_unified is False and not beyond:
            raise BadParameter("kv_unified=False needs the target of `separate`; load the file with leapahead.LLM(...)")
        self.model = model
        types = cache_types(model, options)
        params = _context_params(model, options, types)
        wanted = params.n_ctx
        params.n_ctx = max(wanted, cells)
        if beyond:
            params.kv_unified = False
            if (cells := (wanted + beyond) * params.n_seq_max) > MOST:
                raise BadParameter(
                    f"n_ctx={wanted} is not possible: so many cells for each of {params.n_seq_max} sequences are "
                    f"more than {MOST}; give a smaller one"
                )
            params.n_ctx = cells
        with log.watched():
            self.pointer = c.llama_init_from_model(model.pointer, params)
            self._free = weakref.finalize(self, c.llama_free, self.pointer)
        if not self.pointer:
            raise LeapaheadError(
                f"llama.cpp cannot make a context of {params.n_ctx} tokens for {model.path!r} ({log.reason()}); "
                "use a smaller n_ctx"
            )
        self.memory = c.llama_get_memory(self.pointer)
        if not self.memory:
            raise Refused(f"{model.path!r} is a model without a cache; leapahead decodes causal language models")
        self.n_ctx: int = c.llama_n_ctx(self.pointer)
        self.n_batch: int = c.llama_n_batch(self.pointer)
        self.n_seq_max: int = c.llama_n_seq_max(self.pointer)
        # Computed in parts, a step would move a sliding window on with its first part, and llama.cpp would write the
        # next part over what has left the window, which is lost even if the draft is rejected.
        self.unified, self.copies_states = not beyond, False
        self.windowed = c.llama_model_n_swa(model.pointer) > 0
        self.shares_states = self.saves_states = False
        self.n_step: int = c.llama_n_ubatch(self.pointer) if self.windowed else self.n_batch
        # A context that is longer than what the model was trained with is the user's to choose, as in llama.cpp.
        limited = model.learned_positions or not options.n_ctx
        longest = wanted if beyond or cells else self.n_ctx
        trained = model.n_ctx_train - (beyond if model.learned_positions else 0)
        self.longest = min(longest, trained) if limited and model.n_ctx_train else longest
        self.may_grow = not (model.learned_positions and self.longest == trained)
        self.precision = max(model.precision, *(STEPS[each] for each in types))
        self.fingerprint = (
            f"{params.n_threads} threads {params.n_threads_batch} for batches cache {types[0]} {types[1]} "
            f"flash_attn {options.flash_attn} n_gpu_layers {options.n_gpu_layers}"
            f"{'' if options.use_extra_bufts else ' not repacked'} build {build()}"
        )
        self.seconds, self._gives_hidden = 0.0, False
        self._make_batch(4 * self.n_batch)

    @property
    def alive(self) -> bool:
        """Whether it is still there: the end of the interpreter frees it before the objects that refer to it."""
        return self._free.alive

    def _make_batch(self, n_ids: int) -> None:
        """Allocates the one batch that all forwards use: llama.cpp reads our arrays in place."""
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
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        ids: Sequence[Sequence[int]],
        wanted: Sequence[bool],
        hidden: bool = False,
    ) -> Outputs:
        """One forward.

        Args:
            tokens, positions: of n <= n_batch tokens.
            ids: the sequences that each token belongs to.
            wanted: of which tokens outputs are wanted.
            hidden: whether hidden states are wanted beside the logits; outputs are those of all tokens then.

        Raises:
            LeapaheadError: it failed; the cache may hold some of the tokens.
        """
        n, counts = len(tokens), list(map(len, ids))
        if (total := sum(counts)) > len(self._ids):
            self._make_batch(2 * total)
        starts = accumulate(counts[:-1], initial=0)
        self._tokens[:n], self._positions[:n], self._counts[:n] = list(tokens), list(positions), list(counts)
        self._ids[:total] = list(chain.from_iterable(ids))
        self._rows[:n] = [self._ids_at + ID_BYTES * start for start in starts]
        self._wanted[:n] = list(wanted)
        self._batch.n_tokens = n
        if hidden != self._gives_hidden:
            c.llama_set_embeddings(self.pointer, hidden)
            self._gives_hidden = hidden
        began = perf_counter()
        if (code := c.llama_decode(self.pointer, self._batch)) != 0:
            kind = CacheFull if code == 1 else LeapaheadError
            raise kind(f"llama.cpp could not decode a batch of {n} tokens (code {code}): {log.reason()}")
        rows = n if hidden else sum(wanted)
        if not rows:
            return Outputs(None, None)
        logits = borrowed(ctypes.addressof(c.llama_get_logits(self.pointer).contents), rows, self.model.vocab_size)
        self.seconds += perf_counter() - began  # llama_get_logits waits for the result
        if not hidden:
            return Outputs(logits, None)
        states = ctypes.addressof(c.llama_get_embeddings(self.pointer).contents)
        return Outputs(logits, borrowed(states, rows, self.model.hidden_size))

    def remove(self, sequence: int, start: int = 0) -> bool:
        """Takes the sequence out of its cells from position `start` on; False where the model cannot forget."""
        return bool(c.llama_memory_seq_rm(self.memory, sequence, start, -1))

    def clear(self) -> None:
        """Empties the cache, and sets its memory to zero."""
        c.llama_memory_clear(self.memory, True)

    def copy(self, source: int, goal: int, start: int = 0, end: int = -1) -> None:
        """Lets the cells of `source` at positions [start, end), by default all, belong to `goal` as well.

        So does its recurrent state, in place of the one of `goal`. Nothing is moved, but where each sequence has a
        cache of its own: there, all cells are copied, those of `goal` are lost, and start and end must be left out.
        """
        if self.copies_states:
            self.load_state(goal, self.save_state(source, whole=True), whole=True)
            return
        c.llama_memory_seq_cp(self.memory, source, goal, start, end)

    def first_position(self, sequence: int) -> int:
        """The lowest position of the sequence that is still in the cache, -1 for none."""
        return int(c.llama_memory_seq_pos_min(self.memory, sequence))

    def last_position(self, sequence: int) -> int:
        """The highest position of the sequence, -1 for none."""
        return int(c.llama_memory_seq_pos_max(self.memory, sequence))

    def save_state(self, sequence: int, whole: bool = False) -> State:
        """A copy of the recurrent state of a sequence; `whole`, of its keys and values too."""
        kind = 0 if whole else c.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        state = np.empty(c.llama_state_seq_get_size_ext(self.pointer, sequence, kind), np.uint8)
        data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if c.llama_state_seq_get_data_ext(self.pointer, data, len(state), sequence, kind) != len(state):
            raise LeapaheadError(f"llama.cpp could not save the state of a sequence: {log.reason()}")
        return state

    def load_state(self, sequence: int, state: State, whole: bool = False) -> None:
        """Puts a copy back. Attention cells stay as they are, unless it is a `whole` one, which takes cells anew."""
        kind = 0 if whole else c.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if c.llama_state_seq_set_data_ext(self.pointer, data, len(state), sequence, kind) == 0:
            raise LeapaheadError(f"llama.cpp could not restore the state of a sequence: {log.reason()}")


def cache_types(model: Model, options: LlamaCppOptions) -> tuple[str, str]:
    """The types of keys and values.

    Raises:
        BadParameter: they are not possible for this model.
    """
    usual = "f32" if model.precision == STEPS["f32"] else "f16"
    types = options.type_k or usual, options.type_v or usual
    if model.cells:
        options.check_types(types, model.head_lengths, model.path)
    return types


def context_size(model: Model, options: LlamaCppOptions) -> int:
    """Cells of the KV cache; of each sequence's cache where it has its own."""
    trained = model.n_ctx_train or USUAL_CONTEXT
    wanted = min(trained, USUAL_CONTEXT) if options.n_ctx is None else options.n_ctx or trained
    return max(wanted, SMALLEST_CONTEXT)


def _context_params(model: Model, options: LlamaCppOptions, types: tuple[str, str]) -> Any:
    """What llama.cpp is asked for. What an assertion of llama.cpp would end the process for is refused."""
    trained = model.n_ctx_train or USUAL_CONTEXT
    if model.learned_positions and (options.n_ctx or 0) > trained:
        raise BadParameter(
            f"n_ctx={options.n_ctx} is not possible: {model.path!r} has learned positions for {trained} tokens only; "
            f"give a smaller one, or 0 for all {trained}"
        )
    params = c.llama_context_default_params()
    params.n_ctx = context_size(model, options)
    params.n_batch = min(options.n_batch, params.n_ctx)
    params.n_ubatch = min(options.n_ubatch, params.n_batch)
    if model.alone and (options.n_seq_max or 1) > 1:
        raise BadParameter(
            f"n_seq_max={options.n_seq_max} is not possible: llama.cpp computes one sequence of {model.path!r} at "
            "a time; leave it out"
        )
    usual = 1 if model.alone else USUAL_STATES if model.stateful else USUAL_SEQUENCES
    params.n_seq_max = options.n_seq_max or min(usual, params.n_ubatch)
    if params.n_seq_max > params.n_ubatch:
        raise BadParameter(
            f"n_seq_max={params.n_seq_max} sequences do not fit a batch of {params.n_ubatch} tokens; "
            "use a smaller n_seq_max, or a larger n_batch, n_ubatch and n_ctx"
        )
    params.n_threads = options.n_threads or physical_cores()
    params.n_threads_batch = options.n_threads_batch or params.n_threads
    if model.meta(f"{model.meta('general.architecture')}.pooling_type") is not None:
        params.pooling_type = c.LLAMA_POOLING_TYPE_NONE  # hidden states of every token
    params.kv_unified = True  # one cell may belong to many sequences
    params.swa_full = True  # a rejected draft must not have pushed anything out of a sliding window
    params.no_perf = True
    params.type_k, params.type_v = (CACHE_TYPES[each] for each in types)
    if options.flash_attn is not None:
        params.flash_attn_type = int(options.flash_attn)
    elif "f32" in types:
        params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return params


def build() -> str:
    """The installed llama.cpp: its version, the processor's instructions that it uses, and which kernels it has."""
    return f"{c.__version__} {c.llama_print_system_info().decode(errors='replace').strip(' |')}"
