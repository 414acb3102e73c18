"""A draft model as a source: a smaller model's likeliest next tokens (2211.17192, 2302.01318; trees: 2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from leapahead.drafters.draft_runner import DraftRunner
from leapahead.drafters.sources.forward import ForwardModel, ForwardSource, Path
from leapahead.models.base import CHAIN, Target
from leapahead.planner.draft import Forward, SequenceView, Step


class DraftSource(ForwardSource):
    """One draft model, for one sequence.

    Args:
        model: that it is a source of.
        target: the draft model itself.
        name: who drafted a node: "draft", and with several draft models "draft2", ...
    """

    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, model: ForwardModel, target: Target, name: str) -> None:
        super().__init__(model, name)
        self.target = target
        self._runner: DraftRunner | None = None

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        self._limit = min(sequence.vocab_size, self.target.info.vocab_size)

    @property
    def runner(self) -> DraftRunner:
        """Made when it is first needed: only then has the target read the prompt, which an early exit shares."""
        if self._runner is None:
            sequence = self._sequence
            self._runner = DraftRunner(self.target, sequence.tokens, owner=sequence.owner, source=sequence.source)
        return self._runner

    @property
    def failed(self) -> str:
        return self.runner.failed

    @property
    def opened(self) -> bool:
        return self.runner.opened

    @property
    def reading(self) -> bool:
        return self.runner.reading

    @property
    def missing(self) -> int:
        return self.runner.missing

    def read_ahead(self) -> None:
        self.runner.read_ahead()

    def fail(self, reason: str) -> None:
        self.runner.fail(reason)

    def commit(self) -> None:
        self.runner.commit()

    @classmethod
    def draft(cls, wanted: Sequence[tuple[DraftSource, Sequence[Path]]]) -> Forward | None:
        with wanted[0][0].target.lock:
            for source, paths in wanted:
                source.runner.add(paths)
            drafts, forward = DraftRunner.forward([source.runner for source, _ in wanted])
            for (source, _), draft in zip(wanted, drafts, strict=True):
                if draft is None:
                    continue
                source.steps_without = 0
                rows = [node - draft.choices.num_computed for node in draft.nodes]
                source.keep(draft.paths, draft.choices, rows)
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
