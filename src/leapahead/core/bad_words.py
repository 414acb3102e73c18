"""Token sequences that must not appear in a text. There may be thousands: lists of words in several spellings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any  # a numpy array or a torch tensor


class BadWords:
    """The bad words of one session.

    Args:
        words: see `SamplingParams`.
        to_array: moves a numpy array to the kind and device of the scores.

    Attributes:
        always: int64 [tokens], those that are bad words by themselves.
    """

    def __init__(self, words: Sequence[tuple[int, ...]], to_array: Callable[[npt.NDArray[Any]], Array]) -> None:
        self.always = to_array(np.array([word[0] for word in words if len(word) == 1], dtype=np.int64))
        self._longer: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append(word)

    def completing(self, tokens: list[int], committed: int, path: list[int]) -> Iterator[int]:
        """The tokens that would complete a longer one after the first `committed` of the tokens and a path."""
        for word in self._longer.get(path[-1] if path else tokens[committed - 1], ()):
            need = len(word) - 1
            if (tokens[max(committed - need, 0) : committed] + path)[-need:] == list(word[:-1]):
                yield word[-1]
