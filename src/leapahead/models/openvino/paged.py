"""An OpenVINO model compiled with paged attention: one forward over the new tokens of several sequences.

An exported model keeps its own state and reads one sequence after the other. OpenVINO's transformation to paged
attention replaces the state by blocks of a cache that belongs to the caller, packs the tokens of all sequences into one
row of tokens, and takes for each sequence a mask over its new tokens (`qq_bias`), which is a tree's ancestor mask:

    input_ids, position_ids    int64 [tokens]            subsequence_begins    int32 [sequences + 1]
    past_lens                  int32 [sequences]         block_indices(_begins) the blocks of each sequence
    qq_bias, qq_bias_begins    uint8, int32              rows                  int64: tokens whose logits are wanted

The last one is added here: the output layer of a large vocabulary is computed for the wanted rows only, and the hidden
states that enter it become an output. Knows neither sessions nor trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

from leapahead.core.errors import BadParameter, LeapaheadError, Refused, first_line
from leapahead.core.tree import BoolArray
from leapahead.models.openvino.blocks import Plane, Pool, Track
from leapahead.models.openvino.options import OpenVinoOptions

STEPS = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}  # relative steps of these types
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}  # numpy has no bfloat16
ATTENTION, SLIDING_WINDOW = "PagedAttentionExtension", 10  # type of a paged attention; its input with the window
PIECES, PIECE = 1024, 256  # so many pieces of so many bytes of the weights are part of the digest
LEAST_WEIGHT = 4096  # numbers of a constant that counts as a weight


@dataclass(frozen=True)
class Part:
    """The new tokens of one sequence.

    Attributes:
        track: their place in the cache, with room for them behind `past` entries.
        past: entries that all of them attend to.
        tokens, positions: of each.
        mask: bool [tokens, tokens], which of each other they attend to; None for a chain.
    """

    track: Track
    past: int
    tokens: Sequence[int]
    positions: Sequence[int]
    mask: BoolArray | None


class _Input:
    """An input tensor that is made anew only when its size changes."""

    def __init__(self, request: Any, name: str, dtype: npt.DTypeLike) -> None:
        self._request, self._name = request, name
        self._values, self._is_set = np.zeros(0, dtype), False

    def put(self, values: npt.ArrayLike) -> None:
        found = np.asarray(values)
        if len(found) != len(self._values) or not self._is_set:
            self._values = np.zeros(len(found), self._values.dtype)
            self._request.set_tensor(self._name, ov.Tensor(self._values, shared_memory=True))
            self._is_set = True
        self._values[:] = found


class PagedModel:
    """A compiled model.

    Args:
        file: openvino_model.xml of an exported model.
        options: how it is compiled.
        windows: of each layer, the number of tokens that it attends to; 0 for all. None where no layer has a window.

    Attributes:
        vocab_size, hidden_size, layers: of the model.
        weights: the type of most of its weights, by OpenVINO's name.
        computed_in, cached_in: the types of the computation and of the cache.
        threads: number of them.
        precision: relative step of its numbers.
        planes: of the cache: keys and values of each layer.
        fingerprint: of the weights' shapes and of the options.

    Raises:
        BadParameter: the file cannot be read.
        Refused: the model cannot be given paged attention.
    """

    def __init__(self, file: Path, options: OpenVinoOptions, windows: Sequence[int] | None = None) -> None:
        self.file = file
        core = ov.Core()
        model = read_model(core, file)
        self.weights, count = weight_type(model)
        if why := give_paged_attention(model):
            raise Refused(
                f"OpenVINO cannot give the model {str(file)!r} paged attention ({why}); load the model with "
                "Transformers, or as a GGUF file with llama.cpp"
            )
        if windows:
            _set_windows(model, windows, file)
        _choose_rows(model, file)
        kind = options.precision or ("f32" if self.weights == "f32" else _usual_precision(core))
        cache = options.cache_type or kind
        settings: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": kind,
            "KV_CACHE_PRECISION": cache,
        }
        if options.n_threads is not None:
            settings["INFERENCE_NUM_THREADS"] = options.n_threads
        try:
            compiled = core.compile_model(model, "CPU", settings)
        except RuntimeError as error:
            raise LeapaheadError(
                f"OpenVINO cannot compile {str(file)!r} for this processor: {cause(error)}; export it as f32"
            ) from None
        self._request = compiled.create_infer_request()
        names = {each.get_any_name(): each for each in compiled.inputs}
        self.cache_names = sorted((name for name in names if "cache." in name), key=_layer_first)
        self.layers = len(self.cache_names) // 2
        self.planes = [_plane(names[name], cache) for name in self.cache_names]
        logits, hidden = compiled.outputs
        self.vocab_size = logits.get_partial_shape()[-1].get_length()
        self.hidden_size = hidden.get_partial_shape()[-1].get_length()
        low_bits = "bf16" if self.weights not in STEPS else self.weights  # integer weights: activations of 8 bits
        self.precision = max(STEPS[kind], STEPS[cache], STEPS[low_bits])
        threads = compiled.get_property("INFERENCE_NUM_THREADS")
        self.fingerprint = (
            f"{count} weights, most in {self.weights}, {self.layers} layers of {self.hidden_size}, computed in {kind} "
            f"cache {cache} {threads} threads"
        )
        self.threads, self.computed_in, self.cached_in = int(threads), kind, cache
        self._compiled, self._version = compiled, -1
        self._longest = np.zeros((), np.int32)
        self._request.set_tensor("max_context_len", ov.Tensor(self._longest, shared_memory=True))
        self._inputs = {
            name: _Input(self._request, name, dtype)
            for name, dtype in (
                *((name, np.int64) for name in ("input_ids", "position_ids", "rows")),
                *((name, np.int32) for name in ("past_lens", "subsequence_begins", "block_indices")),
                *((name, np.int32) for name in ("block_indices_begins", "qq_bias_begins")),
                ("qq_bias", np.uint8),
            )
        }

    @property
    def bytes_per_token(self) -> int:
        """Of the cache."""
        return sum(plane.shape[0] * plane.shape[2] * np.dtype(plane.dtype).itemsize for plane in self.planes)

    def digest(self) -> str:
        """16 hex digits of the sizes and some bytes of all weights; "" where the file cannot be read."""
        found = sha256()
        try:
            data = np.memmap(self.file.with_suffix(".bin"), np.uint8, "r")
            for start in np.linspace(0, max(len(data) - PIECE, 0), PIECES, dtype=np.int64):
                found.update(data[start : start + PIECE].tobytes())
        except (OSError, ValueError):
            return ""  # removed or replaced since it was loaded
        found.update(str(len(data)).encode())
        return found.hexdigest()[:16]

    def forward(self, pool: Pool, parts: Sequence[Part], rows: Sequence[int]) -> tuple[Any, Any]:
        """ONE forward.

        Args:
            pool: the cache.
            parts: of the sequences.
            rows: tokens whose logits are wanted, counted over all parts; at least one.

        Returns:
            Logits, float32 [rows, vocab], and the hidden states after the final norm, float32 [tokens, hidden_size], in
            memory that the next forward overwrites.

        Raises:
            LeapaheadError: OpenVINO failed; the message has its reason.
        """
        if pool.version != self._version:
            for index, name in enumerate(self.cache_names):
                self._request.set_tensor(name, self._cache_tensor(pool.memory(index), index))
            self._version = pool.version
        masked = any(part.mask is not None for part in parts)
        begins, blocks, block_begins = [0], list[int](), [0]
        tokens, positions = list[int](), list[int]()
        masks, mask_begins = list[npt.NDArray[np.uint8]](), [0]
        longest = 0
        for part in parts:
            count = len(part.tokens)
            tokens += part.tokens
            positions += part.positions
            begins.append(len(tokens))
            blocks += part.track.blocks
            block_begins.append(len(blocks))
            longest = max(longest, part.past + count)
            if masked:
                mask = np.tri(count, dtype=np.uint8) if part.mask is None else part.mask.astype(np.uint8)
                masks.append(mask.ravel())
            mask_begins.append(mask_begins[-1] + (count * count if masked else 0))
        inputs: dict[str, npt.ArrayLike] = {
            "input_ids": tokens,
            "position_ids": positions,
            "rows": list(rows),
            "past_lens": [part.past for part in parts],
            "subsequence_begins": begins,
            "block_indices": blocks,
            "block_indices_begins": block_begins,
            "qq_bias": np.concatenate(masks) if masked else [],
            "qq_bias_begins": mask_begins,
        }
        for name, each in self._inputs.items():
            each.put(inputs[name])
        self._longest[...] = longest
        try:
            self._request.infer()
        except RuntimeError as error:
            raise LeapaheadError(
                f"OpenVINO could not compute a forward of {len(tokens)} tokens: {cause(error)}"
            ) from None
        logits = self._request.get_output_tensor(0).data.reshape(-1, self.vocab_size)
        return logits, self._request.get_output_tensor(1).data.reshape(-1, self.hidden_size)

    def _cache_tensor(self, memory: npt.NDArray[Any], plane: int) -> Any:
        if self.planes[plane].dtype == np.uint16:
            return ov.Tensor(memory, ov.Shape(memory.shape), ov.Type.bf16)
        return ov.Tensor(memory, shared_memory=True)


def read_model(core: Any, file: Path) -> Any:
    """An exported model.

    Raises:
        BadParameter: it cannot be read.
    """
    if not file.is_file():
        raise BadParameter(f"there is no OpenVINO model {str(file)!r}; name the folder that holds openvino_model.xml")
    try:
        return core.read_model(file)
    except RuntimeError as error:
        raise BadParameter(
            f"the OpenVINO model {str(file)!r} cannot be read: {cause(error)}; export it again"
        ) from None


def weight_type(model: Any) -> tuple[str, int]:
    """The element type of most of the weights, by OpenVINO's name, and the number of weights."""
    counts: dict[str, int] = {}
    for node in model.get_ops():
        if node.get_type_name() == "Constant":
            size = int(np.prod(list(node.get_output_shape(0)), dtype=np.int64))
            if size >= LEAST_WEIGHT:
                name = node.get_output_element_type(0).get_type_name()
                counts[name] = counts.get(name, 0) + size
    return max(counts, key=lambda name: counts[name], default="f32"), sum(counts.values())


def give_paged_attention(model: Any) -> str:
    """Applies OpenVINO's transformation to a model; returns why it cannot be applied, or ""."""
    try:
        paged_attention_transformation(model, allow_qq_bias=True)
    except RuntimeError as error:
        return cause(error)
    types = {node.get_type_name() for node in model.get_ops()}
    if left := sorted({port.get_any_name() for port in model.inputs} & {"attention_mask", "beam_idx"}):
        return f"the transformation leaves the inputs {', '.join(left)}"
    if "ScaledDotProductAttention" in types or ATTENTION not in types:
        return "the transformation finds no attention that it knows"
    return ""


def _set_windows(model: Any, windows: Sequence[int], file: Path) -> None:
    """Gives every layer its sliding window, which the transformation knows of few families."""
    layers = [node for node in model.get_ordered_ops() if node.get_type_name() == ATTENTION]
    layers.sort(key=lambda node: _layer_first(node.input_value(3).get_node().get_friendly_name()))
    if len(layers) != len(windows):
        raise Refused(
            f"the model {str(file)!r} has {len(layers)} attention layers and its config.json describes {len(windows)}; "
            "load it with Transformers"
        )
    for node, window in zip(layers, windows, strict=True):
        node.input(SLIDING_WINDOW).replace_source_output(opset13.constant(np.int32(window)).output(0))
    model.validate_nodes_and_infer_types()


def _choose_rows(model: Any, file: Path) -> None:
    """Lets the output layer compute the wanted rows only, and gives the hidden states before it as a second output."""
    node = model.output("logits").get_node().input_value(0).get_node() if _named(model, "logits") else None
    while node is not None and node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node() if node.get_input_size() else None
    if node is None:
        raise Refused(f"the model {str(file)!r} has no output layer that gives logits; export a causal language model")
    states = node.input_value(0)
    rows = opset13.parameter([-1], dtype=np.int64, name="rows")
    rows.output(0).get_tensor().set_names({"rows"})
    chosen = opset13.gather(states, rows, opset13.constant(0, dtype=np.int64))
    node.input(0).replace_source_output(chosen.output(0))
    model.add_parameters([rows])
    model.add_results([opset13.result(states)])
    model.validate_nodes_and_infer_types()


def _named(model: Any, name: str) -> bool:
    return any(name in output.get_names() for output in model.outputs)


def _plane(port: Any, cache: str) -> Plane:
    shape = port.get_partial_shape()
    heads, tokens, numbers = (shape[axis].get_length() for axis in (1, 2, 3))
    return Plane((heads, tokens, numbers), DTYPES[cache])


def _layer_first(name: str) -> tuple[int, str]:
    """Sorts key_cache.0, value_cache.0, key_cache.1, ... so."""
    kind, _, number = name.rpartition(".")
    return int(number), kind


def _usual_precision(core: Any) -> str:
    """What OpenVINO computes with on this processor by default."""
    return str(core.get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name())


def cause(error: BaseException) -> str:
    """The line of an error of OpenVINO's that says what is wrong; the ones before it name places in its code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith(("Exception from", "Check '", "While "))]
    return (useful or lines or [first_line(error)])[0].rstrip(".:")
