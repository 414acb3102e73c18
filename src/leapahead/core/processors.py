"""The calling convention of logits processors, which is that of Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

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
    """Marks a processor that does not read its prefixes, so that one call serves nodes of every depth."""

    processor: LogitsProcessor

    def __call__(self, prefixes: Array, logits: Array, /) -> Array:
        return self.processor(prefixes, logits)
