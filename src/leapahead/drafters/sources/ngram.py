"""What followed the last tokens earlier in prompt or output, in hash chains as zlib has them: linear time and memory.

    text      the cat sat on the mat . the cat | sat         a match of 2; what followed it comes next
    place      0   1   2  3   4   5  6  7   8  | 9
    latest    (cat) -> 2    (the cat) -> 2                   the last place behind an n-gram, a table for each n
    earlier   5 -> 1 -> none                                 behind (the): the place before that, an array for each n

A look-up walks the chain of the longest n, then of the shorter ones, a few places in all, and reads backwards how long
each match is. A drafted token keeps the places that have it and moves them on; when none is left, text and draft
together are looked up anew, so drafts grow by chaining: ANPD (2404.08698), after prompt lookup (Saxena, 2023).

Which continuation to choose is the learned part: the feature of a candidate (match length, how many places say so,
whether the latest does) becomes a probability by what happened to candidates like it, in `planner.calibration`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import log
from typing import Any, ClassVar, NamedTuple

from leapahead.core.errors import BadParameter
from leapahead.drafters.base import Context
from leapahead.planner.source import Candidate, Source
from leapahead.models.base import CHAIN

LEVELS = (4, 2, 1)  # tokens of the n-grams that have chains, longest first
WALKED = 16  # places of a look-up, over all levels
LONGER = tuple(4.0**length for length in range(65))  # weight of a place by the length of its match
RECENT = 2.5  # what the latest place counts more
BUCKETS = (0, 1, 2, 3, 4, 5, 5, 6, 6, 7)  # of match lengths; longer ones are in the last
MOST, WIDEST = len(LONGER) - 1, len(BUCKETS) - 1
BASE, MASK = 0x2C9277B5, (1 << 30) - 1  # of the rolling keys, one digit of a Python integer each

Live = tuple[tuple[int, int], ...]  # (place of the next token, length of the match), most recent first


class Chains:
    """The places behind every n-gram of a text, each with the place before it that has the same key.

    Two n-grams may have one key, so who walks a chain reads what the text says there. Place 0 stands for none.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.latest: dict[int, int] = {}  # key -> place
        self.earlier = array("i", [0])  # place -> place
        self._key, self._power = 0, pow(BASE, n, MASK + 1)

    def grow(self, text: array[int]) -> None:
        """Enters every place that has a next token by now. The end of the text has none: it never matches itself."""
        first, last = len(self.earlier), len(text)
        before = text[max(first - 1 - self.n, 0) : last]  # the tokens that leave the key, zeros before the text
        before = array("i", [0]) * max(self.n + 1 - first, 0) + before
        key, power, latest, enter = self._key, self._power, self.latest, self.earlier.append
        for place in range(first, last):
            key = (key * BASE + text[place - 1] - before[place - first] * power) & MASK
            enter(latest.get(key, 0))
            latest[key] = place
        self._key = key

    def key(self, tokens: Sequence[int]) -> int:
        """Of n tokens."""
        key = 0
        for token in tokens:
            key = key * BASE + token & MASK
        return key


class Places(NamedTuple):
    """Where the text stood as it stands now.

    Attributes:
        tail: the last tokens, drafted ones among them.
        live: the places that agree with them.
    """

    tail: tuple[int, ...]
    live: Live


class Ngrams(Source):
    """Matches of 1 to `longest` tokens and what followed them.

    Args:
        longest: tokens of a match; what stands further back is not compared.
    """

    name: ClassVar[str] = "ngram"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, longest: int = 8) -> None:
        if longest < 1:
            raise BadParameter(f"longest={longest} is not possible: a match has at least 1 token")
        self.longest = longest
        self.chains = tuple(Chains(n) for n in LEVELS if n <= longest)
        self._text = array("i")

    def begin(self, context: Context) -> None:
        self.index(context.tokens)

    def read(self, context: Context) -> None:
        self.index(context.tokens)

    def index(self, tokens: Sequence[int]) -> None:
        """Enters what is new of a text that grows; linear in that."""
        if len(tokens) > (known := len(self._text)):
            self._text.extend(tokens[known:])
            for chains in self.chains:
                chains.grow(self._text)

    def root(self, context: Context) -> Places | None:
        self.index(context.tokens)
        tail = tuple(self._text[-self.longest :])
        return Places(tail, self._look_up(tail)) if tail else None

    def follow(self, state: Places, token: int) -> Places:
        text, last = self._text, len(self._text) - 1
        tail = (*state.tail, token)[-self.longest :]
        live = tuple([(at + 1, length + 1) for at, length in state.live if text[at] == token and at < last])
        return Places(tail, live or self._look_up(tail))

    def _look_up(self, tail: tuple[int, ...]) -> Live:
        """The latest places behind the longest n-gram that has any, then those behind shorter ones."""
        text, size, left = self._text, len(tail), WALKED
        found: dict[int, int] = {}
        for chains in self.chains:
            n, earlier = chains.n, chains.earlier
            at = chains.latest.get(chains.key(tail[-n:]), 0) if n <= size else 0
            while at and left:
                left -= 1
                if at not in found:
                    length, most = 0, min(size, at)
                    while length < most and text[at - 1 - length] == tail[-1 - length]:
                        length += 1
                    if length >= n:
                        found[at] = length
                at = earlier[at]
        return tuple(sorted(found.items(), reverse=True))

    def candidates(self, state: Places, limit: int) -> list[Candidate]:
        if not state.live:
            return []
        text, slots = self._text, dict[int, list[Any]]()  # token -> weight, longest match, count
        for at, length in state.live:
            weight = LONGER[length] if length < MOST else LONGER[MOST]
            slot = slots.get(token := text[at])
            if slot is None:
                slots[token] = [weight, length, 1]
                continue
            slot[0] += weight
            slot[2] += 1
            if length > slot[1]:
                slot[1] = length
        at, length = state.live[0]
        latest = text[at]
        slots[latest][0] += (RECENT - 1.0) * LONGER[min(length, MOST)]
        whole = sum([slot[0] for slot in slots.values()])
        chosen = sorted(slots.items(), key=_weight, reverse=True)[:limit]
        return [
            Candidate(
                token,
                log(weight / whole),
                (BUCKETS[length] if length < WIDEST else BUCKETS[WIDEST], count if count < 3 else 3, token == latest),
            )
            for token, (weight, length, count) in chosen
        ]

    def figures(self) -> dict[str, Any]:
        return {"tokens": len(self._text), "ngrams": sum(len(chains.latest) for chains in self.chains)}


def _weight(item: tuple[int, list[Any]]) -> float:
    return item[1][0]  # type: ignore[no-any-return]
