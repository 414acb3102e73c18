"""DFlash, DFlash 2, DSpark and JetSpec: one forward of a block of mask tokens gives the candidates of all depths.

    cache    keys and values of the target's fused states, of every layer and committed token
    block    rows behind them, which the next forward overwrites

The candidates of a depth are the same below every path with DFlash; the planner chooses among their combinations, which
DDTree does too (2604.12989). With DSpark they depend on the token before, so they are computed after the likeliest
tokens of the depth before; with DFlash 2 each candidate of a depth is scored after each one of the depth before.
JetSpec (2606.18394) is DFlash whose rows see only those before them in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from leapahead.core.tree import IntArray
from leapahead.drafters.heads.cache import KEYS, VALUES, CachedHead, CachedText, Planes, Span, attention
from leapahead.drafters.heads.config import DFlashConfig
from leapahead.drafters.heads.dflash import DFlash
from leapahead.drafters.heads.dflash2 import DFlash2
from leapahead.drafters.heads.head import Drafted, Key, Path
from leapahead.drafters.heads.modules import Attend
from leapahead.drafters.sources.computed import KEPT_SAMPLED
from leapahead.models.choices import FloatArray, Rows
from leapahead.models.transformers.modes import computing

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

    config: DFlashConfig
    module: DFlash
    sizes: ClassVar[tuple[int, ...]] = (1,)

    def new_text(self, tokens: Sequence[int], known: int, planes: Planes) -> DFlashText:
        return DFlashText(self.config.depths, self.config.is_chained, tokens, known, planes)

    @computing()
    def forward(self, wanted: Sequence[tuple[DFlashText, Sequence[Path]]]) -> list[Drafted]:
        texts = [text for text, _ in wanted]
        self._read(texts)
        count = self.module.rows
        last = torch.tensor([text.tokens[text.length] for text in texts], device=self.device)
        places = [place for text in texts for place in range(text.length, text.length + count)]
        attend = self._attention(texts)
        tokens = self.module.block(last).view(1, -1)
        found = self.module(tokens, torch.tensor([places], device=self.device), attend)
        states = self.module.predicting(found.view(len(texts), count, -1))
        for text in texts:
            text.is_computed = True
        return self.drafted(states, last)

    def drafted(self, states: Tensor, last: Tensor) -> list[Drafted]:
        """The candidates of each text.

        Args:
            states: float [texts, depths, hidden_size], of the rows that predict.
            last: int64 [texts], the last committed tokens.
        """
        logits = self.module.logits(states)
        if self.config.markov:
            return [self._chained(*each) for each in zip(logits, states, last, strict=True)]
        return [Drafted(range(self.config.depths), Rows(each)) for each in logits]

    def _attention(self, texts: Sequence[DFlashText]) -> Attend:
        """That of the blocks of texts."""
        config, rows = self.config, self.module.rows
        full = attention([Span(text, text.length, rows, self._mask(text, config.causal)) for text in texts])
        if not config.sliding:
            return full
        is_causal = config.causal or config.sliding_causal
        masks = [self._mask(text, is_causal, config.window) for text in texts]
        sliding = attention([Span(text, text.length, rows, mask) for text, mask in zip(texts, masks, strict=True)])
        return lambda layer, q, k, v: (sliding if layer in config.sliding else full)(layer, q, k, v)

    def _mask(self, text: DFlashText, is_causal: bool, window: int = 0) -> Tensor | None:
        """What the rows of a text's block see; see `Span`.

        Args:
            text: its committed tokens are before the block.
            is_causal: whether of the block they see only themselves and the rows before.
            window: how many of the last committed tokens they see; 0 for all.
        """
        hidden = max(0, text.length - window) if window else 0
        if not is_causal and not hidden:
            return None
        mask = torch.ones(self.module.rows, text.length + self.module.rows, dtype=torch.bool, device=self.device)
        if is_causal:
            mask.tril_(text.length)
        mask[:, :hidden] = False
        return mask

    @computing()
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

    def _chained(self, logits: Tensor, states: Tensor, last: Tensor) -> Drafted:
        """DSpark's candidates after the likeliest tokens of every depth, of one text; see `drafted`.

        Args:
            logits: float [depths, draft vocabulary], without the bias.
        """
        rows, followed = [self.module.after(logits[:1], states[:1], last[None])], list[Tensor]()
        scores = rows[0].log_softmax(-1)
        for depth in range(1, self.config.depths):
            best = scores.amax(0).topk(min(FOLLOWED, scores.shape[1]))
            followed.append(best.indices if self._device_ids is None else self._device_ids[best.indices])
            rows.append(self.module.after(logits[depth], states[depth], followed[-1]))
            scores = best.values[:, None] + rows[-1].log_softmax(-1)
        tokens = torch.stack(followed).tolist() if followed else []  # the one time that the device is waited for
        keys: list[Key] = [(0,), *((depth, token) for depth, some in enumerate(tokens, 1) for token in some)]
        return Drafted(keys, Rows(torch.cat(rows)))

    @cached_property
    def _device_ids(self) -> Tensor | None:
        """The target's ids of the tokens of the head's vocabulary, on its device; None where they are the same."""
        return None if self._ids is None else torch.from_numpy(self._ids).to(self.device)


class Candidates(Rows):
    """Rows of which only some tokens have logits.

    Args:
        tokens: int64 [rows, candidates], these tokens.
        logits: float [rows, candidates], theirs.
    """

    def __init__(self, tokens: IntArray, logits: Tensor) -> None:
        super().__init__(logits)
        self._tokens = tokens

    def top_k(self, k: int) -> tuple[IntArray, FloatArray]:
        places, logits = super().top_k(k)
        return np.take_along_axis(self._tokens, places, axis=1), logits


class DFlash2Head(DFlashHead):
    """DFlash 2, whose candidates of a depth are scored after every candidate of the depth before."""

    module: DFlash2

    def drafted(self, states: Tensor, last: Tensor) -> list[Drafted]:
        selector, depths = self.module.candidate_selector, self.config.depths
        logits = self.module.logits(states)
        best = logits.topk(min(KEPT_SAMPLED, logits.shape[-1]), dim=-1)
        count = selector.count
        tokens, first = best.indices, best.values[:, :, None, :count]
        before = torch.cat((last[:, None, None].expand(-1, 1, count), tokens[:, :-1, :count]), dim=1)
        scores = selector.scores(first, tokens[:, :, None, :count], states[:, :, None], before)
        others = best.values[:, :, None, count:].expand(-1, -1, count, -1)
        rows = torch.cat((scores, others), dim=-1)  # [texts, depths, tokens before, tokens]
        found = []
        for ids, some in zip(tokens.cpu().numpy(), rows, strict=True):
            keys: list[Key] = [(0,)]
            keys += [(depth, token) for depth in range(1, depths) for token in ids[depth - 1, :count].tolist()]
            candidates = ids[[0, *np.repeat(range(1, depths), count)]]
            found.append(Drafted(keys, Candidates(candidates, torch.cat((some[0, :1], some[1:].flatten(0, 1))))))
        return found
