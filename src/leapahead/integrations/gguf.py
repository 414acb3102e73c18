"""Exports a Hugging Face folder of a Llama as one GGUF file for llama.cpp: weights, tokenizer, chat template.

    config.json                      ->  llama.* keys                refused: what llama.cpp computes differently
    tokenizer.json                   ->  tokenizer.ggml.* keys       refused: what llama.cpp splits differently
    tokenizer_config.json, *.jinja   ->  special ids, chat template
    *.safetensors                    ->  tensors, one at a time      refused: missing, unknown, of another shape

llama.cpp rotates neighbouring pairs of a head's numbers, and Transformers the two halves of a head, so the rows of
`q_proj` and `k_proj` are reordered. Quantised types are made by llama.cpp's own quantiser from an unquantised file,
which is deleted afterwards. The file appears under its name when it is complete, and not before.

Two differences remain, which matter only if the tokenizer merges across them: characters of Unicode 16 and later, which
llama.cpp does not classify as letters, and a long s after an apostrophe with Llama 3's pre-tokenizer.

This module neither loads a model nor decodes with one.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from leapahead.core.errors import BadParameter, LeapaheadError, Refused, needing
from leapahead.core.forks import Mutex
from leapahead.core.parameters import flag
from leapahead.core.storage import replaceable
from leapahead.integrations.gguf_checkpoint import Checkpoint, open_checkpoint
from leapahead.integrations.gguf_shape import Shape, Tensor
from leapahead.integrations.gguf_vocabulary import Vocabulary

Progress = Callable[[str, int, int], None]  # what is being done, done, total


class Mixture(NamedTuple):
    """A quantised type of file.

    Attributes:
        ftype: llama.cpp's name of it.
        types: that llama.cpp intends for the matrices.
        block: how many numbers of a row the largest of these types quantises together.
    """

    ftype: str
    types: tuple[str, ...]
    block: int


MIXTURES = {
    "q8_0": Mixture("LLAMA_FTYPE_MOSTLY_Q8_0", ("Q8_0",), 32),
    "q6_k": Mixture("LLAMA_FTYPE_MOSTLY_Q6_K", ("Q6_K",), 256),
    "q5_k_m": Mixture("LLAMA_FTYPE_MOSTLY_Q5_K_M", ("Q5_K", "Q6_K"), 256),
    "q4_k_m": Mixture("LLAMA_FTYPE_MOSTLY_Q4_K_M", ("Q4_K", "Q6_K"), 256),
    "iq4_nl": Mixture("LLAMA_FTYPE_MOSTLY_IQ4_NL", ("IQ4_NL", "Q5_K", "Q6_K"), 256),
    "q4_0": Mixture("LLAMA_FTYPE_MOSTLY_Q4_0", ("Q4_0", "Q6_K"), 256),
}
KINDS = ("f32", "bf16", *MIXTURES)  # by falling size

LOG = logging.getLogger("leapahead.llama_cpp")
_one_log = Mutex()  # held while the log of the process is that of one export


@dataclass(frozen=True)
class Exported:
    """A written file.

    Attributes:
        path: of the file.
        kind: one of `KINDS`.
        size: in bytes.
        types: how many tensors are of each of llama.cpp's types. Norms are F32 in every kind.
        fallbacks: of `types`, the matrices that could not be of the kind's own types, because the length of their
            rows is not a multiple of `Mixture.block`. They are larger and more precise.
    """

    path: Path
    kind: str
    size: int
    types: Mapping[str, int]
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    @property
    def tensors(self) -> int:
        return sum(self.types.values())


def export_gguf(
    model_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    kind: str = "bf16",
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Writes the Llama in a folder as a GGUF file.

    One tensor at a time is in memory; for the quantised types, an unquantised copy lies beside `out` meanwhile.

    Args:
        model_dir: config.json, tokenizer.json and safetensors of a `LlamaForCausalLM`, as `save_pretrained` left them.
        out: the file to write; its folder must exist.
        kind: one of `KINDS`: "f32" or "bf16" (exact, or rounded to nearest even), or one that llama.cpp's quantiser
            makes.
        force: replace `out` if it exists.
        progress: called with (what, done, total) after each tensor.

    Raises:
        BadParameter: no such folder or kind, `out` cannot be written, or the folder's files are incomplete or broken.
        Refused: a model or tokenizer that llama.cpp would compute or tokenize differently from Transformers.
        LeapaheadError: gguf, llama-cpp-python, torch or safetensors is not installed, or the quantiser failed.
    """
    folder, out, report = Path(model_dir), Path(out), progress or (lambda what, done, total: None)
    place = _check_arguments(folder, out, kind, force)
    _need("gguf")
    llama_cpp = _need("llama_cpp") if kind in MIXTURES else None
    shape = Shape.read(folder)
    vocabulary = Vocabulary.read(folder, shape.vocab)
    with open_checkpoint(folder) as weights:
        plan = weights.plan(shape)
        matrices = {weights.dtypes[source] for source, tensor in plan.items() if len(tensor.shape) > 1}
        plain = {"f32": "F32", "bf16": "BF16"}.get(kind) or (matrices.pop() if len(matrices) == 1 else "F32")
        try:
            # beside its place, so that the last step is a rename on one file system
            with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as work:
                file = Path(work) / "plain.gguf"
                types = _write(file, shape, vocabulary, weights, plan, plain, _name(folder), report)
                if kind in MIXTURES:
                    plain_file, file = file, Path(work) / "quantised.gguf"
                    _quantise(llama_cpp, plain_file, file, kind, len(types), report)
                    types = _types(file)
                size = file.stat().st_size
                os.replace(file, place)
        except OSError as error:
            raise BadParameter(f"{out} cannot be written: {error.strerror or error}") from error
    intended = MIXTURES[kind].types if kind in MIXTURES else types.values()
    fallbacks = Counter(kept for name, kept in types.items() if not _stays_f32(name) and kept not in intended)
    return Exported(out, kind, size, dict(Counter(types.values())), dict(fallbacks))


def _check_arguments(folder: Path, out: Path, kind: str, force: bool) -> Path:
    """The file that is written."""
    if kind not in KINDS:
        raise BadParameter(f"a GGUF file of type {kind!r} is not possible: choose {', '.join(KINDS)}")
    if not folder.is_dir():
        raise BadParameter(f"{folder} is not a folder: name one with config.json, tokenizer.json and safetensors in it")
    if (folder / "adapter_config.json").is_file():
        raise Refused(
            f"{folder} has an adapter (adapter_config.json), which would be left out; merge it with PEFT's "
            "merge_and_unload(), and save the result in another folder"
        )
    place = replaceable(out)
    if not place.parent.is_dir():
        raise BadParameter(
            f"{out} cannot be written, because the folder {place.parent} does not exist: create it first"
        )
    if out.exists() and not flag("force", force):
        raise BadParameter(f"{out} exists; name another file, or replace it with the option 'force'")
    return place


# -------------------------------------------------------------------------------------------------------- the file


def _write(
    file: Path,
    shape: Shape,
    vocabulary: Vocabulary,
    weights: Checkpoint,
    plan: Mapping[str, Tensor],
    dtype: str,
    name: str,
    report: Progress,
) -> dict[str, str]:
    """Writes an unquantised file, matrices in `dtype`; returns the type of every tensor."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    try:
        _add_metadata(writer, shape, dtype, name)
        vocabulary.write(writer)
        types = {}
        for tensor in plan.values():
            kept = types[tensor.name] = "F32" if _stays_f32(tensor.name) else dtype
            number = np.dtype(np.float32 if kept == "F32" else np.int16)
            count = math.prod(tensor.shape) * number.itemsize
            writer.add_tensor_info(tensor.name, tensor.shape, number, count, gguf.GGMLQuantizationType[kept])
        factors = shape.rope_factors()
        if factors is not None:
            types["rope_freqs.weight"] = "F32"
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (source, tensor) in enumerate(plan.items(), start=1):
            writer.write_tensor_data(weights.read(source, tensor, types[tensor.name]))
            report("writing", done, len(plan))
        if factors is not None:
            writer.write_tensor_data(factors)
    finally:
        writer.close()
    return types


def _add_metadata(writer: Any, shape: Shape, dtype: str, name: str) -> None:
    """The keys of the file that describe the model."""
    import gguf

    file_types = {
        "F32": gguf.LlamaFileType.ALL_F32,
        "BF16": gguf.LlamaFileType.MOSTLY_BF16,
        "F16": gguf.LlamaFileType.MOSTLY_F16,
    }
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(file_types[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope["rope_theta"])
    if shape.rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.rope["factor"])


def _stays_f32(name: str) -> bool:
    """Whether llama.cpp needs the tensor in F32 whatever the file's type is: all vectors."""
    return name.endswith("_norm.weight") or name == "rope_freqs.weight"


def _name(folder: Path) -> str:
    """The name of the model in the file. Names on which llama.cpp's tokenization depends are left out."""
    name = folder.resolve().name
    return "" if re.search(r"phi-?3|modern-bert", name.lower()) else name


def _types(file: Path) -> dict[str, str]:
    """The type of every tensor of a file."""
    import gguf

    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


# --------------------------------------------------------------------------------------------------- the quantiser


def _quantise(llama_cpp: Any, plain: Path, file: Path, kind: str, total: int, report: Progress) -> None:
    """Runs llama.cpp's quantiser, whose log shows its progress and goes to our logger."""
    raised: list[BaseException] = []
    lines: list[str] = []

    def read(line: str) -> None:
        lines.append(line)
        if (count := re.match(r"\[\s*(\d+)/\s*\d+\]", line)) and not raised:
            try:
                report("quantising", int(count[1]), total)
            except BaseException as error:  # ctypes would print and drop it, even a KeyboardInterrupt
                raised.append(error)

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, MIXTURES[kind].ftype)
    with _log_of(llama_cpp, read):
        llama_cpp.llama_backend_init()
        failed = llama_cpp.llama_model_quantize(os.fsencode(plain), os.fsencode(file), options)
    if raised:
        raise raised[0]
    if failed:
        reason = next(
            (line for line in reversed(lines) if "fail" in line or "error" in line.lower()), "it gives no reason"
        )
        raise LeapaheadError(f"llama.cpp could not quantise to {kind}: {reason}")


@contextmanager
def _log_of(llama_cpp: Any, read: Callable[[str], None]) -> Iterator[None]:
    """Sends llama.cpp's log to our logger and to `read`, and afterwards where it went before.

    One block after another, since each restores what it found. What the handler of a signal raises within the block is
    raised at its end: in a callback it would be lost.
    """
    from leapahead.models.llama_cpp import log

    part = ""

    def receive(level: int, text: bytes, _: Any) -> None:
        nonlocal part  # a line may come in pieces
        *whole, part = (part + text.decode(errors="replace")).split("\n")
        for line in filter(None, map(str.strip, whole)):
            LOG.debug("%s", line)
            read(line)

    before, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    callback = llama_cpp.llama_log_callback(receive)  # lives as long as this frame: llama.cpp holds no reference
    with _one_log, log.watched():
        log.install()  # a model that is loaded meanwhile would, and it would be undone
        llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(data))
        llama_cpp.llama_log_set(callback, None)
        try:
            yield
        finally:
            llama_cpp.llama_log_set(before, data)


def _need(module: str) -> Any:
    """An optional package.

    Raises:
        LeapaheadError: it is not installed; the message names the extra that brings it.
    """
    with needing("the export", "llama-cpp", module):
        return import_module(module)
