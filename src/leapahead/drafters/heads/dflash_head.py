"""DFlash, DSpark and JetSpec: one forward of a block of mask tokens gives the candidates of all depths.

    cache    keys and values of the target's fused states, of every layer and committed token
    block    rows behind them, which the next forward overwrites

The candidates of a depth are the same below every path with DFlash; the planner chooses among their combinations, which
DDTree does too (2604.12989). With DSpark they depend on the token before, so they are computed after the likeliest
tokens of the depth before. JetSpec (2606.18394) is DFlash whose rows see only those before them in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from leapahead.drafters.heads.cache import KEYS, VALUES, CachedHead, CachedText, Planes, Span, attention, causal
from leapahead.drafters.heads.dflash import DFlash
from leapahead.drafters.heads.head import Drafted, Key, Path
from leapahead.models.choices import Rows

FOLLOWED = 16  # of DSpark, tokens of each depth after which there are candidates of the next one


class DFlashText(CachedText):
    """One text of a `DFlashHead`.

    Args:
        depths: that one forward predicts.
        chained: whether candidates depend on the token before.
        tokens, known, planes: see `CachedText`.
    """

    def __init__(self, depths: int, chained: bool, tokens: Sequence[int], known: int, planes: Planes) -> None:
        super().__init__(tokens, known, planes)
        self.depths, self.chained = depths, chained
        self.is_computed = False

    def append(self, states: Tensor) -> None:
        super().append(states)
        self.is_computed = False

    def discard(self) -> None:
        self.is_computed = False

    def key(self, path: Path) -> Key:
        return (len(path), *path[-1:]) if self.chained else len(path)

    def computable(self, path: Path) -> bool:
        return not path and self.known > 0 and not self.is_computed

    def reach(self, path: Path) -> int:
        return self.depths - len(path)


class DFlashHead(CachedHead):
    """See the module."""

    module: DFlash
    sizes: ClassVar[tuple[int, ...]] = (1,)

    def new_text(self, tokens: Sequence[int], known: int, planes: Planes) -> DFlashText:
        return DFlashText(self.config.depths, bool(self.config.markov), tokens, known, planes)

    @torch.no_grad()
    def forward(self, wanted: Sequence[tuple[DFlashText, Sequence[Path]]]) -> list[Drafted]:
        texts = [text for text, _ in wanted]
        self._read(texts)
        count = self.module.rows
        last = torch.tensor([text.tokens[text.length] for text in texts], device=self.device)
        places = [place for text in texts for place in range(text.length, text.length + count)]
        is_causal = self.config.causal
        masks = [causal(text.length, count, self.device) if is_causal else None for text in texts]
        spans = [Span(text, text.length, count, mask) for text, mask in zip(texts, masks, strict=True)]
        attend = attention(spans)
        tokens = self.module.block(last).view(1, -1)
        found = self.module(tokens, torch.tensor([places], device=self.device), attend)
        states = self.module.predicting(found.view(len(texts), count, -1))
        for text in texts:
            text.is_computed = True
        if self.config.markov:
            return [self._chained(own, token) for own, token in zip(states, last, strict=True)]
        logits = self.module.one(states, last)
        return [Drafted(range(self.config.depths), Rows(each)) for each in logits]

    @torch.no_grad()
    def read(self, text: DFlashText, rows: int) -> None:
        self._read([text], rows)

    def _read(self, texts: Sequence[DFlashText], most: int | None = None) -> None:
        """Computes missing rows of texts, at most so many of each; all by default."""
        read = [(text, found) for text in texts if (found := text.take(most or text.missing)) is not None]
        if not read:
            return
        places = [place for text, own in read for place in range(text.length, text.length + len(own))]
        states = torch.cat([own for _, own in read])[None]
        for layer, both in enumerate(self.module.context(states, torch.tensor([places], device=self.device))):
            for which, rows in zip((KEYS, VALUES), both, strict=True):
                parts = torch.split(rows[0], [len(own) for _, own in read], dim=1)
                for (text, _), part in zip(read, parts, strict=True):
                    text.write((layer, which), text.length, part)
        for text, own in read:
            text.length += len(own)

    def _chained(self, states: Tensor, last: Tensor) -> Drafted:
        """DSpark's candidates after the likeliest tokens of every depth.

        Args:
            states: float [depths, hidden_size], of the rows that predict.
            last: int64 [], the last committed token.
        """
        keys: list[Key] = [(0,)]
        rows = [self.module.one(states[0], last)[None]]
        scores = rows[0].log_softmax(-1)
        for depth in range(1, self.config.depths):
            best = scores.amax(0).topk(min(FOLLOWED, scores.shape[1]))
            tokens = self.target_ids(best.indices.cpu().numpy())
            keys += [(depth, token) for token in tokens.tolist()]
            before = torch.from_numpy(tokens).to(self.device)
            rows.append(self.module.one(states[depth].expand(len(tokens), -1), before))
            scores = best.values[:, None] + rows[-1].log_softmax(-1)
        return Drafted(keys, Rows(torch.cat(rows)))
