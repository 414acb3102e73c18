"""Probes as a source: rows of the target's own forward, below a node where the text was expected to branch off.

    step         root ─ a ─ b            chosen: a, then x
                  │     └─ p1 ─ p2       the probes below a stand where x and the token behind it will
                  └─ p1 ─ p2
    next step    x ─ ?  ─ ?              their outputs are the candidates of both depths below x

The group below the last node of the committed path gives the candidates of the next step; where there was none, there
are no candidates. They depend on the depth alone, as Medusa's do.
"""

from __future__ import annotations

from typing import Any, ClassVar

from leapahead.core.tree import Probes
from leapahead.drafters.sources.computed import ComputedSource, Path
from leapahead.models.base import CHAIN, EMBEDDINGS
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.source import Feature

DEEPEST = 7  # depths that are told apart in the keys of estimates


class ProbeSource(ComputedSource):
    """The probes of one head, for one sequence.

    Args:
        tokens: ids of their embeddings in the target, one for each depth.
        model: name of the head, for reports.
        name: who drafted a node.

    Attributes:
        steps_without: steps since probes rode for it last.
    """

    needs: ClassVar[frozenset[str]] = frozenset({CHAIN, EMBEDDINGS})

    def __init__(self, tokens: tuple[int, ...], model: str, name: str) -> None:
        super().__init__(name)
        self.tokens, self.model = tokens, model
        self.steps_without = self.groups = self.computed = 0

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        self._limit = sequence.vocab_size

    def below(self, node: int, deepest: int) -> Probes | None:
        """The group below a node; None if no probe could help there.

        Args:
            node: of a tree.
            deepest: greatest depth below it at which a row may lie.
        """
        return Probes(node, self.tokens[:deepest]) if deepest > 0 else None

    def is_own(self, probes: Probes) -> bool:
        """Whether a group is of this source."""
        return probes.tokens == self.tokens[: len(probes.tokens)]

    @property
    def has_rows(self) -> bool:
        """Whether there are candidates."""
        return bool(self._rows)

    def read(self, sequence: SequenceView) -> None:
        if self._length != len(sequence.tokens):
            self._length, self._rows = len(sequence.tokens), {}
        self.steps_without += 1

    def observe(self, sequence: SequenceView, step: Step) -> None:
        self._length, self._rows = len(sequence.tokens), {}
        last = step.verdict.path[-1]
        for probes, rows in zip(step.tree.probes, step.choices.probes, strict=True):
            if self.is_own(probes):
                self.groups += 1
                self.computed += len(probes.tokens)
                if probes.node == last:
                    self.keep(range(len(probes.tokens)), rows)

    def root(self, sequence: SequenceView) -> Path | None:
        return () if self._rows else None

    def follow(self, state: Path, token: int) -> Path | None:
        return (*state, token) if len(state) + 1 < len(self._rows) else None

    def key(self, path: Path) -> int:
        return len(path)

    def feature(self, path: Path) -> Feature:
        return (min(len(path), DEEPEST),)

    def figures(self) -> dict[str, Any]:
        return {"model": self.model, "groups": self.groups, "rows": self.computed}
