"""What the engine gives back for a request, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithms: log-softmax of the target's unprocessed logits.

    Attributes:
        token: the committed token.
        logprob: its log-probability.
        top: (token, log-probability) of the likeliest tokens, falling; as many as the request asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Output(NamedTuple):
    """What one step added to a request.

    Attributes:
        tokens: the new token ids.
        accepted: the first so many of them had been drafted.
        finish_reason: "stop" or "length" with the last tokens, else None.
        stop_reason: the stop string or stop token id that ended the text; None at EOS and at the length limit.
        logprobs: one entry for each of `tokens`, where the request asked for them.
    """

    tokens: tuple[int, ...]
    accepted: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
