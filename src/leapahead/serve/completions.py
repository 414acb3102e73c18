"""/v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from leapahead.engine.output import TokenLogprobs
from leapahead.results import Piece, Result
from leapahead.serve import logprobs, parameters
from leapahead.serve.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    PromptLogprobs,
    Span,
    Spans,
)
from leapahead.serve.schema import CompletionRequest
from leapahead.serve.service import Answer, Members, Service
from leapahead.serve.worker import Job


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answers a request."""
    prompts = 1 if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else len(body.prompt)
    parameters.check_count("prompt", prompts, service.settings.limits.prompts)
    sequences = prompts * parameters.samples(body, service.settings)
    return await service.answer(request, body, "cmpl-", sequences, lambda: _prepare(service, body, request.state.owner))


def _prepare(service: Service, body: CompletionRequest, owner: str) -> tuple[Job, Answer]:
    settings, info = service.settings, service.texts.info
    found = parameters.options(body, settings, info.vocab_size)
    found["logprobs"] = parameters.completion_logprobs(body, settings)
    found["grammar"] = service.formats.form(body)
    prompts = service.texts.prompts(body.prompt, body.add_special_tokens, body.truncate_prompt_tokens)
    texts = prompts if info.decoder is None else [info.decoder.start]  # what stands before the answer in the context
    parameters.set_length(found, parameters.completion_length(body, texts, settings, info.context_length))
    asked = (parameters.prompt_logprobs(body, settings, info.vocab_size), found["logprobs"] if body.echo else None)
    scored = max((count for count in asked if count is not None), default=None)
    form = None if found["grammar"] is None else service.formats.param(body)
    job = Job(prompts, found, owner, body.extension.deadline_seconds, scored, form=form)
    completion = Completion(service, body, prompts)
    return job, Answer(
        completion.whole,
        completion.opening,
        completion.chunk,
        completion.last,
        completion.addition,
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
        self._texts, self._samples, self._prompts, self._body = service.texts, body.n or 1, prompts, body
        self._has_logprobs, self._has_spans = body.logprobs is not None, body.extension.spans
        self._text_only = not (self._has_logprobs or self._has_spans or body.return_token_ids)  # but for the last chunk
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self._echoes = [""] * len(prompts)
        if body.echo:
            self._echoes = [
                text if isinstance(text, str) and not body.truncate_prompt_tokens else self._texts.text(tokens)
                for text, tokens in zip(given if len(given) == len(prompts) else prompts, prompts, strict=True)
            ]
        self._scores: Sequence[Sequence[TokenLogprobs]] = [[] for _ in prompts]
        self._of_echoes: list[list[int]] = [[] for _ in prompts]  # where their tokens begin
        self._places: list[logprobs.Places] = []
        if self._has_logprobs:
            tokenizer, text_of = self._texts.tokenizer, self._texts.token
            decoder = service.texts.info.decoder
            for echo, tokens in zip(self._echoes, prompts, strict=True):
                start = tokens if decoder is None else decoder.start
                self._places += [logprobs.Places(tokenizer, text_of, len(echo), start) for _ in range(self._samples)]
            if body.echo:  # here, in a thread, since a long prompt takes a while
                texts = zip(prompts, self._echoes, strict=True)
                self._of_echoes = [logprobs.places(tokenizer, text_of, tokens, echo) for tokens, echo in texts]

    def score(self, scores: Sequence[Sequence[TokenLogprobs]]) -> None:
        """Takes the log-probabilities of the prompts."""
        self._scores = scores

    def whole(self, members: Members, results: Sequence[Result]) -> CompletionReply:
        choices = [
            CompletionChoice(
                index=index,
                text=self._echoes[index // self._samples] + result.text,
                logprobs=self._logprobs(index, result.logprobs, result.text, is_last=True, echoed=True),
                finish_reason=result.finish_reason,  # type: ignore[arg-type]
                stop_reason=result.stop_reason,
                token_ids=result.tokens if self._body.return_token_ids else None,
                prompt_logprobs=self._prompt_logprobs(index),
                prompt_token_ids=self._prompt_ids(index),
            )
            for index, result in enumerate(results)
        ]
        return CompletionReply(**members, choices=choices)

    def opening(self, members: Members) -> list[CompletionReply]:
        """The prompts, where they are echoed, or their token ids are reported."""
        ids: list[int] | None = [] if self._body.return_token_ids else None
        choices = [
            CompletionChoice(
                index=index,
                text=self._echoes[index // self._samples],
                logprobs=self._logprobs(index, [], "", echoed=True),
                token_ids=ids,
                prompt_token_ids=self._prompt_ids(index),
            )
            for index in range(len(self._prompts) * self._samples)
        ]
        return [
            CompletionReply(**members, choices=[choice])
            for choice in choices
            if self._body.echo or choice.prompt_token_ids is not None
        ]

    def addition(self, members: Members, index: int, text: str) -> CompletionReply:
        return CompletionReply(**members, choices=[CompletionChoice(index=index, text=text)])

    def chunk(self, members: Members, index: int, piece: Piece) -> list[CompletionReply] | str:
        if self._text_only and piece.finish_reason is None:
            return piece.text
        choice = CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=self._logprobs(index, piece.logprobs, piece.text, piece.finish_reason is not None),
            finish_reason=piece.finish_reason,  # type: ignore[arg-type]
            stop_reason=piece.result.stop_reason if piece.result is not None else None,
            token_ids=piece.tokens if self._body.return_token_ids else None,
        )
        return [CompletionReply(**members, choices=[choice], leapahead=self._spans(piece))]

    def _spans(self, piece: Piece) -> Spans | None:
        if not self._has_spans:
            return None
        return Spans(spans=[Span(text=text, drafted=drafted) for text, drafted in piece.spans])

    def last(self, members: Members) -> CompletionReply:
        return CompletionReply(**members, choices=[])

    def _echoed(self, index: int) -> list[logprobs.Placed]:
        """What is known of the tokens of an echoed prompt."""
        prompt, most = index // self._samples, self._body.logprobs
        if not self._body.echo:
            return []
        scores = [TokenLogprobs(entry.token, entry.logprob, entry.top[:most]) for entry in self._scores[prompt]]
        return list(zip(scores, self._of_echoes[prompt], strict=True))

    def _prompt_logprobs(self, index: int) -> PromptLogprobs:
        if self._body.prompt_logprobs is None:
            return None
        scores = self._scores[index // self._samples]
        return logprobs.prompt(scores, self._texts.token, self._body.prompt_logprobs)

    def _prompt_ids(self, index: int) -> list[int] | None:
        return list(self._prompts[index // self._samples]) if self._body.return_token_ids else None

    def _logprobs(
        self, index: int, entries: Sequence[TokenLogprobs], text: str, is_last: bool = False, echoed: bool = False
    ) -> CompletionLogprobs | None:
        """Those of a part of a text, after those of the prompt where it is echoed."""
        if not self._has_logprobs:
            return None
        placed = [*(self._echoed(index) if echoed else ()), *self._places[index].take(entries, text, is_last)]
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return logprobs.completion(placed, self._texts.token, echoed and bool(self._body.echo), as_ids)
