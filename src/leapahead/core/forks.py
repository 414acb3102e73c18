"""Locks in a forked child, which inherits those that other threads of its parent held; these threads are not in it."""

from __future__ import annotations

import os
from threading import RLock
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """What a child process has to put in order."""

    def forked(self) -> None:
        """Called in the child, by its only thread."""


_known: WeakSet[Forked] = WeakSet()


def watch(each: Forked) -> None:
    """Has `forked` called in child processes, as long as the object lives."""
    _known.add(each)


def _in_child() -> None:
    for each in list(_known):
        each.forked()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_in_child)


class Mutex:
    """A reentrant lock that is held for moments only, and that a child finds free unless its own thread holds it."""

    def __init__(self) -> None:
        self._lock = RLock()
        watch(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def forked(self) -> None:
        """See `Forked`."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = RLock()
