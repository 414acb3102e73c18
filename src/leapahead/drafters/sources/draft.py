"""A draft model as a source: a smaller model's likeliest next tokens (2211.17192, 2302.01318; trees: 2305.09781).

One that was trained with mask tokens predicts several depths in one forward.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

from leapahead.drafters.draft_runner import DraftRunner
from leapahead.drafters.sources.computed import Path
from leapahead.drafters.sources.forward import ForwardModel, ForwardSource
from leapahead.models.base import CHAIN, Target
from leapahead.planner.draft import Forward, SequenceView, Step
from leapahead.planner.source import Feature

MASKED = 8  # depths of which one forward gives candidates; PARD was trained for so many


class DraftSource(ForwardSource):
    """One draft model, for one sequence.

    Args:
        model: that it is a source of.
        target: the draft model itself.
        name: who drafted a node: "draft", and with several draft models "draft2", ...

    Attributes:
        window: newest tokens that the draft model sees, see `DraftRunner`; set before it is first needed.
    """

    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, model: ForwardModel, target: Target, name: str) -> None:
        super().__init__(model, name)
        self.target = target
        self.window = 0
        self._runner: DraftRunner | None = None

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        self._limit = min(sequence.vocab_size, self.target.info.vocab_size)

    @property
    def runner(self) -> DraftRunner:
        """Made when it is first needed: only then has the target read the prompt, which an early exit shares."""
        if self._runner is None:
            sequence = self._sequence
            self._runner = DraftRunner(
                self.target, sequence.tokens, owner=sequence.owner, source=sequence.source, window=self.window
            )
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

    def computed(self, path: Path) -> Path:
        """The path that the draft model computes to give candidates after a path."""
        return path

    def kept(self, path: Path) -> Hashable:
        """What the candidates at the end of a computed path are kept under."""
        return path

    @classmethod
    def draft(cls, wanted: Sequence[tuple[DraftSource, Sequence[Path]]]) -> Forward | None:
        with wanted[0][0].target.lock:
            for source, paths in wanted:
                source.runner.add([source.computed(path) for path in paths])
            drafts, forward = DraftRunner.forward([source.runner for source, _ in wanted])
            for (source, _), draft in zip(wanted, drafts, strict=True):
                if draft is None:
                    continue
                source.steps_without = 0
                rows = [node - draft.choices.num_computed for node in draft.nodes]
                source.keep([source.kept(path) for path in draft.paths], draft.choices, rows)
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


class ParallelDraftSource(DraftSource):
    """A draft model that was trained with mask tokens: one forward gives several depths (PARD, 2504.18583).

        path a     computed: a m m m        m the mask token

    The row of a has the candidates after it, and those of the masks the candidates one, two, ... tokens below, whatever
    these tokens are. After a path that was computed itself, its own row counts.
    """

    def computed(self, path: Path) -> Path:
        return path + (self.target.info.mask_token,) * (MASKED - 1)

    def kept(self, path: Path) -> tuple[Path, int]:
        masks = 0
        while masks < min(MASKED - 1, len(path)) and path[-1 - masks] == self.target.info.mask_token:
            masks += 1
        return path[: len(path) - masks], masks

    def key(self, path: Path) -> tuple[Path, int]:
        for masks in range(min(MASKED, len(path) + 1)):
            if (key := (path[: len(path) - masks], masks)) in self._rows:
                return key
        return path, 0

    def feature(self, path: Path) -> Feature:
        return (self.key(path)[1],)

    def reach(self, path: Path) -> int:
        return MASKED

    @property
    def rows(self) -> int:
        return MASKED
