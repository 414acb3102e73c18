"""The sizes of forwards that a target is prepared for, as the forwards before tell.

    llama.cpp                      that of the last forward, whose graph it keeps
    OpenVINO, compiled once        that of the last forward
    OpenVINO, compiled k times     that of the last plain step or prompt, and the k - 1 drafted ones used last

A forward of another size takes longer (`planner.switches`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from leapahead.models.base import Cost


class Recent(NamedTuple):
    """What a target is prepared for now.

    Attributes:
        last: rows of the last forward, padding included; None if it was another kind of forward, as a prompt's.
        sizes: rows of drafted steps, padding included, that it is prepared for; None where nothing is known, so that
            all count as equal.
        evicts: whether a drafted step of another size takes the place of one of these.
    """

    last: int | None = None
    sizes: Collection[int] | None = None
    evicts: bool = True

    def has(self, rows: int) -> bool:
        """Whether a drafted step with so many rows, padding included, finds the target prepared."""
        return self.sizes is None or rows in self.sizes


NO_FORWARD = Recent()


class RecentSizes:
    """Follows the forwards of a target.

    Args:
        prepared: see `TargetInfo.prepared`.
    """

    def __init__(self, prepared: int) -> None:
        self.prepared = prepared
        self._last: Cost | None = None
        self._plain = 0  # sequences of the plain step that the target is prepared for
        self._drafted: list[tuple[int, int]] = []  # rows and sequences; the one used last at the end

    def observe(self, cost: Cost) -> tuple[bool, bool]:
        """Takes a forward into account.

        Returns:
            Whether it takes longer than another one of its size right after it would; and whether that is because the
            target was not prepared for it at all.
        """
        before, self._last = self._last, cost
        size = cost.rows, cost.sequences
        if not self.prepared:
            is_new = before is None or (before.rows, before.sequences) != size
            return is_new, is_new
        if cost.rows > cost.sequences:
            is_new = size not in self._drafted
            if not is_new:
                self._drafted.remove(size)
            self._drafted = [*self._drafted[-self.prepared + 1 :], size] if self.prepared > 1 else [size]
            return is_new, is_new
        is_new, self._plain = self._plain != cost.sequences, cost.sequences
        return is_new or before is None or before.rows > before.sequences, is_new

    def interrupt(self) -> None:
        """Another kind of forward was computed, such as a prompt's."""
        self._last, self._plain = None, 0

    def of(self, sequences: int) -> Recent:
        """What the target is prepared for in steps of so many sequences."""
        last = None if self._last is None else self._last.rows
        if not self.prepared:
            return Recent(last, None if last is None else (last,))
        sizes = [rows for rows, count in self._drafted if count == sequences]
        return Recent(last, sizes, len(self._drafted) >= self.prepared)
