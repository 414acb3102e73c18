"""Attention of drafted rows, which see committed rows and their own ancestors, but no row beside them.

             committed     first level   second level
    row r    x x x . .     . . x . .     . . x . .

EAGLE-3 is trained on its own states (2503.01840, section 3.2): its rows are computed once more for every depth, each
below itself. The same attention computes the nodes of many trees at once when a head is evaluated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

Cached = dict[int, tuple[Tensor, Tensor]]  # layer -> keys and values, [batch, key heads, rows, dim] each


class DraftedAttention:
    """An `Attend` of `leapahead.drafters.heads.modules`.

    Its first forward computes the committed rows. After each `descend`, one forward computes a level of drafted rows.

    Args:
        visible: bool [batch or 1, rows, committed rows], the committed rows that each row sees.
    """

    def __init__(self, visible: Tensor) -> None:
        self._visible = visible
        self._committed: Cached = {}
        self._levels: list[Cached] = []

    def descend(self, parents: Tensor | None = None) -> None:
        """The rows that follow are drafted below those before.

        Args:
            parents: int64 [batch, rows], the row of the level before that each one is below; None for its own place.
        """
        if parents is not None:
            index = parents[:, None, :, None]
            self._levels = [
                {layer: (_taken(k, index), _taken(v, index)) for layer, (k, v) in level.items()}
                for level in self._levels
            ]
        self._levels.append({})

    def select(self, visible: Tensor) -> None:
        """The rows that follow are drafted below some of the committed ones, not below those that were drafted.

        Args:
            visible: bool [batch, rows or 1, committed rows], the committed rows that each of them sees. There are
                several of the same text if there was one text so far.
        """
        self._visible, self._levels = visible, []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.to(v.dtype)  # rotary positions may have widened q and k
        (self._levels[-1] if self._levels else self._committed)[layer] = (k, v)
        batch, count = q.shape[0], q.shape[2]
        parts = [self._committed[layer], *(level[layer] for level in self._levels)]
        groups = q.shape[1] // k.shape[1]
        keys, values = (
            torch.cat([each[which].expand(batch, -1, -1, -1) for each in parts], dim=2).repeat_interleave(groups, dim=1)
            for which in (0, 1)
        )
        own = torch.eye(count, dtype=torch.bool, device=q.device)
        committed = self._visible.expand(batch, count, -1)
        drafted = [own.expand(batch, count, count)] * len(self._levels)
        mask = torch.cat([committed, *drafted], dim=-1)[:, None]
        return F.scaled_dot_product_attention(q.to(v.dtype), keys, values, attn_mask=mask)


def _taken(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [batch, heads, rows, dim] at an index [batch, 1, rows, 1]."""
    return rows.gather(2, index.expand(-1, rows.shape[1], -1, rows.shape[3]))
