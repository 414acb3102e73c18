"""Reasoning, content and tool calls of a text that comes in pieces, or as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leapahead.chat.deepseek_calls import DeepSeekCalls
from leapahead.chat.formats import ReasoningFormat, ToolFormat
from leapahead.chat.json_calls import JsonCalls
from leapahead.chat.messages import Delta, Message, ToolCallDelta
from leapahead.chat.reasoning import ReasoningParser
from leapahead.chat.tool_parser import ToolParser
from leapahead.chat.tools import Tool
from leapahead.chat.xml_calls import XmlCalls

CALLS: dict[str, type[ToolParser]] = {"json": JsonCalls, "xml": XmlCalls, "deepseek": DeepSeekCalls}  # by style


class ChatParser:
    """Divides what a model writes. Without formats, all of it is content.

    Args:
        tools: how the model writes tool calls; None where none are to be found.
        reasoning: how it marks its reasoning; None where all text is the answer.
        prompt: the text of the prompt, which may end inside the reasoning, see `ReasoningParser`.
        new_id: gives the ids of tool calls; random ones by default.
        functions: tools that may be called. Their schemas tell which arguments are numbers, objects and so on in
            formats that write them as text; without them, those are strings.
        parallel: whether several calls are given; else only the first one is.
        forced: whether a grammar makes the answer calls and nothing else, so that the beginning of a call at the end
            of the text is left out. Elsewhere it is content, since it may be none.

    Attributes:
        called: whether a tool call was found so far.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        prompt: str = "",
        new_id: Callable[[], str] | None = None,
        functions: Sequence[Tool] = (),
        parallel: bool = True,
        forced: bool = False,
    ) -> None:
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning, prompt)
        self._tools = None if tools is None else CALLS[tools.style](tools, new_id, functions, forced)
        self._parallel = parallel
        self.called = False

    def add(self, text: str) -> Delta:
        """What the next piece of text adds; it may be empty while a marker or a call is not complete."""
        thought, answer = ("", text) if self._reasoning is None else self._reasoning.add(text)
        return self._delta(thought, answer)

    def finish(self) -> Delta:
        """What was held back, at the end of the text."""
        thought, answer = ("", "") if self._reasoning is None else self._reasoning.finish()
        found = self._delta(thought, answer)
        if self._tools is not None:
            last = self._tools.finish()
            found.content += last.content
            for piece in self._allowed(last.tool_calls):
                found.add_call(piece)
        return found

    def _delta(self, thought: str, answer: str) -> Delta:
        found = Delta(answer) if self._tools is None else self._tools.add(answer)
        found.reasoning_content = thought
        found.tool_calls = self._allowed(found.tool_calls)
        self.called = self.called or bool(found.tool_calls)
        return found

    def _allowed(self, pieces: list[ToolCallDelta]) -> list[ToolCallDelta]:
        return pieces if self._parallel else [piece for piece in pieces if piece.index == 0]


def parse(
    text: str,
    tools: ToolFormat | None = None,
    reasoning: ReasoningFormat | None = None,
    prompt: str = "",
    new_id: Callable[[], str] | None = None,
    functions: Sequence[Tool] = (),
    forced: bool = False,
) -> Message:
    """The message of a whole text, with all of its calls. The other arguments are those of `ChatParser`."""
    parser, found = ChatParser(tools, reasoning, prompt, new_id, functions, forced=forced), Message()
    found.add(parser.add(text))
    found.add(parser.finish())
    return found
