"""What all endpoints that decode have in common: the model's names, admission, and the two ways to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from leapahead.engine.output import TokenLogprobs
from leapahead.results import Piece, Result
from leapahead.serve.errors import ApiError
from leapahead.serve.formats import Formats
from leapahead.serve.prompts import Texts
from leapahead.serve.replies import Speculation, Usage
from leapahead.serve.schema import Generation
from leapahead.serve.settings import Settings
from leapahead.serve.streaming import DONE, EventStream, TextEvent, error_event, event, unless_gone
from leapahead.serve.usage import speculation, usage
from leapahead.serve.worker import Batch, Job, Worker

T = TypeVar("T")
Taken = tuple[Batch, int, Piece | None]
Members = dict[str, Any]  # of an answer


@dataclass(frozen=True)
class Answer:
    """How an endpoint answers.

    Attributes:
        whole: the response, given what all responses have and the results of all texts.
        opening: the first chunks of a stream, given what all chunks have.
        chunk: the chunks of a piece, given what all chunks have, the number of its text, and the piece; none where
            there is nothing to be sent yet; a text where the chunk is `addition` with this text.
        last: the chunk without choices.
        addition: the chunk that adds a text and nothing else, given what all chunks have, the number of the text that
            it is added to, and the text.
        score: takes the log-probabilities of the prompts, where the job asks for them.
        write: a chunk as the stream has it.
        ending: what a stream ends with.
        write_error: an error object within a stream as the stream has it.
    """

    whole: Callable[[Members, Sequence[Result]], BaseModel]
    opening: Callable[[Members], Sequence[BaseModel]]
    chunk: Callable[[Members, int, Piece], Sequence[BaseModel] | str]
    last: Callable[[Members], BaseModel]
    addition: Callable[[Members, int, str], BaseModel] | None = None
    score: Callable[[Sequence[Sequence[TokenLogprobs]]], None] | None = None
    write: Callable[[Any], str] = event
    ending: str = DONE
    write_error: Callable[[dict[str, Any]], str] = error_event


class Service:
    """The model and what serves it.

    Args:
        worker: see there.
        texts: see there.
        settings: see there.

    Attributes:
        formats: see there.
        created: when the server was started, in seconds since 1970.
    """

    def __init__(self, worker: Worker, texts: Texts, settings: Settings) -> None:
        self.worker, self.texts, self.settings = worker, texts, settings
        self.formats = Formats(texts, settings)
        self.created = int(time.time())

    def name(self, given: str | None) -> str:
        """The name by which a request has named the model; the first one by default.

        Raises:
            ApiError: the server has no such model.
        """
        if given is None:
            return self.settings.names[0]
        if given not in self.settings.names:
            names = ", ".join(map(repr, self.settings.names))
            raise ApiError(404, f"there is no model {given!r} here; there is {names}", "model", "model_not_found")
        return given

    async def answer(
        self, request: Request, body: Generation, prefix: str, sequences: int, prepare: Callable[[], tuple[Job, Answer]]
    ) -> Response:
        """Decodes what a request asks for, and answers it whole or as a stream.

        Args:
            request: of the client.
            body: of the request.
            prefix: of the response's id, which the request's id follows.
            sequences: number of texts.
            prepare: makes the job; called in a thread.
        """
        log, began = request.state.log, perf_counter()
        for name in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata"):
            if (given := getattr(body, name)) is not None:
                log[name] = given
        members: Members = {
            "id": f"{prefix}{request.state.request_id}",
            "created": int(time.time()),
            "model": self.name(body.model),
            "service_tier": None if body.service_tier is None else "default",
        }
        async with AsyncExitStack() as resources:
            resources.enter_context(self.worker.admitted(sequences))
            job, answer = await unless_gone(request, asyncio.to_thread(prepare))
            job = replace(job, began=began)
            if self.settings.log_prompts:
                log["prompts"] = [self.texts.text(prompt) for prompt in job.prompts]
            if job.scored is not None and answer.score is not None:
                answer.score(await unless_gone(request, self.worker.score(job)))
            if not body.stream:
                batch, results = await unless_gone(request, self.worker.whole(job))
                self._log(log, batch, job)
                if self.settings.log_prompts:
                    log["texts"] = [result.text for result in results]
                members |= self._totals(batch, job, body)
                return await _aside(job, lambda: _json(answer.whole(members, results)))
            pieces = self.worker.pieces(job)
            resources.push_async_callback(pieces.aclose)
            first = await unless_gone(request, anext(pieces))  # what is refused is refused before the stream begins
            resources.callback(self._log, log, first[0], job)
            if self.settings.log_prompts:
                log["texts"] = [""] * job.sequences
            events = self._events(first[0], pieces, job, answer, body, members, log.get("texts"))
            return EventStream(events, resources.pop_all(), request.state.request_id, answer.ending, answer.write_error)

    async def _events(
        self,
        batch: Batch,
        pieces: AsyncGenerator[Taken, None],
        job: Job,
        answer: Answer,
        body: Generation,
        members: Members,
        texts: list[str] | None,
    ) -> AsyncGenerator[str, None]:
        """The events of a stream; `texts` are those that the log will have, None for none."""
        options = body.stream_options
        with_usage = options is not None and options.include_usage
        continuous = with_usage and options is not None and options.continuous_usage_stats
        samples = job.options.get("n", 1)

        def current() -> Members:
            return {**members, "usage": usage(batch, samples)} if continuous else members

        additions: dict[int, TextEvent] = {}  # of the texts whose chunks have always the same members
        for written in await _aside(job, lambda: list(map(answer.write, answer.opening(current())))):
            yield written
        async for _, index, piece in pieces:
            if piece is None or not (piece.text or piece.logprobs or piece.finish_reason or body.return_token_ids):
                continue
            if texts is not None:
                texts[index] += piece.text
            found = answer.chunk(current(), index, piece)
            if not isinstance(found, str):
                for each in found:
                    yield answer.write(each)
                continue
            assert answer.addition is not None, "an answer that gives texts has one"
            if continuous:
                yield event(answer.addition(current(), index, found))
            else:
                if index not in additions:
                    additions[index] = TextEvent(answer.addition(members, index, TextEvent.MARK))
                yield additions[index].of(found)
        if with_usage or body.extension.stats:
            totals = self._totals(batch, job, body)
            if not with_usage:
                totals.pop("usage")
            yield answer.write(answer.last({**members, **totals}))

    @staticmethod
    def _totals(batch: Batch, job: Job, body: Generation) -> dict[str, Usage | Speculation]:
        """What the end of every answer reports."""
        found: dict[str, Usage | Speculation] = {"usage": usage(batch, job.options.get("n", 1))}
        if body.extension.stats:
            found["leapahead"] = speculation(batch)
        return found

    @staticmethod
    def _log(log: dict[str, Any], batch: Batch, job: Job) -> None:
        stats = batch.stats
        log.update(
            prompt_tokens=batch.prompt_tokens,
            cached_tokens=batch.reused_tokens(job.options.get("n", 1)),
            completion_tokens=sum(len(handle.tokens) for handle in batch.handles),
            steps=stats.steps,
            drafted=stats.drafted,
            accepted=stats.accepted,
        )


async def _aside(job: Job, make: Callable[[], T]) -> T:
    """What a function makes; in a thread where it has log-probabilities, of which there may be very many."""
    if job.scored is None and job.options.get("logprobs") is None:
        return make()
    return await asyncio.to_thread(make)


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
