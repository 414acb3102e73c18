"""/v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from leapahead.engine.output import TokenLogprobs
from leapahead.results import Piece, Result
from leapahead.serve import logprobs, parameters
from leapahead.serve.replies import CompletionChoice, CompletionLogprobs, CompletionReply, Span, Spans
from leapahead.serve.schema import CompletionRequest
from leapahead.serve.service import Answer, Members, Service
from leapahead.serve.worker import Job


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answers a request."""
    prompts = 1 if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else len(body.prompt)
    parameters.check_count("prompt", prompts, service.settings.limits.prompts)
    sequences = prompts * parameters.samples(body, service.settings)
    return await service.answer(request, body, "cmpl", sequences, lambda: _prepare(service, body, request.state.owner))


def _prepare(service: Service, body: CompletionRequest, owner: str) -> tuple[Job, Answer]:
    settings, info = service.settings, service.texts.info
    found = parameters.options(body, settings, info.vocab_size)
    found["logprobs"] = parameters.completion_logprobs(body, settings)
    found["grammar"] = service.formats.form(body)
    prompts = service.texts.prompts(body.prompt, body.add_special_tokens)
    parameters.set_length(found, parameters.completion_length(body, prompts, settings, info.context_length))
    scored = bool(body.echo) and body.logprobs is not None
    form = None if found["grammar"] is None else service.formats.param(body)
    job = Job(prompts, found, owner, body.extension.deadline_seconds, scored, form=form)
    completion = Completion(service, body, prompts)
    return job, Answer(
        completion.whole,
        completion.opening,
        completion.chunk,
        completion.addition,
        completion.last,
        completion.score,
    )


class Completion:
    """Makes the response, or the chunks, of one request.

    Args:
        service: see there.
        body: of the request.
        prompts: token ids of each prompt.
    """

    def __init__(self, service: Service, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
        self._texts, self._samples = service.texts, body.n or 1
        self._has_logprobs, self._has_spans = body.logprobs is not None, body.extension.spans
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self._echoes = [""] * len(prompts)
        if body.echo:
            self._echoes = [
                text if isinstance(text, str) else self._texts.text(tokens)
                for text, tokens in zip(given if len(given) == len(prompts) else prompts, prompts, strict=True)
            ]
        self._scores: Sequence[Sequence[TokenLogprobs]] = [[] for _ in prompts]
        self._offsets = [len(self._echoes[index // self._samples]) for index in range(len(prompts) * self._samples)]

    def score(self, scores: Sequence[Sequence[TokenLogprobs]]) -> None:
        """Takes the log-probabilities of the prompts."""
        self._scores = scores

    def whole(self, members: Members, results: Sequence[Result]) -> CompletionReply:
        choices = [
            CompletionChoice(
                index=index,
                text=self._echoes[index // self._samples] + result.text,
                logprobs=self._logprobs(index, result.logprobs, echoed=True),
                finish_reason=result.finish_reason,  # type: ignore[arg-type]
                stop_reason=result.stop_reason,
            )
            for index, result in enumerate(results)
        ]
        return CompletionReply(**members, choices=choices)

    def opening(self, members: Members) -> list[CompletionReply]:
        """The prompts, where they are echoed."""
        return [
            CompletionReply(**members, choices=[CompletionChoice(index=index, text=echo, logprobs=self._echo(index))])
            for index in range(len(self._offsets))
            if (echo := self._echoes[index // self._samples])
        ]

    def addition(self, members: Members, index: int, text: str) -> CompletionReply:
        return CompletionReply(**members, choices=[CompletionChoice(index=index, text=text)])

    def chunk(self, members: Members, index: int, piece: Piece) -> CompletionReply | str:
        if piece.finish_reason is None and not (self._has_logprobs or self._has_spans):
            return piece.text
        choice = CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=self._logprobs(index, piece.logprobs),
            finish_reason=piece.finish_reason,  # type: ignore[arg-type]
            stop_reason=piece.result.stop_reason if piece.result is not None else None,
        )
        return CompletionReply(**members, choices=[choice], leapahead=self._spans(piece))

    def _spans(self, piece: Piece) -> Spans | None:
        if not self._has_spans:
            return None
        return Spans(spans=[Span(text=text, drafted=drafted) for text, drafted in piece.spans])

    def last(self, members: Members) -> CompletionReply:
        return CompletionReply(**members, choices=[])

    def _echo(self, index: int) -> CompletionLogprobs | None:
        """The log-probabilities of an echoed prompt."""
        scores = self._scores[index // self._samples]
        return logprobs.completion(scores, self._texts.token, 0, with_none=True) if scores else None

    def _logprobs(
        self, index: int, entries: Sequence[TokenLogprobs], echoed: bool = False
    ) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        scores = self._scores[index // self._samples] if echoed else []
        offset = 0 if scores else self._offsets[index]
        found = logprobs.completion([*scores, *entries], self._texts.token, offset, with_none=bool(scores))
        self._offsets[index] = offset + sum(map(len, found.tokens))
        return found
