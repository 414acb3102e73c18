"""Traced forwards that are compiled part by part: what repeats, what is compiled, and that the same is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import BY_NAME
from helpers import PROMPT, RandomTrees, run
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.static.compiled import Compiler, Traced
from leapahead.models.transformers.static.executor import StaticExecutor
from leapahead.models.transformers.static.graphs import Calls
from leapahead.models.transformers.static.parts import LEAST_PERIOD, Repeats, compile_in_parts, divided, repeats

LAYERS = 6


class Parts:
    """In place of a compiler of parts: runs their operations."""

    def __init__(self) -> None:
        self.compiled: list[list[Tensor]] = []

    def __call__(self, graph: GraphModule, tensors: list[Tensor]) -> Traced:
        self.compiled.append(tensors)
        return graph


def at_first(at: int) -> int:
    """No place is better than another."""
    return 0


def test_what_repeats() -> None:
    layer = [f"op {number}" for number in range(10)]
    assert repeats(["embed", *layer * 5, "norm", "head"], at_first) == Repeats(1, 10, 5)
    assert repeats(["embed", *layer, "norm", "head"], at_first) is None
    assert repeats(["x"] * LEAST_PERIOD, at_first) is None
    assert repeats([], at_first) is None


def test_parts_begin_where_the_fewest_values_cross() -> None:
    layer = [f"op {number}" for number in range(10)]
    sequence = ["embed", *layer * 5, *layer[:4], "head"]  # four first operations give as many parts
    assert repeats(sequence, lambda at: 1 if at == 3 else 2) == Repeats(3, 10, 5)
    assert repeats(sequence, lambda at: 1 if at == 9 else 2) == Repeats(1, 10, 5)


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(LEAST_PERIOD, 14),
    st.integers(2, 5),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_repeats_are_equal_and_within_the_sequence(
    before: list[int], period: int, number: int, after: list[int]
) -> None:
    sequence = [*before, *[*range(4, 4 + period)] * number, *after]
    found = repeats(sequence, at_first)
    if found is None:
        assert 2 * period * number < len(sequence) or number * period <= period + 1
        return
    parts = [
        sequence[found.first + turn * found.period : found.first + (turn + 1) * found.period]
        for turn in range(found.number)
    ]
    assert all(part == parts[0] and len(part) == found.period for part in parts)
    assert found.number >= 2


def traced(forward: Callable[..., None], *tensors: Tensor) -> GraphModule:
    with torch.no_grad():
        return make_fx(forward)(*tensors)


@pytest.mark.parametrize("before", [torch.sigmoid, lambda state: torch.cat([state, state])[:2]], ids=["own", "view"])
def test_layers_that_write_and_read_what_is_shared(before: Callable[[Tensor], Tensor]) -> None:
    """Each layer writes to its cache and reads a view of it, which was made before the first layer."""
    torch.manual_seed(0)
    weights, at = [torch.randn(4, 4) for _ in range(LAYERS)], torch.tensor([1])
    given = [torch.randn(2, 4), torch.zeros(2, 4), *(torch.randn(12) for _ in range(LAYERS))]

    def forward(state: Tensor, out: Tensor, *caches: Tensor) -> None:
        views, shared = [each.view(3, 4)[:2] for each in caches], before(state)
        for weight, cache, view in zip(weights, caches, views, strict=True):
            state = torch.relu(state @ weight).add_(1).neg() * shared
            state = torch.add(state, 1, out=torch.empty(2, 4))
            cache.view(3, 4).index_copy_(0, at, state[:1])
            state = state + view.sum(0) - torch.cos(state) + view[:1].sin().exp()
        out.copy_(state)

    compile = Parts()
    run = compile_in_parts(traced(forward, *(each.clone() for each in given)), given, compile)
    assert 1 < len(compile.compiled) <= 4
    for tensors in compile.compiled:  # no memory has two names
        assert len({each.untyped_storage().data_ptr() for each in tensors}) == len(tensors)
    for _ in range(2):
        mine, theirs = [each.clone() for each in given], [each.clone() for each in given]
        with torch.no_grad():
            forward(*theirs)
            run(*mine)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_a_later_part_would_write_is_not_divided() -> None:
    weights = [torch.randn(4, 4) for _ in range(LAYERS)]

    def forward(state: Tensor, out: Tensor) -> None:
        held = torch.zeros(2, 4)  # memory of the forward's own, to which all layers write
        for weight in weights:
            state = torch.tanh(torch.relu(state @ weight).neg() + 1).sigmoid().cos().sin()
            held.add_(state)
        out.copy_(held)

    given = [torch.randn(2, 4), torch.zeros(2, 4)]
    compile = Parts()
    run = compile_in_parts(traced(forward, *given), given, compile)
    assert len(compile.compiled) == 1
    expected = [given[0], torch.zeros(2, 4)]
    run(*given)
    forward(*expected)
    torch.testing.assert_close(given[1], expected[1], rtol=0, atol=0)


def test_layers_that_differ_are_parts_of_their_own() -> None:
    """They have the same operations on the same shapes, with different inputs."""
    weights = [torch.randn(4, 4) for _ in range(LAYERS)]

    def forward(state: Tensor, out: Tensor) -> None:
        for at, weight in enumerate(weights):
            before = state
            state = torch.tanh(torch.relu(state @ weight).neg() + 1).sigmoid().cos().sin()
            state = state + (before if at == 3 else state)
        out.copy_(state)

    given = [torch.randn(2, 4), torch.zeros(2, 4)]
    run = compile_in_parts(traced(forward, *given), given, Parts())
    expected = [given[0], torch.zeros(2, 4)]
    run(*given)
    forward(*expected)
    torch.testing.assert_close(given[1], expected[1], rtol=0, atol=0)


class Divided:
    """In place of a compiler: divides the traced operations and runs them, and keeps the parts."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.compiled: list[int] = []

    def __call__(self, graph: Any, tensors: Sequence[Tensor]) -> Traced:
        compile = Parts()
        found = compile_in_parts(graph, tensors, compile)
        self.compiled.append(len(compile.compiled))
        self.parts.append(len(divided(graph)))
        return found


FAMILIES = ["llama", "gemma2", "gemma3", "gpt_oss", "qwen3", "phi3", "deepseek_v3", "gpt2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    """More layers than elsewhere, so that they repeat; what is computed by parts is the text of plain decoding."""
    architecture = BY_NAME[name]
    options = dict(architecture.options)
    count = len(options["layer_types"]) if "layer_types" in options else 1
    many: dict[str, Any] = {"num_hidden_layers": LAYERS, **({"n_layer": LAYERS} if "n_layer" in options else {})}
    if count > 1:
        many["layer_types"] = (options["layer_types"] * LAYERS)[:LAYERS]
    deep = replace(architecture, options={**options, **many})
    plain = run(TransformersTarget(deep.build()), prompt=PROMPT).tokens
    target = TransformersTarget(deep.build(), static=Calls())
    assert isinstance(target.executor, StaticExecutor)
    compile = Divided()
    target.executor.compiler = compiler = Compiler(compile, lambda line: None, least_uses=2)
    for _ in range(2):
        assert run(target, prompt=PROMPT).tokens == plain
        assert run(target, RandomTrees(nodes=6), PROMPT).tokens == plain
        compiler.wait(20)
    assert not compiler.problem
    assert compile.parts
    assert max(compile.parts) > 3
    assert max(compile.compiled) <= 4
