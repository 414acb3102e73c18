"""How a target was loaded, so that a draft model named beside it is loaded in the same way; what is no target."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from leapahead.models.base import Target, TargetInfo

_OPTIONS: WeakKeyDictionary[Target, dict[str, Any]] = WeakKeyDictionary()


def remember(target: Target, **options: Any) -> None:
    """Keeps the options with which a target was loaded by its name."""
    _OPTIONS[target] = options


def of(target: Target | None) -> dict[str, Any]:
    """The options with which a target was loaded by its name; none of another one."""
    return {} if target is None else dict(_OPTIONS.get(target, {}))


def lacking(model: object) -> str:
    """What an object that has a `TargetInfo` lacks to be a target, for messages; "" for any other object."""
    if isinstance(model, type) or not isinstance(getattr(model, "info", None), TargetInfo):
        return ""
    names = [name for name in (*Target.__annotations__, *vars(Target)) if not name.startswith("_")]
    return f", which is no target without {', '.join(name for name in names if not hasattr(model, name))}"
