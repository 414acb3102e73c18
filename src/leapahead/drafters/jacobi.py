"""Jacobi decoding: guess a block, let the target correct all of it at once, keep what has become final, repeat.

    y_i' = choose( . | x, y_{<i} )  for all i in one forward, until y' = y      (Santilli et al., 2305.10427)

The fixed point is unique: it is the text of plain decoding. With the noise of a position fixed, sampling is a map like
greedy, so the same iteration converges to the text that the seed samples.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import Context, Drafter, Proposal, Step
from leapahead.models.base import CHAIN


class Jacobi(Drafter):
    """Jacobi decoding: a block of guesses that the target corrects in parallel, step after step.

    Args:
        block: how many positions ahead are guessed.
        seed: of the random prompt tokens that stand where nothing is known.
    """

    name: ClassVar[str] = "jacobi"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, block: int = 8, seed: int = 0) -> None:
        if block < 1:
            raise BadParameter(f"block={block} is not possible: it must be at least 1")
        self.block = block
        self._random = random.Random(seed)
        self._guesses: list[int] = []  # for the positions after the root
        self._history: list[list[int]] = []  # of each guess: its values, oldest first
        self._after: dict[int, int] = {}  # token -> what followed it last
        self._learnt = 1
        self._converged: Counter[int] = Counter()  # iteration at which a position took its final value, and kept it
        self._iterations: Counter[int] = Counter()  # iterations a position had been through when it was committed

    def begin(self, context: Context) -> None:
        self._learn(context.tokens)

    def _learn(self, tokens: list[int]) -> None:
        for index in range(self._learnt, len(tokens)):
            self._after[tokens[index - 1]] = tokens[index]
        self._learnt = len(tokens)

    def propose(self, context: Context, budget: Budget) -> Proposal:
        while len(self._guesses) < self.block:  # warm start from what is known
            last = self._guesses[-1] if self._guesses else context.root
            guess = self._after.get(last)
            if guess is None:
                guess = context.tokens[self._random.randrange(context.prompt_length)]
            self._guesses.append(guess)
            self._history.append([])
        length = min(self.block, budget.nodes, budget.depth)
        for guess, values in zip(self._guesses[:length], self._history, strict=False):
            values.append(guess)
        return Proposal(TokenTree.chain(context.root, self._guesses[:length]))

    def observe(self, context: Context, step: Step) -> None:
        done = len(step.tokens)
        for token, values in zip(step.tokens, self._history, strict=False):
            self._tally(token, values)
        # The choice after the node at depth d is the new guess for the position d + 1 behind the old root.
        self._guesses = step.choices.of(range(done, len(step.tree))).tolist()
        self._history = [*self._history[done:], []]
        self._history = self._history[: len(self._guesses)]
        self._learn(context.tokens)

    def _tally(self, token: int, values: list[int]) -> None:
        if not values:
            return
        self._iterations[len(values)] += 1
        wrong = [i for i, value in enumerate(values, start=1) if value != token]
        self._converged[(wrong[-1] if wrong else 0) + 1] += 1  # one past the last wrong value

    def figures(self) -> dict[str, Any]:
        positions = self._iterations.total()
        after, share = {}, 0
        for iteration in range(1, max(self._converged, default=0) + 1):
            share += self._converged[iteration]
            after[str(iteration)] = round(share / positions, 4)
        total = sum(n * count for n, count in self._iterations.items())
        return {
            "positions": positions,
            "mean_iterations": round(total / positions, 4) if positions else 0.0,
            "iterations": {str(n): count for n, count in sorted(self._iterations.items())},
            "right_after_iteration": after,  # share of positions whose guess was final by then
        }
