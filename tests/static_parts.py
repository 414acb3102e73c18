"""CUDA graphs on the CPU: a capture records the operations of a forward, and a replay repeats them, with nothing else.

As with CUDA graphs, whatever the host has computed is that of the capture for good: numbers, shapes, and which memory
is read and written. Only what lies in that memory differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from leapahead.models.transformers.static.graphs import CudaGraphs


class Tape(TorchDispatchMode):
    """Records the operations within its block."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, found))
        return found

    def repeat(self) -> None:
        """Repeats them; a tensor that none of them has made is read and written where it is."""
        made: dict[int, Tensor] = {}

        def now(each: Any) -> Any:
            return made.get(id(each), each)

        for func, args, kwargs, before in self.operations:
            found = func(*tree_map(now, args), **tree_map(now, kwargs))
            for old, new in zip(tree_leaves(before), tree_leaves(found), strict=True):
                made[id(old)] = new


class Graph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.tape, self.pool = cuda, Tape(), None
        self.replays = 0

    def replay(self) -> None:
        assert self in self._cuda.alive, "a graph that was reset is replayed"
        self.replays += 1
        self._cuda.log.append("replay")
        self.tape.repeat()

    def reset(self) -> None:
        self._cuda.alive.remove(self)


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """As much of `torch.cuda` as captures need.

    Args:
        taken: bytes of the device's memory that a capture takes.
        total: bytes of memory.

    Attributes:
        alive: graphs that were captured and not reset.
        captured: number of captures so far.
        log: what was called, in order.
        fails: raised by a capture, if it is set.
        fails_at_end: raised at the end of a capture, if it is set, as after an operation that is not permitted in one.
        going_on: pools of captures that the allocator takes as going on: after such an end, too (torch up to 2.11).
    """

    def __init__(self, taken: Callable[[], int] = lambda: 0, total: int = 10**9) -> None:
        self.taken, self.total, self.free = taken, total, total
        self.alive: list[Graph] = []
        self.captured, self.log, self.pools = 0, list[str](), 0
        self.fails: Exception | None = None
        self.fails_at_end: Exception | None = None
        self.going_on = list[int]()
        self.memory: Any = self
        self._current = Stream(self, "main")

    def Stream(self, device: Any) -> Stream:
        return Stream(self, "side")

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    def current_stream(self) -> Stream:
        return self._current

    def set_stream(self, stream: Stream) -> None:
        self._current = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self._current
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def device(self, device: Any) -> Any:
        return nullcontext()

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")
        if self.going_on:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def current_device(self) -> int:
        return 0

    def _cuda_endAllocateToPool(self, device: int, pool: int) -> None:
        if pool not in self.going_on:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.going_on.remove(pool)

    def _cuda_releasePool(self, device: int, pool: int) -> None:
        self.log.append("release")

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.free, self.total

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def graph(self, graph: Graph, *, pool: int, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert stream.name == "side"
        before = self._current
        if self.fails is not None:
            raise self.fails
        self.log.append("capture")
        graph.pool = pool
        self.going_on.append(pool)
        self.set_stream(stream)
        try:
            with graph.tape:
                yield
        finally:
            if self.fails_at_end is not None:
                raise self.fails_at_end
            self.going_on.remove(pool)
            self.set_stream(before)
        self.captured += 1
        self.free -= self.taken()
        self.alive.append(graph)


def recorded(cuda: FakeCuda | None = None) -> CudaGraphs:
    """A backend for a model on the CPU."""
    return CudaGraphs(torch.device("cpu"), cuda or FakeCuda())
