"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from leapahead.engine.output import TokenLogprobs
from leapahead.results import Piece, Result
from leapahead.serve import logprobs, parameters
from leapahead.serve.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    Delta,
)
from leapahead.serve.schema import ChatRequest
from leapahead.serve.service import Answer, Members, Service
from leapahead.serve.worker import Job


async def complete(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answers a request."""
    return await service.answer(
        request,
        body,
        "chatcmpl",
        parameters.samples(body, service.settings),
        lambda: _prepare(service, body, request.state.owner),
    )


def _prepare(service: Service, body: ChatRequest, owner: str) -> tuple[Job, Answer]:
    settings, info = service.settings, service.texts.info
    found = parameters.options(body, settings, info.vocab_size)
    found["logprobs"] = parameters.chat_logprobs(body, settings)
    prompt = service.texts.chat(body.messages, body.chat_template_kwargs, body.add_generation_prompt)
    parameters.set_length(found, parameters.chat_length(body, prompt, settings, info.context_length))
    job = Job([prompt], found, owner, body.extension.deadline_seconds)
    chat = Chat(service, body)
    return job, Answer(chat.whole, chat.opening, chat.chunk, chat.last, lambda _: None)


class Chat:
    """Makes the response, or the chunks, of one request.

    Args:
        service: see there.
        body: of the request.
    """

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self._texts, self._samples, self._has_logprobs = service.texts, body.n or 1, bool(body.logprobs)

    def whole(self, members: Members, results: Sequence[Result]) -> ChatReply:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=result.text),
                logprobs=self._logprobs(result.logprobs),
                finish_reason=result.finish_reason,  # type: ignore[arg-type]
                stop_reason=result.stop_reason,
            )
            for index, result in enumerate(results)
        ]
        return ChatReply(**members, choices=choices)

    def opening(self, members: Members) -> list[ChatChunk]:
        """The role of every answer."""
        return [
            ChatChunk(**members, choices=[ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))])
            for index in range(self._samples)
        ]

    def chunk(self, members: Members, index: int, piece: Piece) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index,
            delta=Delta(content=piece.text),
            logprobs=self._logprobs(piece.logprobs),
            finish_reason=piece.finish_reason,  # type: ignore[arg-type]
            stop_reason=piece.result.stop_reason if piece.result is not None else None,
        )
        return ChatChunk(**members, choices=[choice])

    def last(self, members: Members) -> ChatChunk:
        return ChatChunk(**members, choices=[])

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return logprobs.chat(entries, self._texts.token) if self._has_logprobs else None
