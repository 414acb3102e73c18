"""The mixer: one probability from the acceptance estimates of all sources that propose a token.

    p = sigmoid( sum over the sources that propose it of (w_s logit(p_s) + b_s)
               + sum over the other sources that have candidates there of u_s )

The parameters w, b and u of a source depend on the mode, on whether the node is the root, on whether the user's
prediction has candidates there, and on how many sources propose the token: the more there are, the less each adds.
While a text follows its prediction, other sources say little, and their silence nothing. The parameters are learned by
stochastic gradient descent on the logarithmic loss, from the outcome of every guess along the committed path. So a
source that adds noise loses its weight, and a token is less likely where a good source does not propose it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log, sqrt

from leapahead.core.forks import Mutex

MOST_PROPOSING = 4  # tokens that still more sources propose share their parameters
LEAST_P = 0.001  # estimates are clipped to [LEAST_P, 1 - LEAST_P]
MOST_LOGIT = 7.0  # of a mixed probability, in absolute value
RATE = 0.01  # of learning
LEADING = "prediction"  # the source with which all have parameters of their own

Parameters = list[list[float]]  # [w, b, u] of one source, by the number of sources that propose the token, less one
# Mode; place: 0 at the root, 1 below it, and 2 more where the prediction has candidates; source; and its parameters.
Row = tuple[str, int, str, list[list[float]]]
Logits = Sequence[float | None]  # of each source that has candidates at a node; None if it does not propose the token


class Mixer:
    """The parameters of all sources, shared by all requests of an engine. Thread-safe.

    Args:
        priors: parameters to begin with, as `rows` gives them. Those of other sources begin with w = 1 / sqrt(number
            of sources that propose the token), b = u = 0.
    """

    def __init__(self, priors: Iterable[Row] = ()) -> None:
        self._parameters = {
            (mode, place, source): [list(values) for values in found] for mode, place, source, found in priors
        }
        self._lock = Mutex()

    def parameters(self, mode: str, depth: int, sources: Sequence[str]) -> list[Parameters]:
        """The parameters of the sources that have candidates below a node of some depth. Live: they are learned."""
        found, place = [], min(depth, 1) + (2 if LEADING in sources else 0)
        for source in sources:
            key = mode, place, source
            if (each := self._parameters.get(key)) is None:
                initial = [[1.0 / sqrt(count), 0.0, 0.0] for count in range(1, MOST_PROPOSING + 1)]
                each = self._parameters.setdefault(key, initial)
            found.append(each)
        return found

    def learn(self, parameters: Sequence[Parameters], logits: Logits, p: float, hit: bool) -> None:
        """One step of gradient descent.

        Args:
            parameters: of the sources that have candidates at the node.
            logits: of the token, see `mixed`.
            p: the mixed probability.
            hit: whether the token was the target's choice.
        """
        index, change = _proposing(logits), RATE * (hit - p)
        with self._lock:
            for each, x in zip(parameters, logits, strict=True):
                values = each[index]
                if x is None:
                    values[2] += change
                else:
                    values[0] += change * x
                    values[1] += change

    def rows(self) -> list[Row]:
        """All parameters, as plain types."""
        with self._lock:
            return [
                (*key, [[round(value, 4) for value in values] for values in found])
                for key, found in sorted(self._parameters.items())
            ]


def mixed(parameters: Sequence[Parameters], logits: Logits) -> float:
    """The probability of a token.

    Args:
        parameters: of the sources that have candidates at the node.
        logits: of their estimates for the token, in the same order; None for those that do not propose it.
    """
    index, z = _proposing(logits), 0.0
    for each, x in zip(parameters, logits, strict=True):
        w, b, u = each[index]
        z += u if x is None else w * x + b
    return 1.0 / (1.0 + exp(-min(max(z, -MOST_LOGIT), MOST_LOGIT)))


def logit(p: float) -> float:
    """log(p / (1 - p)) of the clipped probability."""
    p = min(max(p, LEAST_P), 1.0 - LEAST_P)
    return log(p / (1.0 - p))


def _proposing(logits: Logits) -> int:
    """The index of the parameters for so many sources that propose the token."""
    return min(sum(x is not None for x in logits), MOST_PROPOSING) - 1
