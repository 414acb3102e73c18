"""How a target was loaded, so that a draft model that is named beside it is loaded in the same way."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from leapahead.models.base import Target

_OPTIONS: WeakKeyDictionary[Target, dict[str, Any]] = WeakKeyDictionary()


def remember(target: Target, **options: Any) -> None:
    """Keeps the options with which a target was loaded by its name."""
    _OPTIONS[target] = options


def of(target: Target | None) -> dict[str, Any]:
    """The options with which a target was loaded by its name; none of another one."""
    return {} if target is None else dict(_OPTIONS.get(target, {}))
