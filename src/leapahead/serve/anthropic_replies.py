"""What responses of /v1/messages, and the events of their streams, consist of."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from leapahead.serve.replies import IfSet, Speculation

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class TextContent(BaseModel):
    """Text of an answer."""

    type: Literal["text"] = "text"
    text: str = ""
    citations: None = None


class ThinkingContent(BaseModel):
    """What the model wrote before its answer. There is no signature, since clients may change it."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUseContent(BaseModel):
    """A call of a tool. Its result names `id`."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(BaseModel):
    """Tokens of a request.

    Attributes:
        input_tokens: of the prompt that were read; together with `cache_read_input_tokens`, all of them.
        cache_read_input_tokens: of the prompt whose cache entries were kept from earlier requests.
        cache_creation_input_tokens: none are counted.
        output_tokens: of the answer.
    """

    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(BaseModel):
    """The response of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    leapahead: IfSet[Speculation] = None


class TokenCount(BaseModel):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


class MessageEvent(BaseModel):
    """An event of a stream; what members it has, depends on its type."""

    type: str
    message: IfSet[MessageReply] = None
    index: IfSet[int] = None
    content_block: IfSet[Content] = None
    delta: IfSet[dict[str, Any]] = None
    usage: IfSet[MessageUsage] = None
    leapahead: IfSet[Speculation] = None
