"""What `LLM.generate` and `LLM.stream` return."""

from __future__ import annotations

from dataclasses import dataclass, field

from leapahead.core.stats import Stats
from leapahead.core.text import TextStream, Tokenizer
from leapahead.engine.output import Output, TokenLogprobs
from leapahead.engine.request import Handle


@dataclass(frozen=True)
class Result:
    """One finished text.

    Attributes:
        text: the new text, with the space that divides it from the prompt, if there is one. It ends before a stop
            string (behind it with `include_stop`), and special tokens are left out. "" without a tokenizer.
        tokens: the new token ids, up to and including the one that ended the text.
        prompt_tokens: the token ids of the prompt.
        drafted: for each of `tokens`, whether a drafter had proposed it.
        finish_reason: "length" at the limit of `max_new_tokens`, of the context or of the KV cache; else "stop".
        stop_reason: the stop string or stop token id that ended it; None at EOS, at a criterion and at a limit.
        seed: of the Gumbel noise. Given again with the same parameters it gives the same text.
        stats: counters, rates and seconds of this text.
        logprobs: one entry for each of `tokens`, where `logprobs` was given; else empty.
        lossy: the relaxed rule that the text was decoded with, such as "lossy-bild:rollback=5"; "" if it is exact.
    """

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    drafted: list[bool]
    finish_reason: str
    stop_reason: int | str | None
    seed: int
    stats: Stats = field(repr=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)
    lossy: str = ""


@dataclass(frozen=True)
class Piece:
    """What one step added. The texts of all pieces, one after another, are exactly `Result.text`.

    Attributes:
        text: may be "" while a character or a possible stop string is incomplete; it comes with a later piece then.
        tokens: the step's new token ids; the first `drafted` of them had been drafted.
        drafted: see `tokens`.
        spans: (text, drafted) parts; together they are `text`.
        finish_reason: see `Result`, on the last piece; else None.
        result: the whole text with its figures, on the last piece; else None.
        logprobs: one entry for each of `tokens`, where `logprobs` was given; else empty.
    """

    text: str
    tokens: list[int]
    drafted: int
    spans: tuple[tuple[str, bool], ...]
    finish_reason: str | None = None
    result: Result | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


class Writer:
    """Turns the outputs of one request into pieces, and at last into the result."""

    def __init__(self, tokenizer: Tokenizer | None, stop_strings: tuple[str, ...], include_stop: bool) -> None:
        self._given = tokenizer, stop_strings, include_stop
        self._started: TextStream | None = None
        self._texts: list[str] = []

    def _stream(self, handle: Handle) -> TextStream:
        self._started = self._started or TextStream(*self._given, handle.before)
        return self._started

    def piece(self, handle: Handle, output: Output) -> Piece:
        """The piece of one output."""
        stream = self._stream(handle)
        for index, token in enumerate(output.tokens):
            stream.add(token, index < output.accepted)
        last = output.finish_reason is not None
        spans = stream.finish(output.stop_reason) if last else stream.take()
        text = "".join(part for part, _ in spans)
        self._texts.append(text)
        result = self._result(handle) if last else None
        return Piece(
            text, list(output.tokens), output.accepted, spans, output.finish_reason, result, tuple(output.logprobs)
        )

    def result(self, handle: Handle) -> Result:
        """The result of a finished request whose outputs were not read one by one."""
        stream = self._stream(handle)
        for token, drafted in zip(handle.tokens, handle.drafted, strict=True):
            stream.add(token, drafted)
        self._texts = [text for text, _ in stream.finish(handle.stop_reason)]
        return self._result(handle)

    def _result(self, handle: Handle) -> Result:
        return Result(
            text="".join(self._texts),
            tokens=list(handle.tokens),
            prompt_tokens=list(handle.request.tokens),
            drafted=list(handle.drafted),
            finish_reason=str(handle.finish_reason),
            stop_reason=handle.stop_reason,
            seed=handle.request.sampling.seed,
            stats=handle.stats,
            logprobs=list(handle.logprobs),
            lossy=handle.request.lossy,
        )
