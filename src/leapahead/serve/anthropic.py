"""/v1/messages: chats in the form of Anthropic's Messages API.

A request becomes one of a chat, see `anthropic_schema`, and its answer becomes blocks of content: thinking, text, calls
of tools. A stream tells of each block in events:

    message_start
    content_block_start             a block begins
    content_block_delta             more of it
    content_block_stop
    message_delta                   why the answer has ended, and how many tokens it has
    message_stop
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from leapahead.chat import Delta, ToolCallDelta
from leapahead.results import Piece, Result
from leapahead.serve import chat, streaming
from leapahead.serve.anthropic_replies import (
    Content,
    MessageEvent,
    MessageReply,
    MessageUsage,
    StopReason,
    TextContent,
    ThinkingContent,
    TokenCount,
    ToolUseContent,
)
from leapahead.serve.anthropic_schema import CountTokensRequest, MessagesRequest
from leapahead.serve.errors import of_chat, renamed
from leapahead.serve.formats import Reading
from leapahead.serve.messages import json_object
from leapahead.serve.replies import Usage
from leapahead.serve.service import Answer, Members, Service
from leapahead.serve.worker import Job

# Parameters of chats -> what they are called here.
NAMES = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}


async def respond(service: Service, request: Request, body: MessagesRequest) -> Response:
    """Answers a request."""
    with of_chat(NAMES):
        given = body.chat()
        # Clients have to give a length, whatever the server's is.
        most = service.settings.limits.max_tokens or body.max_tokens
        given.max_tokens = min(body.max_tokens, most, service.texts.info.context_length)

        def prepare() -> tuple[Job, Answer]:
            job, reading = chat.prepared(service, given, request.state.owner)
            found = Responder(given.max_tokens, reading)
            return job, Answer(
                found.whole, found.opening, found.chunk, found.last, write=written, ending="", write_error=failed
            )

        return await service.answer(request, given, "msg_", 1, prepare)


async def count(service: Service, body: CountTokensRequest) -> TokenCount:
    """The number of tokens that a request would have the model read."""
    service.name(body.model)
    with of_chat(NAMES):
        given = body.chat()
        service.formats.available(given)
        return TokenCount(input_tokens=len(await asyncio.to_thread(service.texts.chat_of_any_length, given)))


def written(event: MessageEvent) -> str:
    """The event as the stream has it, with its type before it; behind the last one that tells something, the end."""
    found = f"event: {event.type}\n{streaming.event(event)}"
    return found + written(MessageEvent(type="message_stop")) if event.type == "message_delta" else found


def failed(body: dict[str, Any]) -> str:
    """The event of an error."""
    return f"event: error\n{streaming.error_event(renamed(body, NAMES))}"


class Responder:
    """Makes the response, or the events, of one request.

    Args:
        most: greatest length of the answer; None for what the context allows.
        reading: how the answer is read.
    """

    def __init__(self, most: int | None, reading: Reading) -> None:
        self._most, self._parser = most, reading.parser()
        self._blocks: list[Content] = []
        self._is_open = False  # whether the last block may get more
        self._arguments: dict[int, str] = {}  # JSON text by index of the block
        self._calls: dict[int, int] = {}  # index of the call -> of its block
        self._result: Result | None = None

    def whole(self, members: Members, results: Sequence[Result]) -> MessageReply:
        (self._result,) = results
        list(self._added([self._parser.add(self._result.text), self._parser.finish()]))
        for at, arguments in self._arguments.items():
            block = self._blocks[at]
            assert isinstance(block, ToolUseContent)
            block.input = json_object(arguments) or {}  # nothing where the answer ended within them
        return self._reply(members, self._blocks, self._stop_reason())

    def opening(self, members: Members) -> list[MessageEvent]:
        return [MessageEvent(type="message_start", message=self._reply(members, [], None))]

    def chunk(self, members: Members, index: int, piece: Piece) -> list[MessageEvent]:
        parts = [self._parser.add(text) for text, _ in piece.spans]
        if piece.finish_reason is not None:
            self._result = piece.result
            parts.append(self._parser.finish())
        found = list(self._added(parts))
        if piece.finish_reason is not None:
            found += self._closed()
        return found

    def last(self, members: Members) -> MessageEvent:
        """Why the answer has ended, and its tokens."""
        ended = self._reply(members, [], self._stop_reason())
        delta = {"stop_reason": ended.stop_reason, "stop_sequence": ended.stop_sequence}
        return MessageEvent(type="message_delta", delta=delta, usage=ended.usage, leapahead=ended.leapahead)

    def _reply(self, members: Members, blocks: list[Content], stop_reason: StopReason | None) -> MessageReply:
        return MessageReply(
            id=members["id"],
            model=members["model"],
            content=blocks,
            stop_reason=stop_reason,
            stop_sequence=str(self._result.stop_reason) if self._result and stop_reason == "stop_sequence" else None,
            usage=_usage(members["usage"]),
            leapahead=members.get("leapahead"),
        )

    def _stop_reason(self) -> StopReason:
        assert self._result is not None, "the answer has ended"
        if self._result.finish_reason == "length":
            at_most = self._most is not None and len(self._result.tokens) >= self._most
            return "max_tokens" if at_most else "model_context_window_exceeded"
        if self._parser.called:
            return "tool_use"
        return "stop_sequence" if isinstance(self._result.stop_reason, str) else "end_turn"

    # Blocks and the events that tell of them

    def _added(self, parts: Sequence[Delta]) -> Iterator[MessageEvent]:
        for part in parts:
            yield from self._called(part, begun=True)  # the rest of a call comes before what follows it
            if part.reasoning_content:
                yield from self._text(ThinkingContent, "thinking", part.reasoning_content)
            if part.content:
                yield from self._text(TextContent, "text", part.content)
            yield from self._called(part, begun=False)

    def _called(self, part: Delta, begun: bool) -> Iterator[MessageEvent]:
        """Adds those calls of a part that earlier parts have begun, or those that they have not."""
        for call in [call for call in part.tool_calls if (call.index in self._calls) == begun]:
            yield from self._call(call)

    def _text(self, kind: type[TextContent] | type[ThinkingContent], name: str, text: str) -> Iterator[MessageEvent]:
        if not (self._is_open and isinstance(self._blocks[-1], kind)):
            yield from self._begun(kind())
        block = self._blocks[-1]
        setattr(block, name, getattr(block, name) + text)
        yield self._delta(len(self._blocks) - 1, {"type": f"{name}_delta", name: text})

    def _call(self, piece: ToolCallDelta) -> Iterator[MessageEvent]:
        if piece.index not in self._calls:
            yield from self._begun(ToolUseContent(id=piece.id or "", name=piece.name or ""))
            self._calls[piece.index] = len(self._blocks) - 1
        at = self._calls[piece.index]
        if piece.arguments:
            self._arguments[at] = self._arguments.get(at, "") + piece.arguments
            yield self._delta(at, {"type": "input_json_delta", "partial_json": piece.arguments})

    def _delta(self, at: int, delta: dict[str, Any]) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=at, delta=delta)

    def _begun(self, block: Content) -> Iterator[MessageEvent]:
        yield from self._closed()
        self._blocks.append(block)
        self._is_open = True
        yield MessageEvent(
            type="content_block_start", index=len(self._blocks) - 1, content_block=block.model_copy(deep=True)
        )

    def _closed(self) -> Iterator[MessageEvent]:
        """Ends the last block, if it has not ended."""
        if self._is_open:
            self._is_open = False
            yield MessageEvent(type="content_block_stop", index=len(self._blocks) - 1)


def _usage(given: Usage) -> MessageUsage:
    assert given.prompt_tokens_details is not None
    cached = given.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=given.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=given.completion_tokens,
    )
