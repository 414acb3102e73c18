"""Jacobi decoding: the target corrects a block of guessed tokens in parallel, and the correct prefix is committed.

    y_i' = choose( . | x, y_{<i} )  for all i in one forward, until y' = y      (Santilli et al., 2305.10427)

The fixed point is unique: it is the text of plain decoding. When sampling, the Gumbel noise of a position is fixed, so
the same iteration converges to the text that the seed samples.

    sliding   root | g g g g g g g         so many guesses in every step, wherever the text is; known successors first
    pgj       done done | g g g | . . .    fixed blocks, one after another; a block begins with padding tokens
    pj        done done | g g g g g g      one block for the whole text
    hgj       done done | g g g | plain    fixed blocks up to a number of tokens, then one token a step

The last three are those of the paper, as its authors' code has them, but for one thing: a position whose value is final
is committed at once, so that the rows of a step become fewer while a block converges.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import one_of, whole
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import SequenceDrafter
from leapahead.models.base import CHAIN
from leapahead.planner.draft import Proposal, SequenceView, Step

SLIDING, PJ, PGJ, HGJ = VARIANTS = ("sliding", "pj", "pgj", "hgj")


class Jacobi(SequenceDrafter):
    """Jacobi decoding (2305.10427): a block of guesses that the target corrects in parallel, step after step.

    Args:
        block: guess exactly so many positions after the root in every step; with fixed blocks, their length.
        seed: seed of the random choice of prompt tokens, which are the first guess where no better one is known.
        variant: "sliding", or one of those of the paper: "pj" (the whole text at once), "pgj" (fixed blocks) or "hgj"
            (fixed blocks up to `length`). Their first guess is the first token of the text, with which T5 and Marian
            pad.
        length: of hgj: nothing is guessed after so many new tokens; 0 for as many as the encoder's input has, and
            without an encoder for the whole text.
    """

    name: ClassVar[str] = "jacobi"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, block: int = 8, seed: int = 0, variant: str = SLIDING, length: int = 0) -> None:
        self.block, self.length = whole("block", block, 1), whole("length", length)
        self.variant = one_of("variant", variant, VARIANTS)
        if length and variant != HGJ:
            raise BadParameter(f"length={length} is for the variant hgj only; leave it out, or give variant='hgj'")
        self._random = random.Random(whole("seed", seed))
        self._guesses: list[int] = []  # for the positions after the root
        self._history: list[list[int]] = []  # for each guess: its values so far, oldest first
        self._successor: dict[int, int] = {}  # token -> the token that followed it most recently
        self._num_indexed = 1  # tokens whose predecessor has been entered into `_successor`
        self._converged: Counter[int] = Counter()  # iteration at which a position took its final value -> positions
        self._iterations: Counter[int] = Counter()  # iterations that a committed position went through -> positions

    def begin(self, sequence: SequenceView) -> None:
        self._index(sequence.text)

    def _index(self, tokens: list[int]) -> None:
        for index in range(self._num_indexed, len(tokens)):
            self._successor[tokens[index - 1]] = tokens[index]
        self._num_indexed = len(tokens)

    def _wanted(self, sequence: SequenceView, budget: Budget) -> int:
        """How many positions are guessed in this step."""
        if self.variant == SLIDING:
            return self.block
        if self.variant == PJ:
            return budget.depth
        done, end = len(sequence.tokens) - sequence.prompt_length, self.length or len(sequence.source)
        if self.variant == HGJ and 0 < end <= done:
            return 0
        return self.block - 1 - done % self.block  # the target's choice after the last of them completes the block

    def _guess(self, sequence: SequenceView) -> int:
        """The first guess for the position after those that are guessed."""
        if self.variant != SLIDING:
            return sequence.tokens[0]
        last = self._guesses[-1] if self._guesses else sequence.root
        guess = self._successor.get(last)
        return sequence.text[self._random.randrange(sequence.given)] if guess is None else guess

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        length = min(self._wanted(sequence, budget), budget.nodes, budget.depth)
        while len(self._guesses) < length:  # what is guessed is replaced in every step
            self._guesses.append(self._guess(sequence))
            self._history.append([])
        for guess, values in zip(self._guesses[:length], self._history, strict=False):
            values.append(guess)
        return Proposal(TokenTree.chain(sequence.root, self._guesses[:length]))

    def observe(self, sequence: SequenceView, step: Step) -> None:
        committed = len(step.tokens)
        for token, values in zip(step.tokens, self._history, strict=False):
            self._count_iterations(token, values)
        # The choice after the node at depth d is the new guess for position d + 1 after the old root.
        self._guesses = step.choices.of(range(committed, len(step.tree))).tolist()
        self._history = [*self._history[committed:], []]
        self._history = self._history[: len(self._guesses)]
        self._index(sequence.text)

    def _count_iterations(self, token: int, values: list[int]) -> None:
        """Counts how many iterations a committed token took, and at which its guess became final."""
        if not values:
            return
        self._iterations[len(values)] += 1
        wrong = [i for i, value in enumerate(values, start=1) if value != token]
        self._converged[(wrong[-1] if wrong else 0) + 1] += 1

    def figures(self) -> dict[str, Any]:
        positions = self._iterations.total()
        shares, converged = {}, 0
        for iteration in range(1, max(self._converged, default=0) + 1):
            converged += self._converged[iteration]
            shares[str(iteration)] = round(converged / positions, 4)
        total = sum(n * count for n, count in self._iterations.items())
        return {
            "positions": positions,
            "mean_iterations": round(total / positions, 4) if positions else 0.0,
            "iterations": {str(n): count for n, count in sorted(self._iterations.items())},
            "right_after_iteration": shares,  # share of positions whose guess was final after so many iterations
        }
