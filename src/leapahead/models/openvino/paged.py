"""An OpenVINO model compiled with paged attention: one forward over the new tokens of several sequences.

An exported model keeps its own state and reads one sequence after the other. OpenVINO's transformation to paged
attention replaces the state by blocks of a cache that belongs to the caller, packs the tokens of all sequences into one
row of tokens, and takes for each sequence a mask over its new tokens (`qq_bias`), which is a tree's ancestor mask:

    input_ids, position_ids    int64 [tokens]            subsequence_begins    int32 [sequences + 1]
    past_lens                  int32 [sequences]         block_indices(_begins) the blocks of each sequence
    qq_bias, qq_bias_begins    uint8, int32              rows                  int64: tokens whose logits are wanted

Knows neither sessions nor trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.models.openvino.blocks import Plane, Pool
from leapahead.models.openvino.compiled import STATEFUL, CompiledModel, Part, cause, run
from leapahead.models.openvino.options import OpenVinoOptions

Cached: TypeAlias = tuple[str, Any]  # the name of an input of the cache, and its tensor

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}  # numpy has no bfloat16
ATTENTION, SLIDING_WINDOW = "PagedAttentionExtension", 10  # type of a paged attention; its input with the window


class _Input:
    """An input tensor that is made anew only when its size changes."""

    def __init__(self, request: Any, name: str, dtype: npt.DTypeLike) -> None:
        self._request, self._name = request, name
        self._values, self._is_set = np.zeros(0, dtype), False

    def put(self, values: npt.ArrayLike) -> None:
        found = np.asarray(values)
        if len(found) != len(self._values) or not self._is_set:
            self._is_set = False  # until it is, also after an interrupt
            self._values = np.zeros(len(found), self._values.dtype)
            self._request.set_tensor(self._name, ov.Tensor(self._values, shared_memory=True))
            self._is_set = True
        self._values[:] = found


class _Copy:
    """One of the compiled models, with its inputs.

    Args:
        compiled: OpenVINO's.

    Attributes:
        size: tokens and sequences of its last drafted step, for which its operations are prepared.
    """

    def __init__(self, compiled: Any) -> None:
        self._request, self._version = compiled.create_infer_request(), -1
        self.size = (0, 0)
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

    def run(self, inputs: Mapping[str, npt.ArrayLike], longest: int, version: int, cache: Iterable[Cached]) -> Any:
        """Computes a forward.

        Args:
            inputs: but for the cache.
            longest: tokens of the longest sequence, those of this forward included.
            version: of the memory of the cache.
            cache: its inputs, which are read when the version is another one.

        Returns:
            The request, which has the outputs.

        Raises:
            RuntimeError: OpenVINO failed.
        """
        if version != self._version:
            for name, tensor in cache:
                self._request.set_tensor(name, tensor)
            self._version = version
        for name, each in self._inputs.items():
            each.put(inputs[name])
        self._longest[...] = longest
        run(self._request)
        return self._request


class PagedModel(CompiledModel):
    """A model compiled with paged attention.

    Where it is compiled several times (`OpenVinoOptions.copies`), the first copy computes prompts and plain steps, and
    each of the others drafted steps of one size, until another size takes its place. All have one KV cache.

    Args:
        file: openvino_model.xml of an exported model.
        options: how it is compiled.
        windows: of each layer, the number of tokens that it attends to, where its graph does not tell; 0 for all. None
            where no layer has a window.

    Attributes:
        planes: of the cache: keys and values of each layer.

    Raises:
        BadParameter: the file cannot be read.
        Refused: the model cannot be given paged attention.
    """

    trees: ClassVar[bool] = True
    # OpenVINO prepares every operation anew when a forward has another number of tokens than the last one, which can
    # take as long as a forward (`python -m research switching`).
    bucket: ClassVar[int] = 4
    token_axis: ClassVar[int] = 0

    def __init__(self, file: Path, options: OpenVinoOptions, windows: Sequence[int] | None = None) -> None:
        self._windows = windows
        super().__init__(file, options)
        self._first, *self._others = (_Copy(each) for each in self.copies)
        self.prepared = len(self._others)

    def count(self, options: OpenVinoOptions) -> int:
        return options.copies

    def prepare(self, graph: Any) -> None:
        why = str(graph.get_rt_info(STATEFUL).astype(str)) if graph.has_rt_info(STATEFUL) else ""
        if why := why or give_paged_attention(graph):
            raise Refused(f"OpenVINO cannot give the model {str(self.file)!r} paged attention ({why})")
        self.windowed = has_windows(graph)
        if self._windows and not self.windowed:
            _set_windows(graph, self._windows, self.file)

    def measure(self) -> None:
        names = {each.get_any_name(): each for each in self.compiled.inputs}
        self.cache_names = sorted((name for name in names if "cache." in name), key=_layer_first)
        self.layers = len(self.cache_names) // 2
        self.planes = [_plane(names[name], self.cached_in) for name in self.cache_names]
        self.bytes_per_token = sum(
            plane.shape[0] * plane.shape[2] * np.dtype(plane.dtype).itemsize for plane in self.planes
        )

    def new_cache(self, limit: int) -> Pool:
        return Pool(self.planes, limit)

    def forward(self, cache: Pool, parts: Sequence[Part], rows: Sequence[int], drafts: bool = False) -> tuple[Any, Any]:
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
        copy = self._copy((len(tokens), len(parts))) if drafts else self._first
        try:
            request = copy.run(inputs, longest, cache.version, self._cache_inputs(cache))
        except RuntimeError as error:
            raise LeapaheadError(
                f"OpenVINO could not compute a forward of {len(tokens)} tokens: {cause(error)}"
            ) from None
        return self.outputs(request)

    def _copy(self, size: tuple[int, int]) -> _Copy:
        """The copy for a drafted step: the one whose last forward had this size, or the one used longest ago."""
        if not self._others:
            return self._first
        found = next((each for each in self._others if each.size == size), self._others[0])
        self._others.remove(found)
        self._others.append(found)
        found.size = size
        return found

    def _cache_inputs(self, cache: Pool) -> Iterator[Cached]:
        for index, name in enumerate(self.cache_names):
            yield name, self._cache_tensor(cache.memory(index), index)

    def _cache_tensor(self, memory: npt.NDArray[Any], plane: int) -> Any:
        if self.planes[plane].dtype == np.uint16:
            return ov.Tensor(memory, ov.Shape(memory.shape), ov.Type.bf16)
        return ov.Tensor(memory, shared_memory=True)


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


def has_windows(model: Any) -> bool:
    """Whether the transformation has found a sliding window in some layer: a constant 0 stands for none."""
    windows = [node.input_value(SLIDING_WINDOW).get_node() for node in _attention(model)]
    return any(window.get_type_name() != "Constant" or window.data.any() for window in windows)


def _attention(model: Any) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == ATTENTION]


def _set_windows(model: Any, windows: Sequence[int], file: Path) -> None:
    """Gives every layer its sliding window, which the transformation knows of few families."""
    layers = _attention(model)
    layers.sort(key=lambda node: _layer_first(node.input_value(3).get_node().get_friendly_name()))
    if len(layers) != len(windows):
        raise BadParameter(
            f"the model {str(file)!r} has {len(layers)} attention layers and its config.json describes {len(windows)}; "
            "export it again, or load it with Transformers"
        )
    for node, window in zip(layers, windows, strict=True):
        node.input(SLIDING_WINDOW).replace_source_output(opset13.constant(np.int32(window)).output(0))
    model.validate_nodes_and_infer_types()


def _plane(port: Any, cache: str) -> Plane:
    shape = port.get_partial_shape()
    heads, tokens, numbers = (shape[axis].get_length() for axis in (1, 2, 3))
    return Plane((heads, tokens, numbers), DTYPES[cache])


def _layer_first(name: str) -> tuple[int, str]:
    """Sorts key_cache.0, value_cache.0, key_cache.1, ... so."""
    kind, _, number = name.rpartition(".")
    return int(number), kind
