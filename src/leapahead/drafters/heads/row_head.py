"""EAGLE and EAGLE-3: one row for each committed token and drafted node, with a cache of keys and values of its own.

    row i, committed:  (token i + 1, the target's states of position i)     predicts token i + 2
    row of a node:     (its token, the output of its parent's row)          predicts the token below the node

A row needs its parent's output, so every forward is one level deeper. The rows of nodes are dropped when tokens are
committed, and computed anew from the target's own states (2401.15077, section 3.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from leapahead.drafters.heads.head import Drafted, Head, HeadText, Key, Path
from leapahead.drafters.heads.modules import RowModule
from leapahead.models.choices import Rows

FIRST_CAPACITY = 256  # rows of a new text's cache, which doubles when it is full
KEPT_ROWS = 32_768  # of finished texts; the oldest texts are dropped


class RowText(HeadText):
    """One text of a `RowHead`.

    Attributes:
        length: rows of committed tokens in the cache; the nodes' are behind them.
        nodes: path -> its place among the nodes' rows.
        states: path -> output of its row, float [hidden_size]; the empty path is the last committed row's.
        keys, values: float [layers, key heads, capacity, dim].
    """

    def __init__(self, tokens: Sequence[int], cache: Tensor, known: int) -> None:
        super().__init__(tokens, known)
        self.length = known
        self.nodes: dict[Path, int] = {}
        self.states: dict[Path, Tensor] = {}
        self.keys, self.values = cache, torch.empty_like(cache)
        self._waiting: list[Tensor] = []  # the target's states of positions from `length` on

    def append(self, states: Tensor) -> None:
        self.known += len(states)
        self._waiting.append(states)

    @property
    def missing(self) -> int:
        return self.known - self.length

    def discard(self) -> None:
        self.nodes = {}
        if self.missing:
            self.states = {}
        else:
            self.states = {path: state for path, state in self.states.items() if not path}

    def key(self, path: Path) -> Key:
        return path

    def computable(self, path: Path) -> bool:
        return path[:-1] in self.states if path else self.missing > 0

    def take(self, most: int) -> Tensor | None:
        """The target's states of the next missing rows, at most so many; None if none are missing."""
        if not self.missing:
            return None
        waiting = self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting)
        self._waiting = [waiting[most:]] if len(waiting) > most else []
        return waiting[:most]

    def reserve(self, rows: int) -> None:
        """Makes room for so many rows."""
        capacity = self.keys.shape[2]
        if rows <= capacity:
            return
        more = max(capacity, rows - capacity)
        self.keys, self.values = (F.pad(each, (0, 0, 0, more)) for each in (self.keys, self.values))


class Kept(NamedTuple):
    """The rows of a finished text.

    Attributes:
        owner: whose text it is, see `Target.open`.
        tokens: those of its rows, and the one in front of them.
        keys, values: float [layers, key heads, rows, dim].
    """

    owner: str
    tokens: tuple[int, ...]
    keys: Tensor
    values: Tensor

    def common(self, tokens: Sequence[int], owner: str) -> int:
        """How many of its rows a prompt has too; that of its last token is left, so that it can be drafted from."""
        if owner != self.owner:
            return 0
        most = min(len(self.tokens), len(tokens) - 1)
        same = next((at for at in range(most) if self.tokens[at] != tokens[at]), most)
        return max(0, same - 1)


class Part(NamedTuple):
    """The rows of one text in a forward.

    Attributes:
        text: whose rows they are.
        tokens: of the rows.
        states: float [rows, hidden_size], which they read.
        positions: of the rows.
        begin: the cache row of the first of them.
        mask: bool [rows, begin + rows], what each row attends to; None for everything.
        paths: of the rows whose candidates are wanted, the last ones.
    """

    text: RowText
    tokens: list[int]
    states: Tensor
    positions: list[int]
    begin: int
    mask: Tensor | None
    paths: list[Path]


class RowHead(Head):
    """See the module."""

    module: RowModule

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept: deque[Kept] = deque()

    def known(self, tokens: Sequence[int], owner: str) -> int:
        with self.lock:
            return max((kept.common(tokens, owner) for kept in self._kept), default=0)

    def open(self, tokens: Sequence[int], owner: str = "") -> RowText:
        llama = self.module.llama
        shape = (llama.num_hidden_layers, llama.num_key_value_heads, FIRST_CAPACITY, llama.head_dim)
        cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        with self.lock:
            known = self.known(tokens, owner)
            text = RowText(tokens, cache, known)
            if known:
                text.reserve(known)
                kept = next(each for each in self._kept if each.common(tokens, owner) == known)
                text.keys[:, :, :known], text.values[:, :, :known] = kept.keys[:, :, :known], kept.values[:, :, :known]
        return text

    def keep(self, text: RowText, owner: str) -> None:
        rows = text.length
        kept = Kept(
            owner, tuple(text.tokens[: rows + 1]), text.keys[:, :, :rows].clone(), text.values[:, :, :rows].clone()
        )
        with self.lock:
            self._kept.append(kept)
            while sum(len(each.tokens) for each in self._kept) > KEPT_ROWS:
                self._kept.popleft()

    @torch.no_grad()
    def forward(self, wanted: Sequence[tuple[RowText, Sequence[Path]]]) -> list[Drafted]:
        parts = [self._part(text, list(paths), text.missing) for text, paths in wanted]
        states = self._computed(parts)
        ends, rows = [], []
        for part, own in zip(parts, states, strict=True):
            last = own[len(own) - len(part.paths) :]
            part.text.states.update(zip(part.paths, last, strict=True))
            ends.append(last)
        logits = self.module.logits(torch.cat(ends))
        for part, some in zip(parts, torch.split(logits, [len(part.paths) for part in parts]), strict=True):
            rows.append(Drafted(part.paths, Rows(some)))
        return rows

    @torch.no_grad()
    def read(self, text: RowText, rows: int) -> None:
        self._computed([self._part(text, [], rows)])

    def _part(self, text: RowText, paths: list[Path], most: int) -> Part:
        """The rows of committed tokens that are missing, or if there are none, those of nodes."""
        if (waiting := text.take(most)) is not None:
            count, begin = len(waiting), text.length
            mask = None
            if count > 1:
                mask = torch.ones(count, begin + count, dtype=torch.bool, device=self.device).tril_(begin)
            tokens = list(text.tokens[begin + 1 : begin + 1 + count])
            assert len(tokens) == count, "a hidden state was given for a token that is not committed"
            text.length += count
            states = self.module.fuse(waiting)
            positions = list(range(begin, begin + count))
            return Part(text, tokens, states, positions, begin, mask, [()] if paths else [])
        begin = text.length + len(text.nodes)
        visible = torch.zeros(len(paths), begin + len(paths), dtype=torch.bool)
        visible[:, : text.length] = True
        for row, path in enumerate(paths):
            text.nodes[path] = begin - text.length + row
            for end in range(1, len(path) + 1):
                visible[row, text.length + text.nodes[path[:end]]] = True
        states = torch.stack([text.states[path[:-1]] for path in paths])
        positions = [text.length - 1 + len(path) for path in paths]
        mask = visible.to(self.device)
        return Part(text, [path[-1] for path in paths], states, positions, begin, mask, paths)

    def _computed(self, parts: Sequence[Part]) -> list[Tensor]:
        """The outputs of the rows of each part, float [rows, hidden_size]; their keys and values are in the caches."""
        for part in parts:
            part.text.reserve(part.begin + len(part.tokens))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found, start = [], 0
            for part in parts:
                count = len(part.tokens)
                mine, end = slice(start, start + count), part.begin + count
                keys, values = part.text.keys[layer], part.text.values[layer]
                keys[:, part.begin : end], values[:, part.begin : end] = k[0, :, mine], v[0, :, mine]
                found.append(
                    F.scaled_dot_product_attention(
                        q[:, :, mine],
                        keys[None, :, :end],
                        values[None, :, :end],
                        attn_mask=part.mask,
                        enable_gqa=True,
                    )
                )
                start += count
            return torch.cat(found, dim=2)

        tokens = torch.tensor([[token for part in parts for token in part.tokens]], device=self.device)
        positions = torch.tensor([[position for part in parts for position in part.positions]], device=self.device)
        states = torch.cat([part.states for part in parts])[None]
        found = self.module(tokens, states, positions, attend)[0]
        return [*torch.split(found, [len(part.tokens) for part in parts])]
