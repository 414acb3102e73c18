"""The window of lookahead decoding: parallel Jacobi trajectories as a part of the token tree (2402.02057, section 3.1).

       W = 5, N = 4       column   0    1    2    3    4
                          row 0    c    a1   a2   a3   a4        a: oldest, b: a step younger, e: youngest
                          row 1    b0   b1   b2   b3   b4        column i is the chain  c a1 .. ai  bi  ei -> new
                          row 2    e0   e1   e2   e3   e4        and gives the n-gram       (ai; bi ei new)
                          new      ?    ?    ?    ?    ?

The mask of the paper's figure 2b is "itself and its ancestors" of this tree, and its positions are depths, so a target
treats window nodes like any others. The tree builder merges equal siblings: a window node that equals a node of the
draft costs nothing, and one whose token the target chooses is accepted like any drafted token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from leapahead.core.errors import BadParameter
from leapahead.core.tree import TreeBuilder
from leapahead.planner.draft import SequenceView, Step

MOST_TOKENS = 2**20  # no forward has nearly so many


class Window:
    """A window of W columns and N-1 rows below the root.

    Args:
        width: W.
        ngram: N.
        seed: of the random prompt tokens that fill entries for which nothing is known.

    Raises:
        BadParameter: it would have more than `MOST_TOKENS`.
    """

    def __init__(self, width: int, ngram: int, seed: int = 0) -> None:
        if width * (ngram - 1) > MOST_TOKENS:
            raise BadParameter(
                f"window={width} and ngram={ngram} are not possible together: window times ngram - 1 must be at most "
                f"{MOST_TOKENS}"
            )
        self.width, self.ngram = width, ngram
        self._random = random.Random(seed)
        self._rows: list[list[int]] = []  # row 0 without column 0 (W-1 tokens), then rows 1 .. N-2 (W tokens each)
        self._tips = self._no_tips()  # last node of each column, None where the budget cut it off

    def _no_tips(self) -> list[int | None]:
        return [None] * self.width

    def begin(
        self,
        sequence: SequenceView,
        guess: Callable[[int], tuple[int, ...] | None] = lambda token: None,
        root: int | None = None,
    ) -> None:
        """Fills the first W+N-3 tokens after the root.

        Args:
            sequence: that it belongs to.
            guess: gives tokens that may follow a token, None where it knows none; a random token stands there then.
            root: the token that the window hangs below; by default the last one of the sequence.
        """
        length, root = self.width + self.ngram - 3, sequence.root if root is None else root
        ahead: list[int] = []
        while len(ahead) < length:
            ahead += guess(ahead[-1] if ahead else root) or [self._random_token(sequence)]
        ahead = ahead[:length]
        self._rows = [ahead[: self.width - 1]]
        self._rows += [ahead[row - 1 : row - 1 + self.width] for row in range(1, self.ngram - 1)]

    def _random_token(self, sequence: SequenceView) -> int:
        return sequence.text[self._random.randrange(sequence.given)]

    def add(self, builder: TreeBuilder) -> None:
        """Adds the window's nodes below the root, as far as the budget allows."""
        self._tips = []
        spine: int | None = 0
        for column in range(self.width):
            if column > 0 and spine is not None:
                spine = builder.add(spine, self._rows[0][column - 1])
            tip = spine
            for row in self._rows[1:]:
                tip = builder.add(tip, row[column]) if tip is not None else None
            self._tips.append(tip)

    @property
    def tips(self) -> list[int]:
        """The nodes after which `advance` reads what was chosen: the last row, as far as the budget allowed."""
        return [tip for tip in self._tips if tip is not None]

    def observe(self, sequence: SequenceView, step: Step) -> list[tuple[int, tuple[int, ...]]]:
        """Reads the target's choices after the last row, and moves the window on; see `advance`."""
        tips = self.tips
        chosen = step.choices.of(tips).tolist() if tips else []
        return self.advance(sequence, int(step.tree.tokens[0]), chosen, len(step.tokens))

    def advance(
        self, sequence: SequenceView, root: int, chosen: Sequence[int], committed: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Moves the window on.

        Args:
            sequence: that it belongs to.
            root: the token that it hung below.
            chosen: what the model chose after each of `tips`.
            committed: how many tokens the text has grown by.

        A step that had no room for drafts has none of the window's nodes; random tokens stand for what it chose.

        Returns:
            The n-grams that this completed, as (key, tail).
        """
        choices = iter(chosen)
        new = [next(choices) if tip is not None else self._random_token(sequence) for tip in self._tips]
        ngrams = [
            (self._rows[0][column - 1] if column else root, (*(row[column] for row in self._rows[1:]), new[column]))
            for column, tip in enumerate(self._tips)
            if tip is not None
        ]
        self._slide(sequence, new, by=committed if sequence.sampled else 1)
        self._tips = self._no_tips()
        return ngrams

    def _slide(self, sequence: SequenceView, new: list[int], by: int) -> None:
        """Drops the oldest row, appends the new one, and shifts the window by `by` columns.

        When greedy it shifts by one column, whatever was committed: trajectories may be stale but stay complete. When
        sampling it shifts by the number of committed tokens, because a window token was chosen with the Gumbel noise of
        its position.
        """
        rows = [*self._rows[1:], new]
        rows[0] = rows[0][1:]
        for row in rows if by > 1 else []:
            gone = min(by - 1, len(row))
            row[:] = row[gone:] + [self._random_token(sequence) for _ in range(gone)]
        self._rows = rows
