"""What may come next, asked node by node: the part of a drafter that knows, without the part that decides.

    root state ── candidates ──> (token, log-probability, feature) ...
        │ follow(token)
        └─> state below it ── candidates ──> ...

So several sources grow one tree together, and none of them draws up what nobody will use (`planner.grow`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from leapahead.drafters.base import Context, Step

Feature = tuple[Hashable, ...]
Score = Callable[[npt.ArrayLike, npt.ArrayLike], npt.NDArray[np.float64]]  # of tokens and their log-probabilities
NOISE_CANDIDATES = 32  # candidates of which the dice may choose, where a source does not choose itself


class Candidate(NamedTuple):
    """A token that may come next.

    Attributes:
        token: its id.
        logp: the source's opinion, a log-probability among its candidates of this node.
        feature: what else its acceptance depends on, from coarse to fine (match length, count, recency, ...).
    """

    token: int
    logp: float
    feature: Feature


class Source(ABC):
    """One instance per sequence. A state is anything that names a place in the text; it is never changed.

    Class attributes:
        name: who drafted a node.
        needs: capabilities that the target must have.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()

    def begin(self, context: Context) -> None:  # noqa: B027  (some keep nothing of the prompt)
        """Called once, with the prompt committed."""

    @abstractmethod
    def root(self, context: Context) -> Any:
        """The state after the last committed token; None if the source knows nothing there."""

    @abstractmethod
    def follow(self, state: Any, token: int) -> Any:
        """The state one drafted token further; None if the source knows nothing there."""

    @abstractmethod
    def candidates(self, state: Any, limit: int) -> list[Candidate]:
        """At most `limit` tokens that may stand behind a state, likeliest first, each once."""

    def drawn(self, state: Any, limit: int, score: Score) -> list[Candidate]:
        """The same when sampling: those of all its candidates that stand best under the dice, in any order.

        Args:
            score: see `Context.scores`, of the position where the candidates would stand.
        """
        return self.candidates(state, NOISE_CANDIDATES)

    def observe(self, context: Context, step: Step) -> None:
        """Called after the commit; `context.tokens` has grown by `step.tokens`. Not every step is shown."""
        self.read(context)

    def read(self, context: Context) -> None:  # noqa: B027
        """Called before `root` is; reads what was committed in steps that were not shown."""

    def finish(self, context: Context) -> None:  # noqa: B027
        """Called once when the text is complete: what it teaches for others goes to `context.drafter_cache`."""

    def close(self) -> None:  # noqa: B027
        """Called when the text is over, complete or not. Twice is harmless."""

    def figures(self) -> dict[str, Any]:
        """Plain types, for `Stats.drafter`."""
        return {}
