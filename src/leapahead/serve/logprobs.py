"""Log-probabilities in the two formats of the API."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leapahead.engine.output import TokenLogprobs
from leapahead.serve.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LEAST = -9999.0  # what is reported of a token whose probability is 0: JSON has no infinity
TextOf = Callable[[int], str]


def completion(
    entries: Sequence[TokenLogprobs], text_of: TextOf, offset: int, with_none: bool = False
) -> CompletionLogprobs:
    """Those of a completion.

    Args:
        entries: one for each token.
        text_of: gives the text of a token.
        offset: characters before the first token.
        with_none: whether the first token has no log-probability: nothing stands before it.
    """
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for entry in entries:
        text = text_of(entry.token)
        top = {text_of(token): _least(value) for token, value in reversed(entry.top)}  # of equal texts the likeliest
        top = {**dict(reversed(top.items())), text: _least(entry.logprob)}
        first = with_none and not found.tokens
        found.tokens.append(text)
        found.token_logprobs.append(None if first else _least(entry.logprob))
        found.top_logprobs.append(None if first else top)
        found.text_offset.append(offset)
        offset += len(text)
    return found


def chat(entries: Sequence[TokenLogprobs], text_of: TextOf) -> ChatLogprobs:
    """Those of a chat, one entry for each token."""

    def one(token: int, logprob: float) -> TopLogprob:
        text = text_of(token)
        return TopLogprob(token=text, logprob=_least(logprob), bytes=list(text.encode("utf-8", "replace")))

    content = [
        TokenLogprob(
            **one(entry.token, entry.logprob).model_dump(),
            top_logprobs=[one(token, logprob) for token, logprob in entry.top],
        )
        for entry in entries
    ]
    return ChatLogprobs(content=content)


def _least(logprob: float) -> float:
    return max(logprob, LEAST)
