"""The common beginning of two token sequences, by which targets find cache entries that serve another prompt."""

from __future__ import annotations


def common_prefix(one: list[int], other: list[int], most: int) -> int:
    """Length of the common beginning of two lists, at most `most`."""
    low, high = 0, min(most, len(one), len(other))
    while low < high:  # slices are compared without a Python loop
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
