"""The published formula for the step compression of lookahead decoding (2402.02057, section 4)."""

from __future__ import annotations

import math


def drafts_yield(alpha: float, length: int, drafts: float) -> float:
    """Expected tokens of one step with several independent drafts, the bonus token included (2402.02057, equation 5).

    E = (γ + 1) - sum over i = 1..γ of (1 - α^i)^b, where γ is the length and b the number of drafts; b = 1 gives
    equation 4.

    Args:
        alpha: probability that a drafted token is accepted if all before it are.
        length: tokens of each draft.
        drafts: number of drafts.
    """
    return length + 1 - math.fsum((1 - alpha**i) ** drafts for i in range(1, length + 1))


def compression_formula(alpha: float, f: float, ngram: int, window: float) -> float:
    """Step compression S = (f - 1 + E(α, N-1, W)) / f (2402.02057, equation 7).

    Args:
        alpha: see `drafts_yield`.
        f: on average one step in f has a useful speculation, at least 1.
        ngram: n-gram size N.
        window: window W, equal to the number of guesses G.
    """
    return (f - 1 + drafts_yield(alpha, ngram - 1, window)) / f
