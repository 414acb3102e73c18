"""Which thread drives an engine: one at a time, while the others wait for what it does.

Knows neither requests nor forwards.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock, current_thread, get_ident, main_thread
from typing import Any
from weakref import WeakSet, finalize

from leapahead.core import forks, openmp
from leapahead.core.errors import LeapaheadError
from leapahead.core.forks import Lost
from leapahead.models.base import Target

EXIT_SECONDS = 10.0  # that the end of the interpreter waits for a step of another thread
STALLED = 0.01  # seconds between two attempts of an engine that waits for the readers of its streams


def of_request(error: BaseException, earlier: BaseException | None = None) -> BaseException:
    """What ends a request in which something was raised: this, or what has ended it before.

    Raises:
        BaseException: an interrupt, which is the caller's. Signals go to the main thread; in others, what is no
            Exception comes from a request, too: a criterion that calls `sys.exit`, or a native module.
    """
    if isinstance(error, Exception):
        return earlier or error
    if current_thread() is main_thread():
        raise error
    return earlier or LeapaheadError(f"decoding was interrupted by {error!r}")


LOST: Any = Lost("another thread used it")
THREADS_LOST: Any = Lost("its model had threads of its own that compute, or an accelerator")


class Changed(Condition):
    """A condition that may be lost."""

    lost: Any = None

    def __enter__(self) -> bool:
        return self.lost.__enter__() if self.lost else super().__enter__()


class Turn:
    """The right to drive an engine.

    A forked child, which has none of its parent's other threads, goes on with an engine that nobody was using, unless
    its target computes in such threads, or in other processes or on an accelerator, which serve the parent
    (`has_threads`).

    Args:
        target: of the engine.

    Attributes:
        changed: guards what several threads read and write; notified after every change.
        stalled: whether nothing can be done until a reader of a stream has read on.
        stepping: the thread that is inside a step, whether it came by `drive` or not.
    """

    def __init__(self, target: Target) -> None:
        self.changed = Changed()
        self.stalled = False
        self.stepping: int | None = None
        self._target = target
        self._driver: int | None = None
        forks.watch(self)
        EXIT.turns.add(self)
        openmp.find()
        openmp.release()  # of the forwards that have tested the model

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread is driving, as criteria, processors, callbacks and finalizers may find it."""
        return get_ident() in (self._driver, self.stepping)

    def drive(self, action: Callable[[], object]) -> None:
        """Runs the action in this thread, or waits for a change where another thread drives.

        Raises:
            LeapaheadError: this thread is driving already.
        """
        EXIT.pass_by()
        if self.is_inside:
            raise LeapaheadError("a criterion, processor or callback cannot wait for a request of its own engine")
        thread = get_ident()
        try:
            with self.changed:
                if self.stalled and self._driver is None:
                    self.changed.wait(STALLED)
                if self._driver is not None:
                    openmp.release()  # of this thread, which may have driven before
                    self.changed.wait()
                    return
                self._driver = thread
            with self._target.lock:
                action()
        finally:
            if self._driver == thread:
                self._driver = None  # before any call, so that no interrupt comes in between
                self.tell()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within the block, this thread is inside a step.

        Raises:
            LeapaheadError: it is already.
        """
        if self.stepping == (thread := get_ident()):
            raise LeapaheadError("a criterion, processor or callback cannot step its own engine")
        openmp.crowding.look()
        with self._target.lock:
            self.stepping = thread
            try:
                yield
            finally:
                self.stepping = None

    def forked(self) -> None:
        """Called in a child process; see `forks`."""
        lost = THREADS_LOST if getattr(self._target, "has_threads", False) else None
        if self._driver not in (None, get_ident()):
            lost = LOST
        locks: tuple[Any, ...] = (self.changed, self._target.lock)
        for lock in locks:
            if lock.acquire(blocking=False):
                lock.release()
            else:
                lost = lock if isinstance(lock, Lost) else LOST  # of another engine with this target
        if lost:
            self._driver = self.stepping = None  # a thread of this process may get the same number
            self.changed.lost = self._target.lock = lost

    def tell(self) -> None:
        """Wakes the threads that wait for a change."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Keeps other threads from the target, when the step of one of them has ended."""
        self._target.lock.acquire(timeout=EXIT_SECONDS)


class Exit:
    """The end of the interpreter, which stops daemon threads wherever they are; within a forward, that aborts it.

    Attributes:
        turns: of all engines.
    """

    def __init__(self) -> None:
        self.turns: WeakSet[Turn] = WeakSet()
        self._thread: int | None = None  # that ends the interpreter
        self._closed = Lock()
        # What was registered last is called first. Python registers all finalizers with the first one, so that those
        # which free models are called after this.
        finalize(self, int)
        atexit.register(self._begin)

    def pass_by(self) -> None:
        """Stops every other thread, for ever, when the end has begun."""
        if self._thread not in (None, get_ident()):
            self._closed.acquire()

    def _begin(self) -> None:
        self._closed.acquire()
        self._thread = get_ident()
        for turn in list(self.turns):
            turn.close()


EXIT = Exit()
