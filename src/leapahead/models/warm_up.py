"""Targets whose first steps take longer than later ones, and which can be made ready beforehand."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class WarmsUp(Protocol):
    """A target that can prepare itself for batches."""

    def warm_up(self, sequences: int) -> None:
        """Prepares plain and drafted steps of up to so many sequences, as far as they fit; it takes some seconds."""
