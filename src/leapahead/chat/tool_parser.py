"""Finds tool calls in what a model writes, piece by piece.

    content ── start ──> call ── end ──> content ...        hermes
                          │ key ──> value, key ──> arguments ...      arguments are given on as they come

What looks like a call and is none (a JSON answer, unfinished JSON) is content, markers included. The result does not
depend on how the text is divided into pieces: every decision waits until the text that it needs is there.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable

from leapahead.chat.formats import ToolFormat
from leapahead.chat.messages import Delta, ToolCallDelta
from leapahead.chat.reasoning import unfinished

STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|"|[{}\[\]]', re.DOTALL)  # of JSON, as far as its nesting is concerned
SCALAR = re.compile(r"[-+.\w]+")
ARGUMENTS = ("arguments", "parameters")  # models mix the two
NAME = re.compile(r"[\w.:/-]+")
BEFORE_ARGUMENTS = "[ARGS]"  # of later Mistral models, between name and arguments


class NotACall(Exception):
    """The text is no tool call."""


class MoreText(Exception):
    """The next decision needs more text."""


def value_end(text: str, start: int) -> int:
    """The index after a JSON value. Its brackets are matched, nothing else is checked.

    Raises:
        MoreText: the value is not complete.
        NotACall: there is none.
    """
    if start >= len(text):
        raise MoreText
    if text[start] == '"':
        if found := STRING.match(text, start):
            return found.end()
        raise MoreText
    if text[start] in "{[":
        depth = 0
        for part in PARTS.finditer(text, start):
            depth += (part[0] in "{[") - (part[0] in "}]")
            if part[0] == '"':
                break
            if depth == 0:
                return part.end()
        raise MoreText
    found = SCALAR.match(text, start)
    if found is None:
        raise NotACall
    if found.end() == len(text):
        raise MoreText
    return found.end()


class ToolParser:
    """Gives content and tool calls.

    Args:
        format: of the model.
        new_id: gives the ids of calls; random ones by default.
    """

    def __init__(self, format: ToolFormat, new_id: Callable[[], str] | None = None) -> None:
        self._format = format
        self._new_id = new_id or self._random_id
        self._text = ""  # not decided yet
        self._calls = 0
        self._delta = Delta()
        self._do: Callable[[], None] = self._beginning if format.leads else self._content
        self._raw = ""  # of a call whose name is not given yet: its text so far
        self._name: str | None = None
        self._arguments: str | None = None  # of a call whose name comes after them
        self._given = False  # whether the name of the call that is read was given
        self._depth, self._in_string, self._escaped = 0, False, False  # inside the arguments

    def add(self, text: str) -> Delta:
        """Takes more text of the model."""
        self._text += text
        self._advance()
        return self._take()

    def finish(self) -> Delta:
        """The end of the model's text."""
        self._advance()
        rest = self._raw + self._text
        between = self._do == self._item or not rest.strip()
        if not (self._given or (between and self._calls)):
            self._delta.content += rest
        self._text = self._raw = ""
        return self._take()

    def _advance(self) -> None:
        try:
            while self._text:
                self._do()
        except MoreText:
            pass

    def _take(self) -> Delta:
        given, self._delta = self._delta, Delta()
        return given

    def _random_id(self) -> str:
        digits = secrets.token_hex(self._format.id_length)[: self._format.id_length]
        return digits if self._format.plain_id else f"call_{digits}"

    # Between calls

    def _content(self) -> None:
        """Text up to the next call. White space before and after calls is left out."""
        before, found, after = self._text.partition(self._format.start)
        if not found:
            kept = unfinished(self._text, self._format.start)
            kept += len(before[: len(before) - kept]) - len(before[: len(before) - kept].rstrip())
            given, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
            self._delta.content += given
            raise MoreText
        self._delta.content += before.rstrip()
        self._raw, self._text = before[len(before.rstrip()) :] + found, after
        self._begin(self._listed if self._format.listed else self._object)

    def _beginning(self) -> None:
        """A text that begins with a call, or has none."""
        text, start = self._text.lstrip(), self._format.start
        if text.startswith(start):
            at = self._text.index(start) + len(start)
            self._raw, self._text = self._text[:at], self._text[at:]
            self._begin(self._object)
        elif text.startswith("{"):
            self._begin(self._object)
        elif not start.startswith(text):  # the empty text waits
            self._do = self._rest
        else:
            raise MoreText

    def _after(self) -> None:
        """Behind a call of a text that begins with one: another one may follow."""
        text = self._text.lstrip(" \t\r\n;,")
        if not text:
            raise MoreText
        if text.startswith("{"):
            self._raw, self._text = self._text[: len(self._text) - len(text)], text
            self._begin(self._object)
        else:
            self._do = self._rest

    def _rest(self) -> None:
        self._delta.content += self._text
        self._text = ""

    # Calls

    def _begin(self, state: Callable[[], None]) -> None:
        self._name, self._arguments, self._given = None, None, False
        self._do = state

    def _skip(self, count: int) -> None:
        """Moves over text that belongs to a call."""
        if not self._given:
            self._raw += self._text[:count]
        self._text = self._text[count:]

    def _space(self) -> None:
        """Moves over white space; there must be more text behind it."""
        self._skip(len(self._text) - len(self._text.lstrip()))
        if not self._text:
            raise MoreText

    def _listed(self) -> None:
        """After Mistral's marker: a JSON array of calls, or a name and its arguments."""
        self._space()
        if self._text[0] == "[":
            self._skip(1)
            self._do = self._item
            return
        found = NAME.match(self._text)
        if found is None:
            self._give_up()
            return
        behind = self._text[found.end() :].lstrip()
        if not behind or (behind != BEFORE_ARGUMENTS and BEFORE_ARGUMENTS.startswith(behind)):
            raise MoreText
        if behind.startswith(BEFORE_ARGUMENTS):
            behind = behind[len(BEFORE_ARGUMENTS) :].lstrip()
            if not behind:
                raise MoreText
        if not behind.startswith("{"):
            self._give_up()
            return
        self._name = found[0]
        self._text = behind
        self._announce()
        self._do = self._streamed_alone

    def _item(self) -> None:
        """Between the calls of an array."""
        self._space()
        if self._text[0] == "]":
            self._skip(1)
            self._raw, self._do = "", self._content
        elif self._text[0] == ",":
            self._skip(1)
        else:
            self._begin(self._object)

    def _object(self) -> None:
        """Before the object of a call."""
        self._space()
        if self._text[0] != "{":
            self._give_up()
            return
        self._skip(1)
        self._do = self._member

    def _member(self) -> None:
        """Before a key of a call's object, or at its end."""
        try:
            self._space()
            if self._text[0] == "}":
                self._skip(1)
                self._complete()
            elif self._text[0] == ",":
                self._skip(1)
            else:
                self._read_member()
        except NotACall:
            self._give_up()
        except ValueError:  # a string that is no JSON
            self._give_up()

    def _read_member(self) -> None:
        """A key and its value; the arguments are given on as they come, once the name is known."""
        if self._text[0] != '"':
            raise NotACall
        end = value_end(self._text, 0)
        key = json.loads(self._text[:end], strict=False)
        colon = len(self._text) - len(self._text[end:].lstrip())
        if colon >= len(self._text):
            raise MoreText
        if self._text[colon] != ":":
            raise NotACall
        start = len(self._text) - len(self._text[colon + 1 :].lstrip())
        if start >= len(self._text):
            raise MoreText
        if key in ARGUMENTS and self._name is not None and not self._given and self._text[start] == "{":
            self._text = self._text[start:]
            self._announce()
            self._do = self._streamed
            return
        end = value_end(self._text, start)
        value = self._text[start:end]
        if key == "name" and self._name is None:
            name = json.loads(value, strict=False)
            if not isinstance(name, str) or not name:
                raise NotACall
            self._name = name
        elif key in ARGUMENTS and not self._given:
            self._arguments = json.loads(value, strict=False) if value[0] == '"' else value
        self._skip(end)

    def _announce(self) -> None:
        """Gives the name of the call."""
        assert self._name is not None, "a call is announced when its name is known"
        self._delta.add_call(ToolCallDelta(self._calls, self._new_id(), self._name))
        self._calls += 1
        self._given, self._raw = True, ""

    def _streamed(self) -> None:
        if self._stream():
            self._do = self._member

    def _streamed_alone(self) -> None:
        """Arguments without an object around them."""
        if self._stream():
            self._given = False
            self._do = self._content

    def _stream(self) -> bool:
        """Gives on what there is of the arguments; whether that is all of them."""
        for at, character in enumerate(self._text):
            if self._in_string:
                if self._escaped or character == "\\":
                    self._escaped = not self._escaped
                else:
                    self._in_string = character != '"'
                continue
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if self._depth == 0:
                self._give_arguments(self._text[: at + 1])
                self._text = self._text[at + 1 :]
                return True
        self._give_arguments(self._text)
        self._text = ""
        return False

    def _give_arguments(self, text: str) -> None:
        self._delta.add_call(ToolCallDelta(self._calls - 1, arguments=text))

    def _complete(self) -> None:
        """At the end of a call's object."""
        if not self._given:
            if self._name is None or (self._format.leads and self._arguments is None):
                raise NotACall
            self._announce()
            self._give_arguments("{}" if self._arguments in (None, "null") else self._arguments or "")
        self._leave()

    def _give_up(self) -> None:
        """This is no call: its text is content. Behind a name that was given, the rest of the call is left out."""
        if self._given:
            self._leave()
            return
        self._delta.content += self._raw
        self._raw = ""
        self._do = self._rest if self._format.leads else self._content

    def _leave(self) -> None:
        """Behind a call."""
        self._given, self._raw = False, ""
        if self._format.end:
            self._given, self._do = True, self._end
        elif self._format.listed:
            self._do = self._item
        else:
            self._do = self._after

    def _end(self) -> None:
        """Up to the marker behind a call, or up to the next call where that is missing."""
        start, end = self._format.start, self._format.end
        found = re.search(f"{re.escape(end)}|(?={re.escape(start)})", self._text)
        if found is None:
            kept = max(unfinished(self._text, end), unfinished(self._text, start))
            self._text = self._text[len(self._text) - kept :]
            raise MoreText
        self._text, self._given, self._do = self._text[found.end() :], False, self._content
