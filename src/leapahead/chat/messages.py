"""What a chat completion consists of, with OpenAI's names: a message, and the pieces of a streamed one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Function:
    """A call of a function.

    Attributes:
        name: of the tool.
        arguments: JSON text, as the model wrote it. It is cut off where the text was.
    """

    name: str
    arguments: str = ""


@dataclass
class ToolCall:
    """A tool call of a message.

    Attributes:
        id: by which the tool's answer names it.
        function: what is called.
        type: always "function".
    """

    id: str
    function: Function
    type: str = "function"


@dataclass
class ToolCallDelta:
    """A piece of a tool call.

    Attributes:
        index: of the call in the message.
        id, name: in the first piece of a call; None in the others.
        arguments: more of the JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class Delta:
    """A piece of a message.

    Attributes:
        content: more text; "" for none.
        reasoning_content: more of what the model wrote before its answer; "" for none.
        tool_calls: pieces of tool calls, at most one of each call.
    """

    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning_content or self.tool_calls)

    def add_call(self, piece: ToolCallDelta) -> None:
        """Adds a piece of a tool call, to the piece of the same call if there is one."""
        if self.tool_calls and self.tool_calls[-1].index == piece.index:
            self.tool_calls[-1].arguments += piece.arguments
        else:
            self.tool_calls.append(piece)


@dataclass
class Message:
    """A whole message.

    Attributes:
        content: the text; None if there is none beside tool calls.
        reasoning_content: what the model wrote before its answer; None if it wrote nothing of that kind.
        tool_calls: in the order in which they were written.
    """

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Adds the next piece of a stream."""
        if delta.content:
            self.content = (self.content or "") + delta.content
        if delta.reasoning_content:
            self.reasoning_content = (self.reasoning_content or "") + delta.reasoning_content
        for piece in delta.tool_calls:
            if piece.id is not None and piece.name is not None:
                self.tool_calls.append(ToolCall(piece.id, Function(piece.name)))
            self.tool_calls[piece.index].function.arguments += piece.arguments
