"""Sources of the compiled module, for the compiled search: suffix, recycling, siblings and the token table.

Each is a subclass of its counterpart in Python and hands on what it reads to the attribute `compiled`. The compiled
search asks that for candidates, and calls none of the methods that the search in Python calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from leapahead import native
from leapahead.drafters.sources.recycling import Recycling
from leapahead.drafters.sources.siblings import Siblings
from leapahead.drafters.sources.suffix import LOCATE_TOKENS, Suffix
from leapahead.drafters.sources.token_table import TableSource
from leapahead.drafters.token_table import TokenTable
from leapahead.models.choices import PromptRows
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.source import Source

LONGEST = 4  # tokens of a context, at most, in the compiled recycling


def counterpart(source: Source) -> Source:
    """The compiled source that does the same as `source`, which has not begun; `source` itself where there is none."""
    if type(source) is Suffix:
        return CompiledSuffix()
    if type(source) is Recycling and source.longest <= LONGEST:
        return CompiledRecycling(source.k, source.longest)
    if type(source) is Siblings:
        return CompiledSiblings()
    if type(source) is TableSource:
        return CompiledTableSource(source.table)
    return source


class CompiledSuffix(Suffix):
    """See `Suffix`."""

    compiled: native.module.Suffix

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.automaton, native.module.SuffixAutomaton)
        self.compiled = native.module.Suffix(self.automaton)
        self._version = -1  # of the past texts that were read last

    def read(self, sequence: SequenceView) -> None:
        tokens, shared, volumes = sequence.tokens, self._shared, None
        fresh = len(tokens) - self.automaton.tokens
        if shared is not None and shared.version != self._version:
            self._version = shared.version
            volumes = [
                (volume.automaton, len(volume.texts))
                for volume in shared.volumes
                if isinstance(volume.automaton, native.module.SuffixAutomaton)  # all of them
            ]
        if fresh or volumes is not None:
            self.compiled.read(tokens[-max(fresh, LOCATE_TOKENS) :], fresh, volumes)

    def observe(self, sequence: SequenceView, step: Step) -> None:
        """The tokens are read before the next search."""


class CompiledRecycling(Recycling):
    """See `Recycling`."""

    compiled: native.module.Recycling

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        shared = self._shared.compiled if self._shared is not None else None
        self.compiled = native.module.Recycling(self.k, self.longest, shared)

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:
        first = max(0, rows.start + 1 - self.longest)
        self.compiled.read_rows(sequence.tokens[first : rows.start + len(rows.tokens)], *rows.top_k(self.k))

    def read(self, sequence: SequenceView) -> None:
        self.compiled.set_end(sequence.tokens[-self.longest :])

    def observe(self, sequence: SequenceView, step: Step) -> None:
        tree, end = step.tree, step.position + 1
        last = sequence.tokens[max(0, end - self.longest) : end]
        following, logits = step.choices.top_k(self.k)
        self.compiled.observe(last, tree.token_list, tree.parent_list, step.verdict.path, following, logits)

    def figures(self) -> dict[str, Any]:
        return {"contexts": len(self.compiled)}


class CompiledSiblings(Siblings):
    """See `Siblings`."""

    compiled: native.module.Siblings

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        self.compiled = native.module.Siblings(self._k)

    def read(self, sequence: SequenceView) -> None:
        self.compiled.set_end(len(sequence.tokens))

    def observe(self, sequence: SequenceView, step: Step) -> None:
        length, tree, compiled = len(sequence.tokens), step.tree, self.compiled
        if compiled.age(length, step.position, tree.depth_list):
            following, logits = step.choices.top_k(self._k)
            last = step.verdict.path[-1]
            compiled.observe(length, step.position, tree.parent_list, tree.depth_list, last, following, logits)

    def figures(self) -> dict[str, Any]:
        return {"positions": len(self.compiled)}


class CompiledTableSource(TableSource):
    """See `TableSource`."""

    compiled: native.module.TokenTable

    def __init__(self, table: TokenTable) -> None:
        super().__init__(table)
        self.compiled = native.module.TokenTable(np.asarray(table.tokens), np.asarray(table.logp).view(np.uint16))

    def read(self, sequence: SequenceView) -> None:
        self.compiled.set_end(sequence.root)

    def observe(self, sequence: SequenceView, step: Step) -> None:
        """The last token is read before the next search."""
