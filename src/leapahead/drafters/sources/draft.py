"""A draft model as a source: the likeliest next tokens of a smaller model (2211.17192, 2302.01318; trees: 2305.09781).

Its candidates after a path cost a draft forward, so it has some only where such a forward was run; where that pays is
decided by `leapahead.drafters.draft_forwards`. With seed-aware drafting its distribution is ranked by what this seed
will choose, which is the coupled rule (drafter-invariant speculative decoding, 2408.07978; several draft models:
2506.05632).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from leapahead.drafters.draft_runner import DraftRunner, Path
from leapahead.models.base import CHAIN, Target
from leapahead.planner.backoff import BackOff
from leapahead.planner.draft import Forward, SequenceView, Step
from leapahead.planner.source import Candidate, FloatArray, Score, Source

KEPT, KEPT_SAMPLED = 64, 1024  # likeliest tokens that are kept of each path: greedy, and for ranking with the noise
Row = tuple[npt.NDArray[np.int64], FloatArray]  # tokens, likeliest first; their log-probabilities


class DraftSource(Source):
    """One draft model, for one sequence.

    Args:
        target: the draft model.
        name: who drafted a node: "draft", and with several draft models "draft2", ...

    Attributes:
        steps_without: steps since its last draft forward.
        back_off: of its draft forwards.
    """

    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})
    costs_forward: ClassVar[bool] = True

    def __init__(self, target: Target, name: str = "draft") -> None:
        self.target = target
        self.name = name  # type: ignore[misc]  # there may be several
        self.steps_without = 0
        self.back_off = BackOff()
        self._runner: DraftRunner | None = None
        self._rows: dict[Path, Row] = {}
        self._length = 0

    def begin(self, sequence: SequenceView) -> None:
        self._sequence = sequence
        self._limit = min(sequence.vocab_size, self.target.info.vocab_size)

    @property
    def runner(self) -> DraftRunner:
        """Made when it is first needed: only then has the target read the prompt, which an early exit shares."""
        if self._runner is None:
            self._runner = DraftRunner(self.target, self._sequence.tokens, owner=self._sequence.owner)
        return self._runner

    def read(self, sequence: SequenceView) -> None:
        if self._length != len(sequence.tokens):
            self._length = len(sequence.tokens)
            self._rows = {}
            self.steps_without += 1
            self.back_off.suspended()  # counts the step
            self.runner.commit()

    def root(self, sequence: SequenceView) -> Path | None:
        return None if self.runner.failed else ()

    def follow(self, state: Path, token: int) -> Path:
        return (*state, token)

    def has_candidates(self, state: Path) -> bool:
        """Whether a draft forward has computed this path."""
        return state in self._rows

    def candidates(self, state: Path, limit: int) -> list[Candidate]:
        if (row := self._rows.get(state)) is None:
            return []
        tokens, logp = row
        return _candidates(tokens[:limit], logp[:limit])

    def seed_aware_candidates(self, state: Path, limit: int, score: Score) -> list[Candidate]:
        if (row := self._rows.get(state)) is None:
            return []
        tokens, logp = row
        if len(tokens) > limit:
            best = np.argpartition(score(tokens, logp), -limit)[-limit:]
            tokens, logp = tokens[best], logp[best]
        return _candidates(tokens, logp)

    def probabilities(self, parents: Sequence[Path], tokens: Sequence[int]) -> FloatArray:
        return np.array([self._probability(path, token) for path, token in zip(parents, tokens, strict=True)])

    def _probability(self, path: Path, token: int) -> float:
        """q of a token after a path: 0 if it is not among those that are kept, NaN if the path was not computed."""
        if (row := self._rows.get(path)) is None:
            return float("nan")
        found = np.flatnonzero(row[0] == token)
        return float(np.exp(row[1][found[0]])) if len(found) else 0.0

    @staticmethod
    def draft(wanted: Sequence[tuple[DraftSource, Sequence[Path]]]) -> Forward | None:
        """Computes paths of several texts in ONE forward of the draft model that these sources share.

        Their runners have read their prompts.

        Returns:
            The forward, timed; None if there was nothing to compute, or it failed.
        """
        with wanted[0][0].target.lock:
            for source, paths in wanted:
                source.runner.add(paths)
            drafts, forward = DraftRunner.forward([source.runner for source, _ in wanted])
            for (source, _), draft in zip(wanted, drafts, strict=True):
                if draft is None:
                    continue
                source.steps_without = 0
                kept = KEPT_SAMPLED if source._sequence.sampled else KEPT
                tokens, logits = draft.choices.top_k(min(kept, source._limit))
                logp = logits - logits[:, :1]
                logp -= np.log(np.exp(logp).sum(axis=1, keepdims=True))
                for path, node in zip(draft.paths, draft.nodes, strict=True):
                    row = node - draft.choices.num_computed
                    known = tokens[row] < source._limit  # the draft model's vocabulary may be the larger one
                    source._rows[path] = tokens[row][known], logp[row][known]
        return forward

    def observe(self, sequence: SequenceView, step: Step) -> None:
        """Nothing: `read` is called before the next draft."""

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.target.info.name, "forwards": 0, "seconds": 0.0}
        if self._runner is not None:
            found |= {"forwards": self._runner.forwards, "seconds": round(self._runner.seconds, 4)}
            if self._runner.failed:
                found["stopped"] = self._runner.failed
        return found


def _candidates(tokens: npt.NDArray[np.int64], logp: FloatArray) -> list[Candidate]:
    return [Candidate(token, value, ()) for token, value in zip(tokens.tolist(), logp.tolist(), strict=True)]
