"""Compiles a traced forward part by part, so that layers that are equal are compiled once.

    traced      embedding  layer  layer  layer  ...  layer  norm  head
    parts       [embedding layer] [layer] [layer] ... [layer] [norm head]       all parts but the outer ones are equal

A forward of 32 layers has thousands of operations, and a compiler takes a minute for them; for one layer it takes
seconds. Where layers differ in turn (a sliding window in every other one), several of them make a part. Weights become
inputs of the parts, so that equal layers share their code. A forward in which little repeats is one part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

Compiled = Callable[..., Any]

LEAST_COVER = 0.5  # of the operations, that must lie in equal parts
LEAST_PERIOD = 8  # operations of a part


class Repeats(NamedTuple):
    """Equal consecutive parts of a sequence: `number` of `period` operations each, from the operation `first` on."""

    first: int
    period: int
    number: int


class Part(NamedTuple):
    """Operations of a forward, as a graph of their own.

    Attributes:
        graph: takes the inputs, and returns a tuple of the outputs.
        inputs, outputs: nodes of the whole forward.
    """

    graph: GraphModule
    inputs: list[Node]
    outputs: list[Node]


def compile_in_parts(
    traced: GraphModule, tensors: Sequence[Tensor], compile: Callable[[GraphModule, list[Tensor]], Compiled]
) -> Compiled:
    """Compiles a forward.

    Args:
        traced: its operations, which return nothing; the graph is changed.
        tensors: the arguments that it was traced with; no others are written to.
        compile: compiles a graph, given tensors like its arguments.

    Returns:
        What takes the same arguments.
    """
    parts = divided(traced)
    if len(parts) == 1:
        return compile(traced, list(tensors))
    places = traced.graph.find_nodes(op="placeholder")
    weights = {node: getattr(traced, node.target) for node in traced.graph.find_nodes(op="get_attr")}
    known = {**dict(zip(places, tensors, strict=True)), **weights}
    codes: dict[Hashable, Compiled] = {}
    steps = list[tuple[Compiled, Part]]()
    for part in parts:
        if (key := _structure(part.graph)) not in codes:
            codes[key] = compile(part.graph, [known[each] if each in known else _like(each) for each in part.inputs])
        steps.append((codes[key], part))
    over = _last_uses(parts, known)

    def run(*arguments: Tensor) -> None:
        values = {**dict(zip(places, arguments, strict=True)), **weights}
        for (code, part), ended in zip(steps, over, strict=True):
            found = code(*[values[each] for each in part.inputs])
            values.update(zip(part.outputs, found, strict=True))
            for each in ended:  # so that later parts use their memory
                del values[each]

    return run


def divided(traced: GraphModule) -> list[Part]:
    """The parts of a forward in their order; one, where it cannot be divided.

    The graph is changed: views of arguments that are written to are made anew for each of their users, so that no part
    is given two names of the same memory.
    """
    _name_once(traced.graph)
    _sink_views(traced.graph)
    traced.recompile()
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    found = repeats([_signature(node) for node in nodes], lambda at: _crossing(nodes, at))
    if found is None:
        return [Part(traced, [], [])]
    ends = [found.first + turn * found.period for turn in range(found.number + 1)]
    number = {node: int(np.searchsorted(ends, at, side="right")) for at, node in enumerate(nodes)}
    if not _may_be_divided(nodes, number):
        return [Part(traced, [], [])]
    return [_part(traced, [node for node in nodes if number[node] == turn]) for turn in sorted({*number.values()})]


def repeats(sequence: Sequence[Hashable], crossing: Callable[[int], int]) -> Repeats | None:
    """The equal consecutive parts that cover most of a sequence; None where they cover little.

    Args:
        crossing: how many values are made before an operation and used from it on: parts begin where that is least.
    """
    names = {each: at for at, each in enumerate(dict.fromkeys(sequence))}
    ids = np.array([names[each] for each in sequence])
    best: Repeats | None = None
    for period in range(LEAST_PERIOD, len(ids) // 2 + 1):
        first, length = _longest_run(ids[:-period] == ids[period:])
        count = length // period + 1
        if count > 1 and (best is None or period * count > best.period * best.number + period):
            some = min(period, length - (count - 1) * period + 1)  # first operations with which there are as many parts
            first = min(range(first, first + some), key=crossing)
            best = Repeats(first, period, count)
    return best if best is not None and best.period * best.number >= LEAST_COVER * len(ids) else None


def _longest_run(flags: Any) -> tuple[int, int]:
    """Where the longest run of true elements begins, and how long it is."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    at = int(lengths.argmax())
    return int(edges[2 * at]), int(lengths[at])


def _crossing(nodes: Sequence[Node], at: int) -> int:
    """How many values are made by the nodes before `at` and used by others."""
    before = set(nodes[:at])
    return sum(any(user not in before for user in node.users) for node in before)


def _part(traced: GraphModule, nodes: Sequence[Node]) -> Part:
    inside = set(nodes)
    inputs = list(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph, copies = Graph(), dict[Node, Node]()
    for at, each in enumerate(inputs):
        copies[each] = graph.placeholder(f"input_{at}")
        copies[each].meta = each.meta
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Part(GraphModule(torch.nn.Module(), graph), inputs, outputs)


def _last_uses(parts: Sequence[Part], kept: Iterable[Node]) -> list[list[Node]]:
    """For each part, the values that no later one needs."""
    last = {node: at for at, part in enumerate(parts) for node in (*part.outputs, *part.inputs)}
    for node in kept:
        last.pop(node, None)
    found: list[list[Node]] = [[] for _ in parts]
    for node, at in last.items():
        found[at].append(node)
    return found


# What nodes are


def _signature(node: Node) -> Hashable:
    """What is equal for equal operations: the function, its constants, and the shapes of its tensors."""
    given = [_laid_out(each) for each in node.all_input_nodes]
    return str(node.target), _constants(node, lambda used: "node"), str(given), str(_laid_out(node))


def _structure(graph: GraphModule) -> Hashable:
    """Equal for graphs that compute the same from inputs of the same shapes."""
    names = {node: f"%{at}" for at, node in enumerate(graph.graph.nodes)}
    return tuple(
        (node.op, str(node.target), _constants(node, names.__getitem__), str(_laid_out(node))) for node in names
    )


def _constants(node: Node, name: Callable[[Node], str]) -> str:
    """The arguments of a node, with names in the place of other nodes."""
    return str(torch.fx.node.map_arg((node.args, node.kwargs), name))


def _laid_out(node: Node) -> Any:
    """The shape, strides and type of a node's tensor; of several; None where it is not known."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (*value.shape,), (*value.stride(),), value.dtype, value.device
        return [one(each) for each in value] if isinstance(value, (list, tuple)) else value

    return one(node.meta.get("val"))


def _like(node: Node) -> Tensor:
    """A tensor like that of a node."""
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _views(node: Node) -> Node | None:
    """The node of whose memory this one is another name; None for a node with memory of its own."""
    if node.target is operator.getitem:
        first = node.args[0]
        return first if isinstance(first, Node) and getattr(first.target, "is_view", False) else None
    return node.all_input_nodes[0] if getattr(node.target, "is_view", False) else None


def _memory(node: Node) -> Node:
    """The node that has made the memory of this one."""
    while (viewed := _views(node)) is not None:
        node = viewed
    return node


def _writes(node: Node) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    schema = getattr(node.target, "_schema", None)
    for at, argument in enumerate(schema.arguments if schema else ()):
        given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from given if isinstance(given, (list, tuple)) else [given]


def _name_once(graph: Graph) -> None:
    """Has users of what an operation has written to in place use its argument, which is the same tensor."""
    for node in graph.nodes:
        returns: Any = getattr(getattr(node.target, "_schema", None), "returns", ())
        in_place = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
        written = next(_writes(node), None)
        if in_place and written is not None and _laid_out(written) == _laid_out(node):
            node.replace_all_uses_with(written)


def _sink_views(graph: Graph) -> None:
    """Makes views of arguments that are written to right before each of their users."""
    written = {_memory(each) for node in graph.nodes for each in _writes(node)}
    for node in reversed(list(graph.nodes)):
        if _views(node) is not None and (memory := _memory(node)).op == "placeholder" and memory in written:
            for user in list(node.users):
                with graph.inserting_before(user):
                    user.replace_input_with(node, graph.node_copy(node))
            graph.erase_node(node)


def _may_be_divided(nodes: Sequence[Node], number: dict[Node, int]) -> bool:
    """Whether memory that a part has made is written in no other part, and shapes of what parts share are known."""
    for node in nodes:
        for each in _writes(node):
            memory = _memory(each)
            if memory.op != "placeholder" and number.get(memory) != number[node]:
                return False
        crosses = any(number.get(user, number[node]) != number[node] for user in node.users)
        if crosses and not isinstance(node.meta.get("val"), Tensor):
            return False
    return True
