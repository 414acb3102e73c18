"""The section "suffix" of the drafter cache: past texts, with a suffix automaton over them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.core.forks import Mutex
from leapahead.drafters.cache import Arrays, Entry, Section
from leapahead.drafters.sources.suffix_automaton import new_automaton

CAPACITY = 200_000  # tokens


class Volume:
    """Some past texts and the suffix automaton over them."""

    def __init__(self) -> None:
        self.automaton = new_automaton()
        self.texts: dict[bytes, int] = {}  # int32 ids as bytes -> number of tokens, oldest first

    @property
    def tokens(self) -> int:
        return self.automaton.tokens

    def add(self, text: bytes) -> None:
        self.automaton.restart()
        self.automaton.extend(array("i", text).tolist())
        self.texts[text] = len(text) // 4


class PastTexts(Section):
    """Past texts in two volumes, old and young.

    A text enters the young volume, unless that holds it already. When the young volume is full, it becomes the old one,
    and the texts of the previous old one are dropped.

    Args:
        capacity: tokens of both volumes together. The default of 200,000 takes up to 28 MB.

    Attributes:
        volumes: old and young. The pair is replaced as a whole, so that a reader may keep using its own.
        version: grows with every change.
    """

    token_arrays: ClassVar[tuple[str, ...]] = ("tokens",)
    exchanged: ClassVar[int] = 4 * CAPACITY

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 4:
            raise BadParameter(f"capacity={capacity} is not possible: past texts need room for at least 4 tokens")
        self.capacity = capacity
        self.volumes = (Volume(), Volume())
        self.version = 0
        self._lock = Mutex()

    @property
    def max_length(self) -> int:
        """Greatest length of a text, of which the last tokens are kept: the size of a volume, half of the capacity."""
        return self.capacity // 2

    def add(self, tokens: Sequence[int]) -> None:
        """Adds a text that has ended."""
        with self._lock:
            self.volumes = self._with(self.volumes, array("i", tokens[-self.max_length :]))
            self.version += 1

    def _with(self, volumes: tuple[Volume, Volume], text: array[int]) -> tuple[Volume, Volume]:
        """The volumes with one more text. A young volume that has room for it is changed in place."""
        _, young = volumes
        if len(text) < 2:
            return volumes  # one token has no continuation
        if (key := text.tobytes()) in young.texts:
            young.texts[key] = young.texts.pop(key)  # it is the latest text again
            return volumes
        if young.tokens + len(text) > self.max_length:
            volumes = young, Volume()
        volumes[1].add(key)
        return volumes

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The texts, oldest first: `tokens`, int32 [tokens], concatenated, and `lengths`, int64 [texts]."""
        with self._lock:
            texts = self._texts()
        return {
            "tokens": np.array([token for text in texts for token in text], dtype=np.int32),
            "lengths": np.array([len(text) for text in texts], dtype=np.int64),
        }

    def _texts(self) -> list[array[int]]:
        old, young = self.volumes
        return [array("i", text) for text in (*(t for t in old.texts if t not in young.texts), *young.texts)]

    def merge(self, arrays: Arrays) -> None:
        """Merges other texts as if they had come before its own; the oldest of all are dropped."""
        others = _checked(arrays)
        with self._lock:
            self._hold(others + self._texts())

    def replace(self, arrays: Arrays) -> None:
        texts = _checked(arrays)
        with self._lock:
            self._hold(texts)

    def _hold(self, texts: Sequence[array[int]]) -> None:
        """Holds the newest of these texts, given oldest first, that fit."""
        newest_first = {text[-self.max_length :].tobytes(): None for text in reversed(texts)}
        texts = [array("i", text) for text in reversed(newest_first)]
        first, room = len(texts), self.capacity
        while first and (room := room - len(texts[first - 1])) >= 0:
            first -= 1
        volumes = Volume(), Volume()
        for text in texts[first:]:
            volumes = self._with(volumes, text)
        self.volumes = volumes
        self.version += 1

    @staticmethod
    def entries_of(arrays: Arrays) -> list[Entry]:
        """A key is a text, int32 ids as bytes; values are empty."""
        return [(text.tobytes(), b"") for text in _checked(arrays)]

    @staticmethod
    def arrays_of(entries: Sequence[Entry]) -> dict[str, npt.NDArray[Any]]:
        if any(len(key) % 4 or value for key, value in entries):
            raise ValueError("a past text consists of 4 bytes a token, and has no value")
        return {
            "tokens": np.frombuffer(b"".join(key for key, _ in entries), dtype=np.int32),
            "lengths": np.array([len(key) // 4 for key, _ in entries], dtype=np.int64),
        }

    def figures(self) -> dict[str, Any]:
        volumes = self.volumes
        return {
            "texts": sum(len(volume.texts) for volume in volumes),
            "tokens": sum(volume.tokens for volume in volumes),
            "capacity": self.capacity,
            "states": sum(len(volume.automaton) for volume in volumes),
        }


def _checked(arrays: Arrays) -> list[array[int]]:
    """The texts of `PastTexts.arrays`.

    Raises:
        ValueError: the arrays are something else.
    """
    if set(arrays) != {"tokens", "lengths"}:
        raise ValueError(f"past texts are the arrays tokens and lengths, not {', '.join(sorted(arrays)) or 'none'}")
    tokens, lengths = arrays["tokens"], arrays["lengths"]
    for name, found, kind in (("tokens", tokens, np.int32), ("lengths", lengths, np.int64)):
        if found.ndim != 1 or found.dtype != kind:
            raise ValueError(
                f"{name} of past texts is {found.dtype} with {found.ndim} dimensions; it must be "
                f"{np.dtype(kind)} with one"
            )
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"a past text of {lengths.min()} tokens is not possible")
    if lengths.sum() != len(tokens):
        raise ValueError(f"the lengths of past texts add up to {lengths.sum()}, but there are {len(tokens)} tokens")
    if len(tokens) and tokens.min() < 0:
        raise ValueError(f"a past text holds {tokens.min()}, which is not a token id")
    ends = np.cumsum(lengths).tolist()
    return [
        array("i", tokens[end - length : end].tobytes()) for end, length in zip(ends, lengths.tolist(), strict=True)
    ]
