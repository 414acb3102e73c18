"""A draft model as a source: what a smaller model thinks may come next (2211.17192, 2302.01318; trees: 2305.09781).

What it thinks of a place costs a forward of it, so it knows a place only once it has looked there; the planner says
where that pays (`planner.look`). Under the dice its distribution is ranked by what this seed will pick, which is the
coupled rule (drafter-invariant speculative decoding, 2408.07978; several drafts: 2506.05632): the text stays plain
decoding's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from leapahead.drafters.base import Context, Forward, Step
from leapahead.drafters.draft_runner import Following, Path
from leapahead.planner.source import Candidate, Score, Source
from leapahead.models.base import CHAIN, Target

KEPT, SAMPLED = (
    64,
    1024,
)  # likeliest tokens of a place that are kept: greedy; sampling, where the dice choose among them
Row = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]  # tokens, likeliest first; their log-probabilities


class DraftSource(Source):
    """One draft model, for one sequence.

    Args:
        target: the draft model, loaded.
        name: who drafted a node: "draft", of several drafts "draft2", ...
    """

    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, target: Target, name: str = "draft") -> None:
        self.target = target
        self.name = name  # type: ignore[misc]  # of an instance: there may be several
        self.following: Following | None = None
        self.idle = 0  # steps since it has looked last
        self.resting = 0  # steps in which it is not to be asked
        self._rest = 0
        self._rows: dict[Path, Row] = {}
        self._length = 0

    def begin(self, context: Context) -> None:
        self.following = Following(self.target, context.tokens)
        self._context = context
        self._limit = min(context.vocab_size, self.target.vocab_size)

    def settle(self, *, useful: bool, longest: int) -> None:
        """After a step in which it has looked: rests longer each time that nothing came of it, `longest` at most."""
        self._rest = 0 if useful else min(max(1, 2 * self._rest), longest)
        self.resting = self._rest

    @property
    def able(self) -> bool:
        """Whether it can follow the text still."""
        return self.following is not None and not self.following.failed

    def read(self, context: Context) -> None:
        if self._length != len(context.tokens):
            assert self.following is not None
            self._length = len(context.tokens)
            self._rows = {}
            self.idle += 1
            self.resting = max(0, self.resting - 1)
            self.following.settle()

    def root(self, context: Context) -> Path | None:
        return () if self.able else None

    def follow(self, state: Path, token: int) -> Path:
        return (*state, token)

    def knows(self, state: Path) -> bool:
        return state in self._rows

    def candidates(self, state: Path, limit: int) -> list[Candidate]:
        if (row := self._rows.get(state)) is None:
            return []
        tokens, logp = row
        some = zip(tokens[:limit].tolist(), logp[:limit].tolist(), strict=True)
        return [Candidate(token, value, ()) for token, value in some]

    def drawn(self, state: Path, limit: int, score: Score) -> list[Candidate]:
        if (row := self._rows.get(state)) is None:
            return []
        tokens, logp = row
        if len(tokens) > limit:
            best = np.argpartition(score(tokens, logp), -limit)[-limit:]
            tokens, logp = tokens[best], logp[best]
        return [Candidate(token, value, ()) for token, value in zip(tokens.tolist(), logp.tolist(), strict=True)]

    def q(self, path: Path, token: int) -> float:
        """Its probability of a token behind a place, of the tokens that are kept; NaN where it did not look."""
        if (row := self._rows.get(path)) is None:
            return float("nan")
        found = np.flatnonzero(row[0] == token)
        return float(np.exp(row[1][found[0]])) if len(found) else 0.0

    @staticmethod
    def look(asked: Sequence[tuple[DraftSource, Sequence[Path]]]) -> Forward | None:
        """Looks at places of several texts in ONE forward of the draft model that these sources share."""
        for source, paths in asked:
            assert source.following is not None
            source.following.add(paths)
        looks, forward = Following.look([source.following for source, _ in asked if source.following is not None])
        for (source, _), look in zip(asked, looks, strict=True):
            if look is None:
                continue
            source.idle = 0
            tokens, logits = look.choices.top_k(min(SAMPLED if source._context.sampled else KEPT, source._limit))
            logp = logits - logits[:, :1]
            logp -= np.log(np.exp(logp).sum(axis=1, keepdims=True))
            for path, node in zip(look.paths, look.nodes, strict=True):
                row = node - look.choices.first
                known = tokens[row] < source._limit  # the draft's vocabulary may be the larger one
                source._rows[path] = tokens[row][known], logp[row][known]
        return forward

    def observe(self, context: Context, step: Step) -> None:
        """`read` does it, before the next draft."""

    def close(self) -> None:
        if self.following is not None:
            self.following.close()

    def figures(self) -> dict[str, Any]:
        assert self.following is not None
        told: dict[str, Any] = {
            "model": self.target.name,
            "forwards": self.following.forwards,
            "seconds": round(self.following.seconds, 4),
        }
        return told | ({"stopped": self.following.failed} if self.following.failed else {})
