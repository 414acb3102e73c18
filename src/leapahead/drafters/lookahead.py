"""Lookahead decoding (Fu et al., 2402.02057): a window of Jacobi trajectories feeds an n-gram pool; both are a tree.

    root = last committed token c, at position p
    ├─ guesses: the pool's tails of c, merged into a trie, each N-1 deep              (verification branch)
    └─ o1 ─ o2 ─ ... ─ o_{W-1}     row 0 of the window: the spine, positions p+1 .. p+W-1   (lookahead branch)
       under the root and under each spine node hangs one column: rows 1 .. N-2, position growing by 1

       W = 5, N = 4       column   0    1    2    3    4
                          row 0    c    a1   a2   a3   a4        a: oldest, b: a step younger, e: youngest
                          row 1    b0   b1   b2   b3   b4        column i is the chain  c a1 .. ai  bi  ei -> new
                          row 2    e0   e1   e2   e3   e4        and gives the n-gram       (ai; bi ei new)
                          new      ?    ?    ?    ?    ?

The mask of the paper's figure 2b is "itself and its ancestors" of this tree and its positions are depths, so the target
needs to know nothing of it. The tree builder merges equal siblings: a window node that a guess shares costs nothing,
and one that the target happens to choose is accepted like any draft.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np

from leapahead.drafter import Context, Drafter, Proposal, Step
from leapahead.drafters.pool import NgramPool
from leapahead.errors import BadParameter
from leapahead.target import TREE
from leapahead.tree import Budget, TreeBuilder

# (W, N, G): three for kinds of text, three as published per model size (2402.02057, table 4).
PRESETS = {
    "code": (8, 6, 15),
    "text": (7, 5, 10),
    "creative": (5, 4, 8),
    "7b": (15, 5, 15),
    "13b": (10, 5, 10),
    "34b": (7, 5, 7),
}


class Lookahead(Drafter):
    """Lookahead decoding: n-grams from a window of parallel Jacobi iterations, verified in the same forward.

    Args:
        window: W, how many positions ahead the window looks; by default the preset's.
        ngram: N, the length of the n-grams, key included; 2 is Jacobi decoding with a memory.
        guesses: G, how many n-grams of one key are kept, and verified in one step.
        preset: (W, N, G) of code (8, 6, 15), text (7, 5, 10), creative (5, 4, 8), or as published for model sizes:
            7b (15, 5, 15), 13b (10, 5, 10), 34b (7, 5, 7).
        prompt_ngrams: enter the prompt's n-grams into the pool.
        start_from_pool: fill the first window by following the pool, instead of with random prompt tokens.
        pool_capacity: greatest number of n-grams in the pool.
        seed: of the random prompt tokens that fill the window.
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
        if preset not in PRESETS:
            raise BadParameter(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
        given = (window, ngram, guesses)
        self.window, self.ngram, self.guesses = (
            value if value is not None else usual for value, usual in zip(given, PRESETS[preset], strict=True)
        )
        if self.window < 1 or self.ngram < 2 or self.guesses < 1:
            raise BadParameter(
                f"window={self.window}, ngram={self.ngram}, guesses={self.guesses} is not possible: "
                "window and guesses must be at least 1 and ngram at least 2"
            )
        self.prompt_ngrams, self.start_from_pool = prompt_ngrams, start_from_pool
        self.pool = NgramPool(self.ngram, self.guesses, pool_capacity)
        self._random = random.Random(seed)
        self._rows: list[list[int]] = []  # row 0 without column 0 (W-1 tokens), then rows 1 .. N-2 (W tokens each)
        self._tips: list[int | None] = []  # node at the foot of each column, None where the budget cut it
        self._accepted_on_hits = self._hits = 0
        self._hit = False

    def begin(self, context: Context) -> None:
        if self.prompt_ngrams:
            self.pool.add_text(context.tokens)
        ahead = self._first_guess(context)
        self._rows = [ahead[: self.window - 1]]
        self._rows += [ahead[row - 1 : row - 1 + self.window] for row in range(1, self.ngram - 1)]

    def _first_guess(self, context: Context) -> list[int]:
        """W+N-3 tokens, for the positions after the root: random ones of the prompt, or a walk through the pool."""
        ahead: list[int] = []
        while len(ahead) < self.window + self.ngram - 3:
            tail = self.pool.peek(ahead[-1] if ahead else context.root) if self.start_from_pool else None
            ahead += tail or [self._fill(context)]
        return ahead[: self.window + self.ngram - 3]

    def _fill(self, context: Context) -> int:
        return context.tokens[self._random.randrange(context.prompt_length)]

    def propose(self, context: Context, budget: Budget) -> Proposal:
        builder = TreeBuilder(context.root, budget)
        tails = self.pool.get(context.root)
        self._hit = bool(tails)
        # Recency is the opinion; where the budget is short the dice say whom it serves first.
        recency = -np.log(np.arange(1, len(tails) + 1))
        for index in context.rank(len(context.tokens), [tail[0] for tail in tails], recency).tolist():
            builder.add_path(tails[index])
        guessed = len(builder)
        self._tips = self._add_window(builder)
        sources = ("",) + ("guess",) * (guessed - 1) + ("window",) * (len(builder) - guessed)
        return Proposal(builder.build(), sources)

    def _add_window(self, builder: TreeBuilder) -> list[int | None]:
        """Hangs the window under the root; returns the foot of each column."""
        tips: list[int | None] = []
        spine: int | None = 0
        for column in range(self.window):
            if column > 0 and spine is not None:
                spine = builder.add(spine, self._rows[0][column - 1])
            tip = spine
            for row in self._rows[1:]:
                tip = builder.add(tip, row[column]) if tip is not None else None
            tips.append(tip)
        return tips

    def observe(self, context: Context, step: Step) -> None:
        self._hits += self._hit
        self._accepted_on_hits += step.verdict.accepted if self._hit else 0
        root = int(step.tree.tokens[0])
        feet = [tip for tip in self._tips if tip is not None]
        chosen = iter(step.choices.of(feet).tolist() if feet else [])
        new = [next(chosen) if tip is not None else self._fill(context) for tip in self._tips]
        for column, tip in enumerate(self._tips):
            if tip is not None:
                key = self._rows[0][column - 1] if column else root
                self.pool.add(key, (*(row[column] for row in self._rows[1:]), new[column]))
        self._slide(context, new, by=len(step.tokens) if context.sampled else 1)
        # Last, so that what was really said is the most recent.
        self.pool.add_text(context.tokens, start=len(context.tokens) - len(step.tokens))

    def _slide(self, context: Context, new: list[int], by: int) -> None:
        """The oldest row leaves, the new one enters, and the window moves on.

        By one column when greedy, whatever was committed: trajectories may be stale but stay whole. Under sampling by
        the committed tokens, because a window token was chosen with the dice of its position (ALGORITHMS 4.2.3).
        """
        rows = [*self._rows[1:], new]
        rows[0] = rows[0][1:]
        for row in rows if by > 1 else []:
            gone = min(by - 1, len(row))
            row[:] = row[gone:] + [self._fill(context) for _ in range(gone)]
        self._rows = rows

    def figures(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "ngram": self.ngram,
            "guesses": self.guesses,
            **self.pool.figures(),
            "accepted_per_hit": round(self._accepted_on_hits / self._hits, 4) if self._hits else 0.0,
        }
