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
        by_count = self._by_count(self._length + max(map(len, paths)))
        drafted = {token: at for at, token in enumerate(sorted({token for path in paths for token in path}))}
        if not drafted:
            self._penalise(scores, self._tokens, self._counted(self._tokens, later)[None, :], by_count)
            return
        times = np.zeros((len(paths), len(drafted)), dtype=np.int64)  # in each path
        for row, path in enumerate(paths):
            for token in path:
                times[row, drafted[token]] += 1
        some = self._to_array(np.array(list(drafted)))
        before = scores[:, some]  # a copy: these few differ between rows, all others do not
        self._penalise(scores, self._tokens, self._counted(self._tokens, later)[None, :], by_count)
        scores[:, some] = before
        self._penalise(scores, some, self._counted(some, later)[None, :] + self._to_array(times), by_count)

    def _counted(self, tokens: Array, later: Sequence[int]) -> Array:
        """int64 [tokens], how often each of them is in the output, but for what came later."""
        counts = self._counts[tokens]
        if later:
            gone = self._to_array(np.array(later))[:, None] == tokens
            counts = counts - array_namespace(counts).sum(array_namespace(counts).astype(gone, counts.dtype), axis=0)
        return counts

    def _penalise(self, scores: Array, tokens: Array, counts: Array, by_count: Array) -> None:
        """Changes the scores of some tokens, each once, which are so often in the output: [rows or 1, tokens]."""
        xp = array_namespace(scores)
        seen = self._in_prompt[tokens] | (counts > 0)
        part = scores[:, tokens]
        repeated = xp.where(part > 0, part / self._repetition, part * self._repetition)
        scores[:, tokens] = xp.where(seen, repeated, part) - xp.astype(by_count[counts], part.dtype)

    def _by_count(self, most: int) -> Array:
        """float32 [counts], what is subtracted from the score of a token that is so often in the output."""
        if self._subtracted.shape[0] <= most:
            counts = np.arange(2 * most + 64)
            subtracted = self._frequency * counts + self._presence * (counts > 0)
            self._subtracted = self._to_array(subtracted.astype(np.float32))
        return self._subtracted
