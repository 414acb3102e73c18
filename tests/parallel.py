"""Targets on several devices within one process: each of the other devices is a thread that follows the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

from leapahead.models.base import Target
from leapahead.models.parallel.link import connected
from leapahead.models.parallel.target import ParallelTarget
from leapahead.models.parallel.worker import follow

SECONDS = 60.0


def divided(targets: Sequence[Target]) -> ParallelTarget:
    """A target on as many devices as there are targets of the same model. To be closed."""
    own, *others = connected(len(targets), SECONDS)
    pairs = zip(targets[1:], others, strict=True)
    threads = [Thread(target=follow, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()

    def end(patience: float) -> None:
        for thread in threads:
            thread.join(SECONDS)

    return ParallelTarget(targets[0], own, end)


@contextmanager
def on_devices(make: Callable[[], Target], size: int) -> Iterator[ParallelTarget]:
    """The same within a block."""
    target = divided([make() for _ in range(size)])
    try:
        yield target
    finally:
        target.close()
