"""The store of captured forwards, the order of CUDA's calls, and the buckets of shapes."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from static_parts import FakeCuda, recorded

from leapahead.core.tree import TokenTree
from leapahead.models.transformers.static.buffers import BYTES, Buffers, Draft
from leapahead.models.transformers.static.graphs import Calls, Graphs, capture
from leapahead.models.transformers.static.shapes import (
    MOST_ROWS,
    ROWS,
    Shape,
    most_rows,
    own_of,
    rows_of,
    slots_of,
    usual_rows,
)


class Counter:
    """A forward that adds one in static memory."""

    def __init__(self) -> None:
        self.total, self.calls = torch.zeros(()), 0
        self.step = torch.ones(())

    def __call__(self) -> None:
        self.calls += 1
        self.total.add_(self.step)


def tolerant(cuda: FakeCuda, most: int = 64) -> Graphs:
    graphs = Graphs(recorded(cuda), most)
    graphs.tolerant = True
    return graphs


def test_the_order_of_a_capture() -> None:
    cuda, forward = FakeCuda(), Counter()
    graphs = tolerant(cuda)
    graphs.run("key", forward)
    assert cuda.log == [
        "side waits for main",
        "main waits for side",
        "synchronize",
        "empty_cache",
        "capture",
        "replay",
    ]
    assert forward.calls == 2  # one to warm up, one captured
    forward.step.fill_(10.0)
    graphs.run("key", forward)
    assert (forward.calls, cuda.log[-1]) == (2, "replay")
    assert float(forward.total) == 3 + 10


def test_all_captures_share_a_pool_until_memory_moves() -> None:
    cuda = FakeCuda()
    graphs = tolerant(cuda)
    graphs.over("memory")
    for key in "ab":
        graphs.run(key, Counter())
    assert [graph.pool for graph in cuda.alive] == [1, 1]
    graphs.over("memory")
    assert len(graphs) == 2
    graphs.over("other memory")
    assert (len(graphs), cuda.alive, graphs.has_begun) == (0, [], False)
    graphs.run("a", Counter())
    assert cuda.alive[0].pool == 2


def test_the_least_recently_used_ones_are_released() -> None:
    cuda = FakeCuda()
    graphs = tolerant(cuda, most=2)
    forwards = {key: Counter() for key in "abc"}
    for key in "abac":
        graphs.run(key, forwards[key])
    assert [key in graphs for key in "abc"] == [True, False, True]
    assert (len(cuda.alive), cuda.captured) == (2, 3)
    graphs.run("b", forwards["b"])
    assert cuda.captured == 4


def test_memory_is_bounded() -> None:
    sizes = iter([60, 30, 30, 500])
    cuda = FakeCuda(taken=lambda: next(sizes), total=1000)
    graphs = tolerant(cuda)
    assert graphs.backend.most_bytes == 100
    for key in "ab":
        graphs.run(key, Counter())
    assert graphs.bytes == 90
    graphs.run("c", Counter())
    assert (graphs.bytes, "a" in graphs) == (60, False)
    graphs.run("d", Counter())  # larger than all that is allowed: it is kept, alone
    assert (graphs.bytes, len(graphs)) == (500, 1)


def test_a_capture_that_fails_is_said_once_and_called() -> None:
    cuda, forward = FakeCuda(), Counter()
    cuda.fails = RuntimeError("operation not permitted when stream is capturing\nmore")
    graphs = tolerant(cuda)
    with pytest.warns(RuntimeWarning, match=r"\(a\) could not be captured and runs without a graph: operation not"):
        graphs.run("a", forward)
    assert (graphs.is_new("a"), graphs.is_new("b")) == (False, True)
    before = forward.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs.run("a", forward)
        graphs.run("b", forward)
    assert forward.calls == before + 1 + 2  # a call; and one to warm up, and a call
    graphs.clear()
    cuda.fails = None
    graphs.run("a", forward)
    assert "a" in graphs


def test_a_capture_that_fails_at_its_end_leaves_the_current_stream_and_captures_the_next_one() -> None:
    """`torch.cuda.graph` leaves neither the stream nor the allocator's pool, when the end of the capture raises."""
    cuda = FakeCuda()
    cuda.fails_at_end = RuntimeError("operation failed due to a previous error during capture")
    graphs = tolerant(cuda)
    with pytest.warns(RuntimeWarning, match="runs without a graph: operation failed"):
        graphs.run("a", Counter())
    assert (cuda.current_stream().name, cuda.going_on, cuda.log.count("release")) == ("main", [], 1)
    cuda.fails_at_end = None
    graphs.run("b", Counter())
    assert list(graphs) == ["b"]
    graphs.clear()


def test_the_pool_of_a_capture_that_ended_before_an_error_is_released_with_its_graph() -> None:
    cuda = FakeCuda()
    forward, calls = Counter(), iter([None, torch.OutOfMemoryError("CUDA out of memory")])

    def second_fails() -> None:
        forward()
        if (error := next(calls, None)) is not None:
            raise error

    with pytest.warns(RuntimeWarning, match="CUDA out of memory"):
        tolerant(cuda).run("a", second_fails)
    assert (cuda.going_on, cuda.log.count("release")) == ([], 0)


@pytest.mark.parametrize("name", ["_cuda_endAllocateCurrentStreamToPool", "_cuda_endAllocateToPool"])
def test_a_capture_that_fails_is_ended_by_the_name_of_each_version(name: str) -> None:
    """The first is that of torch up to 2.7."""
    ended = list[tuple[int, object]]()

    def end(device: int, pool: object) -> None:
        ended.append((device, pool))

    cuda = FakeCuda()
    cuda.fails_at_end = RuntimeError("no")
    cuda.memory = SimpleNamespace(**{name: end, "_cuda_releasePool": end})
    with pytest.raises(RuntimeError, match="no"), capture(cuda.CUDAGraph(), 3, cuda.Stream("cuda"), cuda):
        pass
    assert ended == [(0, 3)] * 2


def test_without_memory_for_a_capture_the_others_are_released() -> None:
    cuda = FakeCuda()
    graphs = tolerant(cuda)
    graphs.run("a", Counter())
    cuda.fails = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.warns(RuntimeWarning, match="CUDA out of memory"):
        graphs.run("b", Counter())
    assert (len(graphs), cuda.alive) == (0, [])


def test_in_the_test_of_a_model_a_failure_is_an_error() -> None:
    cuda = FakeCuda()
    cuda.fails = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        Graphs(recorded(cuda)).run("a", Counter())


def test_calls_are_not_recorded() -> None:
    forward = Counter()
    graphs = Graphs(Calls())
    for _ in range(3):
        graphs.run("a", forward)
    assert (forward.calls, graphs.bytes) == (3, 0)


def test_rows_are_rounded_up() -> None:
    assert [rows_of(n, 1) for n in (1, 2, 3, 5, 9, 64, 65, 128, 129)] == [1, 4, 4, 8, 16, 64, 128, 128, None]
    assert rows_of(33, 16) is None
    assert rows_of(32, 16) == 32 == most_rows(16)
    assert all(batch * most_rows(batch) <= MOST_ROWS for batch in (1, 2, 3, 4, 8, 16, 64, 512))
    assert list(ROWS) == sorted(ROWS)


def test_a_first_forward_with_drafts_is_padded_to_few_rows() -> None:
    assert [usual_rows(4, batch) for batch in (2, 4, 8, 16, 32, 64)] == [64, 32, 16, 8, 4, 4]
    assert usual_rows(1, 4) == 1
    assert usual_rows(32, 16) == 32


def test_slots_are_doubled() -> None:
    assert [slots_of(need, 256, 1000) for need in (3, 256, 257, 600)] == [256, 256, 512, 1000]
    assert slots_of(20, 256, 24) == 24
    assert (own_of(8, 0), own_of(8, 1), own_of(2, 30)) == (8, 16, 32)


def test_what_fits_the_buffer() -> None:
    assert Buffers.fits(Shape(1, 128, 128, 4096))
    assert Buffers.fits(Shape(16, 32, 32, 4096))
    assert Buffers.fits(Shape(4, 128, 256, 4096))
    assert not Buffers.fits(Shape(512, 1, 4096, 8192))
    assert BYTES % 8 == 0


def test_the_inputs_are_not_written_again_before_their_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made on the stream of the model's device, which need not be the current one."""

    class Event:
        def synchronize(self) -> None:
            log.append("wait")

        def record(self, stream: object = "of the current device") -> None:
            log.append(stream)

    log: list[object] = []
    buffers, shape = Buffers(torch.device("cpu")), Shape(1, 4, 4, 64)
    buffers._copied = Event()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    for _ in range(2):
        buffers.write(shape, [Draft(TokenTree.root(3), 5, 0)])
    assert log == ["wait", buffers.device.device] * 2


def test_two_threads_capture_one_after_the_other() -> None:
    """A target and a draft model have streams of their own, and each waits for the whole device before it captures."""
    cuda, first, inside = FakeCuda(), Event(), Event()
    backends = recorded(cuda), recorded(cuda)

    def slow() -> None:
        first.set()
        inside.wait(0.2)

    def fast() -> None:
        inside.set()

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(backends[0].record, slow)
        first.wait(10)
        threads.submit(backends[1].record, fast).result()
        one.result()
    assert cuda.log == ["side waits for main", "main waits for side", "synchronize", "empty_cache", "capture"] * 2


def test_memory_is_not_freed_while_another_thread_captures() -> None:
    """Torch would raise an error. That of a capture which is none of ours costs no running text."""
    cuda, began, freed = FakeCuda(), Event(), Event()
    graphs = tolerant(cuda)
    graphs.run("a", Counter())
    failed = list[str]()

    def captures() -> None:
        if cuda.log[-1] == "capture":
            began.set()
            freed.wait(0.2)

    def restart() -> None:
        graphs.backend.restart()
        freed.set()

    empty_cache = cuda.empty_cache

    def noted() -> None:
        try:
            empty_cache()
        except RuntimeError as error:
            failed.append(str(error))
            raise

    cuda.empty_cache = noted  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(recorded(cuda).record, captures)
        assert began.wait(10)
        threads.submit(restart).result()
        one.result()
    assert failed == []
    cuda.going_on.append(9)
    graphs.clear()
    assert len(failed) == 1
