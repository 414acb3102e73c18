"""The window of lookahead decoding: Jacobi trajectories side by side, as part of the tree (2402.02057, section 3.1).

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
from collections.abc import Callable

from leapahead.core.tree import TreeBuilder
from leapahead.drafters.base import Context, Step


class Window:
    """W columns of N-1 rows, which hang on the root.

    Args:
        width: W.
        ngram: N.
        seed: of the random prompt tokens that stand where nothing is known.
    """

    def __init__(self, width: int, ngram: int, seed: int = 0) -> None:
        self.width, self.ngram = width, ngram
        self._random = random.Random(seed)
        self._rows: list[list[int]] = []  # row 0 without column 0 (W-1 tokens), then rows 1 .. N-2 (W tokens each)
        self._tips: list[int | None] = []  # node at the foot of each column, None where the budget cut it

    def begin(self, context: Context, guess: Callable[[int], tuple[int, ...] | None] = lambda token: None) -> None:
        """Fills W+N-3 tokens, for the positions after the root: by what `guess` says of a token, or at random."""
        length = self.width + self.ngram - 3
        ahead: list[int] = []
        while len(ahead) < length:
            ahead += guess(ahead[-1] if ahead else context.root) or [self._fill(context)]
        ahead = ahead[:length]
        self._rows = [ahead[: self.width - 1]]
        self._rows += [ahead[row - 1 : row - 1 + self.width] for row in range(1, self.ngram - 1)]

    def _fill(self, context: Context) -> int:
        return context.tokens[self._random.randrange(context.prompt_length)]

    def add(self, builder: TreeBuilder) -> None:
        """Hangs the window under the root, as far as the budget goes."""
        self._tips = []
        spine: int | None = 0
        for column in range(self.width):
            if column > 0 and spine is not None:
                spine = builder.add(spine, self._rows[0][column - 1])
            tip = spine
            for row in self._rows[1:]:
                tip = builder.add(tip, row[column]) if tip is not None else None
            self._tips.append(tip)

    def observe(self, context: Context, step: Step) -> list[tuple[int, tuple[int, ...]]]:
        """The n-grams that the step has made, as (key, tail); then the window slides."""
        root = int(step.tree.tokens[0])
        feet = [tip for tip in self._tips if tip is not None]
        chosen = iter(step.choices.of(feet).tolist() if feet else [])
        new = [next(chosen) if tip is not None else self._fill(context) for tip in self._tips]
        ngrams = [
            (self._rows[0][column - 1] if column else root, (*(row[column] for row in self._rows[1:]), new[column]))
            for column, tip in enumerate(self._tips)
            if tip is not None
        ]
        self._slide(context, new, by=len(step.tokens) if context.sampled else 1)
        return ngrams

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
