"""Text that a user gives on the command line, in a file or on standard input: all of it must be UTF-8."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import limited

BYTE_ORDER_MARK = "\ufeff"  # that editors of Windows begin a file of UTF-8 with


def utf8_only(_: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """A callback for parameters whose value is text for the model, or a tuple of such texts.

    Raises:
        BadParameter: a text was not UTF-8.
    """
    what = parameter.opts[-1] if isinstance(parameter, click.Option) else "the prompt"
    if isinstance(value, tuple):
        return tuple(utf8(text, what) for text in value)
    return None if value is None else utf8(value, what)


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The prompt as given, read from a file, or from standard input for "-"; without the mark of a file's encoding.

    Raises:
        click.UsageError: none or both are given.
        BadParameter: the text is not UTF-8, is far too long for a prompt, or standard input is closed.
    """
    if (prompt is None) == (file is None):
        raise click.UsageError("give either a prompt (or - for standard input) or --file")
    if "-" in (prompt, str(file)):
        return standard_input().removeprefix(BYTE_ORDER_MARK)
    if file is None:
        assert prompt is not None
        return prompt
    try:
        with file.open(encoding="utf-8-sig") as opened:
            return limited(opened.read, str(file))
    except UnicodeDecodeError:
        raise BadParameter(f"{file} is not UTF-8 text") from None


def to_complete(text: str, as_chat: bool) -> Any:
    """The prompt as the library takes it: the text, or a message of a user's with it.

    Raises:
        BadParameter: the text is empty, and no message.
    """
    if as_chat:
        return [{"role": "user", "content": text}]
    if not text:
        raise BadParameter("the prompt is empty; give some text")
    return text


def standard_input() -> str:
    if sys.stdin is None:
        raise BadParameter("standard input is closed, so no prompt can be read from it")
    return utf8(limited(sys.stdin.read, "standard input"), "standard input")


def utf8(text: str, what: str) -> str:
    """The text, as Python decodes it from arguments and standard input, refused if its bytes were not UTF-8.

    Where the locale is ASCII, Python decodes every byte of another character to a lone surrogate.

    Raises:
        BadParameter: bytes that are not UTF-8, which Python has decoded to lone surrogates.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        place = next(index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff")
        byte = ord(text[place]) - 0xDC00
        raise BadParameter(
            f"{what} is not UTF-8 text: byte 0x{byte & 0xFF:02x} at character {place}; convert it to UTF-8 first"
        ) from None
