"""Locks in a forked child, which inherits those that other threads of its parent held; these threads are not in it."""

from __future__ import annotations

import os
from _thread import RLock  # a class, and what `threading.RLock` makes
from typing import NoReturn, Protocol
from weakref import WeakSet

from leapahead.core.errors import LeapaheadError


class Forked(Protocol):
    """What a child process has to put in order."""

    def forked(self) -> None:
        """Called in the child, by its only thread."""


class Lost:
    """In place of a lock in a forked process that cannot go on with what it guards. To lock it is refused.

    Args:
        why: it cannot.
    """

    def __init__(self, why: str) -> None:
        self.why = why

    def __enter__(self) -> NoReturn:
        raise LeapaheadError(
            f"this LLM, or its engine, was forked while {self.why}, so that this process cannot go on with it; make "
            "one in each process"
        )

    def __exit__(self, *_: object) -> None: ...

    def acquire(self, **_: object) -> bool:
        """Never."""
        return False


_known: WeakSet[Forked] = WeakSet()


def watch(each: Forked) -> None:
    """Has `forked` called in child processes, as long as the object lives."""
    _known.add(each)


def _in_child() -> None:
    for each in list(_known):
        each.forked()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_in_child)


class Mutex(RLock):  # type: ignore[misc]  # which is final for type checkers only
    """A reentrant lock that is held for moments only, and that a child finds free unless its own thread holds it."""

    def __init__(self) -> None:
        super().__init__()
        watch(self)

    def forked(self) -> None:
        """See `Forked`."""
        if not self._is_owned():  # type: ignore[attr-defined]
            self._at_fork_reinit()  # type: ignore[attr-defined]
