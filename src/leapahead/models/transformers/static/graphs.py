"""Recorded forwards: CUDA graphs, or plain calls in their place, and the store that keeps the most recently used ones.

A recorded forward reads and writes the same memory as at its recording. Whoever moves that memory clears the store.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from leapahead.core.errors import first_line
from leapahead.core.forks import Mutex

Forward = Callable[[], None]  # reads and writes static memory only; to run it twice is to run it once

MOST_GRAPHS = 64
MEMORY_SHARE = 0.1  # of a device's memory, that graphs may take
WARM_UPS = 1  # forwards before a capture, in which libraries choose their kernels and allocate their workspaces


class Recording(Protocol):
    """A forward that can be repeated.

    Attributes:
        bytes: of the device's memory that it has taken beside that of earlier recordings.
    """

    bytes: int

    def replay(self) -> None:
        """Runs it."""

    def release(self) -> None:
        """Gives its memory back, to later recordings of the same backend."""


class GraphBackend(Protocol):
    """What records forwards.

    Attributes:
        most_bytes: that all recordings may take.
        pooled: whether recordings share memory, so that the largest of a pool is best recorded first.
    """

    most_bytes: int
    pooled: bool

    def record(self, forward: Forward) -> Recording:
        """Records a forward, running it some times or not at all."""

    def restart(self) -> None:
        """Called when all recordings are released: the next ones share memory among themselves only."""


class Called:
    """A forward that is called."""

    bytes = 0

    def __init__(self, forward: Forward) -> None:
        self.replay = forward

    def release(self) -> None:
        """There is nothing to release."""


class Calls:
    """In place of graphs where there are none: every forward is called. For tests."""

    most_bytes, pooled = 0, False

    def record(self, forward: Forward) -> Recording:
        return Called(forward)

    def restart(self) -> None:
        """There is nothing to share."""


# Of a process, one capture at a time: what waits for the whole device, as the beginning of another capture does, is an
# error while a stream of it is captured, in both threads.
capturing = Mutex()


class CudaGraph:
    """A captured forward."""

    def __init__(self, graph: Any, taken: int) -> None:
        self._graph, self.bytes = graph, taken
        self.replay: Callable[[], None] = graph.replay
        self.release: Callable[[], None] = graph.reset


@contextmanager
def capture(graph: Any, pool: Any, stream: Any, cuda: Any = torch.cuda) -> Iterator[None]:
    """Captures what is launched in its block, on the current device.

    Args:
        graph, pool, stream: of the capture, see `torch.cuda.graph`.
        cuda: torch's module for CUDA; another one in tests.
    """
    try:
        # Other threads may allocate meanwhile, which the usual mode forbids. After a capture that has failed, the
        # stream would stay the current one.
        with cuda.stream(stream), cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except BaseException:
        # Up to torch 2.11, the allocator takes a capture whose end fails as going on for good, and then frees no memory
        # any more. Of a capture that has ended it says that there is none.
        memory, device = cuda.memory, cuda.current_device()
        with suppress(RuntimeError, AttributeError):
            end = getattr(memory, "_cuda_endAllocateToPool", None) or memory._cuda_endAllocateCurrentStreamToPool
            end(device, pool)
            memory._cuda_releasePool(device, pool)
        raise


class CudaGraphs:
    """Captures forwards as CUDA graphs that share one memory pool and one stream.

    Args:
        device: of the model.
        cuda: torch's module for CUDA; another one in tests.
    """

    pooled = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self.most_bytes = int(MEMORY_SHARE * cuda.mem_get_info(device)[1])
        self._stream = cuda.Stream(device)
        self._pool = cuda.graph_pool_handle()

    def record(self, forward: Forward) -> Recording:
        cuda, stream = self._cuda, self._stream
        with capturing, cuda.device(self._device):
            # On the stream of the capture, since a library's workspace belongs to one stream.
            stream.wait_stream(cuda.current_stream())
            with cuda.stream(stream):
                for _ in range(WARM_UPS):
                    forward()
            cuda.current_stream().wait_stream(stream)
            cuda.synchronize()
            cuda.empty_cache()  # what is free in torch is free on the device, and is measured as such
            free = cuda.mem_get_info(self._device)[0]
            graph = cuda.CUDAGraph()
            with capture(graph, self._pool, stream, cuda):
                forward()
            return CudaGraph(graph, max(0, free - cuda.mem_get_info(self._device)[0]))

    def restart(self) -> None:
        self._pool = self._cuda.graph_pool_handle()
        # Memory cannot be freed while another thread captures; where that is a capture of the user's own, it stays.
        with capturing, suppress(RuntimeError):
            self._cuda.empty_cache()


class Graphs:
    """The recorded forwards by key, of which those are released that were not used for the longest time.

    Args:
        backend: that records them.
        most: recordings that are kept.

    Attributes:
        tolerant: whether a forward that cannot be recorded is called instead; otherwise the error is raised.
    """

    def __init__(self, backend: GraphBackend, most: int = MOST_GRAPHS) -> None:
        self.backend, self.most = backend, most
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()
        self._unfit: set[Hashable] = set()  # whose recording failed
        self._memory: object = None
        self._has_told = self.tolerant = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def is_new(self, key: Hashable) -> bool:
        """Whether the next forward of this key is recorded, or tried to be."""
        return not (key in self._kept or key in self._unfit)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Hashable]:
        """The keys of the recordings."""
        return iter(self._kept)

    @property
    def has_begun(self) -> bool:
        """Whether a recording was made or tried since the last `clear`."""
        return bool(self._kept or self._unfit)

    @property
    def bytes(self) -> int:
        """Of the device's memory, that the recordings take."""
        return sum(each.bytes for each in self._kept.values())

    def over(self, memory: object) -> None:
        """Releases all recordings, unless they were made over this memory. It is compared for equality."""
        if memory != self._memory:
            self.clear()
            self._memory = memory

    def run(self, key: Hashable, forward: Forward) -> None:
        """Runs a forward by its recording; one that is not recorded yet is recorded before."""
        if key in self._unfit:
            forward()
            return
        recording = self._kept.get(key)
        if recording is None:
            try:
                recording = self.backend.record(forward)
            except RuntimeError as error:  # among them torch's errors of exhausted memory
                if not self.tolerant:
                    raise
                self._give_up(key, error)
                forward()
                return
            self._kept[key] = recording
            self._fit()
        else:
            self._kept.move_to_end(key)
        recording.replay()

    def drop(self, key: Hashable) -> None:
        """Releases one recording, if it is there."""
        if (recording := self._kept.pop(key, None)) is not None:
            recording.release()

    def clear(self) -> None:
        """Releases all."""
        if not self.has_begun:
            return
        for recording in self._kept.values():
            recording.release()
        self._kept.clear()
        self._unfit.clear()
        self.backend.restart()

    def _fit(self) -> None:
        """Releases old recordings until the others keep to the limits; the newest one stays in any case."""
        while len(self._kept) > self.most or (self.bytes > self.backend.most_bytes and len(self._kept) > 1):
            self._kept.popitem(last=False)[1].release()

    def _give_up(self, key: Hashable, error: RuntimeError) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self.clear()  # so that the forward itself has memory
        self._unfit.add(key)
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                f"a forward ({key}) could not be captured and runs without a graph: {first_line(error)}",
                RuntimeWarning,
                stacklevel=2,
            )
