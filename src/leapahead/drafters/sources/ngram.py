"""N-gram matching: what followed the last tokens earlier in prompt or output, in hash chains as of zlib.

    text       the cat sat on the mat . the cat | sat        a match of 2; what followed it is proposed
    position    0   1   2  3   4   5  6  7   8  | 9
    latest     (cat) -> 2    (the cat) -> 2                  the latest position after an n-gram, a table for each n
    earlier    5 -> 1 -> none                                after (the): the previous position, an array for each n

A look-up walks the chain of the longest n, then those of shorter n, a few positions in all, and compares backwards how
long each match is. A drafted token keeps the matches that agree with it; when none is left, text and draft together are
looked up again: ANPD (2404.08698), after prompt lookup (Saxena, 2023). Time and memory are linear in the text.

The feature of a candidate (match length, number of matches, whether the latest match has it) becomes a probability in
`leapahead.planner.acceptance`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import log
from typing import Any, ClassVar, NamedTuple

from leapahead.core.parameters import whole
from leapahead.models.base import CHAIN
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Candidate, Source

LEVELS = (4, 2, 1)  # n of the n-grams that have chains, longest first
MAX_WALKED = 16  # positions of a look-up, over all levels
LENGTH_WEIGHTS = tuple(4.0**length for length in range(65))  # of a match, by its length
LATEST_WEIGHT = 2.5  # factor of the latest match
LENGTH_BUCKETS = (0, 1, 2, 3, 4, 5, 5, 6, 6, 7)  # by match length; longer matches are in the last one
LAST_WEIGHT, LAST_BUCKET = len(LENGTH_WEIGHTS) - 1, len(LENGTH_BUCKETS) - 1
BASE, MASK = 0x2C9277B5, (1 << 30) - 1  # of the rolling hash; keys are small enough to be fast Python integers

Positions = tuple[tuple[int, int], ...]  # (position of the next token, length of the match), latest first


class Chains:
    """The positions after every n-gram of a text, each linked to the previous one with the same key.

    Two n-grams may have the same key, so whoever walks a chain compares the text. Position 0 stands for none.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.latest: dict[int, int] = {}  # key -> position
        self.earlier = array("i", [0])  # position -> position
        self._key, self._power = 0, pow(BASE, n, MASK + 1)

    def grow(self, text: array[int]) -> None:
        """Enters the new positions that have a next token. The end of the text has none, so it never matches itself."""
        first, last = len(self.earlier), len(text)
        leaving = text[max(first - 1 - self.n, 0) : last]  # tokens that leave the key, zeros before the text
        leaving = array("i", [0]) * max(self.n + 1 - first, 0) + leaving
        key, power, latest, append = self._key, self._power, self.latest, self.earlier.append
        for position in range(first, last):
            key = (key * BASE + text[position - 1] - leaving[position - first] * power) & MASK
            append(latest.get(key, 0))
            latest[key] = position
        self._key = key

    def key(self, tokens: Sequence[int]) -> int:
        """The hash of n tokens."""
        key = 0
        for token in tokens:
            key = key * BASE + token & MASK
        return key


class Matches(NamedTuple):
    """Earlier occurrences of the last tokens.

    Attributes:
        tail: the last tokens, including drafted ones.
        positions: the matches that agree with them.
    """

    tail: tuple[int, ...]
    positions: Positions


class Ngrams(Source):
    """Proposes what followed earlier matches of 1 to `longest` tokens.

    Args:
        longest: greatest length of a match; tokens further back are not compared.
    """

    name: ClassVar[str] = "ngram"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, longest: int = 8) -> None:
        self.longest = whole("longest", longest, least=1)
        self.chains = tuple(Chains(n) for n in LEVELS if n <= longest)
        self._text = array("i")

    def begin(self, sequence: SequenceView) -> None:
        self.index(sequence.text)

    def read(self, sequence: SequenceView) -> None:
        self.index(sequence.text)

    def index(self, tokens: Sequence[int]) -> None:
        """Enters the new tokens of a growing text, in time linear in their number."""
        if len(tokens) > (known := len(self._text)):
            self._text.extend(tokens[known:])
            for chains in self.chains:
                chains.grow(self._text)

    def root(self, sequence: SequenceView) -> Matches | None:
        self.index(sequence.text)
        tail = tuple(self._text[-self.longest :])
        return Matches(tail, self._look_up(tail)) if tail else None

    def follow(self, state: Matches, token: int) -> Matches:
        text, last = self._text, len(self._text) - 1
        tail = (*state.tail, token)[-self.longest :]
        agreeing = tuple([(at + 1, length + 1) for at, length in state.positions if text[at] == token and at < last])
        return Matches(tail, agreeing or self._look_up(tail))

    def _look_up(self, tail: tuple[int, ...]) -> Positions:
        """The latest matches of the longest n-gram that has any, then those of shorter ones."""
        text, size, left = self._text, len(tail), MAX_WALKED
        found: dict[int, int] = {}
        for chains in self.chains:
            n, earlier = chains.n, chains.earlier
            at = chains.latest.get(chains.key(tail[-n:]), 0) if n <= size else 0
            while at and left:
                left -= 1
                if at not in found:
                    length, longest = 0, min(size, at)
                    while length < longest and text[at - 1 - length] == tail[-1 - length]:
                        length += 1
                    if length >= n:
                        found[at] = length
                at = earlier[at]
        return tuple(sorted(found.items(), reverse=True))

    def candidates(self, state: Matches, limit: int) -> list[Candidate]:
        if not state.positions:
            return []
        text, tallies = self._text, dict[int, list[Any]]()  # token -> weight, longest match, count
        for at, length in state.positions:
            weight = LENGTH_WEIGHTS[length] if length < LAST_WEIGHT else LENGTH_WEIGHTS[LAST_WEIGHT]
            tally = tallies.get(token := text[at])
            if tally is None:
                tallies[token] = [weight, length, 1]
                continue
            tally[0] += weight
            tally[2] += 1
            if length > tally[1]:
                tally[1] = length
        at, length = state.positions[0]
        latest = text[at]
        tallies[latest][0] += (LATEST_WEIGHT - 1.0) * LENGTH_WEIGHTS[min(length, LAST_WEIGHT)]
        total = sum([tally[0] for tally in tallies.values()])
        chosen = sorted(tallies.items(), key=_weight, reverse=True)[:limit]
        return [
            Candidate(
                token,
                log(weight / total),
                (
                    LENGTH_BUCKETS[length] if length < LAST_BUCKET else LENGTH_BUCKETS[LAST_BUCKET],
                    count if count < 3 else 3,
                    int(token == latest),
                ),
            )
            for token, (weight, length, count) in chosen
        ]

    def figures(self) -> dict[str, Any]:
        return {"tokens": len(self._text), "ngrams": sum(len(chains.latest) for chains in self.chains)}


def _weight(item: tuple[int, list[Any]]) -> float:
    return item[1][0]  # type: ignore[no-any-return]
