"""The interface of a grammar: which tokens may come next, so that a text has a given form.

    CompiledGrammar ── follow(tokens) ──> GrammarState     one for each sequence
                                            allows, forced, mask, ended: after any drafted path

A question names a prefix as `(length, path)`: the first `length` committed tokens of the sequence, then drafted ones.
So each node of a tree is answered for its own prefix, and the answer is the one of plain decoding there. The
implementation is `leapahead.grammar`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]


class GrammarState(Protocol):
    """A grammar along one sequence, whose committed tokens it reads as they grow.

    Attributes:
        problem: why a prefix could not be followed although the grammar allows it (a limit was reached); "" if none.
    """

    problem: str

    def mask(self, length: int, path: Sequence[int]) -> BoolArray:
        """bool [vocab], the tokens that may come next; all of them where a drafted prefix has left the grammar.

        The text never comes there, so that what is chosen there does not matter.
        """

    def allows(self, length: int, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """For each of `tokens`, whether it may come next. Faster than `mask` for a few tokens."""

    def admitted(self, length: int, path: Sequence[int]) -> int:
        """How many tokens of a path, from its beginning, the grammar allows; those that end the text do not count."""

    def forced(self, length: int, path: Sequence[int]) -> list[int]:
        """The tokens of the text that must come next, as the tokenizer would write it; none where there is a choice.

        A text can be divided into tokens in several ways, so that the target may choose others.
        """

    def ended(self, length: int, path: Sequence[int]) -> bool:
        """Whether the text is complete and nothing can be added to it."""


@runtime_checkable
class CompiledGrammar(Protocol):
    """A grammar for one vocabulary. Sequences share it."""

    def follow(self, tokens: list[int], vocab_size: int) -> GrammarState:
        """The state at the beginning of a sequence's output.

        Args:
            tokens: committed tokens, live; those that are there now are the prompt, which the grammar does not concern.
            vocab_size: length of a mask.
        """
