"""A target small enough to check by hand: logits from a table over the last few tokens, and a cache that can be wrong.

It keeps what a real backend keeps, entries of (position, token) of which each node attends to some, and computes a
node's logits from the entries that the node *attends to*. So a wrong mask, a wrong position or a wrong commit changes
the text. For tests, the tutorial, and for watching the engine without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import compress
from threading import RLock

import numpy as np
import numpy.typing as npt

from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import UNLIMITED, BoolArray, IntArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import (
    ALL,
    HIDDEN,
    NOTHING,
    PROMPT_ROWS,
    Capture,
    Cost,
    TargetInfo,
    checked_prompt,
    require,
)
from leapahead.models.choices import Choices, PromptRows

Entries = tuple[tuple[int, int], ...]  # (position, token), in order of position


class ToySession:
    """The cache of one sequence: every committed token but the last, once the prompt is read.

    Attributes:
        cache: the entries.
        sound: whether the position of every entry is its index. Then the last entries tell what a node attends to.
    """

    def __init__(self, target: ToyTarget, tokens: list[int], params: SamplingParams, capture: Capture) -> None:
        self.tokens, self.capture = tokens, capture
        self.sampler = Sampler(params, tokens, target.info.vocab_size)
        self.cache: list[tuple[int, int]] = []
        self.sound = True
        self._order = target.order
        self._pending: list[tuple[int, int]] = []

    @property
    def unread(self) -> int:
        return max(0, self.sampler.prompt_length - 1 - len(self.cache))

    @property
    def replay(self) -> int:
        return 0

    def forward(self, tree: TokenTree, mask: BoolArray, positions: IntArray, num_computed: int = 0) -> list[Entries]:
        """The entries that every node behind the computed ones attends to; the nodes' entries wait for the commit.

        Of a sound cache the last entries alone, as many as the table reads.
        """
        assert num_computed <= len(self._pending), "nodes that never went through the target"
        self._pending[num_computed:] = list(zip(positions.tolist(), tree.tokens.tolist(), strict=True))[num_computed:]
        attended = [list(compress(self._pending, row)) for row in mask[num_computed:].tolist()]
        committed = self.cache[-self._order :] if self.sound else self.cache
        return [tuple(sorted(committed + some)) for some in attended]

    def commit(self, verdict: Verdict) -> None:
        kept = [self._pending[node] for node in verdict.path]
        indices = range(len(self.cache), len(self.cache) + len(kept))
        self.sound = self.sound and [position for position, _ in kept] == list(indices)
        self.cache += kept
        self._pending = []
        self.tokens += verdict.tokens
        self.sampler.committed()
        assert len(self.cache) == len(self.tokens) - 1  # every committed token but the last

    def close(self) -> None:
        self.cache = []


class ToyTarget:
    """logits = table(last `order` tokens), as long as a node attends to exactly one token at every position.

    Args:
        vocab_size: size of the alphabet.
        order: how many tokens back the table reads; small orders make texts repeat, which drafters need.
        seed: which table.
        sharpness: standard deviation of the logits; higher is more predictable when sampling.
        context_length: greatest number of tokens of a sequence.
        capabilities: all but hidden states by default; pass fewer to see refusals.
        max_leaves, max_nodes: of a tree.
    """

    def __init__(
        self,
        vocab_size: int = 12,
        order: int = 2,
        seed: int = 0,
        sharpness: float = 2.0,
        context_length: int = UNLIMITED,
        capabilities: frozenset[str] = ALL - {HIDDEN},
        max_leaves: int = UNLIMITED,
        max_nodes: int = UNLIMITED,
    ) -> None:
        name = f"toy(vocab_size={vocab_size}, order={order}, seed={seed})"
        precision = float(np.finfo(np.float64).eps)
        self.info = TargetInfo(name, vocab_size, context_length, precision, capabilities, fingerprint=name)
        self.lock = RLock()
        self.max_leaves, self.max_nodes = max_leaves, max_nodes
        self.order = order
        self._seed, self._sharpness = seed, sharpness
        self._row = lru_cache(maxsize=1 << 16)(self._compute_row)

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> ToySession:
        require(self.info, capture.needs, "this capture")
        return ToySession(self, checked_prompt(tokens, self.info), params, capture)

    def prefill(self, session: ToySession, max_tokens: int) -> PromptRows | None:
        start, last = len(session.cache), session.sampler.prompt_length - 1
        end = min(start + max_tokens, last)
        session.cache += [(position, session.tokens[position]) for position in range(start, end)]
        first = max(start, last - PROMPT_ROWS)
        if not session.capture.top_k or first >= end:
            return None
        seen = [tuple(session.cache[max(0, at + 1 - self.order) : at + 1]) for at in range(first, end)]
        rows = np.stack([self.row(each) for each in seen])
        return PromptRows(np.array(session.tokens[first:end]), first, rows)

    def fork(self, session: ToySession, params: SamplingParams) -> ToySession:
        twin = ToySession(self, list(session.tokens), params, session.capture)
        twin.cache, twin.sound = list(session.cache), session.sound
        return twin

    def step(
        self,
        sessions: Sequence[ToySession],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        capture: Capture = NOTHING,
    ) -> list[Choices]:
        require(self.info, capture.needs, "this capture")
        return [
            Choices(self.logits(session, tree, first), tree, session.sampler, num_computed=first)
            for session, tree, first in zip(sessions, trees, num_computed or [0] * len(trees), strict=True)
        ]

    def cost(self, sessions: Sequence[ToySession], trees: Sequence[TokenTree]) -> Cost:
        return Cost(sum(map(len, trees)), len(trees), max(len(session.tokens) for session in sessions))

    def weights_digest(self) -> str:
        """See `IdentifiesWeights`."""
        return sha256(f"{self.info.name} {self._sharpness}".encode()).hexdigest()[:16]

    def logits(self, session: ToySession, tree: TokenTree, num_computed: int = 0) -> npt.NDArray[np.float64]:
        """float64 [nodes - num_computed, vocab]."""
        attended = session.forward(tree, self.mask(tree), self.positions(session, tree), num_computed)
        return np.stack([self.row(each) for each in attended])

    def mask(self, tree: TokenTree) -> BoolArray:
        """bool [nodes, nodes]; which nodes each node attends to. Tests break it."""
        return tree.ancestor_mask

    def positions(self, session: ToySession, tree: TokenTree) -> IntArray:
        """int64 [nodes]. Tests break it."""
        return len(session.tokens) - 1 + tree.depths

    def row(self, attended: Entries) -> npt.NDArray[np.float64]:
        """float64 [vocab]; the logits after these entries: all of a sequence, or the last ones, `order` at least."""
        start = attended[0][0] if len(attended) >= self.order else 0
        if all(position == index for index, (position, _) in enumerate(attended, start)):
            return self._row(tuple(token for _, token in attended[-self.order :]))
        return self._compute_row((-1, *(n for pair in attended for n in pair)))  # a broken context: other logits

    def _compute_row(self, key: tuple[int, ...]) -> npt.NDArray[np.float64]:
        rng = np.random.default_rng([self._seed, *(n + 1 for n in key)])
        return rng.normal(scale=self._sharpness, size=self.info.vocab_size)
