"""The sequences whose keys and values are cached: admission, common beginnings, and what closed ones leave behind.

A closed sequence stays as an idle track, for prompts that begin with its tokens, until its room is needed. How entries
are stored is in the subclasses: `blocks` and `stateful`. This module knows neither OpenVINO nor trees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from leapahead.core.errors import CacheFull
from leapahead.models.captured import TopK
from leapahead.models.prefix import common_prefix

MOST_IDLE = 16  # closed sequences whose entries are kept


@dataclass(eq=False)
class Track:
    """What the cache holds of one sequence.

    Attributes:
        tokens: of the sequence, live; the cache holds the entries of the first `length`.
        length: committed entries.
        pending: entries behind them that the last forward wrote.
        reserve: the length that the sequence is expected to grow to.
        top_k: what was captured of the sequence's prompt, of positions below `length`.
        owner: see `Target.open`.
    """

    tokens: list[int]
    length: int = 0
    pending: int = 0
    reserve: int = 0
    top_k: TopK | None = None
    owner: str = ""


Kind = TypeVar("Kind", bound=Track)


class Cache(ABC, Generic[Kind]):
    """The tracks of all sequences.

    Args:
        limit: greatest number of committed tokens, all sequences together; the nodes of a step come on top.

    Attributes:
        open: the tracks of open sequences.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open: list[Kind] = []
        self._idle: list[Kind] = []  # least recently used first

    def take(self, tokens: list[int], reuse: int, reserve: int = 0, owner: str = "") -> Kind:
        """A track for a new sequence, with the entries of as many of its first `reuse` tokens as any track has.

        Args:
            reserve: the length that the sequence is expected to grow to.
            owner: see `Target.open`.

        Raises:
            CacheFull: it does not fit beside the open sequences.
        """
        reserve = max(len(tokens), reserve)
        self._admit(len(tokens), reserve)
        shared, source = 0, None
        for each in (each for each in (*self._idle, *self.open) if each.owner == owner):
            found = common_prefix(each.tokens, tokens, min(each.length, reuse))
            shared, source = (found, each) if found > shared else (shared, source)
        track = self._new(tokens, reserve, owner)
        if source is not None:
            if source in self._idle:  # it is the last to be discarded
                self._idle.remove(source)
                self._idle.append(source)
            self._share(track, source, shared)
        self.open.append(track)
        return track

    def fork(self, track: Kind, tokens: list[int]) -> Kind:
        """A track for the same tokens as an open one, whose last step was committed.

        Raises:
            CacheFull: it does not fit beside the open sequences.
        """
        self._admit(len(tokens), max(track.reserve, len(tokens)))
        twin = self._new(tokens, track.reserve, track.owner)
        self._share(twin, track, track.length)
        self.open.append(twin)
        return twin

    def release(self, track: Kind) -> None:
        """Ends an open sequence; its entries stay for a prompt that begins with its tokens. Twice is harmless."""
        if track not in self.open:
            return
        self.open.remove(track)
        self.discard(track)
        track.tokens = track.tokens[: track.length]
        for each in list(self._idle):  # a track that begins another one is of no more use
            if each.owner == track.owner and common_prefix(each.tokens, track.tokens, each.length) == each.length:
                self._drop(each)
        if track.length:
            self._idle.append(track)
        else:
            self._clear(track)
        while len(self._idle) > MOST_IDLE:
            self._drop(self._idle[0])

    def reclaim(self, used: Collection[Kind]) -> None:
        """Ends what an interrupted call has left behind: open tracks that are not used."""
        for track in [each for each in self.open if each not in used]:
            self.release(track)

    def forget(self) -> None:
        """Discards what is kept of closed sequences, and releases the memory unless a sequence is open."""
        while self._idle:
            self._drop(self._idle[0])

    @abstractmethod
    def extend(self, tracks: Sequence[Kind], counts: Sequence[int]) -> None:
        """Makes room for so many entries behind the committed and pending ones of each track.

        Raises:
            CacheFull: the sequences have grown beyond the limit.
        """

    @abstractmethod
    def keep(self, track: Kind, slots: Sequence[int]) -> None:
        """Commits the pending entries at these slots, counted from the committed ones, in this order."""

    @abstractmethod
    def discard(self, track: Kind) -> None:
        """Drops the pending entries, as after a forward that failed."""

    @abstractmethod
    def _new(self, tokens: list[int], reserve: int, owner: str) -> Kind:
        """An empty track."""

    @abstractmethod
    def _share(self, track: Kind, source: Kind, shared: int) -> None:
        """Gives a new track what another one has of its first `shared` tokens."""

    @abstractmethod
    def _clear(self, track: Kind) -> None:
        """Releases what a track holds."""

    def _drop(self, track: Kind) -> None:
        """Discards an idle track."""
        self._idle.remove(track)
        self._clear(track)

    def _admit(self, length: int, reserve: int) -> None:
        """Refuses a sequence that could make open ones run out of room. Alone it is refused for its prompt only."""
        taken = sum(max(track.reserve, track.length) for track in self.open)
        if length > self.limit or (self.open and taken + reserve > self.limit):
            raise self._full(len(self.open) + 1, max([reserve, *(track.reserve for track in self.open)]))

    def _check_room(self) -> None:
        """Refuses to let open sequences grow beyond the limit."""
        if sum(track.length for track in self.open) >= self.limit:
            raise self._full(len(self.open), max(track.length for track in self.open) + 1)

    def _full(self, count: int, length: int) -> CacheFull:
        return CacheFull(
            f"the cache holds {self.limit} tokens, too few for {count} sequence{'s' if count > 1 else ''} of up to "
            f"{length}; use a shorter prompt, fewer new tokens or sequences, or load the model with larger cache_tokens"
        )
