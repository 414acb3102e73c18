"""Sources of the compiled module, for the compiled search: suffix, recycling, siblings and the token table.

Each is a subclass of its counterpart in Python, with the attribute `compiled`. The compiled search makes that read the
text and observe the steps, and asks it for candidates; it calls none of the methods that the search in Python calls.
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
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source

LONGEST = 4  # tokens of a context, at most, in the compiled recycling


def counterpart(source: Source, encoded: bool = False) -> Source:
    """The compiled source that does the same as `source`, which has not begun; `source` itself where there is none.

    Args:
        source: in Python.
        encoded: whether it is for a sequence with an encoder's input, which the compiled search does not show.
    """
    if type(source) is Suffix and not encoded:
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

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        if fresh := len(sequence.tokens) - self.automaton.tokens:
            self.compiled.read(sequence.tokens[-fresh:], fresh, None)

    def read(self, sequence: SequenceView) -> None:
        shared = self._shared
        if shared is None or shared.version == self._version:
            return
        self._version = shared.version
        tokens, fresh = sequence.tokens, len(sequence.tokens) - self.automaton.tokens
        volumes = [
            (volume.automaton, len(volume.texts))
            for volume in shared.volumes
            if isinstance(volume.automaton, native.module.SuffixAutomaton)  # all of them
        ]
        self.compiled.read(tokens[-max(fresh, LOCATE_TOKENS) :], fresh, volumes)


class CompiledRecycling(Recycling):
    """See `Recycling`."""

    compiled: native.module.Recycling

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        shared = self._shared.compiled if self._shared is not None else None
        self.compiled = native.module.Recycling(self.k, self.longest, shared)

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:
        first = max(0, rows.top_k_start + 1 - self.longest)
        if rows.top_k_start < rows.end:
            self.compiled.read_rows(sequence.tokens[first : rows.end], *rows.top_k(self.k))

    def figures(self) -> dict[str, Any]:
        return {"contexts": len(self.compiled)}


class CompiledSiblings(Siblings):
    """See `Siblings`."""

    compiled: native.module.Siblings

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        self.compiled = native.module.Siblings(self._k)

    def figures(self) -> dict[str, Any]:
        return {"positions": len(self.compiled)}


class CompiledTableSource(TableSource):
    """See `TableSource`."""

    compiled: native.module.TokenTable

    def __init__(self, table: TokenTable) -> None:
        super().__init__(table)
        self.compiled = native.module.TokenTable(np.asarray(table.tokens), np.asarray(table.logp).view(np.uint16))
