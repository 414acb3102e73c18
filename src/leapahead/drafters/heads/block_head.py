"""Medusa: one forward gives the candidates of all depths, from the target's state at the newest position alone.

The candidates of a depth are the same below every path; the planner's best-first growth chooses among their
combinations by how often each head and rank was right (2401.10774, section 2.3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from leapahead.drafters.heads.head import Drafted, Head, HeadText, Key, Path
from leapahead.drafters.heads.modules import Medusa
from leapahead.models.choices import Rows
from leapahead.models.transformers.modes import computing


class BlockText(HeadText):
    """One text of a `BlockHead`.

    Args:
        depths: that one forward predicts.
        known: see `HeadText`.

    Attributes:
        state: the target's at the newest position, float [hidden_size]; None before the first one.
        is_computed: whether a forward has read it.
    """

    def __init__(self, tokens: Sequence[int], depths: int, known: int) -> None:
        super().__init__(tokens, known)
        self.depths, self.is_computed = depths, False
        self.state: Tensor | None = None

    def append(self, states: Tensor) -> None:
        self.known += len(states)
        if len(states):
            self.state, self.is_computed = states[-1], False

    def discard(self) -> None:
        self.is_computed = False

    def key(self, path: Path) -> Key:
        return len(path)

    def computable(self, path: Path) -> bool:
        return not path and self.state is not None and not self.is_computed

    def reach(self, path: Path) -> int:
        return self.depths - len(path)


class BlockHead(Head):
    """See the module."""

    module: Medusa
    sizes: ClassVar[tuple[int, ...]] = (1,)

    def known(self, tokens: Sequence[int], owner: str) -> int:
        return max(0, len(tokens) - 2)  # the state before the last token is the newest one that there is

    def open(self, tokens: Sequence[int], owner: str = "") -> BlockText:
        return BlockText(tokens, self.config.depths, self.known(tokens, owner))

    @computing()
    def forward(self, wanted: Sequence[tuple[BlockText, Sequence[Path]]]) -> list[Drafted]:
        states = []
        for text, _ in wanted:
            assert text.state is not None, "no hidden state was given"
            text.is_computed = True
            states.append(text.state)
        logits = self.module(torch.stack(states))
        return [Drafted(range(self.config.depths), Rows(each)) for each in logits]
