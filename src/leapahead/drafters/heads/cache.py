"""The rows that a head keeps of its texts: keys and values of its own layers, one row for every committed token.

    plane    (layer, KEYS) or (layer, VALUES)    float [key heads, rows, dim]

A text has the planes that were written to it: one pair for each layer with attention, or none where a head has no
attention. The rows of a finished text are kept for prompts that begin like it, and behind them the target's states that
the head has not read, since it did not draft there: nothing is computed at the end of a text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from leapahead.drafters.heads.head import Head, HeadText
from leapahead.drafters.heads.modules import Attend

KEYS, VALUES = 0, 1
Plane = tuple[int, int]  # number of a layer of the head, KEYS or VALUES
Planes = Mapping[Plane, Tensor]
FIRST_CAPACITY = 256  # rows of a new plane, which doubles when it is full
KEPT_ROWS = 32_768  # of finished texts; the oldest texts are dropped, never the newest one
UNREAD = 8  # rows that a position counts as whose states are kept, which are wider than keys and values


class CachedText(HeadText):
    """One text of a `CachedHead`.

    Args:
        tokens, known: see `HeadText`.
        planes: of an earlier text that begins with the same `known` rows.

    Attributes:
        length: rows of committed tokens that were computed; those of drafted nodes are behind them.
    """

    def __init__(self, tokens: Sequence[int], known: int, planes: Planes) -> None:
        super().__init__(tokens, known)
        self.length = known
        self._planes: dict[Plane, Tensor] = {}
        self._waiting: list[Tensor] = []  # the target's states of positions from `length` on
        for plane, rows in planes.items():
            self.write(plane, 0, rows[:, :known])

    def append(self, states: Tensor) -> None:
        self.known += len(states)
        self._waiting.append(states)

    @property
    def missing(self) -> int:
        return self.known - self.length

    def renew(self, start: int) -> None:
        """Forgets what was taken over of positions from `start` on, of which none has been read since."""
        kept, waiting = max(0, start - self.length), self.waiting()
        self._waiting = [waiting[:kept]] if waiting is not None and kept else []
        self.length, self.known = min(self.length, start), start

    def waiting(self) -> Tensor | None:
        """The target's states of the missing rows; None if none are missing."""
        if not self.missing:
            return None
        if len(self._waiting) > 1:
            self._waiting = [torch.cat(self._waiting)]
        return self._waiting[0]

    def take(self, most: int) -> Tensor | None:
        """The target's states of the next missing rows, at most so many; None if none are missing."""
        if (waiting := self.waiting()) is None:
            return None
        self._waiting = [waiting[most:]] if len(waiting) > most else []
        return waiting[:most]

    def write(self, plane: Plane, begin: int, rows: Tensor) -> Tensor:
        """Writes rows of a plane, and gives all rows up to the last of them.

        Args:
            begin: the place of the first row. Rows before it that were not written are 0.
            rows: float [key heads, rows, dim].

        Returns:
            float [key heads, begin + rows, dim], a view that the next write may change.
        """
        heads, count, dim = rows.shape
        end = begin + count
        found = self._planes.get(plane)
        if found is None or found.shape[1] < end:
            larger = rows.new_zeros(heads, max(end, 2 * found.shape[1] if found is not None else FIRST_CAPACITY), dim)
            if found is not None:
                larger[:, : found.shape[1]] = found
            self._planes[plane] = found = larger
        found[:, begin:end] = rows
        return found[:, :end]

    def planes(self) -> dict[Plane, Tensor]:
        """Copies of the rows of committed tokens, float [key heads, length, dim] each."""
        return {plane: rows[:, : self.length].clone() for plane, rows in self._planes.items()}


class Span(NamedTuple):
    """Rows of one text that a forward computes, among those of other texts.

    Attributes:
        text: whose rows they are.
        begin: the cache row of the first of them.
        rows: number of rows.
        mask: bool [rows, begin + rows], what each row attends to; None for everything.
    """

    text: CachedText
    begin: int
    rows: int
    mask: Tensor | None = None


def causal(begin: int, count: int, device: torch.device) -> Tensor | None:
    """The mask of rows that attend to those before them and to themselves; see `Span`."""
    if count == 1:
        return None
    return torch.ones(count, begin + count, dtype=torch.bool, device=device).tril_(begin)


def attention(spans: Sequence[Span]) -> Attend:
    """Attention of rows of several texts, side by side in one batch, each over the rows of its own text.

    Keys and values are written to the texts.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found, start = [], 0
        for span in spans:
            mine = slice(start, start + span.rows)
            keys = span.text.write((layer, KEYS), span.begin, k[0, :, mine])
            values = span.text.write((layer, VALUES), span.begin, v[0, :, mine])
            found.append(
                F.scaled_dot_product_attention(
                    q[:, :, mine], keys[None], values[None], attn_mask=span.mask, enable_gqa=True
                )
            )
            start += span.rows
        return torch.cat(found, dim=2)

    return attend


class Kept(NamedTuple):
    """What is kept of a finished text.

    Attributes:
        owner: whose text it is, see `Target.open`.
        tokens: those of its rows and states, and the one in front of them.
        planes: its rows.
        states: the target's of the positions behind them, float [positions, width]; None for none.
    """

    owner: str
    tokens: tuple[int, ...]
    planes: Planes
    states: Tensor | None

    @property
    def unread(self) -> int:
        """Positions behind its rows."""
        return 0 if self.states is None else len(self.states)

    @property
    def size(self) -> int:
        """What counts of `KEPT_ROWS`."""
        return len(self.tokens) + UNREAD * self.unread

    def common(self, tokens: Sequence[int], owner: str) -> int:
        """How many of its positions a prompt has too; that of its last token is left, so that it is drafted from."""
        if owner != self.owner:
            return 0
        most = min(len(self.tokens), len(tokens) - 1)
        same = next((at for at in range(most) if self.tokens[at] != tokens[at]), most)
        return max(0, same - 1)

    def continues(self, other: Kept) -> bool:
        """Whether another text is the beginning of this one."""
        return self.owner == other.owner and self.tokens[: len(other.tokens)] == other.tokens


class CachedHead(Head):
    """A head whose texts keep rows. One whose module has no attention (`has_attention`) needs the newest row alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept: deque[Kept] = deque()

    @abstractmethod
    def new_text(self, tokens: Sequence[int], known: int, planes: Planes) -> CachedText:
        """A text of this head; arguments as of `CachedText`."""

    def known(self, tokens: Sequence[int], owner: str) -> int:
        if not self.module.has_attention:
            return max(0, len(tokens) - 2)  # the state before the last token is the newest one that there is
        with self.lock:
            return max((kept.common(tokens, owner) for kept in self._kept), default=0)

    def open(self, tokens: Sequence[int], owner: str = "") -> CachedText:
        with self.lock:
            known = self.known(tokens, owner)
            same = (kept for kept in reversed(self._kept) if kept.common(tokens, owner) == known)
            if not known or (kept := next(same, None)) is None:
                return self.new_text(tokens, known, {})
            text = self.new_text(tokens, min(known, len(kept.tokens) - 1 - kept.unread), kept.planes)
            if kept.states is not None and text.known < known:
                text.append(kept.states[: known - text.known])
            return text

    def keep(self, text: CachedText, owner: str) -> None:
        if not self.module.has_attention:
            return
        states = None if (waiting := text.waiting()) is None else waiting.clone()
        kept = Kept(owner, tuple(text.tokens[: text.known + 1]), text.planes(), states)
        with self.lock:
            self._kept = deque(each for each in self._kept if not kept.continues(each))
            self._kept.append(kept)
            while len(self._kept) > 1 and sum(each.size for each in self._kept) > KEPT_ROWS:
                self._kept.popleft()

    def renew(self, text: CachedText, start: int, owner: str) -> None:
        # Most texts have their first token in common. Where the target has more, it has read such a text since then.
        if not self.module.has_attention or start > 1 or start >= text.known:
            return
        with self.lock:
            self._kept = deque(each for each in self._kept if not each.common(text.tokens, owner))
            text.renew(start)
