"""Expected tokens and speed-up of one draft, by formula."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from leapahead.bench.conditions import Data, conditions
from leapahead.core.errors import BadParameter

LONGEST = 512  # drafted tokens, the longest draft that is considered


def expected_tokens(alpha: float, length: int) -> float:
    """Tokens of one step with one draft: (1 - α^(K+1)) / (1 - α) (Leviathan et al., 2211.17192, equation 1)."""
    return (1 - alpha ** (length + 1)) / (1 - alpha)


def expected_speedup(alpha: float, length: int, cost: float) -> float:
    """Wall-clock gain over plain decoding: expected tokens / (1 + c K) (2211.17192, theorem 3.8).

    A target step over K + 1 tokens is assumed to cost as much as one over a single token.
    """
    return expected_tokens(alpha, length) / (1 + cost * length)


def expected(alphas: Sequence[float], length: int = 5, cost: float = 0.05, longest: int = 16) -> Data:
    """The expected-tokens calculator.

    Args:
        alphas: acceptance rates, 0 < alpha < 1: probability that a drafted token is accepted if all before it are.
        length: K, drafted tokens per step.
        cost: c, time of drafting one token, in target steps.
        longest: last K of the curves.

    Returns:
        rows, one for each alpha: tokens and speedup at K; best_length and best_speedup (None where the cost is 0 and a
        longer draft is always better); curves of tokens and speedup over K = 0..longest.
    """
    for alpha in alphas:
        if not 0 < alpha < 1:
            raise BadParameter(f"alpha={alpha:g} is not possible: an acceptance rate lies between 0 and 1")
    if not alphas or length < 0 or longest < 1 or not 0 <= cost < math.inf:
        raise BadParameter(f"K={length} and c={cost:g} must be at least 0, and there must be an alpha and a K to draw")
    longest = max(longest, length)
    rows = []
    for alpha in dict.fromkeys(alphas):
        speedups = [expected_speedup(alpha, k, cost) for k in range(LONGEST)]
        best = int(np.argmax(speedups)) if cost > 0 else None
        rows.append(
            {
                "alpha": alpha,
                "tokens": round(expected_tokens(alpha, length), 4),
                "speedup": round(expected_speedup(alpha, length, cost), 4),
                "best_length": best,
                "best_speedup": None if best is None else round(speedups[best], 4),
                "curve": {
                    "length": list(range(longest + 1)),
                    "tokens": [round(expected_tokens(alpha, k), 4) for k in range(longest + 1)],
                    "speedup": [round(expected_speedup(alpha, k, cost), 4) for k in range(longest + 1)],
                },
            }
        )
    return {"figure": "expected", "conditions": conditions(), "length": length, "cost": cost, "rows": rows}
