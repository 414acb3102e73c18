"""Converts a model of Transformers into a graph of OpenVINO that keeps its keys and values itself.

    inputs    input_ids [batch, n], attention_mask [batch, past + n], position_ids [batch, n], beam_idx [batch]
    output    logits [batch, n, vocabulary]
    states    past_key_values.LAYER.key and .value, each [batch, heads, past, size of a head]

The model is traced with OpenVINO's own converter. Weights of 16 bits stay so: each is widened to float32 where the
model reads it, and all computation is in float32. The graph is compared with the model before it is returned, and
OpenVINO's transformation to paged attention, without which a graph can read no token trees, is tried on a copy of it. A
graph that it cannot be applied to says so in its runtime information (`compiled.STATEFUL`).

This module knows of no files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation
from torch import Tensor
from torch.nn.utils import parametrize
from transformers.cache_utils import DynamicCache, DynamicLayer

from leapahead.core.errors import Refused
from leapahead.models.openvino.compiled import CONTEXT_LENGTH, STATEFUL, cause
from leapahead.models.openvino.paged import give_paged_attention, has_windows
from leapahead.models.openvino.runtime import CORE
from leapahead.models.transformers import families
from leapahead.models.transformers.arguments import cache_name
from leapahead.models.transformers.families import Pattern

INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
CHUNKS = (11, 3, 1)  # tokens of each forward of the comparison
TOLERANCE = 1e-3  # greatest difference of two logits, in parts of the greatest logit
BATCH, PAST, NEW = 2, 3, 2  # of the traced forward; sizes that differ, since the converter may keep equal ones as one
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
EXPERTS = "batched_mm"  # the implementation of experts whose operations do not depend on the routing


def convert(model: Any) -> Any:
    """A graph of the model, as `openvino.Model`, in which its weights have the type that they have in the model.

    The graph shares the weights' memory with the model, which is changed: its parameters of 16 bits become modules
    that widen them.

    Args:
        model: a loaded causal language model of Transformers, on the CPU.

    Raises:
        Refused: an encoder-decoder model, a family that is not decoded by attention over keys and values alone, or one
            that OpenVINO cannot convert such that it gives the model's own logits.
    """
    if model.config.is_encoder_decoder:
        raise Refused(f"{_unexportable(model)}: it is an encoder-decoder model; use it with Transformers")
    patterns = _patterns(model)
    config = families.text_config(model)
    windows = any(pattern.window is not None for pattern in patterns.values())
    chunks = any(pattern.chunk is not None for pattern in patterns.values())
    with _quiet(), torch.no_grad():
        _widen(model)
        if config._experts_implementation not in (None, EXPERTS):
            model.set_experts_implementation(EXPERTS)
        own_masks = False
        try:
            graph = _compared(model, Stateless(model, patterns))
        except Refused:
            if windows or chunks:  # a trace of a short text need not have them
                raise
            graph, own_masks = _compared(model, WithoutMasks(model, patterns)), True
    if config._attn_implementation != "sdpa":
        reason = f"its attention is {config._attn_implementation!r}"
    elif own_masks or chunks:
        reason = "it attends in chunks" if chunks else "it makes its attention mask itself"
    else:
        reason = lacks_paged_attention(graph, windows)
    if reason:
        graph.set_rt_info(reason, STATEFUL)
    graph.set_rt_info(str(families.context_length(config)), CONTEXT_LENGTH)
    return graph


def _compared(model: Any, stateless: Stateless) -> Any:
    """The graph of a forward, which gives the logits of the model.

    Raises:
        Refused: it cannot be converted, or gives others.
    """
    try:
        graph = _traced(stateless)
    except Exception as error:  # of the family's own code or of the converter, which raise errors of all kinds
        raise _refusal(model, f"OpenVINO cannot convert it ({cause(error)})") from error
    _compare(model, graph)
    return graph


def _patterns(model: Any) -> dict[str, Pattern]:
    """The attention patterns of the model's layers.

    Raises:
        Refused: it has other layers.
    """
    config = families.text_config(model)
    if families.is_recurrent(model):
        raise _refusal(model, "it has recurrent layers, whose state cannot discard rejected tokens under OpenVINO")
    patterns = families.patterns(config)
    if patterns is None:
        raise _refusal(model, f"it has layers of the kinds {', '.join(families.other_layers(config))}")
    return patterns


def _refusal(model: Any, reason: str) -> Refused:
    return Refused(f"{_unexportable(model)}: {reason}; use it with Transformers, or as a GGUF file with llama.cpp")


def _unexportable(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type}) cannot be exported to OpenVINO"


# ------------------------------------------------------------------------------------------------------- the trace


class Widen(torch.nn.Module):
    """A parameter of 16 bits as float32, wherever the model reads it."""

    def forward(self, parameter: Tensor) -> Tensor:
        return parameter.float()


class Stateless(torch.nn.Module):
    """A forward of the model whose cache comes in and goes out as tensors."""

    def __init__(self, model: Any, patterns: Mapping[str, Pattern]) -> None:
        super().__init__()
        self.model, self.patterns, self.cache_name = model, patterns, cache_name(model)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, beam_idx: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values = keys.index_select(0, beam_idx), values.index_select(0, beam_idx)
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
            cache.layers.append(layer)
        output = self.model(
            input_ids=input_ids,
            attention_mask=self.masks(input_ids.shape[1], attention_mask),
            position_ids=position_ids,
            use_cache=True,
            **{self.cache_name: cache},
        )
        return (output.logits, *(each for layer in cache.layers for each in (layer.keys, layer.values)))

    def masks(self, new: Any, attention_mask: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive, [batch, 1, new, past + new] per pattern; one tensor if there is but one pattern.

        The transformation to paged attention drops masks, but for a window that it recognises by these operations in
        this order: a comparison with a sum, four conjunctions, a broadcast, a choice of two numbers, and a slice.
        """
        batch, end = attention_mask.shape
        there = torch.arange(end)[None, None, None]
        here = torch.arange(end - new, end)[None, None, :, None]
        masks = {}
        for name, pattern in self.patterns.items():
            visible = torch.ones((), dtype=torch.bool)
            if pattern.window is not None:
                visible = visible & (there > here + -pattern.window)
            visible = (attention_mask[:, None, None] > 0) & (visible & (there <= here))
            visible = visible & (
                there >= 0 if pattern.chunk is None else here // pattern.chunk == there // pattern.chunk
            )
            hidden = torch.finfo(torch.float32).min
            masks[name] = torch.where(visible.expand(batch, -1, -1, -1), 0.0, hidden)[..., :end]
        return masks if len(masks) > 1 else next(iter(masks.values()))


class WithoutMasks(Stateless):
    """The same for models that make masks themselves, of the tokens that are there, such as those with ALiBi."""

    def masks(self, new: Any, attention_mask: Tensor) -> Tensor | dict[str, Tensor]:
        return attention_mask


def _widen(model: Any) -> None:
    """Makes the model compute in float32, whatever its parameters are stored in."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype != torch.float32:
                parametrize.register_parametrization(module, name, Widen(), unsafe=True)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point() and buffer.dtype != torch.float32:
                setattr(module, name, buffer.float())


def _traced(stateless: Stateless) -> Any:
    tokens = torch.arange(BATCH * NEW).reshape(BATCH, NEW)

    def example(past: int) -> tuple[Tensor, ...]:
        positions = torch.arange(past, past + NEW).repeat(BATCH, 1)
        return tokens, torch.ones(BATCH, past + NEW, dtype=torch.long), positions, torch.arange(BATCH).int()

    first = stateless(*example(0))  # tells how many layers keep entries, and of which shapes
    numbers = torch.Generator().manual_seed(0)  # not the user's
    past = [torch.randn(BATCH, each.shape[1], PAST, each.shape[3], generator=numbers) for each in first[1:]]
    inputs = (*example(PAST), *past)
    trace: Any = torch.jit.trace(stateless, inputs, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
    graph = ov.convert_model(trace, example_input=inputs)
    return _stateful(graph, past)


# ------------------------------------------------------------------------------------------------------- the graph


def _stateful(graph: Any, past: list[Tensor]) -> Any:
    """Names the inputs and outputs, and makes states of those that are keys and values."""
    kept = [f"{index // 2}.{('key', 'value')[index % 2]}" for index in range(len(past))]
    before, after = ([f"{kind}.{each}" for each in kept] for kind in ("past_key_values", "present"))
    shapes = [[-1, -1]] * 3 + [[-1]] + [[-1, each.shape[1], -1, each.shape[3]] for each in past]
    for port, name, shape in zip(graph.inputs, (*INPUTS, *before), shapes, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(ov.PartialShape(shape))
    for port, name in zip(graph.outputs, ("logits", *after), strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, dict(zip(before, after, strict=True)))
    _begin_empty(graph)
    return graph


def _begin_empty(graph: Any) -> None:
    """Gives every state its first value: no entries, for as many sequences as the forward has."""
    shape = opset13.shape_of(graph.input("input_ids").get_node(), output_type="i64")
    batch = opset13.gather(shape, opset13.constant([0], dtype=np.int64), opset13.constant(0, dtype=np.int64))
    zero = opset13.constant(np.float32(0))
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            sizes = node.get_output_partial_shape(0)
            rest = np.array([sizes[1].get_length(), 0, sizes[3].get_length()], dtype=np.int64)
            node.set_arguments([opset13.broadcast(zero, opset13.concat([batch, opset13.constant(rest)], 0))])
    graph.validate_nodes_and_infer_types()


def lacks_paged_attention(graph: Any, windows: bool = False) -> str:
    """Why OpenVINO's transformation to paged attention cannot be applied to the graph; "" where it can.

    Args:
        graph: is not changed.
        windows: whether some layers have a sliding window.
    """
    copy = graph.clone()
    if why := give_paged_attention(copy):
        return why
    if windows != has_windows(copy):
        return "the transformation does not know its sliding windows"
    return ""


# -------------------------------------------------------------------------------------------------- the comparison


def _compare(model: Any, graph: Any) -> None:
    """Compares the logits of a short text, read in several chunks, with those of a forward of the model.

    Raises:
        Refused: they differ.
    """
    vocabulary = families.text_config(model).vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, (1, sum(CHUNKS)))
    expected = model(input_ids=torch.from_numpy(tokens)).logits.float().numpy()
    try:
        found = _logits(graph, tokens)
    except RuntimeError as error:
        raise _refusal(model, f"OpenVINO cannot run the converted model ({cause(error)})") from error
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not difference < TOLERANCE:
        reason = f"the logits of the converted model differ from its own by {difference:.1g} of the greatest"
        raise _refusal(model, reason)


def _logits(graph: Any, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 [1, n, vocabulary]; of tokens [1, n], read in chunks."""
    request = CORE.compile_model(graph, "CPU", EXACT).create_infer_request()
    found, begin = [], 0
    for chunk in CHUNKS:
        end = begin + chunk
        inputs = (tokens[:, begin:end], np.ones((1, end), np.int64), np.arange(begin, end)[None], np.zeros(1, np.int32))
        request.infer(dict(zip(INPUTS, inputs, strict=True)))
        found.append(request.get_tensor("logits").data.copy())
        begin = end
    return np.concatenate(found, axis=1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of a trace, which are about code that does not depend on the example."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
