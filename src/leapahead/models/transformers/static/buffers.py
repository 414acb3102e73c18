"""The inputs of captured forwards: one buffer on the host, one copy to the same place on the device.

    int64 of every row      tokens, positions, slots, their positions, length     as `masks.fill` writes them
                            moves from, moves to, home, written slots             see `cache.Slots`
    then bool               ancestors [batch, rows, own]

The device's buffer never moves, so that a captured forward finds its inputs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leapahead.core.tree import BoolArray, IntArray, TokenTree
from leapahead.models.transformers.masks import Inputs, fill
from leapahead.models.transformers.static.cache import MOVES, Slots
from leapahead.models.transformers.static.shapes import Shape

BYTES = 2**20
WORD = 8  # bytes of an int64


class Draft(NamedTuple):
    """One sequence of a forward.

    Attributes:
        tree: whose nodes from `first` on are new.
        length: committed entries of its row.
        first: nodes whose entries are there.
        moves: of the row, which are outstanding.
    """

    tree: TokenTree
    length: int
    first: int
    moves: Sequence[tuple[int, int]] = ()


class _Layout(NamedTuple):
    """Where the inputs of forwards of one shape lie in the host's buffer, and their bytes in both buffers."""

    raw: npt.NDArray[np.uint8]
    inputs: IntArray
    source: IntArray
    goal: IntArray
    home: IntArray
    written: IntArray
    ancestors: BoolArray
    host: Tensor
    device: Tensor


class Buffers:
    """See the module.

    Args:
        device: of the model. For CUDA, the host's buffer is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self.host = torch.zeros(BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        self.device = torch.zeros(BYTES, dtype=torch.uint8, device=device)
        self._layouts: dict[tuple[int, int, int], _Layout] = {}
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @staticmethod
    def fits(shape: Shape) -> bool:
        """Whether there is room for the inputs of a forward of this shape."""
        return _words(shape) * WORD + shape.all_rows * shape.own <= BYTES

    def write(self, shape: Shape, drafts: Sequence[Draft]) -> None:
        """Fills the buffer for the stepped rows, in the order of the cache, and starts the copy."""
        if self._copied is not None:
            self._copied.synchronize()  # with the last copy, which has long been made
        raw, inputs, source, goal, home, written, ancestors, host, device = self._layout(shape)
        raw[:] = 0
        inputs[:, 2 * shape.rows :] = 1  # padding rows attend to the first slot
        written[:] = drafts[0].length + drafts[0].first + shape.rows  # where nothing is read, of the first row
        for row, draft in enumerate(drafts):
            fill(inputs[row], ancestors[row], draft.tree, draft.length, draft.first)
            if draft.moves:
                source[row, : len(draft.moves)], goal[row, : len(draft.moves)] = np.array(draft.moves).T
            home[row] = row
            written[row] = np.arange(shape.rows) + draft.length + draft.first
        device.copy_(host, non_blocking=True)
        if self._copied is not None:
            # On the stream of the copy: by default it would be that of the current device, which may be another one.
            self._copied.record(torch.cuda.current_stream(self.device.device))

    def _layout(self, shape: Shape) -> _Layout:
        key = shape.batch, shape.rows, shape.own
        if (found := self._layouts.get(key)) is None:
            words, size = _words(shape) * WORD, shape.all_rows * shape.own
            raw = self.host.numpy()[: words + size]
            values = raw[:words].view(np.int64).reshape(shape.batch, -1)
            ancestors = raw[words:].view(np.bool_).reshape(shape.batch, shape.rows, shape.own)
            inputs, source, goal, home, written = np.split(values, np.cumsum(_columns(shape))[:-1], axis=1)
            host, device = (each[: words + size] for each in (self.host, self.device))
            found = _Layout(raw, inputs, source, goal, home, written, ancestors, host, device)
            self._layouts[key] = found
        return found

    def read(self, shape: Shape) -> tuple[Inputs, Slots]:
        """Views of the device's buffer."""
        words, size = _words(shape) * WORD, shape.all_rows * shape.own
        values = self.device[:words].view(torch.int64).view(shape.batch, -1)
        # As bytes: the compiler of torch 2.11 takes no view of bytes as booleans.
        ancestors = self.device[words : words + size].view(shape.batch, shape.rows, shape.own)
        inputs, source, goal, home, written = torch.split(values, _columns(shape), dim=1)
        return Inputs.over(inputs, ancestors, shape.end), Slots(source, goal, home[:, 0], written)


def _columns(shape: Shape) -> list[int]:
    return [2 * shape.rows + 2 * shape.own + 1, MOVES, MOVES, 1, shape.rows]


def _words(shape: Shape) -> int:
    return shape.batch * sum(_columns(shape))
