"""Log-probabilities in the two formats of the API."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leapahead.engine.output import TokenLogprobs
from leapahead.serve.replies import ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob

LEAST = -9999.0  # what is reported of a token whose probability is 0: JSON has no infinity
TextOf = Callable[[int], str]


def completion(
    entries: Sequence[TokenLogprobs], text_of: TextOf, offset: int, with_none: bool = False, as_ids: bool = False
) -> CompletionLogprobs:
    """Those of a completion.

    Args:
        entries: one for each token.
        text_of: gives the text of a token.
        offset: characters before the first token.
        with_none: whether the first token has no log-probability: nothing stands before it.
        as_ids: whether tokens are named by their ids.
    """
    name_of = by_id if as_ids else text_of
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for entry in entries:
        name = name_of(entry.token)
        top = {name: _least(entry.logprob)}
        for token, value in entry.top:
            top.setdefault(name_of(token), _least(value))  # of equal texts the likeliest
        first = with_none and not found.tokens
        found.tokens.append(name)
        found.token_logprobs.append(None if first else _least(entry.logprob))
        found.top_logprobs.append(None if first else top)
        found.text_offset.append(offset)
        offset += len(text_of(entry.token))
    return found


def prompt(entries: Sequence[TokenLogprobs], text_of: TextOf, k: int) -> list[dict[str, PromptLogprob] | None]:
    """Those of a prompt, as vLLM has them: token id -> what is known of it, the prompt's own token first.

    Args:
        entries: one for each token; the first one says nothing.
        text_of: gives the text of a token.
        k: number of alternatives; -1 for all.
    """
    found: list[dict[str, PromptLogprob] | None] = [None]
    for entry in entries[1:]:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
        several = dict([(entry.token, entry.logprob), *entry.top[: None if k < 0 else k]])
        found.append(
            {
                str(token): PromptLogprob(logprob=_least(value), rank=ranks.get(token), decoded_token=text_of(token))
                for token, value in several.items()
            }
        )
    return found


def by_id(token: int) -> str:
    """What stands for a token where the request asks for its id."""
    return f"token_id:{token}"


def chat(entries: Sequence[TokenLogprobs], text_of: TextOf, as_ids: bool = False) -> ChatLogprobs:
    """Those of a chat, one entry for each token; see `completion`."""

    def one(token: int, logprob: float) -> TopLogprob:
        text = by_id(token) if as_ids else text_of(token)
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
