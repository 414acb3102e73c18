"""Log-probabilities in the two formats of the API."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leapahead.core.text import REPLACEMENT, Detokenizer, Tokenizer
from leapahead.engine.output import TokenLogprobs
from leapahead.serve.replies import ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob

LEAST = -9999.0  # what is reported of a token whose probability is 0: JSON has no infinity
NEAR = 32  # characters in which the text of a prompt is looked for what a token adds
TextOf = Callable[[int], str]
Placed = tuple[TokenLogprobs, int]


class Places:
    """Where the tokens of one text begin: the number of characters before the text that each of them adds.

    A token that adds no text, such as a special one or a part of a character, begins where the next one does.

    Args:
        tokenizer: of the model; None for no text at all.
        text_of: gives the text of a token.
        begin: characters before the first token.
        before: see `Detokenizer`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, text_of: TextOf, begin: int = 0, before: Sequence[int] = ()
    ) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, before=before)
        self._text_of, self._end, self._sent = text_of, begin, begin
        self._waiting: list[Placed] = []

    def take(self, entries: Sequence[TokenLogprobs], text: str, is_last: bool) -> list[Placed]:
        """The tokens whose places are final, those that waited first.

        A stop string may end the text before a token, so that tokens wait while the text before them is held back.

        Args:
            entries: further tokens.
            text: what is sent with them.
            is_last: whether the text ends with it.
        """
        self._sent += len(text)
        self._waiting += [(entry, self._place(entry.token)) for entry in entries]
        waiting = self._waiting
        count = next((at for at, (_, place) in enumerate(waiting) if place > self._sent and not is_last), len(waiting))
        self._waiting = waiting[count:]
        return [(entry, min(place, self._sent)) for entry, place in waiting[:count]]

    def _place(self, token: int) -> int:
        added = "" if self._detokenizer is None else self._detokenizer.add(token)
        place = self._end + len(added) - len(_own(added, self._text_of(token)))
        self._end += len(added)
        return place


def places(tokenizer: Tokenizer | None, text_of: TextOf, tokens: Sequence[int], text: str) -> list[int]:
    """Where the tokens of a prompt begin in its text, which the client has sent, or has special tokens; see `Places`.

    The text that was sent lacks what the tokenizer puts before it, and may be written in other characters.
    """
    if tokenizer is None:
        return [0] * len(tokens)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    found, end = [], 0
    for token in tokens:
        added = detokenizer.add(token)
        own = _own(added, text_of(token))
        if not text.startswith(added, end):
            own = added = own.lstrip()
            near = NEAR if tokenizer.decode([token], skip_special_tokens=True) else 0
            at = text.find(added, end, end + len(added) + near)
            if at < 0:
                own = added = ""
            end = max(at, end)
        found.append(end + len(added) - len(own))
        end += len(added)
    return found


def _own(added: str, alone: str) -> str:
    """What a token adds, without the bytes of earlier tokens that it shows to be no character."""
    return added if alone.startswith(REPLACEMENT) else added.lstrip(REPLACEMENT)


def completion(
    entries: Sequence[Placed], text_of: TextOf, with_none: bool = False, as_ids: bool = False
) -> CompletionLogprobs:
    """Those of a completion.

    Args:
        entries: one for each token, and where it begins.
        text_of: gives the text of a token.
        with_none: whether the first token has no log-probability: nothing stands before it.
        as_ids: whether tokens are named by their ids.
    """
    name_of = by_id if as_ids else text_of
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for entry, place in entries:
        name = name_of(entry.token)
        top = {name: _least(entry.logprob)}
        for token, value in entry.top:
            top.setdefault(name_of(token), _least(value))  # of equal texts the likeliest
        first = with_none and not found.tokens
        found.tokens.append(name)
        found.token_logprobs.append(None if first else _least(entry.logprob))
        found.top_logprobs.append(None if first else top)
        found.text_offset.append(place)
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


def chat(
    entries: Sequence[TokenLogprobs], text_of: TextOf, bytes_of: Sequence[bytes] | None, as_ids: bool = False
) -> ChatLogprobs:
    """Those of a chat, one entry for each token; see `completion`.

    Args:
        entries, text_of, as_ids: see there.
        bytes_of: the bytes of all tokens; those of rows without a token are none. None where they are not known.
    """

    def one(token: int, logprob: float) -> TopLogprob:
        known = None if bytes_of is None else list(bytes_of[token]) if token < len(bytes_of) else []
        return TopLogprob(token=by_id(token) if as_ids else text_of(token), logprob=_least(logprob), bytes=known)

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
