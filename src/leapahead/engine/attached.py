"""The drafters of one engine: one object for each name and options, attached to the target, measured once."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from leapahead.core import openmp
from leapahead.core.errors import BadParameter
from leapahead.drafters import registry
from leapahead.drafters.base import Drafter, Host
from leapahead.models.base import Target

MOST = 32  # drafters that are kept; of more, the oldest but the very first, an LLM's own, is released


class AttachedDrafters:
    """Makes drafters by name and keeps them.

    Args:
        target: that they draft for.
        host: what they are given of the engine.
    """

    def __init__(self, target: Target, host: Host) -> None:
        self.target, self.host = target, host
        self._drafters: dict[Hashable, Drafter] = {}
        self._prepared: set[Drafter] = set()

    def get(self, drafter: str | type[Any] | Drafter, **options: Any) -> Drafter:
        """See `Engine.drafter`."""
        key = (drafter, *((name, _key(value)) for name, value in sorted(options.items())))
        if (known := self._drafters.get(key)) is not None:  # without waiting for a step that is under way
            return known
        with self.target.lock:
            found = drafter if isinstance(drafter, Drafter) else registry.make(drafter, **options)
            self._check(found)
            found.attach(self.host)
            found.host = self.host  # also where `attach` is a subclass's own
            openmp.release()  # of the forwards that test draft models
            found = self._drafters.setdefault(key, found)
            while len(self._drafters) > MOST:
                oldest = self._drafters.pop(list(self._drafters)[1])
                self._prepared.discard(oldest)
                oldest.release()
            return found

    def _check(self, drafter: Drafter) -> None:
        """Refuses a drafter that was attached by another engine."""
        if getattr(drafter, "host", self.host) is not self.host:
            raise BadParameter(f"this drafter {drafter.name!r} belongs to another engine; make one for each")

    def release(self) -> None:
        """Tells all drafters that the engine is closed, also where one of them fails."""
        with ExitStack() as stack:  # calls what comes last first
            for drafter in reversed(dict.fromkeys(self._drafters.values())):
                stack.callback(drafter.release)

    def prepare(self, drafter: Drafter) -> None:
        """See `Engine.prepare`.

        Raises:
            BadParameter: the drafter was attached to the target of another engine.
        """
        if drafter in self._prepared:
            return
        self._check(drafter)
        with self.target.lock:
            if drafter not in self._prepared:
                try:
                    if drafter.plans:
                        self.host.latency.prepare(self.target)
                    drafter.prepare()
                finally:
                    openmp.release()
                self._prepared.add(drafter)


def _key(value: object) -> Hashable:
    """What tells two values of an option apart: themselves, or which object they are where they have no hash."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return value if isinstance(value, Hashable) else Same(value)


@dataclass(frozen=True, eq=False)
class Same:
    """Equal to another of the same object, which it keeps, so that its identity is not given to a later one."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
