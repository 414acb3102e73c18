"""Lookahead decoding (Fu et al., 2402.02057): a window of Jacobi trajectories feeds an n-gram pool; both are one tree.

    root = last committed token c, at position p
    ├─ guesses: the pool's tails of c, merged into a trie, each N-1 deep              (verification branch)
    └─ o1 ─ o2 ─ ... ─ o_{W-1}     row 0 of the window: the spine, positions p+1 .. p+W-1   (lookahead branch)
       under the root and under each spine node hangs one column: rows 1 .. N-2, position growing by 1

`drafters.window` holds the window, `drafters.pool` the n-gram pool.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import flag, one_of, whole
from leapahead.core.tree import Budget, TreeBuilder
from leapahead.drafters.base import SequenceDrafter
from leapahead.drafters.pool import NgramPool
from leapahead.drafters.window import Window
from leapahead.models.base import TREE
from leapahead.planner.draft import Proposal, SequenceView, Step

MOST_ROWS = 2**16  # of a step; the published shapes have some hundred
# (W, N, G): three by kind of text; three by model size, as published (2402.02057, table 4).
PRESETS = {
    "code": (8, 6, 15),
    "text": (7, 5, 10),
    "creative": (5, 4, 8),
    "7b": (15, 5, 15),
    "13b": (10, 5, 10),
    "34b": (7, 5, 7),
}


class Lookahead(SequenceDrafter):
    """Lookahead decoding (2402.02057): n-grams of a window of Jacobi iterations, verified in the same forward.

    Args:
        window: W; the window covers exactly so many positions in every step. By default the preset's.
        ngram: N, the length of the n-grams, key included; 2 is Jacobi decoding with a pool. By default the preset's.
        guesses: G; never keep more than so many n-grams of one key, nor verify more in a step. By default the preset's.
        preset: (W, N, G) by name: code (8, 6, 15), text (7, 5, 10), creative (5, 4, 8), or as published for model
            sizes: 7b (15, 5, 15), 13b (10, 5, 10), 34b (7, 5, 7).
        prompt_ngrams: enter the prompt's n-grams into the pool.
        start_from_pool: fill the first window with n-grams of the pool instead of random prompt tokens.
        pool_capacity: never keep more than so many n-grams in the pool.
        seed: seed of the random choice of prompt tokens that fill the window.
    """

    name: ClassVar[str] = "lookahead"
    needs: ClassVar[frozenset[str]] = frozenset({TREE})

    def __init__(
        self,
        window: int | None = None,
        ngram: int | None = None,
        guesses: int | None = None,
        preset: str = "34b",
        prompt_ngrams: bool = True,
        start_from_pool: bool = False,
        pool_capacity: int = 100_000,
        seed: int = 0,
    ) -> None:
        options, usual = (window, ngram, guesses), PRESETS[one_of("preset", preset, PRESETS)]
        self.window, self.ngram, self.guesses = (
            value if value is not None else default for value, default in zip(options, usual, strict=True)
        )
        for name, value, least in (("window", self.window, 1), ("ngram", self.ngram, 2), ("guesses", self.guesses, 1)):
            whole(name, value, least)
        if (rows := (self.window + self.guesses) * (self.ngram - 1)) > MOST_ROWS:
            raise BadParameter(
                f"window={self.window}, ngram={self.ngram} and guesses={self.guesses} are not possible together: a "
                f"step would have {rows} rows, and {MOST_ROWS} are the most; give smaller ones"
            )
        self.prompt_ngrams = flag("prompt_ngrams", prompt_ngrams)
        self.start_from_pool = flag("start_from_pool", start_from_pool)
        self.pool = NgramPool(self.ngram, self.guesses, whole("pool_capacity", pool_capacity, 1))
        self._window = Window(self.window, self.ngram, whole("seed", seed))
        self._accepted_on_hits = self._hits = 0
        self._hit = False

    def begin(self, sequence: SequenceView) -> None:
        if self.prompt_ngrams:
            self.pool.add_text(sequence.text)
        self._window.begin(sequence, self.pool.peek if self.start_from_pool else lambda token: None)

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        builder = TreeBuilder(sequence.root, budget)
        tails = self.pool.get(sequence.root)
        self._hit = bool(tails)
        # By recency; when sampling, with the noise of the position added. A short budget takes the first ones.
        recency = -np.log(np.arange(1, len(tails) + 1))
        for index in sequence.rank(len(sequence.tokens), [tail[0] for tail in tails], recency).tolist():
            builder.add_path(sequence.allowed(tails[index]))
        guessed = len(builder)
        self._window.add(builder)
        sources = ("",) + ("guess",) * (guessed - 1) + ("window",) * (len(builder) - guessed)
        return Proposal(builder.build(), sources)

    def observe(self, sequence: SequenceView, step: Step) -> None:
        self._hits += self._hit
        self._accepted_on_hits += step.verdict.accepted if self._hit else 0
        for key, tail in self._window.observe(sequence, step):
            self.pool.add(key, tail)
        # After the window's n-grams, so that those of the committed text are the most recent.
        self.pool.add_text(sequence.tokens, start=len(sequence.tokens) - len(step.tokens))

    def figures(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "ngram": self.ngram,
            "guesses": self.guesses,
            **self.pool.figures(),
            "accepted_per_hit": round(self._accepted_on_hits / self._hits, 4) if self._hits else 0.0,
        }
