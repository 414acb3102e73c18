"""The calling convention of logits processors, which is that of Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter

Array = Any  # a numpy array or a torch tensor: whatever the target's logits are


class LogitsProcessor(Protocol):
    """A user's change to the logits, with the calling convention of Transformers.

    It must be a function of its arguments: it is called on drafted prefixes that may never be committed. What it raises
    there ends no request.
    """

    def __call__(self, prefixes: Array, logits: Array, /) -> Array:
        """prefixes: int [rows, length]; logits: float [rows, vocab]; returns float [rows, vocab].

        The arrays are of the target's kind: torch for Transformers, numpy elsewhere.
        """
        ...


def processed(processor: LogitsProcessor, prefixes: Array, logits: Array) -> Array:
    """float [rows, vocab], what a processor makes of the logits.

    Raises:
        BadParameter: it has returned something else, for example None after a change in place.
    """
    found = processor(prefixes, logits)
    shape, kind = getattr(found, "shape", None), type(logits)
    if shape != logits.shape or not isinstance(found, kind):
        own = getattr(processor, "processor", processor)  # within `PrefixFree`
        returned = type(found).__name__ if shape is None else f"a {_name(type(found))} of shape {list(shape)}"
        raise BadParameter(
            f"the logits processor {getattr(own, '__name__', type(own).__name__)} has returned {returned}; it must "
            f"return the changed logits, a {_name(kind)} of shape {list(logits.shape)}, also where it changes them in "
            "place"
        )
    return found


def _name(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


@dataclass(frozen=True)
class PrefixFree:
    """Marks a processor that does not read its prefixes, so that one call serves nodes of every depth.

    It is given prefixes of no tokens, since those of a long text would take time.
    """

    processor: LogitsProcessor

    def __call__(self, prefixes: Array, logits: Array, /) -> Array:
        return self.processor(prefixes, logits)


class Prefix:
    """The tokens of a text as an array, which is kept: making one of a long list takes milliseconds.

    Args:
        tokens: of the text, live.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self._array, self._length = tokens, np.zeros(0, dtype=np.int64), 0

    def first(self, length: int) -> npt.NDArray[np.int64]:
        """int64 [length], the first so many of them, which do not change any more. Not to be written."""
        if length > len(self._array):
            self._array = np.concatenate((self._array, np.zeros(length, dtype=np.int64)))
        if length > self._length:
            self._array[self._length : length] = self._tokens[self._length : length]
            self._length = length
        return self._array[:length]
