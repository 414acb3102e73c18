"""The shapes of captured forwards: rows, sequences and cache slots are rounded up to few sizes."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from leapahead.models.transformers.forward import Layers

# Few sizes, since each is captured for each number of sequences: eight rows take a GPU little longer than five.
ROWS = (1, 4, 8, 16, 32, 64, 128)  # of one sequence
USUAL_ROWS = 128  # of all sequences, to which a first forward with drafts is padded
MOST_ROWS = 512  # of all sequences; larger forwards take so long that their launches do not matter


class Shape(NamedTuple):
    """What the operations of a forward depend on.

    Attributes:
        batch: rows of the cache that take part, the first ones; those behind the stepped ones are padding.
        rows: nodes of each of them, padding included.
        own: slots of each of them that nodes may have, computed ones included.
        end: slots of the cache that are read.
        layers: whose hidden states are given.
    """

    batch: int
    rows: int
    own: int
    end: int
    layers: Layers = ()

    @property
    def all_rows(self) -> int:
        return self.batch * self.rows

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.rows} rows, {self.end} cached"


def rows_of(new: int, batch: int) -> int | None:
    """The bucket of a forward with `new` nodes of each of `batch` sequences; None where it is too large."""
    at = bisect_left(ROWS, new)
    return ROWS[at] if at < len(ROWS) and batch * ROWS[at] <= MOST_ROWS else None


def most_rows(batch: int) -> int:
    """The largest bucket of a batch."""
    return next(rows for rows in reversed(ROWS) if batch * rows <= MOST_ROWS)


def usual_rows(new: int, batch: int) -> int:
    """The rows of the first forward of a batch that is captured for `new` nodes of a sequence, itself a bucket."""
    if new == 1:
        return 1
    return max(new, *(rows for rows in ROWS if batch * rows <= max(batch, USUAL_ROWS)))


def most_covering(rows: int) -> int:
    """Of all sequences, in a captured forward that takes the place of one of so many rows."""
    return max(USUAL_ROWS, 2 * rows)


def slots_of(need: int, least: int, capacity: int) -> int:
    """The bucket of a forward that reads `need` of `capacity` slots, and `least` in any case."""
    return min(max(least, doubled(need)), capacity)


def own_of(rows: int, computed: int) -> int:
    """The bucket of the slots that nodes may have, `computed` of them from earlier forwards."""
    return rows if computed == 0 else doubled(rows + computed)


def doubled(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
