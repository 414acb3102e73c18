"""The interface of a source whose candidates are rows of logits that a network has computed before it is asked.

With seed-aware drafting the distribution of a row is ranked by what this seed will choose, which is the coupled rule
(drafter-invariant speculative decoding, 2408.07978; several draft models: 2506.05632).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from leapahead.models.choices import Rows
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Candidate, Feature, FloatArray, Score, Source

Path = tuple[int, ...]  # drafted tokens from below the last committed one
KEPT, KEPT_SAMPLED = 64, 1024  # likeliest tokens that are kept of each path: greedy, and for ranking with the noise


class Row(NamedTuple):
    """What is kept of a network's logits after a path.

    Attributes:
        tokens: likeliest first.
        logp: their log-probabilities among the likeliest tokens, as candidates have them.
        share: the log of the probability that the likeliest tokens have together in the whole vocabulary; NaN where
            nobody asks for it, since it takes time in the vocabulary.
    """

    tokens: npt.NDArray[np.int64]
    logp: FloatArray
    share: float


class Named(Protocol):
    """A network that candidates come from."""

    @property
    def source_name(self) -> str:
        """Who drafted a node, in reports."""


def numbered(models: Sequence[Named]) -> list[str]:
    """The names of their sources, with a number where several have the same."""
    counts, found = Counter[str](), []
    for model in models:
        name = model.source_name
        counts[name] += 1
        found.append(name if counts[name] == 1 else f"{name}{counts[name]}")
    return found


class ComputedSource(Source):
    """Candidates of one network, for one sequence.

    Args:
        name: who drafted a node.

    Attributes:
        unsure: there are no candidates after a path where the network's likeliest token has less probability.
    """

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]  # there may be several
        self.unsure = 0.0
        self._rows: dict[Hashable, Row] = {}
        self._length = 0  # of the text that the rows belong to
        self._limit = 0

    def begin(self, sequence: SequenceView) -> None:
        self._sequence = sequence

    def key(self, path: Path) -> Hashable:
        """What the candidates after a path are kept under."""
        return path

    def feature(self, path: Path) -> Feature:
        """See `Candidate.feature`, of the candidates after a path."""
        return ()

    def keep(self, keys: Sequence[Hashable], found: Rows, rows: Sequence[int] | None = None) -> None:
        """Keeps the likeliest tokens of rows of logits.

        Args:
            keys: one for each row.
            found: of a forward.
            rows: which of them; all by default.
        """
        kept = KEPT_SAMPLED if self._sequence.sampled else KEPT
        tokens, logits = found.top_k(min(kept, found.width))
        logp = logits - logits[:, :1]
        logp -= np.log(np.exp(logp).sum(axis=1, keepdims=True))
        tokens = self.target_ids(tokens)
        which = list(range(len(tokens)) if rows is None else rows)
        shares = [float("nan")] * len(which)
        if self.unsure or self._sequence.explained:
            shares = (logits[which, 0] - logp[which, 0] - found.log_sums(which)).tolist()
        for key, row, share in zip(keys, which, shares, strict=True):
            known = tokens[row] < self._limit  # the network's vocabulary may be the larger one
            self._rows[key] = Row(tokens[row][known], logp[row][known], share)

    def target_ids(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The target's ids of tokens of the network's vocabulary."""
        return tokens

    def follow(self, state: Path, token: int) -> Path | None:
        return (*state, token)

    def has_candidates(self, state: Path) -> bool:
        """Whether a draft forward has computed this path."""
        return self.key(state) in self._rows

    def _sure(self, state: Path) -> Row | None:
        """The row of a path, unless the network is unsure there."""
        row = self._rows.get(self.key(state))
        return None if row is None or np.exp(row.logp[:1].sum() + row.share) < self.unsure else row

    def candidates(self, state: Path, limit: int) -> list[Candidate]:
        if (row := self._sure(state)) is None:
            return []
        tokens, logp, _ = row
        return self._candidates(state, tokens[:limit], logp[:limit])

    def seed_aware_candidates(self, state: Path, limit: int, score: Score) -> list[Candidate]:
        if (row := self._sure(state)) is None:
            return []
        tokens, logp, _ = row
        if len(tokens) > limit:
            best = np.argpartition(score(tokens, logp), -limit)[-limit:]
            tokens, logp = tokens[best], logp[best]
        return self._candidates(state, tokens, logp)

    def _candidates(self, state: Path, tokens: npt.NDArray[np.int64], logp: FloatArray) -> list[Candidate]:
        feature = self.feature(state)
        return [Candidate(token, value, feature) for token, value in zip(tokens.tolist(), logp.tolist(), strict=True)]

    def probabilities(self, parents: Sequence[Path], tokens: Sequence[int]) -> FloatArray:
        return np.array([self._probability(path, token) for path, token in zip(parents, tokens, strict=True)])

    def _probability(self, path: Path, token: int) -> float:
        """q of a token after a path: 0 if it is not among those that are kept.

        NaN if the path was not computed, or if nobody has said that q would be asked for.
        """
        if (row := self._rows.get(self.key(path))) is None:
            return float("nan")
        found = np.flatnonzero(row.tokens == token)
        return float(np.exp(row.logp[found[0]] + row.share)) if len(found) else 0.0
