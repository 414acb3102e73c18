"""Targets on several devices within one process: each of the other devices is a thread that follows the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar

from leapahead.models.base import Target
from leapahead.models.parallel.followed import FollowedTarget
from leapahead.models.parallel.link import connected
from leapahead.models.parallel.target import ParallelTarget
from leapahead.models.parallel.tensor import TensorParallelTarget
from leapahead.models.parallel.worker import follow

SECONDS = 60.0
Followed = TypeVar("Followed", bound=FollowedTarget)


def divided(targets: Sequence[Target]) -> ParallelTarget:
    """A target on as many devices as there are targets of the same model. To be closed."""
    return followed(targets, ParallelTarget)


def together(targets: Sequence[Target]) -> TensorParallelTarget:
    """The same where every device computes every forward, here with the whole model."""
    return followed(targets, TensorParallelTarget)


def followed(targets: Sequence[Target], kind: type[Followed]) -> Followed:
    """The target of the process that decodes, which those in other threads follow."""
    own, *others = connected(len(targets), SECONDS)
    is_together = kind is TensorParallelTarget
    pairs = zip(targets[1:], others, strict=True)
    threads = [Thread(target=follow, args=(*pair, is_together), daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()

    def end(patience: float) -> None:
        for thread in threads:
            thread.join(SECONDS)

    return kind(targets[0], own, end)


@contextmanager
def on_devices(make: Callable[[], Target], size: int) -> Iterator[ParallelTarget]:
    """The same within a block."""
    target = divided([make() for _ in range(size)])
    try:
        yield target
    finally:
        target.close()
