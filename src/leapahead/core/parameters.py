"""Checks of the numbers and token ids that a user passes, and the parts of a list of options.

Numpy's numbers are accepted; booleans are not numbers.
"""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Any

from leapahead.core.errors import BadParameter

MOST_BATCH = MOST_SAMPLES = 2**16  # sequences decoded together, and samples of a prompt; more is a slip of the hand
# A part of a list that commas divide: a value in quotes may hold commas.
PART = re.compile(r"""(?P<key>[^,=]*=)\s*(?P<quote>["'])(?P<value>.*?)(?P=quote)\s*(?=,|$)|[^,]+""", re.DOTALL)


def listed(text: str) -> list[str]:
    """The parts of `KEY=VALUE,KEY="VALUE, WITH COMMAS",WORD`, without empty ones, spaces around them, and quotes."""
    parts = (each["key"] + each["value"] if each["quote"] else each[0] for each in PART.finditer(text))
    return [part.strip() for part in parts if part.strip()]


def is_whole(value: object) -> bool:
    """Whether this is a whole number, of Python or of numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """The value as an int.

    Raises:
        BadParameter: it is no whole number, less than `least`, or more than `most`.
    """
    if not is_whole(value) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise BadParameter(f"{name}={value!r} is not possible: it must be a whole number {limits}")
    return int(value)


def number(value: Any) -> float | None:
    """The value as an int or float; None if it is no number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def unicode_text(what: str, text: str) -> str:
    """The text itself, which `what` names.

    Raises:
        BadParameter: it holds a lone surrogate, which no tokenizer can take.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadParameter(f"{what} holds a lone surrogate, so it is no Unicode text; decode its bytes as UTF-8")
    return text


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The value, a tuple of token ids, as ints.

    Raises:
        BadParameter: it is no tuple of whole numbers.
    """
    if not isinstance(value, tuple) or not all(map(is_whole, value)):
        raise BadParameter(f"{name}={value!r} is not possible: it must be a tuple of token ids")
    return tuple(map(int, value))
