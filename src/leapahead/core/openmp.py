"""The thread pools of OpenMP, of which each thread that computes has one of its own.

GNU's OpenMP lets a thread that waits for the others spin, unless there are more threads than processors: then all
sleep and are woken at every barrier, and a forward of a small model takes half as long again, or more. It counts the
threads of all pools. So a pool that a thread leaves behind (the main thread, which has loaded the model, or one that
has waited for its text) makes the forwards of every other thread slow. Threads end their pool when they have computed
for a while; the next computation makes a new one, in some tens of microseconds. A thread that forks ends its pool, too:
the child would wait for threads that it does not have, for ever.

Where other programs use the processors too, spinning is what is slow: a thread that spins uses up the time in which the
one that it waits for could run, and a forward takes many times as long. So while a thread of this process waits for
processors for long, a further pool is kept that computes nothing: there are more threads than processors then, and all
sleep while they wait for each other. The number of threads that compute stays as it is, so that no bit of a result
changes. Where the user has set how OpenMP's threads wait (OMP_WAIT_POLICY, GOMP_SPINCOUNT), it stays so.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic

SOFT = 1  # omp_pause_soft
TASKS = Path("/proc/self/task")
WINDOW = 0.5  # seconds between two looks at how long the threads of the process wait for processors
# Seconds in a second that the thread which waits longest may wait. On two cores: up to 0.01 on a free machine, 0.1 in a
# server beside its clients, 0.3 to 0.5 beside one busy program. One late thread is enough to make all others wait.
CROWDED = 0.2
FREE = 0.02  # below which they may spin again; with another busy program it is more, even if they sleep
SHORTEST, LONGEST = 4.0, 64.0  # seconds of sleeping after which spinning is tried, where the share is between these
_known: dict[str, ctypes.CDLL] = {}
_set_by_user = any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))


def find() -> None:
    """Looks for the OpenMP libraries of the process. To be called when a library that computes was loaded."""
    if sys.platform != "linux":
        return
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    names = {line[line.index("/") :] for line in maps if "/libgomp" in line}
    for name in names - _known.keys():
        try:
            library = ctypes.CDLL(name)
            library.omp_pause_resource_all.argtypes = [ctypes.c_int]
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        except (OSError, AttributeError):  # replaced since it was loaded, or older than OpenMP 5
            continue
        _known[name] = library


def release() -> None:
    """Ends the pools of the calling thread. Harmless if it has none, and inside of a parallel region."""
    for library in list(_known.values()):
        library.omp_pause_resource_all(SOFT)


class Sleeping:
    """While it is not ended, waiting threads of these libraries sleep: it keeps a pool that computes nothing.

    Raises:
        RuntimeError: the system, or an interpreter that is ending, allows no further thread.
    """

    def __init__(self, libraries: Sequence[ctypes.CDLL]) -> None:
        self.libraries, self._ended = libraries, Event()
        Thread(target=self._keep, name="leapahead-openmp", daemon=True).start()

    def _keep(self) -> None:
        free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of a null pointer it does nothing
        for library in self.libraries:
            library.GOMP_parallel(free, None, len(os.sched_getaffinity(0)) + 1, 0)
        self._ended.wait()
        release()

    def end(self) -> None:
        """Lets them spin again."""
        self._ended.set()


class Crowding:
    """Watches how long the threads of this process wait for processors, and lets them sleep or spin accordingly.

    Attributes:
        sleeping: while waiting threads sleep.
    """

    def __init__(self) -> None:
        self.sleeping: Sleeping | None = None
        self._lock = Lock()
        self._looked = 0.0  # when, by `monotonic`
        self._waited: dict[str, int] = {}  # thread -> nanoseconds until then
        self._changed = 0.0  # when they began to sleep, or to spin
        self._pause = SHORTEST

    def look(self) -> None:
        """To be called often, as before every step; does nothing but twice a second."""
        if monotonic() - self._looked < WINDOW or not _known or _set_by_user:
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            now, waited = monotonic(), _waited()
            seconds, self._looked = now - self._looked, now
            longest = max((time - self._waited.get(thread, 0) for thread, time in waited.items()), default=0)
            share = longest / 1e9 / seconds
            self._waited = waited
            if seconds < 2 * WINDOW or share > CROWDED:  # a longer time was a slow step, or one without any
                self.decide(share, now)
        finally:
            self._lock.release()

    def decide(self, share: float, now: float) -> None:
        """Lets the threads sleep, or spin.

        A server's own threads and its clients take processors, too, so the share may never become that of a free
        machine. Then spinning is tried, in intervals that double while it proves to be wrong.

        Args:
            share: seconds in a second that the thread which waited longest has waited for a processor.
            now: the time in seconds.
        """
        since, crowded = now - self._changed, share > CROWDED
        if self.sleeping is None and crowded:
            self._pause = min(2 * self._pause, LONGEST) if since < SHORTEST else SHORTEST
            self._changed = now
            with suppress(RuntimeError):  # then they spin as before
                self.sleeping = Sleeping(list(_known.values()))
        elif self.sleeping is not None and (share < FREE or (not crowded and since > self._pause)):
            self.sleeping.end()
            self.sleeping, self._changed = None, now


def _waited() -> dict[str, int]:
    """Thread of this process -> nanoseconds that it has waited for a processor; none where the system does not say."""
    found: dict[str, int] = {}
    try:
        threads = os.listdir(TASKS)
    except OSError:
        return found
    for thread in threads:
        try:
            with open(TASKS / thread / "schedstat", encoding="ascii") as file:
                found[thread] = int(file.read().split()[1])
        except (OSError, IndexError, ValueError):  # it has just ended, or the system does not say
            continue
    return found


crowding = Crowding()
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=release)


@contextmanager
def watched() -> Iterator[None]:
    """Meanwhile a thread of its own calls `crowding.look`: for work that has no steps, as the loading of a model."""
    ended = Event()

    def watch() -> None:
        while not ended.wait(WINDOW):
            find()
            crowding.look()

    watcher = Thread(target=watch, name="leapahead-openmp-watch", daemon=True)
    if sys.platform == "linux" and not _set_by_user:
        with suppress(RuntimeError):  # no further thread is allowed
            watcher.start()
    try:
        yield
    finally:
        ended.set()
        if watcher.ident is not None:  # it was started
            watcher.join()
