"""Which thread drives an engine: one at a time, while the others wait for what it does.

Knows neither requests nor forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Condition, get_ident

from leapahead.core import openmp
from leapahead.core.errors import LeapaheadError

STALLED = 0.01  # seconds between two attempts of an engine that waits for the readers of its streams


class Turn:
    """The right to drive an engine.

    Args:
        lock: of the target.

    Attributes:
        changed: guards what several threads read and write; notified after every change.
        stalled: whether nothing can be done until a reader of a stream has read on.
        stepping: the thread that is inside a step, whether it came by `drive` or not.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self.changed = Condition()
        self.stalled = False
        self.stepping: int | None = None
        self._lock = lock
        self._driver: int | None = None
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
            with self._lock:
                action()
        finally:
            if self._driver == thread:
                self._driver = None  # before any call, so that no interrupt comes in between
                self.tell()

    def tell(self) -> None:
        """Wakes the threads that wait for a change."""
        with self.changed:
            self.changed.notify_all()
