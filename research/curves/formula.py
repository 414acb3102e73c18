"""The paper's formula of step compression (2402.02057), and its two numbers fitted to what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leapahead.core.errors import BadParameter, needing


def drafts_yield(alpha: float, length: int, drafts: float) -> float:
    """Expected tokens of one step with several independent drafts, bonus included (2402.02057, equation 5).

    E = (γ + 1) - sum over i = 1..γ of (1 - α^i)^b, with γ the length and b the number of drafts; b = 1 is equation 4.
    """
    return length + 1 - math.fsum((1 - alpha**i) ** drafts for i in range(1, length + 1))


def compression_formula(alpha: float, f: float, ngram: int, window: float) -> float:
    """S = (f - 1 + E(α, N-1, W)) / f: one step in about f has a useful speculation (2402.02057, equation 7)."""
    return (f - 1 + drafts_yield(alpha, ngram - 1, window)) / f


@dataclass(frozen=True)
class Fit:
    """The formula's two numbers.

    Attributes:
        alpha: probability that a drafted token is right, 0 < alpha < 1.
        f: about one step in f has a useful speculation, >= 1.
        rms: root mean square of measured minus formula.
        points: how many were fitted.
    """

    alpha: float
    f: float
    rms: float
    points: int


def fit(points: Sequence[tuple[int, int, float]]) -> Fit:
    """Least squares over (N, W, S).

    Raises:
        BadParameter: fewer than three points, or no step anywhere that yields more than one token.
        LeapaheadError: scipy is not installed.
    """
    enough([(ngram, window) for ngram, window, _ in points])
    if max(s for _, _, s in points) <= 1:
        raise BadParameter("there is nothing to fit: no draft was accepted, step compression is 1 everywhere")
    optimize = optimizer()

    def residuals(x: Any) -> list[float]:
        return [compression_formula(x[0], x[1], ngram, window) - s for ngram, window, s in points]

    bounds = ([1e-6, 1.0], [1 - 1e-6, np.inf])
    # From several starts: with a large f the curve hardly depends on alpha, and a search that begins there stays.
    found = [optimize.least_squares(residuals, (start, 2.0), bounds=bounds) for start in (0.2, 0.5, 0.8)]
    best = min(found, key=lambda each: float(each.cost))
    rms = math.sqrt(2 * float(best.cost) / len(points))
    return Fit(round(float(best.x[0]), 4), round(float(best.x[1]), 4), round(rms, 4), len(points))


def enough(pairs: Sequence[tuple[int, int]]) -> None:
    """Refuses fewer than three (N, W)."""
    if len(set(pairs)) < 3:
        raise BadParameter("alpha and f cannot be fitted to fewer than three points; name more sizes or n-gram lengths")


def optimizer() -> Any:
    """scipy's; a LeapaheadError where it is not installed."""
    with needing("the fit", "lab", "scipy"):
        from scipy import optimize
    return optimize
