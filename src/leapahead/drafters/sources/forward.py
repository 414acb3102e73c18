"""The interface of a source whose candidates cost a forward of another network: a draft model, or a trained head.

It has candidates only where such a forward was run; where that pays is decided by `leapahead.drafters.draft_forwards`.
With seed-aware drafting its distribution is ranked by what this seed will choose, which is the coupled rule
(drafter-invariant speculative decoding, 2408.07978; several draft models: 2506.05632).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from leapahead.models.choices import Rows
from leapahead.planner.backoff import BackOff
from leapahead.planner.draft import Forward, SequenceView
from leapahead.planner.profile import LatencyProfiles
from leapahead.planner.source import Candidate, Feature, FloatArray, Score, Source

Path = tuple[int, ...]  # drafted tokens from below the last committed one
KEPT, KEPT_SAMPLED = 64, 1024  # likeliest tokens that are kept of each path: greedy, and for ranking with the noise
Row = tuple[npt.NDArray[np.int64], FloatArray]  # tokens, likeliest first; their log-probabilities


class ForwardModel(Protocol):
    """A network whose forwards give candidates: a loaded draft model or head, shared by all texts."""

    @property
    def latency(self) -> LatencyProfiles: ...

    @property
    def title(self) -> str:
        """What messages call it: "the draft model small"."""

    @property
    def source_name(self) -> str:
        """Who drafted a node, in reports; a number is added where several have the same."""

    def source(self, name: str) -> ForwardSource:
        """A new source, for one sequence."""

    def known(self, tokens: Sequence[int], owner: str) -> int:
        """How many tokens of a prompt, its first ones, there are whose hidden states it does not need."""

    def prepare(self) -> None:
        """Loads or measures its latency profile."""

    def measure(self) -> None:
        """Measures it anew."""


class ForwardSource(Source):
    """One such network, for one sequence.

    Args:
        model: the network.
        name: who drafted a node.

    Attributes:
        steps_without: steps since its last draft forward.
        back_off: of its draft forwards.
        unsure: there are no candidates after a path where the network's likeliest token has less probability.
    """

    costs_forward: ClassVar[bool] = True

    def __init__(self, model: ForwardModel, name: str) -> None:
        self.model = model
        self.name = name  # type: ignore[misc]  # there may be several
        self.steps_without = 0
        self.back_off = BackOff()
        self.unsure = 0.0
        self._rows: dict[Hashable, Row] = {}
        self._length = 0
        self._limit = 0

    def begin(self, sequence: SequenceView) -> None:
        self._sequence = sequence

    def read(self, sequence: SequenceView) -> None:
        if self._length != len(sequence.tokens):
            self._length = len(sequence.tokens)
            self._rows = {}
            self.steps_without += 1
            self.back_off.suspended()  # counts the step
            self.commit()

    # ------------------------------------------------------------------------------------ its network's text

    @property
    @abstractmethod
    def failed(self) -> str:
        """Why the network cannot follow this text any more; "" while it can."""

    @property
    @abstractmethod
    def opened(self) -> bool:
        """Whether it has begun to read the prompt."""

    @property
    @abstractmethod
    def reading(self) -> bool:
        """Whether it has begun to and is not through, so that it cannot draft yet."""

    @property
    @abstractmethod
    def missing(self) -> int:
        """Rows of committed tokens that the next forward must compute beside what it is asked for."""

    @abstractmethod
    def read_ahead(self) -> None:
        """Reads the next chunk of the text."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Stops following the text and releases its cache."""

    @abstractmethod
    def commit(self) -> None:
        """The text has grown: discards what was drafted and was not committed."""

    @classmethod
    @abstractmethod
    def draft(cls, wanted: Sequence[tuple[Any, Sequence[Path]]]) -> Forward | None:
        """Computes paths of several texts in ONE forward of the network that these sources share.

        Args:
            wanted: sources, which are through with reading, and the paths after which they want candidates.

        Returns:
            The forward, timed; None if there was nothing to compute, or it failed.
        """

    def computable(self, path: Path) -> bool:
        """Whether one forward can compute the candidates after a path."""
        return True

    def reach(self, path: Path) -> int:
        """The number of depths of which a forward from a path gives candidates."""
        return 1

    # -------------------------------------------------------------------------------------------- candidates

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
        for key, row in zip(keys, range(len(tokens)) if rows is None else rows, strict=True):
            known = tokens[row] < self._limit  # the network's vocabulary may be the larger one
            self._rows[key] = tokens[row][known], logp[row][known]

    def target_ids(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The target's ids of tokens of the network's vocabulary."""
        return tokens

    def root(self, sequence: SequenceView) -> Path | None:
        return None if self.failed else ()

    def follow(self, state: Path, token: int) -> Path | None:
        return (*state, token)

    def has_candidates(self, state: Path) -> bool:
        """Whether a draft forward has computed this path."""
        return self.key(state) in self._rows

    def _sure(self, state: Path) -> Row | None:
        """The row of a path, unless the network is unsure there."""
        row = self._rows.get(self.key(state))
        return None if row is None or np.exp(row[1][:1].sum()) < self.unsure else row

    def candidates(self, state: Path, limit: int) -> list[Candidate]:
        if (row := self._sure(state)) is None:
            return []
        tokens, logp = row
        return self._candidates(state, tokens[:limit], logp[:limit])

    def seed_aware_candidates(self, state: Path, limit: int, score: Score) -> list[Candidate]:
        if (row := self._sure(state)) is None:
            return []
        tokens, logp = row
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
        """q of a token after a path: 0 if it is not among those that are kept, NaN if the path was not computed."""
        if (row := self._rows.get(self.key(path))) is None:
            return float("nan")
        found = np.flatnonzero(row[0] == token)
        return float(np.exp(row[1][found[0]])) if len(found) else 0.0
