"""Types of values on the command line: of `--option KEY=VALUE`, those of a drafter's options; finite numbers; paths."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from leapahead.core.errors import BadParameter


class Finite(click.FloatRange):
    """A number in a range, without nan and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


class HomePath(click.Path):
    """A path with `~` as the home folder: shells leave it in quotes, and after `--option=`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(os.path.expanduser(value), param, ctx)


class Folder(HomePath):
    """A folder to write to; an empty text would be the current one."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            name = param.opts[0] if param else ""
            raise BadParameter(f"{name}='' is no folder; give one, such as . for the current one")
        return super().convert(value, param, ctx)


def value_of(pair: str, text: str, annotation: Any) -> Any:
    """`text` in the type that a drafter's signature names.

    Args:
        pair: the option and its value as they were typed, for the message.

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
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation).removesuffix(" | None")
    raise BadParameter(f"{pair} is not possible: the value must be of type {name}")


def _bool(text: str) -> bool:
    word = text.lower()
    if word not in ("true", "false", "yes", "no", "on", "off"):
        raise ValueError(text)
    return word in ("true", "yes", "on")
