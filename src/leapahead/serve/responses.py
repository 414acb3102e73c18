"""/v1/responses: chats in the form of OpenAI's Responses API, without anything that is kept between requests.

A request becomes one of a chat, see `responses_schema`, and its answer becomes items: reasoning, a message, calls. A
stream tells of each item in events:

    response.created, response.in_progress
    response.output_item.added              an item begins
      response.content_part.added             its text begins
      response.output_text.delta, ...         more of it
      response.output_text.done
      response.content_part.done
    response.output_item.done
    response.completed                      or response.incomplete, with the whole response
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from leapahead.chat import Delta, ToolCallDelta
from leapahead.engine.output import TokenLogprobs
from leapahead.results import Piece, Result
from leapahead.serve import chat, logprobs, streaming
from leapahead.serve.errors import of_chat, renamed
from leapahead.serve.formats import Reading
from leapahead.serve.prompts import Texts
from leapahead.serve.replies import TokenLogprob, Usage
from leapahead.serve.responses_replies import (
    Event,
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseReply,
    ResponseUsage,
)
from leapahead.serve.responses_schema import ResponsesRequest
from leapahead.serve.schema import ChatRequest
from leapahead.serve.service import Answer, Members, Service
from leapahead.serve.worker import Job

# Parameters of chats -> what they are called here.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
Item = OutputMessage | OutputReasoning | OutputCall


async def respond(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """Answers a request."""
    with of_chat(NAMES):
        given = body.chat()

        def prepare() -> tuple[Job, Answer]:
            job, reading = chat.prepared(service, given, request.state.owner)
            responder = Responder(service.texts, body, given, reading, job.options)
            return job, Answer(
                responder.whole,
                responder.opening,
                responder.chunk,
                responder.last,
                write=written,
                ending="",
                write_error=responder.failed,
            )

        return await service.answer(request, given, "resp_", 1, prepare)


def written(event: Event) -> str:
    """The event as the stream has it, with its type before it."""
    return f"event: {event.type}\n{streaming.event(event)}"


class Responder:
    """Makes the response, or the events, of one request.

    Args:
        texts: of the model.
        body: of the request.
        given: the chat that it is.
        reading: how its answer is read.
        options: of `LLM.generate`.
    """

    def __init__(
        self, texts: Texts, body: ResponsesRequest, given: ChatRequest, reading: Reading, options: Any
    ) -> None:
        self._texts, self._body, self._options = texts, body, options
        self._has_logprobs = given.logprobs
        self._bytes = texts.bytes if given.logprobs else None
        self._parser = reading.parser()
        self._finish_reason: str | None = None
        self._pending: Sequence[TokenLogprob] = ()  # of tokens whose text has not come yet
        self._items: list[Item] = []
        self._calls: dict[int, OutputCall] = {}  # by index of the call
        self._sent = 0

    def whole(self, members: Members, results: Sequence[Result]) -> ResponseReply:
        (result,) = results
        list(self._added([self._parser.add(result.text), self._parser.finish()], result.logprobs))
        return self._ended(members, result.finish_reason)

    def opening(self, members: Members) -> list[Event]:
        """The response before anything was put out."""
        kinds = "response.created", "response.in_progress"
        return [self._event(kind, response=self._response(members, "in_progress")) for kind in kinds]

    def chunk(self, members: Members, index: int, piece: Piece) -> list[Event]:
        parts = [self._parser.add(text) for text, _ in piece.spans]
        if piece.finish_reason is not None:
            parts.append(self._parser.finish())
        found = list(self._added(parts, piece.logprobs))
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
            found += self._closed(piece.finish_reason)
        return found

    def last(self, members: Members) -> Event:
        """The whole response."""
        response = self._ended(members, self._finish_reason)
        return self._event(f"response.{response.status}", response=response)

    def failed(self, body: dict[str, Any]) -> str:
        """The event of an error: OpenAI's has its members beside `type`, and its clients look for them in `error`."""
        ours = renamed(body, NAMES)
        more = {name: ours["error"][name] for name in ("code", "message", "param")}
        return f"event: error\n{streaming.error_event({**ours, **more, 'sequence_number': self._sent})}"

    def _ended(self, members: Members, finish_reason: str | None) -> ResponseReply:
        list(self._closed(finish_reason))
        found = self._response(members, "incomplete" if finish_reason == "length" else "completed")
        if found.status == "incomplete":
            found.incomplete_details = IncompleteDetails()
        return found

    def _response(self, members: Members, status: Any) -> ResponseReply:
        body, usage = self._body, members.get("usage")
        common = {name: value for name, value in members.items() if name not in ("created", "usage")}
        return ResponseReply(
            **common,
            created_at=members["created"],
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            output=[item.model_copy(deep=True) for item in self._items],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={} if body.reasoning is None else body.reasoning.model_dump(),
            safety_identifier=body.safety_identifier,
            temperature=self._options.get("temperature"),
            text={"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            tool_choice="auto" if body.tool_choice is None else _plain(body.tool_choice),
            tools=[tool.model_dump() for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=self._options.get("top_p", 1.0),
            usage=None if usage is None else self._usage(usage),
            user=body.user,
        )

    def _usage(self, given: Usage) -> ResponseUsage:
        """As this API has it. Tokens of reasoning are those of its text, tokenized once more."""
        prompt, answer = given.prompt_tokens_details, given.completion_tokens_details
        assert prompt is not None
        assert answer is not None
        thoughts = [part.text for item in self._items if isinstance(item, OutputReasoning) for part in item.content]
        return ResponseUsage(
            input_tokens=given.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=prompt.cached_tokens),
            output_tokens=given.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=sum(len(self._texts.ids(text, add_special_tokens=False)) for text in thoughts),
                accepted_prediction_tokens=answer.accepted_prediction_tokens,
                rejected_prediction_tokens=answer.rejected_prediction_tokens,
            ),
            total_tokens=given.total_tokens,
        )

    # Items and the events that tell of them

    def _event(self, kind: str, **members: Any) -> Event:
        self._sent += 1
        return Event(type=kind, sequence_number=self._sent - 1, **members)

    def _added(self, parts: Sequence[Delta], entries: Sequence[TokenLogprobs]) -> Iterator[Event]:
        """Adds parts to the items. Log-probabilities go to the message, with the first text that follows."""
        if self._has_logprobs and entries:
            self._pending = [*self._pending, *self._logprobs(entries)]
        for part in parts:
            yield from self._called(part, begun=True)  # the rest of a call comes before what follows it
            if part.reasoning_content:
                yield from self._text(OutputReasoning, "reasoning_text", part.reasoning_content)
            if part.content:
                yield from self._text(OutputMessage, "output_text", part.content)
            yield from self._called(part, begun=False)

    def _called(self, part: Delta, begun: bool) -> Iterator[Event]:
        """Adds those calls of a part that earlier parts have begun, or those that they have not."""
        for call in [call for call in part.tool_calls if (call.index in self._calls) == begun]:
            yield from self._call(call)

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
        return logprobs.chat(entries, self._texts.token, self._bytes, False).content

    def _text(self, kind: type[OutputMessage] | type[OutputReasoning], name: str, text: str) -> Iterator[Event]:
        if not self._items or not isinstance(self._items[-1], kind) or self._items[-1].status != "in_progress":
            yield from self._closed("stop")
            prefix = "msg" if kind is OutputMessage else "rs"
            item: Any = kind(id=f"{prefix}_{uuid4().hex}")
            yield from self._begun(item)
            item.content = [OutputText() if kind is OutputMessage else ReasoningText()]
            yield self._event("response.content_part.added", part=item.content[0].model_copy(), **self._place(item))
        item = self._items[-1]
        item.content[0].text += text
        more: dict[str, Any] = {}
        if kind is OutputMessage:
            more["logprobs"], self._pending = list(self._pending), ()
            item.content[0].logprobs += more["logprobs"]
        yield self._event(f"response.{name}.delta", delta=text, **more, **self._place(item))

    def _call(self, piece: ToolCallDelta) -> Iterator[Event]:
        if (item := self._calls.get(piece.index)) is None:
            yield from self._closed("stop")
            item = OutputCall(id=f"fc_{uuid4().hex}", call_id=piece.id or "", name=piece.name or "")
            self._calls[piece.index] = item
            yield from self._begun(item)
        if piece.arguments:
            item.arguments += piece.arguments
            at = self._items.index(item)
            kind = "response.function_call_arguments.delta"
            yield self._event(kind, delta=piece.arguments, item_id=item.id, output_index=at)

    def _begun(self, item: Item) -> Iterator[Event]:
        self._items.append(item)
        at = len(self._items) - 1
        yield self._event("response.output_item.added", item=item.model_copy(deep=True), output_index=at)

    def _closed(self, finish_reason: str | None) -> Iterator[Event]:
        """Ends the last item, if it has not ended."""
        if not self._items or (item := self._items[-1]).status != "in_progress":
            return
        item.status = "incomplete" if finish_reason == "length" else "completed"
        at = len(self._items) - 1
        if isinstance(item, OutputCall):
            kind = "response.function_call_arguments.done"
            yield self._event(kind, arguments=item.arguments, name=item.name, item_id=item.id, output_index=at)
        else:
            (part,), place, more = item.content, self._place(item), {}
            if isinstance(part, OutputText):
                part.logprobs += self._pending  # of tokens without text
                self._pending, more["logprobs"] = (), part.logprobs
            yield self._event(f"response.{part.type}.done", text=part.text, **more, **place)
            yield self._event("response.content_part.done", part=part.model_copy(), **place)
        yield self._event("response.output_item.done", item=item.model_copy(deep=True), output_index=at)

    def _place(self, item: Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._items) - 1, "content_index": 0}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump()
