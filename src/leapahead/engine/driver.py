"""A thread that drives an engine, for callers that must not wait in theirs."""

from __future__ import annotations

import atexit
from threading import Thread

from leapahead.core.forks import Mutex
from leapahead.engine.scheduler import Engine


class Driver:
    """Drives an engine until that is closed, nobody needs the thread any more, or the interpreter ends.

    At its end Python stops such a thread wherever it is; in the middle of a forward, that aborts the process. So the
    engine is closed before.

    Args:
        engine: to be driven.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread: Thread | None = None
        self._starting = Mutex()
        self._stopped = False

    def start(self) -> None:
        """Starts the thread, unless it is running. Several threads may call this."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(
                    target=self._engine.run_forever, args=(lambda: self._stopped,), name="leapahead", daemon=True
                )
                self._thread.start()
                atexit.unregister(self._at_exit)
                atexit.register(self._at_exit)

    def stop(self) -> None:
        """Lets the thread end after its step, so that it keeps the engine no longer. Waits for nothing."""
        self._stopped = True
        atexit.unregister(self._at_exit)
        if self._thread is not None and self._thread.is_alive():  # it is not in a forked child
            self._engine._turn.tell()

    def join(self) -> None:
        """Waits for the end of the thread, after the engine was closed."""
        atexit.unregister(self._at_exit)
        if self._thread is not None:
            self._thread.join()

    def _at_exit(self) -> None:
        if self._thread is not None and self._thread.is_alive():  # it is not in a forked child
            self._engine.close()
            self._thread.join()
