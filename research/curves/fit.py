"""The two parameters of the step compression formula (2402.02057), fitted to measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leapahead.bench.formula import compression_formula
from leapahead.core.errors import BadParameter, needing


@dataclass(frozen=True)
class Fit:
    """The fitted parameters.

    Attributes:
        alpha: probability that a drafted token is accepted, 0 < alpha < 1.
        f: about one step in f has a useful speculation, >= 1.
        rms: root mean square of measured minus formula.
        points: number of points fitted.
    """

    alpha: float
    f: float
    rms: float
    points: int


def fit(points: Sequence[tuple[int, int, float]]) -> Fit:
    """Least squares over points (N, W, S).

    Raises:
        BadParameter: fewer than three points, or step compression is 1 everywhere.
        LeapaheadError: scipy is not installed.
    """
    require_points([(ngram, window) for ngram, window, _ in points])
    if max(s for _, _, s in points) <= 1:
        raise BadParameter("there is nothing to fit: no draft was accepted, step compression is 1 everywhere")
    optimize = optimizer()

    def residuals(x: Any) -> list[float]:
        return [compression_formula(x[0], x[1], ngram, window) - s for ngram, window, s in points]

    bounds = ([1e-6, 1.0], [1 - 1e-6, np.inf])
    # Several starts, because the curve hardly depends on alpha where f is large, and a search that starts there stays.
    found = [optimize.least_squares(residuals, (start, 2.0), bounds=bounds) for start in (0.2, 0.5, 0.8)]
    best = min(found, key=lambda each: float(each.cost))
    rms = math.sqrt(2 * float(best.cost) / len(points))
    return Fit(round(float(best.x[0]), 4), round(float(best.x[1]), 4), round(rms, 4), len(points))


def require_points(pairs: Sequence[tuple[int, int]]) -> None:
    """Refuses fewer than three different pairs (N, W)."""
    if len(set(pairs)) < 3:
        raise BadParameter("alpha and f cannot be fitted to fewer than three points; name more sizes or n-gram lengths")


def optimizer() -> Any:
    """scipy.optimize; a LeapaheadError where scipy is not installed."""
    with needing("the fit", "bench", "scipy"):
        from scipy import optimize
    return optimize
