"""Checks of the numbers, booleans, names and token ids that a user passes; parts of lists, and similar names.

Numpy's numbers are accepted; booleans are not numbers.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from leapahead.core.errors import BadParameter

LARGEST = float(np.finfo(np.float32).max)
MOST_BATCH = MOST_SAMPLES = 2**16  # sequences decoded together, and samples of a prompt; more is a slip of the hand
MOST_CHARACTERS = 2**26  # of a prompt, which is more than any model reads
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


def is_left_out(option: object) -> bool:
    """Whether an option that names files or models is left out, which None and "" mean."""
    return option is None or (isinstance(option, str) and not option)


def flag(name: str, value: Any) -> bool:
    """The value as a bool.

    Raises:
        BadParameter: it is none, of Python or of numpy: "false", for example, would count as true.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise BadParameter(f"{name}={value!r} is not possible: it must be true or false")
    return bool(value)


def within(name: str, value: Any, least: float, most: float, rule: str) -> float:
    """The value as a number.

    Args:
        rule: what it must be, for the message.

    Raises:
        BadParameter: it is no number, or not from `least` to `most`.
    """
    found = number(value)
    if found is None or not least <= found <= most:  # comparisons with NaN are false
        raise BadParameter(f"{name}={value!r} is not possible: it must be {rule}")
    return found


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """The value, one of some names.

    Raises:
        BadParameter: it is none of them.
    """
    if not isinstance(value, str) or value not in known:
        raise BadParameter(f"there is no {name} {value!r}; there are {', '.join(known)}")
    return value


def similar(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word most similar to a word, or with which it ends, as `torch_dtype` does with `dtype`; "" for none.

    Args:
        cutoff: `difflib`'s ratio from which on any other word is similar.
    """
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.75)
    parts = sorted((each for each in names if len(each) > 3 and word.endswith(each)), key=len)
    return (close or parts[-1:] or difflib.get_close_matches(word, names, n=1, cutoff=cutoff) or [""])[0]


def meant(word: str, known: Iterable[str]) -> str:
    """What stands behind a word that is none of the known ones in a message: the most similar one, or nothing."""
    return f" (did you mean {found!r}?)" if (found := similar(word, known)) else ""


def apart(names: str) -> list[str]:
    """The names in a text, divided by commas; the text itself where a file or folder has that name, commas included."""
    if os.path.exists(os.path.expanduser(names)):
        return [names]
    return [name.strip() for name in names.split(",") if name.strip()]


def file_path(name: str, value: Any) -> Path:
    """The value as a path, with `~` as the home folder; a number would be opened as a file descriptor.

    Raises:
        BadParameter: it is no path, an empty one, or one with a null character.
    """
    if not isinstance(value, (str, PathLike)) or not (text := fspath(value)) or not isinstance(text, str):
        raise BadParameter(f"{name}={value!r} is not possible: it must be the path of a file")
    if "\0" in text:
        raise BadParameter(f"{name}={value!r} is not possible: no path of a file has a null character")
    return Path(os.path.expanduser(text))  # unlike that of Path, it leaves the name of an unknown user as it is


def finite(name: str, value: Any) -> float:
    """The value as a number that is finite in float32, in which logits are processed.

    Raises:
        BadParameter: it is none.
    """
    rule = f"a finite number, at most {LARGEST:.2g} in size, as float32 is"
    return float(within(name, value, -LARGEST, LARGEST, rule))


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


def limited(read: Callable[[int], str], what: str) -> str:
    """The text of a file, which `what` names; one that does not end, such as /dev/zero, is not read for ever.

    Raises:
        BadParameter: it has more than `MOST_CHARACTERS`.
    """
    text = read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise BadParameter(f"{what} has more than {MOST_CHARACTERS:,} characters, which no model reads; shorten it")
    return text


def check_token_ids(name: str, value: Any) -> None:
    """Refuses what is no sequence of token ids.

    Raises:
        BadParameter: it is none, or something in it is no whole number.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise BadParameter(f"{name}={value!r} is not possible: it must be a sequence of token ids")
    if not set(map(type, value)) <= {int}:  # the fast way, since prompts may be long
        for token in value:
            if not is_whole(token):
                raise BadParameter(f"{name} has {token!r}, which is no token id; give whole numbers")


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The value, a tuple of token ids, as ints.

    Raises:
        BadParameter: it is no tuple of whole numbers.
    """
    if not isinstance(value, tuple) or not all(map(is_whole, value)):
        raise BadParameter(f"{name}={value!r} is not possible: it must be a tuple of token ids")
    return tuple(map(int, value))
