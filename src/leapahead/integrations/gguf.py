"""A Hugging Face folder of a Llama as one GGUF file, which llama.cpp computes with: weights, tokenizer, chat template.

    config.json                      ->  llama.* keys                refused: what llama.cpp would compute otherwise
    tokenizer.json                   ->  tokenizer.ggml.* keys       refused: what llama.cpp would cut otherwise
    tokenizer_config.json, *.jinja   ->  special ids, chat template
    *.safetensors                    ->  tensors, one at a time      refused: missing, unknown, of another shape

llama.cpp rotates neighbouring pairs of a head's numbers, Transformers the two halves, so the rows of `q_proj` and
`k_proj` are reordered. The quantised types are llama.cpp's own work, done on a plain file that is deleted afterwards.
The file appears under its name when it is complete, and not before.

What is still tokenized otherwise, and only if the tokenizer merges across it: characters of Unicode 16 and later, which
llama.cpp takes for no letters, and a long s after an apostrophe with Llama 3's pre-tokenizer.

Knows nothing of targets: it neither loads a model nor decodes with one.
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
from typing import Any

import numpy as np

from leapahead.core.errors import BadParameter, LeapaheadError, Refused, needing
from leapahead.integrations.gguf_vocabulary import ELSEWHERE, Vocabulary, read_json

Progress = Callable[[str, int, int], None]  # what is being done, done, total

KINDS = ("f32", "bf16", "q8_0", "q4_k_m")
MIXTURES = {"q8_0": ("Q8_0",), "q4_k_m": ("Q4_K", "Q6_K")}  # what the matrices of a quantised file are meant to be
PACKED = {"q8_0": 32, "q4_k_m": 256}  # how many numbers of a row are quantised together
FTYPES = {"q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}
ARCHITECTURE = "LlamaForCausalLM"

LOG = logging.getLogger("leapahead.llama_cpp")


@dataclass(frozen=True)
class Exported:
    """A written file.

    Attributes:
        path: of the file.
        kind: one of `KINDS`.
        size: in bytes.
        types: how many tensors are of each of llama.cpp's types. Norms are F32 in every kind.
        fallbacks: of `types`, the matrices that could not be of the kind's own types, because the length of their
            rows is no multiple of `PACKED`. They are larger and more exact, not wrong.
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

    In memory is one tensor at a time; the quantised types need room for an unquantised copy beside `out` meanwhile.

    Args:
        model_dir: config.json, tokenizer.json and safetensors of a `LlamaForCausalLM`, as `save_pretrained` left them.
        out: the file to write; its folder must exist.
        kind: "f32" or "bf16" (exact, or rounded to nearest even), "q8_0" or "q4_k_m" (llama.cpp's quantiser).
        force: replace `out` if it exists.
        progress: called with (what, done, total) after each tensor.

    Raises:
        BadParameter: no such folder or kind, `out` cannot be written, or the folder's files are incomplete or broken.
        Refused: a model or tokenizer of which llama.cpp would make something else than Transformers does.
        LeapaheadError: gguf, llama-cpp-python, torch or safetensors is not installed, or the quantiser failed.
    """
    folder, out, tell = Path(model_dir), Path(out), progress or (lambda what, done, total: None)
    if kind not in KINDS:
        raise BadParameter(f"a GGUF file of type {kind!r} is not possible: choose {', '.join(KINDS)}")
    if not folder.is_dir():
        raise BadParameter(f"{folder} is not a folder: name one with config.json, tokenizer.json and safetensors in it")
    if not out.parent.is_dir():
        raise BadParameter(f"{out} cannot be written, because the folder {out.parent} does not exist: create it first")
    if out.is_dir():
        raise BadParameter(f"{out} is a folder: name the file to write")
    if out.exists() and not force:
        raise BadParameter(f"{out} exists: name another file, or force its replacement (--force, force=True)")
    _need("gguf")
    llama_cpp = _need("llama_cpp") if kind in MIXTURES else None
    shape = Shape.read(folder)
    vocabulary = Vocabulary.read(folder, shape.vocab)
    with _checkpoint(folder) as weights:
        plan = weights.plan(shape)
        matrices = {weights.dtypes[source] for source, tensor in plan.items() if len(tensor.shape) > 1}
        plain = {"f32": "F32", "bf16": "BF16"}.get(kind) or (matrices.pop() if len(matrices) == 1 else "F32")
        try:
            # beside `out`, so that the last step is a rename on one file system
            with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
                file = Path(work) / "plain.gguf"
                types = _write(file, shape, vocabulary, weights, plan, plain, _name(folder), tell)
                if kind in MIXTURES:
                    plain_file, file = file, Path(work) / "quantised.gguf"
                    _quantise(llama_cpp, plain_file, file, kind, len(types), tell)
                    types = _types(file)
                size = file.stat().st_size
                os.replace(file, out)
        except OSError as error:
            raise BadParameter(f"{out} cannot be written: {error.strerror or error}") from error
    fallbacks = Counter(
        kept for name, kept in types.items() if kind in MIXTURES and not _stays_f32(name) and kept not in MIXTURES[kind]
    )
    return Exported(out, kind, size, dict(Counter(types.values())), dict(fallbacks))


# ------------------------------------------------------------------------------------------------------ the config


@dataclass(frozen=True)
class Shape:
    """What config.json says, with the defaults of Transformers for what it leaves out."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    tied: bool
    rope: Mapping[str, Any]  # rope_type, rope_theta, and what the type needs

    @classmethod
    def read(cls, folder: Path) -> Shape:
        config = read_json(folder / "config.json", required=True)
        names = config.get("architectures") or [config.get("model_type") or "unnamed"]
        if ARCHITECTURE not in names:
            raise Refused(f"{folder} holds a {names[0]}, and only {ARCHITECTURE} can be exported: {ELSEWHERE}")
        for key, want in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("quantization_config", None),
            ("partial_rotary_factor", 1.0),
        ):
            found = config.get(key, want)
            if found != want and found is not None:
                said = key if isinstance(found, dict) else f"{key} {found!r}"
                raise Refused(f"{folder} has {said} in config.json, which cannot be exported: {ELSEWHERE}")
        try:
            heads = int(config["num_attention_heads"])
            shape = cls(
                vocab=int(config["vocab_size"]),
                hidden=int(config["hidden_size"]),
                intermediate=int(config["intermediate_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
                context=int(config.get("max_position_embeddings", 2048)),
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                tied=bool(config.get("tie_word_embeddings", False)),
                rope=_rope(folder, config),
            )
        except KeyError as error:
            raise BadParameter(f"{folder / 'config.json'} lacks {error.args[0]}: save the model again") from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise BadParameter(f"{folder / 'config.json'} is broken ({error}): save the model again") from None
        if shape.head_dim % 2 or shape.heads % shape.kv_heads:
            raise BadParameter(
                f"{folder / 'config.json'} cannot be right: {shape.heads} heads of {shape.head_dim} numbers for "
                f"{shape.kv_heads} key-value heads"
            )
        return shape

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the folder, tensor of the file), in the order of the file."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", Tensor("token_embd.weight", (self.vocab, hidden))
        for layer in range(self.layers):
            for source, name, shape, heads in (
                ("input_layernorm", "attn_norm", (hidden,), 0),
                ("self_attn.q_proj", "attn_q", (queries, hidden), self.heads),
                ("self_attn.k_proj", "attn_k", (keys, hidden), self.kv_heads),
                ("self_attn.v_proj", "attn_v", (keys, hidden), 0),
                ("self_attn.o_proj", "attn_output", (hidden, queries), 0),
                ("post_attention_layernorm", "ffn_norm", (hidden,), 0),
                ("mlp.gate_proj", "ffn_gate", (self.intermediate, hidden), 0),
                ("mlp.up_proj", "ffn_up", (self.intermediate, hidden), 0),
                ("mlp.down_proj", "ffn_down", (hidden, self.intermediate), 0),
            ):
                yield f"model.layers.{layer}.{source}.weight", Tensor(f"blk.{layer}.{name}.weight", shape, heads)
        yield "model.norm.weight", Tensor("output_norm.weight", (hidden,))
        if not self.tied:
            yield "lm_head.weight", Tensor("output.weight", (self.vocab, hidden))

    def rope_factors(self) -> Any:
        """What Llama 3's scaling divides each frequency by, [head_dim / 2]; None for any other rope.

        Wavelengths up to L / high stay, those from L / low on are stretched by `factor`; between them the frequency is
        a blend of both, linear in L / wavelength. L is the context of the first training.
        """
        if self.rope["rope_type"] != "llama3":
            return None
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        wavelengths = 2 * math.pi * self.rope["rope_theta"] ** exponents
        low, high = self.rope["low_freq_factor"], self.rope["high_freq_factor"]
        turns = self.rope["original_max_position_embeddings"] / wavelengths
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)  # share of the frequency that stays as it was
        return (1 / (kept + (1 - kept) / self.rope["factor"])).astype(np.float32)


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file; `heads` is not 0 where the rows of each head are reordered."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0


def _rope(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope of config.json, in either of the forms that Transformers has used."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    needs = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }.get(kind)
    if needs is None:
        raise Refused(f"{folder} has a rope of type {kind!r}, and only default, linear and llama3 can be exported")
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise Refused(f"{folder} has partial_rotary_factor {given['partial_rotary_factor']}, which cannot be exported")
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {"rope_type": kind, "rope_theta": float(theta), **{key: float(given[key]) for key in needs}}


# ----------------------------------------------------------------------------------------------------- the weights


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, each read when it is asked for.

    Attributes:
        shards: name of a tensor -> its open safetensors file.
        dtypes: name of a tensor -> "F32", "BF16" or "F16", as safetensors calls them.
    """

    folder: Path
    shards: Mapping[str, Any]
    dtypes: Mapping[str, str]

    def plan(self, shape: Shape) -> dict[str, Tensor]:
        """Name in the folder -> tensor of the file; checks that they are all there, and nothing else."""
        plan = dict(shape.tensors())
        for source, tensor in plan.items():
            if source not in self.shards:
                raise BadParameter(f"{self.folder} lacks the tensor {source}: its safetensors are incomplete")
            found = tuple(self.shards[source].get_slice(source).get_shape())
            if found != tensor.shape:
                raise BadParameter(
                    f"{self.folder} has {source} of shape {found}, where config.json says {tensor.shape}: "
                    "config and weights do not belong together"
                )
            if self.dtypes[source] not in ("F32", "BF16", "F16"):
                raise Refused(
                    f"{self.folder} has {source} in {self.dtypes[source]}, and only F32, BF16 and F16 can be exported"
                )
        known = plan.keys() | ({"lm_head.weight"} if shape.tied else set())
        extra = [name for name in self.shards if name not in known and not name.endswith("rotary_emb.inv_freq")]
        if extra:
            raise Refused(f"{self.folder} has the tensor {min(extra)}, which no plain Llama has: {ELSEWHERE}")
        return plan

    def read(self, source: str, tensor: Tensor, dtype: str) -> Any:
        """The numbers as they stand in the file, [shape]; BF16 as 16-bit integers, which numpy has no type for."""
        import torch

        weight = self.shards[source].get_tensor(source).to(getattr(torch, _TORCH[dtype]))
        if tensor.heads:
            rows = weight.view(tensor.heads, 2, tensor.shape[0] // tensor.heads // 2, -1)
            weight = rows.transpose(1, 2).reshape(tensor.shape)  # x0 x1 .. y0 y1 ..  ->  x0 y0 x1 y1 ..
        return (weight.contiguous().view(torch.int16) if dtype == "BF16" else weight.contiguous()).numpy()


_TORCH = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@contextmanager
def _checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Opens the safetensors of a folder: one file, or the shards that its index names."""
    safetensors = _need("safetensors")
    _need("torch")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise BadParameter(f"{index} has no weight_map: save the model again")
        files = sorted(set(map(str, where.values())))
    else:
        files = ["model.safetensors"]
    shards, dtypes, opened = {}, {}, []
    try:
        for name in files:
            if not (folder / name).is_file():
                raise BadParameter(f"{folder} has no {name}: save the model there with save_pretrained, or download it")
            try:
                opened.append(safetensors.safe_open(folder / name, framework="pt"))
                for tensor in opened[-1].keys():  # noqa: SIM118  (it is no mapping)
                    shards[tensor] = opened[-1]
                    dtypes[tensor] = opened[-1].get_slice(tensor).get_dtype()
            except (safetensors.SafetensorError, OSError) as error:
                raise BadParameter(f"{folder / name} is broken ({error}): download or save it again") from None
        yield Checkpoint(folder, shards, dtypes)
    finally:
        for handle in opened:
            handle.__exit__(None, None, None)


# -------------------------------------------------------------------------------------------------------- the file


def _write(
    file: Path,
    shape: Shape,
    vocabulary: Vocabulary,
    weights: Checkpoint,
    plan: Mapping[str, Tensor],
    dtype: str,
    name: str,
    tell: Progress,
) -> dict[str, str]:
    """Writes a file that is not quantised, matrices in `dtype`; returns the type of every tensor."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    try:
        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(
            {
                "F32": gguf.LlamaFileType.ALL_F32,
                "BF16": gguf.LlamaFileType.MOSTLY_BF16,
                "F16": gguf.LlamaFileType.MOSTLY_F16,
            }[dtype]
        )
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
            tell("writing", done, len(plan))
        if factors is not None:
            writer.write_tensor_data(factors)
    finally:
        writer.close()
    return types


def _stays_f32(name: str) -> bool:
    """Whether llama.cpp wants the tensor in F32 whatever the file's type: vectors."""
    return name.endswith("_norm.weight") or name == "rope_freqs.weight"


def _name(folder: Path) -> str:
    """For people; but llama.cpp tokenizes otherwise for models with certain names in theirs."""
    name = folder.resolve().name
    return "" if re.search(r"phi-?3|modern-bert", name.lower()) else name


def _types(file: Path) -> dict[str, str]:
    """The type of every tensor of a file."""
    import gguf

    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


# -------------------------------------------------------------------------------------------------- llama.cpp's part


def _quantise(llama_cpp: Any, plain: Path, file: Path, kind: str, total: int, tell: Progress) -> None:
    """llama.cpp's quantiser; its log goes to our logger, and tells how far it is."""
    raised: list[BaseException] = []
    lines: list[str] = []

    def read(line: str) -> None:
        lines.append(line)
        if (count := re.match(r"\[\s*(\d+)/\s*\d+\]", line)) and not raised:
            try:
                tell("quantising", int(count[1]), total)
            except BaseException as error:  # ctypes would print and drop it, even a KeyboardInterrupt
                raised.append(error)

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, FTYPES[kind])
    with _log_of(llama_cpp, read):
        llama_cpp.llama_backend_init()
        failed = llama_cpp.llama_model_quantize(os.fsencode(plain), os.fsencode(file), options)
    if raised:
        raise raised[0]
    if failed:
        reason = next(
            (line for line in reversed(lines) if "fail" in line or "error" in line.lower()), "no reason given"
        )
        raise LeapaheadError(f"llama.cpp could not quantise to {kind}: {reason}")


@contextmanager
def _log_of(llama_cpp: Any, read: Callable[[str], None]) -> Iterator[None]:
    """Sends llama.cpp's log to our logger and to `read`, and afterwards where it went before."""
    part = ""

    def receive(level: int, text: bytes, _: Any) -> None:
        nonlocal part  # a line may come in pieces
        *whole, part = (part + text.decode(errors="replace")).split("\n")
        for line in filter(None, map(str.strip, whole)):
            LOG.debug("%s", line)
            read(line)

    before, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(data))
    callback = llama_cpp.llama_log_callback(receive)  # lives as long as this frame: llama.cpp holds no reference
    llama_cpp.llama_log_set(callback, None)
    try:
        yield
    finally:
        llama_cpp.llama_log_set(before, data)


def _need(module: str) -> Any:
    """An optional package, or the sentence that says how to install it."""
    extra = "llama-cpp" if module in ("gguf", "llama_cpp") else "transformers"
    with needing("the export", extra, module):
        return import_module(module)
