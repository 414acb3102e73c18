"""EAGLE and EAGLE-3: one row for each committed token and drafted node, with a cache of keys and values of its own.

    row i, committed:  (token i + 1, the target's states of position i)     predicts token i + 2
    row of a node:     (its token, the output of its parent's row)          predicts the token below the node

A row needs its parent's output, so every forward is one level deeper. The rows of nodes are dropped when tokens are
committed, and computed anew from the target's own states (2401.15077, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leapahead.drafters.heads.cache import CachedHead, CachedText, Planes, Span, attention, causal
from leapahead.drafters.heads.head import Drafted, Key, Path
from leapahead.drafters.heads.modules import RowModule
from leapahead.models.choices import Rows
from leapahead.models.transformers.modes import computing


class RowText(CachedText):
    """One text of a `RowHead`.

    Attributes:
        nodes: path -> its place among the nodes' rows.
        states: path -> output of its row, float [hidden_size]; the empty path is the last committed row's.
    """

    def __init__(self, tokens: Sequence[int], known: int, planes: Planes) -> None:
        super().__init__(tokens, known, planes)
        self.nodes: dict[Path, int] = {}
        self.states: dict[Path, Tensor] = {}

    def discard(self) -> None:
        self.nodes = {}
        if self.missing:
            self.states = {}
        else:
            self.states = {path: state for path, state in self.states.items() if not path}

    def key(self, path: Path) -> Key:
        return path

    def computable(self, path: Path) -> bool:
        return path[:-1] in self.states if path else self.missing > 0


class Part(NamedTuple):
    """The rows of one text in a forward.

    Attributes:
        text: whose rows they are.
        tokens: of the rows.
        states: float [rows, hidden_size], which they read.
        positions: of the rows.
        begin: the cache row of the first of them.
        mask: bool [rows, begin + rows], what each row attends to; None for everything.
        paths: of the rows whose candidates are wanted, the last ones.
    """

    text: RowText
    tokens: list[int]
    states: Tensor
    positions: list[int]
    begin: int
    mask: Tensor | None
    paths: list[Path]


class RowHead(CachedHead):
    """See the module."""

    module: RowModule

    def new_text(self, tokens: Sequence[int], known: int, planes: Planes) -> RowText:
        return RowText(tokens, known, planes)

    @computing()
    def forward(self, wanted: Sequence[tuple[RowText, Sequence[Path]]]) -> list[Drafted]:
        parts = [self._part(text, list(paths), text.missing) for text, paths in wanted]
        states = self._computed(parts)
        ends, rows = [], []
        for part, own in zip(parts, states, strict=True):
            last = own[len(own) - len(part.paths) :]
            part.text.states.update(zip(part.paths, last, strict=True))
            ends.append(last)
        logits = self.read_out(torch.cat(ends), [path for part in parts for path in part.paths])
        for part, some in zip(parts, torch.split(logits, [len(part.paths) for part in parts]), strict=True):
            rows.append(Drafted(part.paths, Rows(some)))
        return rows

    def read_out(self, states: Tensor, paths: Sequence[Path]) -> Tensor:
        """The logits of rows, float [rows, draft vocabulary].

        Args:
            states: float [rows, hidden_size], their outputs.
            paths: of the rows.
        """
        return self.module.logits(states)

    @computing()
    def read(self, text: RowText, rows: int) -> None:
        self._computed([self._part(text, [], rows)])

    def _part(self, text: RowText, paths: list[Path], most: int) -> Part:
        """The rows of committed tokens that are missing, or if there are none, those of nodes."""
        if (waiting := text.take(most)) is not None:
            count, begin = len(waiting), text.length
            mask = causal(begin, count, self.device)
            tokens = list(text.tokens[begin + 1 : begin + 1 + count])
            assert len(tokens) == count, "a hidden state was given for a token that is not committed"
            text.length += count
            states = self.module.fuse(waiting)
            positions = list(range(begin, begin + count))
            return Part(text, tokens, states, positions, begin, mask, [()] if paths else [])
        begin = text.length + len(text.nodes)
        visible = torch.zeros(len(paths), begin + len(paths), dtype=torch.bool)
        visible[:, : text.length] = True
        for row, path in enumerate(paths):
            text.nodes[path] = begin - text.length + row
            for end in range(1, len(path) + 1):
                visible[row, text.length + text.nodes[path[:end]]] = True
        states = torch.stack([text.states[path[:-1]] for path in paths])
        positions = [text.length - 1 + len(path) for path in paths]
        mask = visible.to(self.device)
        return Part(text, [path[-1] for path in paths], states, positions, begin, mask, paths)

    def _computed(self, parts: Sequence[Part]) -> list[Tensor]:
        """The outputs of the rows of each part, float [rows, hidden_size]; their keys and values are in the caches."""

        attend = attention([Span(part.text, part.begin, len(part.tokens), part.mask) for part in parts])
        numbers = [pair for part in parts for pair in zip(part.tokens, part.positions, strict=True)]
        tokens, positions = torch.tensor(numbers, device=self.device).T[:, None]  # in one copy
        states = torch.cat([part.states for part in parts])[None]
        found = self.module(tokens, states, positions, attend)[0]
        return [*torch.split(found, [len(part.tokens) for part in parts])]
