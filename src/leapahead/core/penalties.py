"""Repetition, presence and frequency penalties of a text that grows.

Only the scores of tokens that are in the text change, so only those are read and written. What is counted is kept on
the device of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace

Array = Any


class Penalties:
    """The penalties of one session.

    Args:
        repetition, presence, frequency: see `SamplingParams`.
        prompt: its tokens.
        vocab_size: length of a row of scores.
        to_array: moves a numpy array to the kind and device of the scores.
    """

    def __init__(
        self,
        repetition: float,
        presence: float,
        frequency: float,
        prompt: Sequence[int],
        vocab_size: int,
        to_array: Callable[[npt.NDArray[Any]], Array],
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._to_array = to_array
        in_prompt = np.zeros(vocab_size, dtype=np.bool_)
        in_prompt[list(prompt)] = True
        met = np.flatnonzero(in_prompt)
        self._met = set(met.tolist())
        self._tokens = to_array(met)  # all that may be changed, each once
        self._in_prompt = to_array(in_prompt)
        self._counts = to_array(np.zeros(vocab_size, dtype=np.int64))  # of the output
        self._length = 0  # of the output
        self._subtracted = to_array(np.zeros(0, dtype=np.float32))  # [count], from the score of a token of that count

    def count(self, tokens: Sequence[int]) -> None:
        """To be called with the tokens that the output has grown by."""
        if not tokens:
            return
        some, times = np.unique(np.array(tokens, dtype=np.int64), return_counts=True)
        at = self._to_array(some)
        self._counts[at] += self._to_array(times.astype(np.int64))
        self._length += len(tokens)
        if fresh := [token for token in some.tolist() if token not in self._met]:
            self._met.update(fresh)
            self._tokens = array_namespace(at).concat((self._tokens, self._to_array(np.array(fresh))))

    def apply(self, scores: Array, paths: Sequence[Sequence[int]], later: Sequence[int]) -> None:
        """Changes the scores, float [rows, vocab], in place.

        Args:
            scores: of rows with the same committed prefix.
            paths: what each row has behind that prefix.
            later: tokens that were counted and are not in the prefix: its successors.
        """
        xp = array_namespace(scores)
        longest = max(map(len, paths))
        tokens = self._tokens
        if longest:  # -1 is no token
            behind = self._to_array(np.array([[*path, *[-1] * (longest - len(path))] for path in paths]))
            tokens = xp.concat((tokens, self._to_array(np.array([token for path in paths for token in path]))))
        counts = self._counts[tokens][None, :]
        if longest:
            counts = counts + xp.sum(xp.astype(behind[:, :, None] == tokens, xp.int64), axis=1)
        if later:
            gone = self._to_array(np.array(later))[:, None] == tokens
            counts = counts - xp.sum(xp.astype(gone, xp.int64), axis=0)
        seen = self._in_prompt[tokens] | (counts > 0)
        part = scores[:, tokens]
        repeated = xp.where(part > 0, part / self._repetition, part * self._repetition)
        part = xp.where(seen, repeated, part)
        scores[:, tokens] = part - xp.astype(self._by_count(self._length + longest)[counts], part.dtype)

    def _by_count(self, most: int) -> Array:
        """float32 [counts], what is subtracted from the score of a token that is so often in the output."""
        if self._subtracted.shape[0] <= most:
            counts = np.arange(2 * most + 64)
            subtracted = self._frequency * counts + self._presence * (counts > 0)
            self._subtracted = self._to_array(subtracted.astype(np.float32))
        return self._subtracted
