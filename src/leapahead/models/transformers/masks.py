"""From trees to the tensors of one forward: tokens, positions, and attention masks.

    one row of the batch, length 5, tree of 4 nodes   slot   0 1 2 3 4 | 5 6 7 8 | 9 ..
        root (position 5)                                    x x x x x | x       |
        ├─ a (6)                                             x x x x x | x x     |       committed entries,
        │  └─ c (7)                                          x x x x x | x x   x |       ancestors, itself
        └─ b (6)                                             x x x x x | x   x   |

A sliding window is a distance of positions, not of slots: b is at slot 7 and position 6. Rows shorter than the longest
attend to nothing behind their own nodes. Padding nodes repeat the root and attend to the committed entries and
themselves, so that no row of a mask is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leapahead.core.tree import IntArray, TokenTree
from leapahead.models.transformers.families import Pattern

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a forward over several trees, each behind its own committed entries.

    Behind those a row of the batch has slots of its own: of its computed nodes, which went through earlier, then of the
    new ones.

    Attributes:
        tokens: int64 [batch, n]; of the new nodes.
        positions: int64 [batch, n]; of the new nodes.
        lengths: int64 [batch]; committed entries.
        slots: int64 [batch, own]; of all nodes. Rows with fewer nodes than others repeat the slot of their root.
        there: int64 [batch, own]; the positions of all nodes.
        ancestors: bool [batch, n, own], or uint8 with 0 for false; which nodes the new ones attend to.
        end: number of slots that the forward reads.
        straight: whether the positions of the new nodes of every tree are `end - n`, `end - n + 1`, ..., which is what
            a model counts that is not told positions, and whether all entries lie at the slot of their position.
        offsets: int64 [batch, 1]; see `Row.offset`; None for none.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    slots: Tensor
    there: Tensor
    ancestors: Tensor
    end: int
    straight: bool = False
    offsets: Tensor | None = None

    @classmethod
    def of(
        cls,
        trees: Sequence[TokenTree],
        lengths: Sequence[int],
        device: torch.device,
        num_computed: Sequence[int] | None = None,
        left_out: Sequence[int] | None = None,
        offsets: Sequence[int] = (),
    ) -> Inputs:
        """Of these trees.

        Args:
            trees: one for each row.
            lengths: committed entries of each row.
            device: of the tensors.
            num_computed: see `Target.step`.
            left_out: see `Row.left_out`; a pattern of attention by positions is not possible with it.
            offsets: see `Row.offset`.
        """
        num_computed, left_out = num_computed or [0] * len(trees), left_out or [0] * len(trees)
        n = max(len(tree) - first for tree, first in zip(trees, num_computed, strict=True))
        own = max(num_computed) + n
        values = np.zeros((len(trees), 2 * n + 2 * own + 1), dtype=np.int64)
        ancestors = np.zeros((len(trees), n, own), dtype=np.bool_)
        for row, each in enumerate(zip(trees, lengths, num_computed, left_out, strict=True)):
            fill(values[row], ancestors[row], *each)
        begins = {length + first for length, first in zip(lengths, num_computed, strict=True)}
        moved = torch.from_numpy(values).to(device)  # one transfer
        straight = len(begins) == 1 and not any(left_out) and all(tree.is_chain for tree in trees)
        found = cls.over(moved, torch.from_numpy(ancestors).to(device), max(begins) + n, straight)
        return replace(found, offsets=torch.tensor(offsets, device=device)[:, None]) if any(offsets) else found

    @classmethod
    def over(cls, values: Tensor, ancestors: Tensor, end: int, straight: bool = False) -> Inputs:
        """Views of what `fill` has written: int64 [batch, 2 * n + 2 * own + 1], and bool or uint8 [batch, n, own]."""
        _, n, own = ancestors.shape
        tokens, positions, slots, there, length = torch.split(values, [n, n, own, own, 1], dim=1)
        return cls(tokens, positions, length[:, 0], slots, there, ancestors, end, straight)

    @property
    def told(self) -> Tensor:
        """int64 [batch, n]: the positions of the new nodes as the model is told them. Masks count the tokens alone."""
        return self.positions if self.offsets is None else self.positions + self.offsets

    @property
    def key_positions(self) -> Tensor:
        """int64 [batch, end]: the position of the entry in every slot."""
        slots = torch.arange(self.end, device=self.tokens.device)
        return slots.repeat(len(self.tokens), 1).scatter_(1, self.slots, self.there)

    def masks(self, patterns: Mapping[str, Pattern], dtype: torch.dtype | None) -> Tensor | dict[str, Tensor]:
        """[batch, 1, n, kv] per pattern: boolean, or with `dtype` additive. One tensor if there is but one pattern."""
        n = self.tokens.shape[1]
        slots = torch.arange(self.end, device=self.tokens.device)
        visible = (slots < self.lengths[:, None])[:, None].repeat(1, n, 1)  # [batch, n, kv]
        visible.scatter_(2, self.slots[:, None].expand(self.ancestors.shape), self.ancestors.bool())
        masks = {}
        for name, pattern in patterns.items():
            mask = visible
            if pattern.window is not None or pattern.chunk is not None:
                there = self.key_positions[:, None]  # [batch, 1, kv]
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


def fill(values: IntArray, ancestors: BoolArray, tree: TokenTree, length: int, first: int, left_out: int = 0) -> None:
    """Writes one row of a batch: its tokens, positions, slots, the positions of these, and its length.

    Args:
        values: int64 [2 * n + 2 * own + 1].
        ancestors: bool [n, own], all false.
        tree: whose nodes from `first` on are new; at most `n` of them.
        length: committed entries.
        first: nodes that are computed; at most `own - n`.
        left_out: see `Row.left_out`.
    """
    n, own = ancestors.shape
    size, new = len(tree), len(tree) - first
    there = [length + left_out + depth for depth in tree.depth_list]
    tokens = tree.token_list[first:] + tree.token_list[:1] * (n - new)
    positions = there[first:] + there[:1] * (n - new)
    slots = [*range(length, length + first + n), *[length] * (own - first - n)]
    values[:] = [*tokens, *positions, *slots, *there, *there[:1] * (own - size), length]
    ancestors[:new, :size] = (np.tri(size, dtype=np.bool_) if tree.is_chain else tree.ancestor_mask)[first:]
    if size < own:
        ancestors[new:, size : first + n] = np.eye(n - new, dtype=np.bool_)
        ancestors[:, first + n :] = ancestors[:, :1]  # padding repeats the root's slot
