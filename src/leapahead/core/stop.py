"""Where a text ends: EOS, stop tokens, stop strings, criteria, grammar, length. Cuts a verdict before it is committed.

The tokens of a verdict are checked one by one, as in plain decoding, so that a stop in the middle of an accepted path
ends the text at the same token. This module knows no tokenizer: stop strings are searched in what `text` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import token_ids, whole
from leapahead.core.tree import UNLIMITED
from leapahead.core.verify import Verdict


@dataclass(frozen=True, kw_only=True)
class StopParams:
    """When to stop.

    Attributes:
        max_new_tokens: >= 1.
        eos_token_ids: end the text; the text's last token is one of them.
        stop_token_ids: the same, chosen by the user.
        stop_strings: end the text at the token that completes one, wherever in that token it ends; also where this
            token is one of `stop_token_ids`.
        criteria: called with all tokens (prompt included) after each new one; true ends the text.

    Raises:
        BadParameter: a value is impossible; the message names it.
    """

    max_new_tokens: int = UNLIMITED
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    criteria: tuple[Callable[[Sequence[int]], bool], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", whole("max_new_tokens", self.max_new_tokens, least=1))
        for name in ("eos_token_ids", "stop_token_ids"):
            object.__setattr__(self, name, token_ids(name, getattr(self, name)))
        for name, what in (("stop_strings", "strings"), ("criteria", "functions")):
            given = getattr(self, name)
            wrong = not isinstance(given, (tuple, list))
            if wrong or not all(isinstance(each, str) if what == "strings" else callable(each) for each in given):
                raise BadParameter(f"{name}={given!r} is not possible: it must be a tuple of {what}")
            object.__setattr__(self, name, tuple(given))
        if any(not stop for stop in self.stop_strings):
            raise BadParameter("an empty stop string would end every text at once; leave it out")


class Stopper:
    """Decides where one sequence ends.

    Args:
        params: see `StopParams`.
        prompt: the prompt's tokens (for criteria).
        longest: greatest number of tokens, prompt included.
        text: gives the text that the next token adds; needed for stop strings only.
        complete: given the tokens since the last commit, tells whether a grammar allows nothing after them.

    Attributes:
        room: how many tokens the length limit, the context and the KV cache still allow.
        finish_reason: None while running, then "stop" or "length", as in the OpenAI API.
        stop_reason: which token id or string ended it; None at EOS and at the length limit.

    Raises:
        BadParameter: there are stop strings and no `text`.
    """

    def __init__(
        self,
        params: StopParams,
        prompt: Sequence[int],
        longest: int = UNLIMITED,
        text: Callable[[int], str] | None = None,
        complete: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        if params.stop_strings and text is None:
            raise BadParameter(
                f"stop strings {list(params.stop_strings)} need a tokenizer, and the model was passed without one; "
                "pass tokenizer=..., or use stop_token_ids"
            )
        self.params = params
        self.room = min(params.max_new_tokens, longest - len(prompt))
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._ids = frozenset((*params.eos_token_ids, *params.stop_token_ids))
        self._only_ids = not (params.stop_strings or params.criteria or complete)
        self._seen = list(prompt) if params.criteria else []
        self._text, self._complete = text, complete
        self._tail = ""  # the end of the text, as long as the longest stop string

    def cut(self, verdict: Verdict) -> Verdict:
        """The verdict up to and including the token that ends the text; unchanged if none does."""
        if self._only_ids and len(verdict.tokens) < self.room and self._ids.isdisjoint(verdict.tokens):
            self.room -= len(verdict.tokens)
            return verdict
        for count, token in enumerate(verdict.tokens, start=1):
            if token < 0:
                break  # no token could be chosen, which the engine reports
            self._check(token, verdict.tokens[:count])
            if self.finish_reason is not None:
                return verdict.cut(count)
        return verdict

    def _check(self, token: int, tokens: Sequence[int]) -> None:
        """Looks at the next token, the last of those that are to be committed."""
        p = self.params
        self.room -= 1
        if token in p.eos_token_ids:
            self.finish_reason = "stop"
        elif (found := self._stop_string(token)) is not None:
            self.finish_reason, self.stop_reason = "stop", found
        elif token in p.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self._criterion(token) or (self._complete is not None and self._complete(tokens)):
            self.finish_reason = "stop"
        elif self.room <= 0:
            self.finish_reason = "length"

    def _stop_string(self, token: int) -> str | None:
        if not self.params.stop_strings or self._text is None:
            return None
        self._tail += (new := self._text(token))
        first = len(self._tail) - len(new) + 1  # the least end of a match, since an earlier one has ended the text
        hits = [
            (at, stop)
            for stop in self.params.stop_strings
            if (at := self._tail.find(stop, max(0, first - len(stop)))) >= 0
        ]
        self._tail = self._tail[-max(len(stop) for stop in self.params.stop_strings) :]
        return min(hits)[1] if hits else None

    def _criterion(self, token: int) -> bool:
        if not self.params.criteria:
            return False
        self._seen.append(token)
        return any(criterion(self._seen) for criterion in self.params.criteria)


def check_lengths(min_new_tokens: int, max_new_tokens: int) -> None:
    """Refuses a least number of new tokens that the length limit does not allow.

    Raises:
        BadParameter: `min_new_tokens` is greater than `max_new_tokens`.
    """
    if whole("min_new_tokens", min_new_tokens) > max_new_tokens:
        raise BadParameter(
            f"min_new_tokens={min_new_tokens} is not possible with max_new_tokens={max_new_tokens}: it must not be "
            "greater"
        )
