"""The errors that a user can cause, each one clear sentence. Knows nothing of any other room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LeapaheadError(Exception):
    """Base of every error raised on purpose: its text names the value that is wrong and the remedy."""


class BadParameter(LeapaheadError, ValueError):
    """A parameter that cannot be: an impossible temperature, an unknown option, an empty prompt."""


class Refused(LeapaheadError):
    """A capability that is missing, refused by name before any work is done."""


class ContextOverflow(LeapaheadError, ValueError):
    """A prompt that does not fit the target's context."""


class CacheFull(LeapaheadError):
    """A sequence that does not fit the target's memory beside those that are open; nothing of them is lost."""


class BadLogits(LeapaheadError, ArithmeticError):
    """Logits from which no token can be chosen: NaN, +inf, or every token banned."""


class DraftError(LeapaheadError):
    """A drafter broke its contract (a token outside the vocabulary, a tree beyond its budget)."""


@contextmanager
def needing(what: str, extra: str, *packages: str) -> Iterator[None]:
    """Around an import: one of `packages` that is missing is told with the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in packages:
            raise
        package = name.replace("llama_cpp", "llama-cpp-python")
        raise LeapaheadError(
            f'{what} needs {package}, which is not installed: pip install "leapahead[{extra}]"'
        ) from None
