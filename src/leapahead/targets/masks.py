"""From trees to the tensors of one forward: tokens, positions, and who sees whom.

    one row of the batch, length 5, tree of 4 nodes   slot   0 1 2 3 4 | 5 6 7 8 | 9 ..
        root (position 5)                                    x x x x x | x       |
        ├─ a (6)                                             x x x x x | x x     |       committed entries,
        │  └─ c (7)                                          x x x x x | x x   x |       ancestors, itself
        └─ b (6)                                             x x x x x | x   x   |

A window is a distance of positions, not of slots: b is at slot 7 and position 6. Rows shorter than the longest see
nothing behind their own nodes. Padding nodes repeat the root and see the committed entries and themselves, so that no
line of a mask is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leapahead.targets.families import Pattern
from leapahead.tree import TokenTree


@dataclass(frozen=True)
class Inputs:
    """What a model is given for several trees, each behind its own committed entries.

    Attributes:
        tokens: int64 [batch, n].
        positions: int64 [batch, n].
        lengths: int64 [batch]; committed entries.
        ancestors: bool [batch, n, n].
        longest: the greatest of `lengths`.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    ancestors: Tensor
    longest: int

    @classmethod
    def of(cls, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device) -> Inputs:
        batch, n = len(trees), max(len(tree) for tree in trees)
        whole = np.empty((batch, 2 * n + 1), dtype=np.int64)  # tokens, positions, length: one transfer
        ancestors = np.zeros((batch, n, n), dtype=np.bool_)
        for row, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
            own = len(tree)
            whole[row, :own] = tree.tokens
            whole[row, own:n] = tree.tokens[0]
            whole[row, n : n + own] = length + tree.depths
            whole[row, n + own : 2 * n] = length
            whole[row, 2 * n] = length
            ancestors[row, :own, :own] = np.tri(own, dtype=np.bool_) if tree.is_chain else tree.ancestor_mask
            ancestors[row, own:, own:] = np.eye(n - own, dtype=np.bool_)
        moved = torch.from_numpy(whole).to(device)
        return cls(
            tokens=moved[:, :n],
            positions=moved[:, n : 2 * n],
            lengths=moved[:, 2 * n],
            ancestors=torch.from_numpy(ancestors).to(device),
            longest=max(lengths),
        )

    def masks(self, patterns: Mapping[str, Pattern], dtype: torch.dtype | None) -> Tensor | dict[str, Tensor]:
        """[batch, 1, n, kv] per pattern: boolean, or with `dtype` additive. One tensor if there is but one pattern."""
        batch, n = self.tokens.shape
        end = self.longest + n
        slots = torch.arange(end, device=self.tokens.device)
        visible = (slots < self.lengths[:, None])[:, None].repeat(1, n, 1)  # [batch, n, kv]
        new = self.lengths[:, None] + slots[:n]  # [batch, n]; the slots of the nodes
        visible.scatter_(2, new[:, None].expand(batch, n, n), self.ancestors)
        masks = {}
        for name, pattern in patterns.items():
            mask = visible
            if pattern.window is not None or pattern.chunk is not None:
                there = slots.repeat(batch, 1).scatter_(1, new, self.positions)[:, None]  # [batch, 1, kv]; positions
                here = self.positions[:, :, None]
                if pattern.window is not None:
                    mask = mask & (here - there < pattern.window)
                if pattern.chunk is not None:
                    mask = mask & (here // pattern.chunk == there // pattern.chunk)
            if dtype is not None:
                hidden = torch.finfo(dtype).min
                additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, hidden)
                masks[name] = additive[:, None]
            else:
                masks[name] = mask[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))
