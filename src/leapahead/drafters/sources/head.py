"""A trained head as a source: it reads the target's hidden states of every committed token, and drafts from them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import LeapaheadError
from leapahead.drafters.sources.computed import Path
from leapahead.drafters.sources.forward import ForwardModel, ForwardSource
from leapahead.models.base import Capture, Cost
from leapahead.models.choices import PromptRows
from leapahead.planner.draft import Forward, SequenceView, Step
from leapahead.planner.source import Feature

if TYPE_CHECKING:
    from leapahead.drafters.heads.head import Head

CHUNK = 512  # rows of a text that are computed in one step; fewer are computed together with a draft
DEEPEST = 7  # depths that are told apart in the keys of estimates, where candidates depend on the depth
FAILURES = LeapaheadError, RuntimeError  # the latter of PyTorch, such as a full memory


class HeadSource(ForwardSource):
    """One head, for one sequence.

    Args:
        model: that it is a source of.
        head: the head itself, beside the target.
        name: who drafted a node: the kind of the head, with a number where there are several of it.
    """

    def __init__(self, model: ForwardModel, head: Head, name: str) -> None:
        super().__init__(model, name)
        self.head = head
        self.capture = Capture(hidden=head.layers)  # type: ignore[misc]  # they differ from head to head
        self.forwards, self.seconds = 0, 0.0
        self._opened, self._failed = False, ""

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        self._limit = min(sequence.vocab_size, self.head.vocab_size)
        with self._trying():
            self.text = self.head.open(sequence.tokens, sequence.owner)

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:
        if not self._failed:
            with self._trying():
                self.head.renew(self.text, rows.start, sequence.owner)
        self._append(rows.start, rows.states(self.head.layers))

    def committed(self, sequence: SequenceView, step: Step) -> None:
        nodes = step.verdict.path
        states = step.choices.states(self.head.layers)
        is_chain = nodes == tuple(range(len(nodes)))
        self._append(step.position, states[: len(nodes)] if is_chain else states[list(nodes)])

    def _append(self, start: int, states: Any) -> None:
        """Gives the head the hidden states of positions from `start` on."""
        if self._failed or start + len(states) <= self.text.known:
            return
        if start > self.text.known:
            self.fail(f"the target gave no hidden states of positions {self.text.known} to {start - 1}")
            return
        with self._trying():
            self.text.append(self.head.as_states(states[self.text.known - start :]))

    @property
    def failed(self) -> str:
        return self._failed

    @property
    def opened(self) -> bool:
        return self._opened

    @property
    def reading(self) -> bool:
        return not self._failed and self.text.missing > CHUNK

    @property
    def missing(self) -> int:
        return self.text.missing

    def read_ahead(self) -> None:
        self._opened = True  # the next draft forward reads what is missing, unless it is too much for one
        if self.reading:
            with self.head.lock, self._trying():
                self.head.read(self.text, CHUNK)

    def fail(self, reason: str) -> None:
        self._failed = reason
        self.close()

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Within the block, what fails ends the drafts of the head for this text, and not the text.

        So does an interrupt, which may leave rows counted that were not computed; it goes on.
        """
        try:
            yield
        except BaseException as error:
            self.fail(str(error) or type(error).__name__)
            if not isinstance(error, FAILURES):
                raise

    def commit(self) -> None:
        if not self._failed:
            self.text.discard()

    def finish(self, sequence: SequenceView) -> None:
        if not self._failed:
            with self._trying():
                self.head.keep(self.text, sequence.owner)

    def close(self) -> None:
        self.text = self.head.open(())

    def computable(self, path: Path) -> bool:
        return self.text.computable(path)

    def reach(self, path: Path) -> int:
        return self.text.reach(path)

    def key(self, path: Path) -> Hashable:
        return self.text.key(path)

    def feature(self, path: Path) -> Feature:
        return (min(len(path), DEEPEST),) if self.text.reach(()) > 1 else ()

    def target_ids(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self.head.target_ids(tokens)

    @classmethod
    def draft(cls, wanted: Sequence[tuple[HeadSource, Sequence[Path]]]) -> Forward | None:
        head = wanted[0][0].head
        clock = head.latency.clock
        rows = sum(source.missing + len(paths) for source, paths in wanted)
        with head.lock:
            began = clock()
            try:
                drafts = head.forward([(source.text, paths) for source, paths in wanted])
            except BaseException as error:  # see `_trying`
                for source, _ in wanted:
                    source.fail(str(error) or type(error).__name__)
                if not isinstance(error, FAILURES):
                    raise
                return None
            for (source, _), draft in zip(wanted, drafts, strict=True):
                source.keep(draft.keys, draft.rows)
        seconds = clock() - began
        for source, _ in wanted:
            source.steps_without = 0
            source.forwards += 1
            source.seconds += seconds / len(wanted)
        longest = max(len(source.text.tokens) for source, _ in wanted)
        return Forward(seconds, Cost(max(rows, len(wanted)), len(wanted), longest))

    def observe(self, sequence: SequenceView, step: Step) -> None:
        """Nothing: `read` is called before the next draft."""

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.head.name, "forwards": self.forwards, "seconds": round(self.seconds, 4)}
        return found | ({"stopped": self._failed} if self._failed else {})
