"""An exported OpenVINO model, read and compiled: what paged attention and the stateful model have in common.

The output layer of a large vocabulary is computed for wanted rows only, by an input `rows`, and the hidden states that
enter it become a second output. Knows neither sessions nor trees.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
from openvino import opset13

from leapahead.core.errors import BadParameter, LeapaheadError, Refused, first_line
from leapahead.core.processor import described
from leapahead.core.tree import BoolArray
from leapahead.models.openvino.options import OpenVinoOptions
from leapahead.models.openvino.runtime import CORE

FloatArray: TypeAlias = npt.NDArray[np.float32]

BF16 = "bf16"
STEPS = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}  # relative steps of these types
CAPABILITIES = {"bf16": "BF16", "f16": "FP16"}  # of types other than f32: OpenVINO's names of what a processor can do
PIECES, PIECE = 1024, 256  # so many pieces of so many bytes of the weights are part of the digest
LEAST_WEIGHT = 4096  # numbers of a constant that counts as a weight
NO_WEIGHTS = ("boolean", "i32", "i64")  # types of masks and tables
# Of a graph's runtime information: why it is decoded by its states, and the tokens of the longest sequence.
STATEFUL, CONTEXT_LENGTH = ["leapahead", "stateful"], ["leapahead", "context_length"]


@dataclass(frozen=True)
class Part:
    """The new tokens of one sequence.

    Attributes:
        track: their place in the cache, with room for them behind `past` entries.
        past: entries that all of them attend to.
        tokens, positions: of each.
        mask: bool [tokens, tokens], which of each other they attend to; None for a chain.
    """

    track: Any
    past: int
    tokens: Sequence[int]
    positions: Sequence[int]
    mask: BoolArray | None


class CompiledModel(ABC):
    """A compiled model.

    Args:
        file: openvino_model.xml of an exported model.
        options: how it is compiled.

    Attributes:
        trees: whether a forward takes masks over its new tokens.
        bucket: see `TargetInfo.bucket`.
        vocab_size, hidden_size: of the model.
        layers: of those that cache keys and values.
        context_length: tokens of the longest sequence, where the graph tells them; else 0.
        weights: the type of most of its weights, by OpenVINO's name.
        computed_in, cached_in: the types of the computation and of the cache.
        threads: number of them.
        copies: the model, compiled several times; `compiled` is the first one.
        precision: relative step of its numbers.
        fingerprint: of the weights' shapes and of the options.
        bytes_per_token: of the cache.

    Raises:
        BadParameter: the file cannot be read.
        Refused: it is no model that can be decoded in this way.
    """

    trees: ClassVar[bool]
    bucket: ClassVar[int]
    prepared: int = 0  # see `TargetInfo.prepared`
    windowed = False  # whether paged attention has sliding windows
    token_axis: ClassVar[int]  # of the hidden states
    bytes_per_token: int
    layers: int

    def __init__(self, file: Path, options: OpenVinoOptions) -> None:
        self.file = file
        graph = read_model(file)
        tells = graph.has_rt_info(CONTEXT_LENGTH)
        self.context_length = int(graph.get_rt_info(CONTEXT_LENGTH).astype(str)) if tells else 0
        self.weights, count = weight_type(graph)
        self.prepare(graph)
        kind = options.precision or ("f32" if self.weights == "f32" else _usual_precision())
        _check_able(kind)
        _choose_rows(graph, file, self.token_axis, kind)
        cache = options.cache_type or kind
        settings: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": kind,
            "KV_CACHE_PRECISION": cache,
        }
        if options.n_threads is not None:
            settings["INFERENCE_NUM_THREADS"] = options.n_threads
        if kind == BF16 and (options.n_threads or os.cpu_count()) == 1 and uses_amx():
            raise Refused(
                f"{str(file)!r} cannot be loaded: OpenVINO ends the process when it compiles bf16 for one thread on a "
                "processor with AMX; use n_threads=2 or precision='f32', or set the "
                "environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
            )
        try:
            self.copies: list[Any] = [CORE.compile_model(graph, "CPU", settings) for _ in range(self.count(options))]
        except RuntimeError as error:
            remedy = "export it as f32" if kind == "f32" else "use precision='f32'"
            if cache != kind:
                remedy = f"leave out cache_type={cache!r}, so that the cache has the type of the computation, {kind}"
            raise LeapaheadError(
                f"OpenVINO cannot compile {str(file)!r} for this processor: {cause(error)}; {remedy}"
            ) from None
        self.compiled = self.copies[0]
        _check_precision(self.compiled, kind)
        self.computed_in, self.cached_in = kind, cache
        self.threads = int(self.compiled.get_property("INFERENCE_NUM_THREADS"))
        logits, hidden = self.compiled.outputs
        self.vocab_size = logits.get_partial_shape()[-1].get_length()
        self.hidden_size = hidden.get_partial_shape()[-1].get_length()
        low_bits = "bf16" if self.weights not in STEPS else self.weights  # integer weights: activations of 8 bits
        self.precision = max(STEPS[kind], STEPS[cache], STEPS[low_bits])
        self.measure()
        self.fingerprint = (
            f"{count} weights, most in {self.weights}, {self.layers} layers of {self.hidden_size}, computed in {kind} "
            f"cache {cache} {self.threads} threads"
        )

    @abstractmethod
    def prepare(self, graph: Any) -> None:
        """Changes a graph such that `forward` can run it.

        Raises:
            Refused: that is not possible.
        """

    @abstractmethod
    def count(self, options: OpenVinoOptions) -> int:
        """How often the model is compiled.

        Raises:
            BadParameter: the options ask for more copies than are possible.
        """

    @abstractmethod
    def measure(self) -> None:
        """Reads `layers`, and what else belongs to the cache, from the compiled model."""

    @abstractmethod
    def new_cache(self, limit: int) -> Any:
        """A cache for at most so many tokens, all sequences together; a subclass of `tracks.Cache`."""

    @abstractmethod
    def forward(self, cache: Any, parts: Sequence[Part], rows: Sequence[int], drafts: bool = False) -> tuple[Any, Any]:
        """ONE forward.

        Args:
            cache: see `new_cache`.
            parts: of the sequences.
            rows: tokens whose logits are wanted, counted over all parts; at least one.
            drafts: whether it is a step with drafted nodes, for which a copy of its own may be compiled.

        Returns:
            Logits, float32 [rows, vocab], and the hidden states after the final norm, [tokens, hidden_size], for
            `states`; both in memory that the next forward may overwrite.

        Raises:
            LeapaheadError: OpenVINO failed; the message has its reason.
        """

    def outputs(self, request: Any) -> tuple[Any, Any]:
        """What `forward` returns, of a request that has run."""
        logits, hidden = (request.get_output_tensor(index).data for index in (0, 1))
        return logits.reshape(-1, self.vocab_size), hidden.reshape(-1, self.hidden_size)

    def states(self, hidden: Any) -> FloatArray:
        """float32, to be kept: hidden states as a forward gives them."""
        if self.computed_in != BF16:
            return np.array(hidden)
        bits: npt.NDArray[np.uint32] = hidden.view(np.uint16).astype(np.uint32) << 16  # numpy has no bfloat16
        return bits.view(np.float32)

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


def run(request: Any) -> None:
    """Runs a request whose inputs are set.

    Not by `infer`, which copies all outputs, and which lost an error of OpenVINO's where there was one thread.

    Raises:
        RuntimeError: OpenVINO failed.
    """
    try:
        request.start_async()
    finally:  # also when interrupted in between: nobody may touch the tensors of a request that runs
        request.wait()


def read_model(file: Path) -> Any:
    """An exported model.

    Raises:
        BadParameter: it cannot be read.
    """
    if not file.is_file():
        raise BadParameter(f"there is no OpenVINO model {str(file)!r}; name the folder that holds openvino_model.xml")
    try:
        return CORE.read_model(file)
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
            name = node.get_output_element_type(0).get_type_name()
            if size >= LEAST_WEIGHT and name not in NO_WEIGHTS:
                counts[name] = counts.get(name, 0) + size
    return max(counts, key=lambda name: counts[name], default="f32"), sum(counts.values())


def _choose_rows(model: Any, file: Path, axis: int, kind: str) -> None:
    """Lets the output layer compute the wanted rows only, and gives the hidden states before it as a second output."""
    node = model.output("logits").get_node().input_value(0).get_node() if _named(model, "logits") else None
    while node is not None and node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node() if node.get_input_size() else None
    if node is None:
        raise Refused(f"the model {str(file)!r} has no output layer that gives logits; export a causal language model")
    states = node.input_value(0)
    rows = opset13.parameter([-1], dtype=np.int64, name="rows")
    rows.output(0).get_tensor().set_names({"rows"})
    chosen = opset13.gather(states, rows, opset13.constant(axis, dtype=np.int64))
    node.input(0).replace_source_output(chosen.output(0))
    model.add_parameters([rows])
    # OpenVINO computes what leads to an output of float32 in float32, back to the last matrix products. With the hidden
    # states, those would be the residual sums of all layers.
    model.add_results([opset13.result(opset13.convert(states, BF16) if kind == BF16 else states)])
    model.validate_nodes_and_infer_types()


def _named(model: Any, name: str) -> bool:
    return any(name in output.get_names() for output in model.outputs)


def _usual_precision() -> str:
    """What OpenVINO computes with on this processor by default."""
    return str(CORE.get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name())


def _check_able(asked: str) -> None:
    """Refuses a precision that the processor lacks, before anything is compiled."""
    able = CORE.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if asked != "f32" and CAPABILITIES[asked] not in able:
        others = " or ".join(["f32", *(name for name, listed in CAPABILITIES.items() if listed in able)])
        raise Refused(f"precision={asked!r} is not possible on this processor; use {others}")


def _check_precision(compiled: Any, asked: str) -> None:
    """Refuses a precision that OpenVINO replaced by another one without an error."""
    found = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if found != asked:
        others = " or ".join(dict.fromkeys(("f32", found)))
        raise Refused(f"precision={asked!r} is not possible on this processor; use {others}")


def uses_amx() -> bool:
    """Whether OpenVINO computes with AMX. Where ONEDNN_MAX_CPU_ISA forbids it, FP16 is no capability either."""
    _, extensions = described()
    return "amx_bf16" in extensions and "FP16" in CORE.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def cause(error: BaseException) -> str:
    """The line of an error of OpenVINO's that says what is wrong; the ones before it name places in its code."""
    lines = [line.strip().removeprefix("Caught exception: ") for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith(("Exception from", "Check '", "While "))]
    return (useful or lines or [first_line(error)])[0].rstrip(".:")
