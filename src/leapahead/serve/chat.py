"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from leapahead.chat import Delta as Part
from leapahead.chat import Message
from leapahead.engine.output import TokenLogprobs
from leapahead.results import Piece, Result
from leapahead.serve import logprobs, parameters
from leapahead.serve.formats import Reading
from leapahead.serve.messages import joined
from leapahead.serve.prompts import Texts
from leapahead.serve.replies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    Delta,
    FunctionDelta,
    Span,
    Spans,
    ToolCallPiece,
    ToolCallReply,
)
from leapahead.serve.schema import ChatRequest
from leapahead.serve.service import Answer, Members, Service
from leapahead.serve.worker import Job


async def complete(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answers a request."""
    return await service.answer(
        request,
        body,
        "chatcmpl-",
        parameters.samples(body, service.settings),
        lambda: _prepare(service, body, request.state.owner),
    )


def _prepare(service: Service, body: ChatRequest, owner: str) -> tuple[Job, Answer]:
    job, reading = prepared(service, body, owner)
    chat = Chat(service.texts, body, reading, job.prompts[0])
    return job, Answer(chat.whole, chat.opening, chat.chunk, chat.last, chat.addition, chat.score)


def prepared(service: Service, body: ChatRequest, owner: str) -> tuple[Job, Reading]:
    """The job of a request, and how its answers are read. Called in a thread.

    Raises:
        ApiError: it cannot be answered.
    """
    settings, texts, formats = service.settings, service.texts, service.formats
    found = parameters.options(body, settings, texts.info.vocab_size)
    found["logprobs"] = parameters.chat_logprobs(body, settings, texts.info.vocab_size)
    scored = parameters.prompt_logprobs(body, settings, texts.info.vocab_size)
    available, choice = formats.available(body)
    prompt = texts.chat(body, body.truncate_prompt_tokens)
    before = prompt if texts.info.decoder is None else texts.info.decoder.start  # the answer, in the context
    parameters.set_length(found, parameters.chat_length(body, before, settings, texts.info.context_length))
    reading = formats.reading(body, choice, available, prompt)
    found["grammar"] = formats.grammar(body, reading)
    deadline = body.extension.deadline_seconds
    form = None if found["grammar"] is None else formats.param(body, reading)
    return Job([prompt], found, owner, deadline, scored, formats.tokenizer(reading), form), reading


class Chat:
    """Makes the response, or the chunks, of one request.

    Args:
        texts: of the model.
        body: of the request.
        reading: how its answers are read.
        prompt: token ids of the chat.
    """

    def __init__(self, texts: Texts, body: ChatRequest, reading: Reading, prompt: list[int]) -> None:
        self._texts, self._samples, self._body, self._prompt = texts, body.n or 1, body, prompt
        self._scores: Sequence[TokenLogprobs] = []
        self._bytes = texts.bytes if body.logprobs else None  # in a thread: reading them takes a while
        last = body.messages[-1]
        self._echo = joined(last.content) if body.echo and last.role == "assistant" and last.content else ""
        self._held: list[list[int]] = [[] for _ in range(self._samples)]  # tokens of what is not sent yet
        self._reading, self._has_spans = reading, body.extension.spans
        self._empty = "" if reading.tools is None else None  # content of the first chunk: calls may stand alone
        self._parsers = [reading.parser() for _ in range(self._samples)]
        self._text_only = not (body.logprobs or body.return_token_ids or self._has_spans)  # but for the last chunk
        self._is_plain = self._text_only and reading.tools is None and reading.reasoning is None

    def score(self, scores: Sequence[Sequence[TokenLogprobs]]) -> None:
        """Takes the log-probabilities of the prompt."""
        self._scores = scores[0]

    def whole(self, members: Members, results: Sequence[Result]) -> ChatReply:
        count = self._body.prompt_logprobs
        return ChatReply(
            **members,
            choices=[self._choice(index, result) for index, result in enumerate(results)],
            prompt_logprobs=None if count is None else logprobs.prompt(self._scores, self._texts.token, count),
            prompt_token_ids=self._prompt if self._body.return_token_ids else None,
        )

    def _choice(self, index: int, result: Result) -> ChatChoice:
        parser, found = self._parsers[index], Message()
        found.add(parser.add(result.text))
        found.add(parser.finish())
        thought = found.reasoning_content
        content = self._echo + (found.content or "")
        message = AnswerMessage(
            content=content or (None if found.tool_calls or thought else ""),
            tool_calls=[ToolCallReply.model_validate(asdict(call)) for call in found.tool_calls] or None,
            reasoning_content=thought,
            reasoning=thought,
        )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(result.logprobs),
            finish_reason=self._reading.finish_reason(result.finish_reason, parser.called),  # type: ignore[arg-type]
            stop_reason=result.stop_reason,
            token_ids=result.tokens if self._body.return_token_ids else None,
        )

    def opening(self, members: Members) -> list[ChatChunk]:
        """The role of every answer, and what is echoed."""
        delta = Delta(role="assistant", content=self._echo or self._empty)
        ids = self._prompt if self._body.return_token_ids else None
        return [
            ChatChunk(**members, choices=[ChatChunkChoice(index=index, delta=delta)], prompt_token_ids=ids)
            for index in range(self._samples)
        ]

    def addition(self, members: Members, index: int, text: str) -> ChatChunk:
        return ChatChunk(**members, choices=[ChatChunkChoice(index=index, delta=Delta(content=text))])

    def chunk(self, members: Members, index: int, piece: Piece) -> list[ChatChunk] | str:
        if self._is_plain and piece.finish_reason is None:
            return piece.text
        parser, held, body = self._parsers[index], self._held[index], self._body
        if body.return_token_ids:
            held += piece.tokens
        parts = [(parser.add(text), drafted) for text, drafted in piece.spans]
        plain = self._text_only and piece.finish_reason is None
        if plain and not any(part.reasoning_content or part.tool_calls for part, _ in parts):
            text = "".join(part.content for part, _ in parts)
            return text or []
        if piece.finish_reason is not None:
            parts.append((parser.finish(), bool(piece.spans) and piece.spans[-1][1]))
        if not (piece.finish_reason or piece.logprobs or any(part for part, _ in parts)):
            return []  # what may become a marker is held back
        first, *others = _deltas([part for part, _ in parts])
        choice = ChatChunkChoice(
            index=index,
            delta=first,
            logprobs=self._logprobs(piece.logprobs),
            token_ids=list(held) if body.return_token_ids else None,
        )
        held.clear()
        choices = [choice, *(ChatChunkChoice(index=index, delta=delta) for delta in others)]
        choices[-1].finish_reason = self._reading.finish_reason(piece.finish_reason, parser.called)  # type: ignore[assignment]
        choices[-1].stop_reason = piece.result.stop_reason if piece.result is not None else None
        chunks = [ChatChunk(**members, choices=[each]) for each in choices]
        if self._has_spans:
            chunks[0].leapahead = _spans(parts)
            for each in chunks[1:]:
                each.leapahead = Spans(spans=[])
        return chunks

    def last(self, members: Members) -> ChatChunk:
        return ChatChunk(**members, choices=[])

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return logprobs.chat(entries, self._texts.token, self._bytes, bool(self._body.return_tokens_as_token_ids))


def _deltas(parts: Sequence[Part]) -> list[Delta]:
    """What several parts add together. Each delta has one call at most, since clients read the first one only."""
    found = Part()
    for part in parts:
        found.content += part.content
        found.reasoning_content += part.reasoning_content
        for piece in part.tool_calls:
            found.add_call(piece)
    thought = found.reasoning_content or None
    deltas = [Delta(content=found.content or None, reasoning_content=thought, reasoning=thought)]
    for at, piece in enumerate(found.tool_calls):
        call = ToolCallPiece(
            index=piece.index,
            id=piece.id,
            type=None if piece.id is None else "function",
            function=FunctionDelta(name=piece.name, arguments=piece.arguments),
        )
        if at:
            deltas.append(Delta())
        deltas[-1].tool_calls = [call]
    return deltas


def _spans(parts: Sequence[tuple[Part, bool]]) -> Spans:
    """Which parts had been drafted; text that was held back counts to the part that completes it."""
    found = []
    for part, drafted in parts:
        if part.reasoning_content:
            found.append(Span(text=part.reasoning_content, drafted=drafted, reasoning=True))
        if part.content:
            found.append(Span(text=part.content, drafted=drafted))
    return Spans(spans=found)
