"""Reads tool calls that are JSON objects with a name and arguments: Hermes, Llama 3 and Mistral.

content ── start ──> call ── end ──> content ...        hermes
                      │ key ──> value, key ──> arguments ...      arguments are given on as they come
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from leapahead.chat.formats import ToolFormat
from leapahead.chat.tool_parser import MoreText, NotACall, ToolParser
from leapahead.chat.tools import Tool

CHARACTERS = re.compile(r'(?>[^"\\]+|\\.)*+', re.DOTALL)  # of a JSON string
MARK = re.compile(r'["{}\[\]]')  # of JSON, as far as its nesting is concerned
SPACE = re.compile(r"\s*")
SCALAR = re.compile(r"[-+.\w]+")
ARGUMENTS = ("arguments", "parameters")  # models mix the two
NAME = re.compile(r"[\w.:/-]+")
BEFORE_ARGUMENTS = "[ARGS]"  # of later Mistral models, between name and arguments


class ValueEnd:
    """Finds the end of a JSON value in a text that grows. What was looked through is not looked through again.

    A value may be as long as the text, which comes in as many pieces as it has tokens.
    """

    def __init__(self) -> None:
        self._start = -1  # of the value
        self._at, self._depth, self._in_string = 0, 0, False  # where the search goes on, and what is open there

    def find(self, text: str, start: int) -> int:
        """The index after the value. Its brackets are matched, nothing else is checked.

        Args:
            text: begins with what was given before, if that was not complete.
            start: of the value.

        Raises:
            MoreText: the value is not complete.
            NotACall: there is none.
        """
        if start >= len(text):
            raise MoreText
        if text[start] not in '"{[':
            return _scalar_end(text, start)
        if start != self._start:
            self._start, self._at, self._depth, self._in_string = start, start, 0, False
        while True:
            if self._in_string:
                self._at = CHARACTERS.match(text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
                if text[self._at : self._at + 1] != '"':
                    raise MoreText
                self._at, self._in_string = self._at + 1, False
            elif found := MARK.search(text, self._at):
                self._at, self._in_string = found.end(), found[0] == '"'
                self._depth += (found[0] in "{[") - (found[0] in "}]")
            else:
                self._at = len(text)
                raise MoreText
            if self._depth == 0 and not self._in_string:
                self._start = -1
                return self._at


def _scalar_end(text: str, start: int) -> int:
    found = SCALAR.match(text, start)
    if found is None:
        raise NotACall
    if found.end() == len(text):
        raise MoreText
    return found.end()


def _read(text: str) -> Any:
    """A JSON value.

    Raises:
        ValueError: it is none, or a string with half of a surrogate pair, which no answer can contain.
    """
    found = json.loads(text, strict=False)
    if isinstance(found, str):
        found.encode()
    return found


class JsonCalls(ToolParser):
    """Reads calls that are JSON. Arguments as of `ToolParser`."""

    def __init__(
        self,
        format: ToolFormat,
        new_id: Callable[[], str] | None = None,
        functions: Sequence[Tool] = (),
        forced: bool = False,
    ) -> None:
        super().__init__(format, new_id, functions, forced)
        self._name: str | None = None
        self._arguments: str | None = None  # of a call whose name comes after them
        self._value_end = ValueEnd()
        if format.leads:
            self._do = self._beginning

    def _open(self, start: str) -> Callable[[], None]:
        return self._listed if self._format.listed else self._object

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

    def _begin(self, state: Callable[[], None]) -> None:
        self._name, self._arguments = None, None
        super()._begin(state)

    def _listed(self) -> None:
        """After Mistral's marker: a JSON array of calls, or a name and its arguments."""
        self._space()
        if self._text[0] == "[":
            self._skip(1)
            self._do = self._item
            return
        found = NAME.match(self._text)
        if found is None:
            self._no_call()
            return
        behind = self._text[found.end() :].lstrip()
        if not behind or (behind != BEFORE_ARGUMENTS and BEFORE_ARGUMENTS.startswith(behind)):
            raise MoreText
        if behind.startswith(BEFORE_ARGUMENTS):
            behind = behind[len(BEFORE_ARGUMENTS) :].lstrip()
            if not behind:
                raise MoreText
        if not behind.startswith("{"):
            self._no_call()
            return
        self._text = behind
        self._announce(found[0])
        self._do = self._streamed_alone

    def _item(self) -> None:
        """Between the calls of an array."""
        self._space()
        if self._text[0] == "]" and not self._given:  # an empty array
            self._no_call()
        elif self._text[0] == "]":
            self._leave()
            self._text = self._text[1:]
        elif self._text[0] == ",":
            self._skip(1)
        else:
            self._begin(self._object)

    def _object(self) -> None:
        """Before the object of a call."""
        self._space()
        if self._text[0] != "{":
            self._no_call()
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
            self._no_call()
        except ValueError:  # a string that is no JSON
            self._no_call()

    def _read_member(self) -> None:
        """A key and its value; the arguments are given on as they come, once the name is known."""
        if self._text[0] != '"':
            raise NotACall
        end = ValueEnd().find(self._text, 0)
        key = json.loads(self._text[:end], strict=False)
        colon = SPACE.match(self._text, end).end()  # type: ignore[union-attr]  # it matches nothing, too
        if colon >= len(self._text):
            raise MoreText
        if self._text[colon] != ":":
            raise NotACall
        start = SPACE.match(self._text, colon + 1).end()  # type: ignore[union-attr]
        if start >= len(self._text):
            raise MoreText
        if key in ARGUMENTS and self._name is not None and not self._given and self._text[start] == "{":
            self._text = self._text[start:]
            self._announce(self._name)
            self._do = self._streamed
            return
        end = self._value_end.find(self._text, start)
        value = self._text[start:end]
        if key == "name" and self._name is None:
            name = _read(value)
            if not isinstance(name, str) or not name:
                raise NotACall
            self._name = name
        elif key in ARGUMENTS and not self._given:
            self._arguments = _read(value) if value[0] == '"' else value
        self._skip(end)

    def _streamed(self) -> None:
        if self._stream():
            self._do = self._member

    def _streamed_alone(self) -> None:
        """Arguments without an object around them."""
        if self._stream():
            self._leave()

    def _complete(self) -> None:
        """At the end of a call's object."""
        if not self._given:
            if self._name is None or (self._format.leads and self._arguments is None):
                raise NotACall
            self._announce(self._name)
            self._give_arguments("{}" if self._arguments in (None, "null") else self._arguments or "")
        self._behind()

    def _no_call(self) -> None:
        """This is no call. Behind a name that was given, the rest of the call is left out."""
        if self._given:
            self._behind()
        else:
            self._give_up(self._rest if self._format.leads else None)

    def _behind(self) -> None:
        """Behind a call."""
        if self._format.end:
            self._leave(self._end, given=True)
        elif self._format.listed:
            self._leave(self._item, given=True)
        else:
            self._leave(self._after)

    def _end(self) -> None:
        """Up to the marker behind a call, or up to the next call where that is missing."""
        self._drop_until([self._format.end], [self._format.start])
        self._leave()
