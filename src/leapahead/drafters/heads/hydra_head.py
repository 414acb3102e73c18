"""Hydra: each path of drafted tokens is one row, which needs no other path's row (2402.05109, section 3).

Hydra++ computes one more row for every committed token, by its layer over the target's states, and caches its keys and
values. Drafted tokens have none: the heads read their embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leapahead.drafters.heads.cache import CachedHead, CachedText, Planes, Span, attention, causal
from leapahead.drafters.heads.head import Drafted, Key, Path
from leapahead.drafters.heads.hydra import Hydra
from leapahead.models.choices import Rows
from leapahead.models.transformers.modes import computing


class HydraText(CachedText):
    """One text of a `HydraHead`.

    Args:
        depths: number of heads.
        tokens, known, planes: see `CachedText`.

    Attributes:
        state: what the heads read of the newest position, float [hidden_size]; None before it is computed.
    """

    def __init__(self, depths: int, tokens: Sequence[int], known: int, planes: Planes) -> None:
        super().__init__(tokens, known, planes)
        self.depths = depths
        self.state: Tensor | None = None

    def discard(self) -> None:
        """Nothing: no row depends on a drafted one."""

    def key(self, path: Path) -> Key:
        return path

    def computable(self, path: Path) -> bool:
        return len(path) < self.depths and (self.state is not None or self.missing > 0)


class HydraHead(CachedHead):
    """See the module."""

    module: Hydra

    def new_text(self, tokens: Sequence[int], known: int, planes: Planes) -> HydraText:
        return HydraText(self.config.depths, tokens, known, planes)

    @computing()
    def forward(self, wanted: Sequence[tuple[HydraText, Sequence[Path]]]) -> list[Drafted]:
        self._read([text for text, _ in wanted])
        rows = [(text, path) for text, paths in wanted for path in paths]
        logits: list[Tensor | None] = [None] * len(rows)
        for depth in {len(path) for _, path in rows}:
            places = [place for place, (_, path) in enumerate(rows) if len(path) == depth]
            some = [rows[place] for place in places]
            states = torch.stack([text.state for text, _ in some if text.state is not None])
            tokens = torch.tensor([[text.tokens[text.length], *path] for text, path in some], device=self.device)
            for place, found in zip(places, self.module.one(depth, states, tokens), strict=True):
                logits[place] = found
        found = torch.stack([each for each in logits if each is not None])
        parts = torch.split(found, [len(paths) for _, paths in wanted])
        return [Drafted(list(paths), Rows(part)) for (_, paths), part in zip(wanted, parts, strict=True)]

    @computing()
    def read(self, text: HydraText, rows: int) -> None:
        self._read([text], rows)

    def _read(self, texts: Sequence[HydraText], most: int | None = None) -> None:
        """Computes missing rows of texts, at most so many of each; all by default."""
        read = [(text, found) for text in texts if (found := text.take(most or text.missing)) is not None]
        if not read:
            return
        spans = [
            Span(text, text.length, len(states), causal(text.length, len(states), self.device)) for text, states in read
        ]
        places = [place for span in spans for place in range(span.begin, span.begin + span.rows)]
        states = torch.cat([states for _, states in read])[None]
        found = self.module.read(states, torch.tensor([places], device=self.device), attention(spans))[0]
        for (text, _), own in zip(read, torch.split(found, [span.rows for span in spans]), strict=True):
            text.length += len(own)
            text.state = own[-1]
