"""A target small enough to check by hand: a table of logits over the last few tokens, and a cache that can be wrong.

It keeps what a real backend keeps, entries of (token, position) of which each node sees some, and computes a node's
logits from what that node *sees*, so that a wrong mask, a wrong position or a wrong commit changes the text. For tests,
the tutorial, and anyone who wants to watch the engine without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.tree import UNLIMITED, BoolArray, IntArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, LOGITS, PROMPT_ROWS, TOP_K, TREE, Choices, PromptTopK, best, checked_prompt

Seen = tuple[tuple[int, int], ...]  # (position, token), sorted


class ToySession:
    """The cache of one sequence: every committed token but the last."""

    def __init__(self, target: ToyTarget, tokens: list[int], params: SamplingParams) -> None:
        self.tokens = tokens
        self.sampler = Sampler(params, tokens, target.vocab_size)
        self.cache: list[tuple[int, int]] = list(enumerate(tokens[:-1]))
        self._pending: list[tuple[int, int]] = []
        self.prompt_top_k: PromptTopK | None = None

    def forward(self, tree: TokenTree, mask: BoolArray, positions: IntArray, known: int = 0) -> list[Seen]:
        """What every node behind the known ones sees; their entries wait for the commit."""
        assert known <= len(self._pending), "nodes that never went through"
        self._pending[known:] = list(zip(positions.tolist(), tree.tokens.tolist(), strict=True))[known:]
        seen = [[self._pending[other] for other in np.flatnonzero(row)] for row in mask[known:]]
        return [tuple(sorted(self.cache + some)) for some in seen]

    def commit(self, verdict: Verdict) -> None:
        self.cache += [self._pending[node] for node in verdict.path]
        self._pending = []
        self.tokens += verdict.tokens
        self.sampler.committed()
        assert len(self.cache) == len(self.tokens) - 1  # every committed token but the last

    def close(self) -> None:
        self.cache = []


class ToyTarget:
    """logits = table(last `order` tokens), as long as what a node sees is exactly one token at every position.

    Args:
        vocab_size: size of the alphabet.
        order: how many tokens back the table looks; small orders repeat themselves, which drafters need.
        seed: which table.
        sharpness: standard deviation of the logits; higher is more predictable when sampling.
        context_length: greatest number of tokens of a sequence.
        capabilities: pass fewer to see refusals.
    """

    def __init__(
        self,
        vocab_size: int = 12,
        order: int = 2,
        seed: int = 0,
        sharpness: float = 2.0,
        context_length: int = UNLIMITED,
        capabilities: frozenset[str] = frozenset({CHAIN, TREE, LOGITS, TOP_K}),
        max_leaves: int = UNLIMITED,
        max_nodes: int = UNLIMITED,
    ) -> None:
        self.name = f"toy(vocab_size={vocab_size}, order={order}, seed={seed})"
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.max_leaves, self.max_nodes = max_leaves, max_nodes
        self.capabilities = capabilities
        self.precision = float(np.finfo(np.float64).eps)
        self.fingerprint, self.pads = self.name, False
        self._order, self._seed, self._sharpness = order, seed, sharpness
        self._row = lru_cache(maxsize=1 << 16)(self._compute_row)

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        stats: Stats | None = None,
        reserve: int = 0,
        top_k: int = 0,
    ) -> ToySession:
        tokens = checked_prompt(tokens, self.vocab_size, self.context_length)
        if stats is not None:
            stats.prompt_tokens += len(tokens)
            stats.prefill_forwards += len(tokens) > 1
        session = ToySession(self, tokens, params)
        if top_k and TOP_K in self.capabilities and len(tokens) > 1:
            read = list(enumerate(tokens[:-1]))
            first = max(0, len(read) - PROMPT_ROWS)
            rows = np.stack([self.row(tuple(read[: end + 1])) for end in range(first, len(read))])
            session.prompt_top_k = PromptTopK(np.array(tokens[first:-1]), *best(rows, min(top_k, self.vocab_size)))
        return session

    def step(
        self, sessions: Sequence[ToySession], trees: Sequence[TokenTree], known: Sequence[int] | None = None
    ) -> list[Choices]:
        return [
            Choices(self.logits(session, tree, first), tree, session.sampler, first=first)
            for session, tree, first in zip(sessions, trees, known or [0] * len(trees), strict=True)
        ]

    def logits(self, session: ToySession, tree: TokenTree, known: int = 0) -> npt.NDArray[np.float64]:
        """float64 [nodes - known, vocab]."""
        seen = session.forward(tree, self.mask(tree), self.positions(session, tree), known)
        return np.stack([self.row(each) for each in seen])

    def mask(self, tree: TokenTree) -> BoolArray:
        """bool [nodes, nodes]; who sees whom. Tests break it."""
        return tree.ancestor_mask

    def positions(self, session: ToySession, tree: TokenTree) -> IntArray:
        """int64 [nodes]. Tests break it."""
        return len(session.tokens) - 1 + tree.depths

    def row(self, seen: Seen) -> npt.NDArray[np.float64]:
        """float64 [vocab]; the logits after what is seen: (position, token) pairs in order of position."""
        if all(position == index for index, (position, _) in enumerate(seen)):
            return self._row(tuple(token for _, token in seen[-self._order :]))
        return self._compute_row((-1, *(n for pair in seen for n in pair)))  # a broken context: other logits

    def _compute_row(self, key: tuple[int, ...]) -> npt.NDArray[np.float64]:
        rng = np.random.default_rng([self._seed, *(n + 1 for n in key)])
        return rng.normal(scale=self._sharpness, size=self.vocab_size)
