"""Targets whose sessions can give their part of the KV cache to others and go on later."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Reopens(Protocol):
    """A target that opens closed sessions again; an exact one or an encoder-decoder model is not asked to."""

    def reserve(self, session: Any, length: int) -> None:
        """Keeps so much of the cache free for an open session, its tokens included, as `Target.open` does."""

    def reopen(self, session: Any, reserve: int, owner: str) -> None:
        """Opens a closed session again: the same tokens, that very list, and the same sampler.

        Tokens that the cache has lost meanwhile are unread, and nothing is captured of them.

        Args:
            session: closed, with at least one token behind its prompt.
            reserve: see `Target.open`.
            owner: likewise.

        Raises:
            CacheFull: it does not fit beside the sessions that are open; it stays closed.
        """
