"""The errors that a user can cause. Each message is one clear sentence that names the value and the remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The names of models on the Hugging Face hub, by the rules of its client, which is not imported here.
HUB_ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b")


class LeapaheadError(Exception):
    """Base of every error that this package raises on purpose."""


class BadParameter(LeapaheadError, ValueError):
    """An impossible parameter: a negative temperature, an unknown option, an empty prompt."""


class Refused(LeapaheadError):
    """A missing capability, refused by name before any work is done."""


class ContextOverflow(LeapaheadError, ValueError):
    """A prompt that does not fit the target's context."""


class CacheFull(LeapaheadError):
    """A sequence that does not fit the target's cache beside the open ones, which are not affected."""


class BadLogits(LeapaheadError, ArithmeticError):
    """Logits from which no token can be chosen: NaN, +inf, or every token banned.

    Attributes:
        banned: whether the model's own logits are numbers, so that parameters have banned every token.
    """

    banned = False


class DraftError(LeapaheadError):
    """A drafter that broke its contract: a token outside the vocabulary, a tree beyond its budget."""


@contextmanager
def needing(what: str, extra: str, *packages: str) -> Iterator[None]:
    """Encloses an import and turns a missing package into an error that names the extra to install.

    Args:
        what: that needs the import, as the message names it.
        extra: of this package.
        packages: import names that the extra installs; other missing modules are raised as they are.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in packages:
            raise
        package = name.replace("llama_cpp", "llama-cpp-python")
        raise LeapaheadError(
            f'{what} needs {package}, which is not installed: pip install "leapahead[{extra}]"'
        ) from None


def check_folder(name: str | Path) -> None:
    """Refuses what can only be meant as a folder and is not there. What may be a hub id is not looked for.

    Raises:
        BadParameter: it is not there.
    """
    text, folder = str(name), Path(os.path.expanduser(name))
    is_path = folder.is_absolute() or text.startswith("~") or not HUB_ID.fullmatch(text)
    if is_path and not folder.exists():
        raise BadParameter(f"there is no folder {text!r}; give the folder of a Transformers model, or a hub id")


def trained_in(folder: Path) -> str:
    """For the end of a message about a folder: where a training has written its result; "" where there is none."""
    results = (folder / name for name in ("tuned", "head", "draft"))
    return next((f"; a training has written its result to {each}" for each in results if each.is_dir()), "")


def counted(number: int, noun: str) -> str:
    """A number and what it counts, for a message: "1 text", "3 texts"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for a message that quotes it; the name of its class where it has no text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
