"""What the parsers of tool calls have in common: the content around calls, and how pieces are given on.

    content ── start ──> a call, read by the format's own class ──> content ...

What looks like a call and is none (a JSON answer, an unfinished call) is content, markers included. The result does not
depend on how the text is divided into pieces: every decision waits until the text that it needs is there.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from leapahead.chat.formats import ToolFormat
from leapahead.chat.messages import Delta, ToolCallDelta
from leapahead.chat.reasoning import unfinished
from leapahead.chat.tools import Tool


class NotACall(Exception):
    """The text is no tool call."""


class MoreText(Exception):
    """The next decision needs more text."""


class ToolParser(ABC):
    """Gives content and tool calls.

    A parser is a state machine: `_do` is the state, a method that takes text from the front of `_text`, or raises
    `MoreText`.

    Args:
        format: of the model.
        new_id: gives the ids of calls; random ones by default.
        functions: tools that may be called, whose schemas tell the types of values that the format writes as text.
        forced: whether the text is calls and nothing else, so that the rest of an unfinished one is left out.
    """

    def __init__(
        self,
        format: ToolFormat,
        new_id: Callable[[], str] | None = None,
        functions: Sequence[Tool] = (),
        forced: bool = False,
    ) -> None:
        self._format, self._forced = format, forced
        self._functions = {tool.name: tool for tool in functions}
        self._starts = tuple(each for each in (format.start, format.alone) if each)
        self._new_id = new_id or self._random_id
        self._text = ""  # not decided yet
        self._calls = 0
        self._delta = Delta()
        self._do: Callable[[], None] = self._content
        self._raw = ""  # of a call whose name is not given yet: its text so far
        self._given = False  # whether the text that is read belongs to a call whose name was given
        self._depth, self._in_string, self._escaped = 0, False, False  # inside arguments that are JSON

    def add(self, text: str) -> Delta:
        """Takes more text of the model."""
        self._text += text
        self._advance()
        return self._take()

    def finish(self) -> Delta:
        """The end of the model's text."""
        self._advance()
        rest = self._raw + self._text
        if not (self._forced or self._given or (self._calls and not rest.strip())):
            self._delta.content += rest
        self._text = self._raw = ""
        return self._take()

    @abstractmethod
    def _open(self, start: str) -> Callable[[], None]:
        """The state behind a marker with which calls begin."""

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
        found = [(at, start) for start in self._starts if (at := self._text.find(start)) >= 0]
        if not found:
            kept = max(unfinished(self._text, start) for start in self._starts)
            before = self._text[: len(self._text) - kept].rstrip()
            self._delta.content += before
            self._text = self._text[len(before) :]
            raise MoreText
        at, start = min(found)
        before = self._text[:at].rstrip()
        self._delta.content += before
        self._raw, self._text = self._text[len(before) : at + len(start)], self._text[at + len(start) :]
        self._begin(self._open(start))

    # Calls

    def _begin(self, state: Callable[[], None]) -> None:
        self._given = False
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

    def _next(self, *markers: str) -> str | None:
        """Which of the markers the text begins with; None for none of them."""
        for marker in markers:
            if self._text.startswith(marker):
                return marker
        if any(marker.startswith(self._text) for marker in markers):
            raise MoreText
        return None

    def _announce(self, name: str) -> None:
        """Gives the name of the call."""
        self._delta.add_call(ToolCallDelta(self._calls, self._new_id(), name))
        self._calls += 1
        self._given, self._raw = True, ""

    def _give_arguments(self, text: str) -> None:
        self._delta.add_call(ToolCallDelta(self._calls - 1, arguments=text))

    def _stream(self) -> bool:
        """Gives on what there is of arguments that are JSON; whether that is all of them.

        Arguments whose brackets do not match end at the marker behind the call. In a string it is text.
        """
        end = self._format.end
        for at, character in enumerate(self._text):
            if self._in_string:
                if self._escaped or character == "\\":
                    self._escaped = not self._escaped
                else:
                    self._in_string = character != '"'
                continue
            if end and character == end[0] and (self._text.startswith(end, at) or end.startswith(self._text[at:])):
                self._give_arguments(self._text[:at])
                self._text = self._text[at:]
                if len(self._text) < len(end):
                    raise MoreText
                self._depth = 0
                return True
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if self._depth == 0:
                self._give_arguments(self._text[: at + 1])
                self._text = self._text[at + 1 :]
                return True
        self._give_arguments(self._text)
        self._text = ""
        return False

    def _give_up(self, state: Callable[[], None] | None = None) -> None:
        """This is no call: its text is content, and the parser goes on in that state, by default with content."""
        self._delta.content += self._raw
        self._raw = ""
        self._do = state or self._content

    def _leave(self, state: Callable[[], None] | None = None, given: bool = False) -> None:
        """Goes on behind a call, by default with content. With `given`, what follows still belongs to the call."""
        self._given, self._raw = given, ""
        self._do = state or self._content

    def _drop_until(self, ends: Sequence[str], starts: Sequence[str]) -> None:
        """Leaves out text up to a marker that ends calls, that one too, or up to one that begins them."""
        choices = [re.escape(end) for end in ends] + [f"(?={re.escape(start)})" for start in starts]
        found = re.search("|".join(choices), self._text)
        if found is None:
            kept = max(unfinished(self._text, marker) for marker in (*ends, *starts))
            self._text = self._text[len(self._text) - kept :]
            raise MoreText
        self._text = self._text[found.end() :]
