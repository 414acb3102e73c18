"""Reads DeepSeek's tool calls: sections between markers, with a name and arguments that are JSON.

    content ── calls begin ──> between calls ── call begin ──> name ── {...} ── call end ──> between calls
                               between calls ── calls end ──> content

Both forms are read, that of V3 with the word "function" and a fence around the arguments, and that of V3.1 without.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from leapahead.chat.formats import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from leapahead.chat.tool_parser import MoreText, ToolParser

FENCE = r"\s*(?:```(?:json)?\s*)?"
BEFORE_ARGUMENTS = (
    re.compile(rf"\s*([\w.:/-]+)\s*{SEPARATOR}{FENCE}"),
    re.compile(rf"\s*\w+\s*{SEPARATOR}\s*([\w.:/-]+)[ \t]*\n{FENCE}"),
)
BEHIND_NAME = re.compile("|".join(("{", CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END)))


class DeepSeekCalls(ToolParser):
    """Reads calls of DeepSeek's models. Arguments as of `ToolParser`."""

    def _open(self, start: str) -> Callable[[], None]:
        return self._head if start == CALL_BEGIN else self._between

    def _between(self) -> None:
        """Before a call, or behind the last one."""
        self._space()
        marker = self._next(CALL_BEGIN, CALLS_END)
        if marker == CALL_BEGIN:
            raw = "" if self._given else self._raw
            self._text = self._text[len(CALL_BEGIN) :]
            self._begin(self._head)
            self._raw = raw + CALL_BEGIN
        elif self._given:
            self._text = self._text[len(marker or "") :]
            self._leave()
        else:
            self._give_up()

    def _head(self) -> None:
        """The name of a call. It is decided where the arguments begin, or where the call ends without any."""
        end = BEHIND_NAME.search(self._text)
        if end is None:
            raise MoreText
        before, empty = self._text[: end.start()], end[0] == CALL_END
        found = next((match for each in BEFORE_ARGUMENTS if (match := each.fullmatch(before))), None)
        if found is None or end[0] not in ("{", CALL_END):
            self._give_up()
            return
        self._text = self._text[end.start() :]
        self._announce(found[1])
        if empty:
            self._give_arguments("{}")
        self._do = self._end if empty else self._arguments

    def _arguments(self) -> None:
        if self._stream():
            self._do = self._end

    def _end(self) -> None:
        """Up to the end of a call, or to another marker where that is missing."""
        self._drop_until([CALL_END], [CALL_BEGIN, CALLS_END])
        self._leave(self._between, given=True)
