"""Reads tool calls in the XML of Qwen3-Coder. Values are text, which becomes JSON by the tool's schema.

    content ── <tool_call> ──> before the function ── <function=f> ──> between ── </function></tool_call> ──> content
                                                          between ── <parameter=a> ──> value ── </parameter> ──> between

Models leave out markers: <tool_call>, and those behind values and functions, may be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from leapahead.chat.formats import FUNCTION, ToolFormat
from leapahead.chat.reasoning import unfinished
from leapahead.chat.text_values import is_text, json_of, kinds, parameter
from leapahead.chat.tool_parser import MoreText, ToolParser
from leapahead.chat.tools import Tool

NAME = re.compile(r"[\w.:/-]+")
KEY = re.compile(r"([^>\n]+)>")
PARAMETER, PARAMETER_END, FUNCTION_END = "<parameter=", "</parameter>", "</function>"


class XmlCalls(ToolParser):
    """Reads calls that are XML. Arguments as of `ToolParser`."""

    def __init__(
        self,
        format: ToolFormat,
        new_id: Callable[[], str] | None = None,
        functions: Sequence[Tool] = (),
        forced: bool = False,
    ) -> None:
        super().__init__(format, new_id, functions, forced)
        behind = (PARAMETER, FUNCTION_END, format.end)  # where the end of a value is missing
        self._value_ends = (f"\n{PARAMETER_END}", PARAMETER_END, *(f"\n{each}" for each in behind))
        self._value_end = re.compile(f"\n?{PARAMETER_END}|\n(?=" + "|".join(map(re.escape, behind)) + ")")
        self._name = ""
        self._parameters = 0  # of the call so far
        self._kinds: frozenset[str] = frozenset()  # of the value that is read
        self._held = ""  # of the value that is read, where its type has to be found

    def _open(self, start: str) -> Callable[[], None]:
        return self._function if start == FUNCTION else self._before_function

    def _before_function(self) -> None:
        self._space()
        if self._next(FUNCTION) is None:
            self._give_up()
            return
        self._skip(len(FUNCTION))
        self._do = self._function

    def _function(self) -> None:
        """The name of a function. Something of a call must stand behind it."""
        found = NAME.match(self._text)
        if found is None or self._text[found.end() : found.end() + 1] not in ("", ">"):
            self._give_up()
        elif found.end() == len(self._text):
            raise MoreText
        else:
            self._name, self._parameters = found[0], 0
            self._skip(found.end() + 1)
            self._do = self._first

    def _first(self) -> None:
        """Behind the name."""
        self._space()
        if self._next(PARAMETER, FUNCTION_END, self._format.end) is None:
            self._give_up()
            return
        self._announce(self._name)
        self._do = self._between

    def _between(self) -> None:
        """Between the parameters. What is none is left out."""
        self._drop_until([], [PARAMETER, FUNCTION_END, self._format.end, *self._starts])
        if self._text.startswith(PARAMETER):
            self._key()
            return
        self._give_arguments("}" if self._parameters else "{}")
        if self._text.startswith(FUNCTION_END):
            self._text = self._text[len(FUNCTION_END) :]
        self._leave(self._behind, given=True)

    def _key(self) -> None:
        behind = self._text[len(PARAMETER) :]
        found = KEY.match(behind)
        if found is None:
            if "\n" not in behind and ">" not in behind:
                raise MoreText
            self._text = behind
            return
        name = found[1].strip()
        tool = self._functions.get(self._name)
        schema = {} if tool is None else tool.parameters
        self._kinds, self._held = kinds(parameter(schema, name), schema), ""
        self._give_arguments(f"{', ' if self._parameters else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._parameters += 1
        self._text, self._do = behind[found.end() :], self._begin_value

    def _begin_value(self) -> None:
        """A line break before the value does not belong to it."""
        self._text = self._text.removeprefix("\n")
        if is_text(self._kinds):
            self._give_arguments('"')
        self._do = self._value

    def _value(self) -> None:
        found = self._value_end.search(self._text)
        if found is None:
            kept = max(unfinished(self._text, end) for end in self._value_ends)
            self._take_value(self._text[: len(self._text) - kept])
            self._text = self._text[len(self._text) - kept :]
            raise MoreText
        self._take_value(self._text[: found.start()])
        self._give_arguments('"' if is_text(self._kinds) else json_of(self._held, self._kinds))
        self._text, self._do = self._text[found.end() :], self._between

    def _take_value(self, text: str) -> None:
        """A string is given on as it comes, other values once they are complete."""
        if is_text(self._kinds):
            self._give_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._held += text

    def _behind(self) -> None:
        """Behind a function: the end of the call, if it has one."""
        text = self._text.lstrip()
        if self._format.end.startswith(text) and text != self._format.end:
            raise MoreText
        if text.startswith(self._format.end):
            self._text = text[len(self._format.end) :]
        self._leave()
