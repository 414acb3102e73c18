"""Time on a device, and the time that is left for a measurement."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from leapahead.models.transformers.static.graphs import capture

REPEATS = 10  # of the work in one captured graph
WARM_UPS = 3


class Clock:
    """Counts down from a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = perf_counter() + seconds

    @property
    def left(self) -> float:
        return self._end - perf_counter()

    @property
    def has_run_out(self) -> bool:
        return self.left <= 0

    def part(self, seconds: float) -> Clock:
        """Another one, of so many seconds or of what is left here."""
        return Clock(min(seconds, self.left))


def median_seconds(
    work: Callable[[], object], device: torch.device, rounds: int = 15, repeats: int = REPEATS, captured: bool = True
) -> float:
    """Median seconds of some work.

    Args:
        repeats: of the work in the graph.
        captured: on CUDA, capture it in a graph, so that launching its operations takes no time. It must read nothing
            on the host then. Otherwise launches count.
    """
    if device.type == "cuda" and captured:
        with torch.cuda.device(device):  # on whose stream events are recorded
            return captured_seconds(work, device, rounds, repeats)
    found = []
    for turn in range(rounds + WARM_UPS):
        began = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= WARM_UPS:
            found.append(perf_counter() - began)
    return median(found)


def captured_seconds(
    work: Callable[[], object], device: torch.device, rounds: int, repeats: int, cuda: Any = torch.cuda
) -> float:
    """The same for a CUDA device.

    Args:
        cuda: torch's module for CUDA; another one in tests.
    """
    side = cuda.Stream(device)
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with capture(graph, cuda.graph_pool_handle(), side, cuda):
        for _ in range(repeats):
            work()
    found: list[float] = []
    for turn in range(rounds + WARM_UPS):
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= WARM_UPS:
            found.append(begin.elapsed_time(end) / 1e3 / repeats)  # of milliseconds
    return median(found)
