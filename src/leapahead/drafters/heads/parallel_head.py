"""P-EAGLE: EAGLE-3's rows for committed tokens, and behind the newest one a mask for every further depth (2602.01469).

    row i, committed:  (token i + 1, the target's states of position i)     predicts token i + 2
    mask d behind it   (mask token, one learned state)                      predicts token i + 2 + d

A mask sees the committed rows and the masks before it, and is overwritten by the next forward. The candidates of a
depth are the same below every path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from leapahead.drafters.heads.cache import CachedHead, Planes, Span, attention, causal
from leapahead.drafters.heads.config import EagleConfig
from leapahead.drafters.heads.dflash_head import DFlashText
from leapahead.drafters.heads.head import Drafted, Path
from leapahead.drafters.heads.modules import ParallelEagle
from leapahead.models.choices import Rows
from leapahead.models.transformers.modes import computing


class ParallelText(DFlashText):
    """One text of a `ParallelHead`.

    Attributes:
        state: output of the newest committed row, float [hidden_size]; None before there is one.
    """

    state: Tensor | None = None

    def computable(self, path: Path) -> bool:
        return super().computable(path) and (self.state is not None or self.missing > 0)


class Part(NamedTuple):
    """The rows of one text in a forward.

    Attributes:
        span: the rows, the committed ones first.
        committed: how many of them are of committed tokens.
        tokens: of the rows.
        states: float [rows, hidden_size], which they read.
    """

    span: Span
    committed: int
    tokens: list[int]
    states: Tensor


class ParallelHead(CachedHead):
    """See the module."""

    config: EagleConfig
    module: ParallelEagle
    sizes: ClassVar[tuple[int, ...]] = (1,)

    def new_text(self, tokens: Sequence[int], known: int, planes: Planes) -> ParallelText:
        return ParallelText(self.config.depths, False, tokens, known, planes)

    @computing()
    def forward(self, wanted: Sequence[tuple[ParallelText, Sequence[Path]]]) -> list[Drafted]:
        masks = self.config.depths - 1
        texts = [text for text, _ in wanted]
        rows = self._computed([self._part(text, text.missing, masks) for text in texts])
        ends = []
        for text, own in zip(texts, rows, strict=True):
            text.is_computed = True
            assert text.state is not None, "a text is drafted for that has no committed row"
            ends.append(torch.cat((text.state[None], own[len(own) - masks :])))
        logits = self.module.logits(torch.stack(ends))
        return [Drafted(range(self.config.depths), Rows(each)) for each in logits]

    @computing()
    def read(self, text: ParallelText, rows: int) -> None:
        self._computed([self._part(text, rows, 0)])

    def _part(self, text: ParallelText, most: int, masks: int) -> Part:
        """At most so many missing rows of committed tokens, and so many masks."""
        begin, waiting = text.length, text.take(most)
        states = [] if waiting is None else [self.module.fuse(waiting)]
        count = sum(map(len, states))
        tokens = [*text.tokens[begin + 1 : begin + 1 + count], *[self.config.mask_token] * masks]
        states.append(self.module.masked()[0].expand(masks, -1))
        text.length += count
        span = Span(text, begin, count + masks, causal(begin, count + masks, self.device))
        return Part(span, count, tokens, torch.cat(states))

    def _computed(self, parts: Sequence[Part]) -> list[Tensor]:
        """The outputs of the rows of each part, float [rows, hidden_size]."""
        places = [place for span, *_ in parts for place in range(span.begin, span.begin + span.rows)]
        tokens = torch.tensor([[token for part in parts for token in part.tokens]], device=self.device)
        states = torch.cat([part.states for part in parts])[None]
        positions = torch.tensor([places], device=self.device)
        found = self.module(tokens, states, positions, attention([part.span for part in parts]))[0]
        rows = torch.split(found, [part.span.rows for part in parts])
        for part, own in zip(parts, rows, strict=True):
            if part.committed:
                assert isinstance(part.span.text, ParallelText)
                part.span.text.state = own[part.committed - 1]
        return [*rows]
