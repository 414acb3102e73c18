"""The KV cache: blocks of a fixed number of tokens, shared by sequences that begin with the same tokens.

    tokens of a sequence    0 ............ 31 | 32 ........... 63 | 64 .. 70 a b c
    its blocks                     4          |         9         |        2

    a b c  entries of the last step's nodes, behind the committed ones; the commit moves the accepted path together

A block that is full of committed entries is never written again, so it may belong to many sequences; `Pool.uses` counts
them. The block in which a sequence goes on belongs to it alone: what another one has of it is copied. A closed sequence
leaves its blocks behind for prompts that begin with its tokens, until they are needed.

The memory is numpy's, one array for all planes (keys or values of a layer) of one shape, and OpenVINO reads and writes
it in place. It grows by doubling. This module knows neither OpenVINO nor trees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import LeapaheadError
from leapahead.models.openvino import tracks

Entries: TypeAlias = npt.NDArray[Any]

FIRST_BLOCKS = 16


@dataclass(frozen=True)
class Plane:
    """Keys or values of one layer.

    Attributes:
        shape: of a block: heads, tokens, numbers of a head.
        dtype: numpy's, of the same width as OpenVINO's.
    """

    shape: tuple[int, int, int]
    dtype: npt.DTypeLike


@dataclass(eq=False)
class Track(tracks.Track):
    """What the cache holds of one sequence.

    Attributes:
        blocks: in the order of the text.
    """

    blocks: list[int] = field(default_factory=list)


class Pool(tracks.Cache[Track]):
    """The blocks of all sequences.

    Args:
        planes: of all layers.
        limit: greatest number of committed tokens, all sequences together; the nodes of a step come on top.

    Attributes:
        size: tokens of a block.
        version: raised when the memory was moved.
    """

    def __init__(self, planes: Sequence[Plane], limit: int) -> None:
        self.size = planes[0].shape[1]
        super().__init__(max(limit, self.size))
        self.version = 0
        kinds = list(dict.fromkeys(planes))
        counts = {kind: 0 for kind in kinds}
        self._places: list[tuple[int, int]] = []  # of each plane: its array, and the index there
        for plane in planes:
            self._places.append((kinds.index(plane), counts[plane]))
            counts[plane] += 1
        self._kinds = [(counts[kind], kind) for kind in kinds]
        self._empty()

    def _empty(self) -> None:
        self.version += 1  # first: after an interrupt below, nobody must go on with tensors over the former arrays
        self._arrays: list[Entries] = [
            np.zeros((count, FIRST_BLOCKS, *kind.shape), kind.dtype) for count, kind in self._kinds
        ]
        self.uses = [0] * FIRST_BLOCKS
        self._free = list(range(FIRST_BLOCKS - 1, -1, -1))

    def memory(self, plane: int) -> Entries:
        """The entries of a plane: [blocks, heads, tokens, numbers]."""
        array, index = self._places[plane]
        found: Entries = self._arrays[array][index]
        return found

    @property
    def bytes_per_token(self) -> int:
        """Of all planes."""
        return sum(array[:, 0].nbytes for array in self._arrays) // self.size

    def forget(self) -> None:
        super().forget()
        if not self.open:
            self._empty()

    def reclaim(self, used: Collection[Track]) -> None:
        super().reclaim(used)
        tracks = (*self.open, *self._idle)
        known = sum(len(track.blocks) for track in tracks)
        if (sum(self.uses), len(self._free)) != (known, self.uses.count(0)):  # blocks were left behind, too
            counts = Counter(block for track in tracks for block in track.blocks)
            self.uses = [counts[block] for block in range(len(self.uses))]
            self._free = [block for block, uses in enumerate(self.uses) if not uses]

    def _new(self, tokens: list[int], reserve: int, owner: str) -> Track:
        return Track(tokens, reserve=reserve, owner=owner)

    # Entries

    def extend(self, tracks: Sequence[Track], counts: Sequence[int]) -> None:
        """Makes room for so many entries behind the committed and pending ones of each track.

        Raises:
            CacheFull: the sequences have grown beyond the limit.
        """
        self._check_room()
        for track, count in zip(tracks, counts, strict=True):
            while len(track.blocks) * self.size < track.length + count:
                track.blocks.append(self._new_block())

    def keep(self, track: Track, slots: Sequence[int]) -> None:
        """Commits the pending entries at these slots, counted from the committed ones, in this order.

        They are moved to follow each other; the others are discarded.
        """
        assert slots[-1] < track.pending, "commit without a step"
        moved = [(slot, place) for place, slot in enumerate(slots) if slot != place]
        if moved:
            source, goal = np.array(moved).T + track.length
            blocks = np.array(track.blocks)
            from_block, from_at = blocks[source // self.size], source % self.size
            to_block, to_at = blocks[goal // self.size], goal % self.size
            for array in self._arrays:  # [planes, blocks, heads, tokens, numbers]
                array[:, to_block, :, to_at] = array[:, from_block, :, from_at]
        track.length += len(slots)
        self.discard(track)

    def discard(self, track: Track) -> None:
        """Drops the pending entries, as after a forward that failed, and blocks that are not needed for the others."""
        track.pending = 0
        needed = -(-track.length // self.size)
        for block in track.blocks[needed:]:
            self._give_back(block)
        del track.blocks[needed:]

    def _share(self, track: Track, source: Track, shared: int) -> None:
        """Gives a new track what another one has of its first `shared` tokens."""
        full, rest = divmod(shared, self.size)
        own = [self._new_block(source)] if rest else []  # first, since there may be no memory for it
        track.blocks = source.blocks[:full] + own
        for block in source.blocks[:full]:
            self.uses[block] += 1
        for block in own:
            for array in self._arrays:
                array[:, block, :, :rest] = array[:, source.blocks[full], :, :rest]
        track.length = shared
        track.top_k = source.top_k and source.top_k.between(0, shared)

    def _new_block(self, spared: Track | None = None) -> int:
        """A block that belongs to nobody.

        Args:
            spared: an idle track whose blocks must stay.
        """
        while not self._free:
            idle = next((each for each in self._idle if each is not spared), None)
            if idle is not None and len(self.uses) * self.size >= self.limit:
                self._drop(idle)
            else:
                self._grow()
        block = self._free.pop()
        self.uses[block] = 1
        return block

    def _give_back(self, block: int) -> None:
        self.uses[block] -= 1
        if not self.uses[block]:
            self._free.append(block)

    def _clear(self, track: Track) -> None:
        for block in track.blocks:
            self._give_back(block)

    def _grow(self) -> None:
        """Doubles the memory."""
        count = len(self.uses)
        try:
            for index, array in enumerate(self._arrays):  # the old array is released before the next one is made
                if array.shape[1] == count:  # else it grew before memory ran out
                    larger = np.zeros((len(array), 2 * count, *array.shape[2:]), array.dtype)
                    larger[:, :count] = array
                    self._arrays[index] = larger
                del array
        except MemoryError:
            raise LeapaheadError(
                f"there is no memory for a KV cache of {2 * count * self.size} tokens; use fewer or shorter "
                "sequences, or set cache_tokens to a smaller number"
            ) from None
        finally:
            self.version += 1
        self._free = list(range(2 * count - 1, count - 1, -1))
        self.uses += [0] * count
