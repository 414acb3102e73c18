"""Values of `-o KEY=VALUE`, in the types of a drafter's options."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from leapahead.core.errors import BadParameter


def value_of(key: str, text: str, annotation: Any) -> Any:
    """`text` in the type that a drafter's signature names.

    Raises:
        BadParameter: it is not of that type.
    """
    readers: list[tuple[str, Callable[[str], Any]]] = [("int", int), ("float", float), ("bool", _bool), ("str", str)]
    named = set(re.findall(r"\w+", str(annotation))) & {kind for kind, _ in readers}
    for kind, read in readers:
        if kind in named or not named:
            try:
                return read(text)
            except ValueError:
                continue
    raise BadParameter(f"-o {key}={text} is not possible: the value must be of type {annotation}")


def _bool(text: str) -> bool:
    word = text.lower()
    if word not in ("true", "false", "yes", "no", "on", "off"):
        raise ValueError(text)
    return word in ("true", "yes", "on")
