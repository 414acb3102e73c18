"""Predicted output: the user says what the text will be, about, as when a file is edited or a template filled.

    prediction   a b c d e f g h          text  a b c X | ?
                       │ │ └ "replaced": d became X, so e comes next
                       │ └ "inserted": X was put in, so d comes next
                       └ left the prediction here; "found": where else X stands, as when what came before it was deleted

As OpenAI's predicted outputs, as a draft: wrong parts cost time, never text. While the text keeps to the prediction
there is one place to go on from. When it leaves there are several, and each is offered until some tokens have matched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from leapahead.drafters.base import Context
from leapahead.planner.source import Candidate, Source
from leapahead.models.base import CHAIN

MATCH = 4  # tokens, at most, that find the place again
SURE = 3  # tokens that matched, from which on there is no doubt about the place
RUNS = (0, 1, 2, 3, 4, 6, 8, 16, 32)
LIKELY = {"follows": -0.05, "found": -0.7, "inserted": -1.4, "replaced": -1.4, "resumed": -2.0}  # log-probabilities


class Way(NamedTuple):
    """One reading of where the text stands in the prediction.

    Attributes:
        at: the place in the prediction that comes next.
        how: it is there: it follows; or, after a divergence, it was found by its last tokens, or something was inserted
            or replaced; or it resumes where it had been before it went back in the prediction.
        run: tokens before it that matched.
    """

    at: int
    how: str
    run: int


Ways = tuple[Way, ...]  # a state: the readings that the drafted tokens have left, likeliest first


class Prediction(Source):
    """Follows `Context.prediction`; without one it knows nothing."""

    name: ClassVar[str] = "prediction"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self) -> None:
        self._tokens: Sequence[int] = ()
        self._places: dict[tuple[int, ...], list[int]] | None = None  # n-gram -> places behind it, rising
        self._read = 0  # tokens of the text
        self._at = 0  # the place that comes next
        self._run = SURE  # tokens before it that matched; the beginning is as good as any
        self._left = self._since = 0  # the place where the text left the prediction, and how many tokens ago
        self._front = 0  # behind the furthest place that the text surely was at
        self.matched = self.divergences = 0

    def begin(self, context: Context) -> None:
        self._tokens, self._read = context.prediction, context.prompt_length
        self.read(context)

    def root(self, context: Context) -> Ways | None:
        if self._run >= SURE:
            back = [Way(self._front, "resumed", 0)] if self._at < self._front else []
            return self._in_reach(Way(self._at, "follows", self._run), *back)
        return self._in_reach(
            *([Way(self._at, "found", self._run)] if self._run else ()),
            Way(self._left, "inserted", 0),
            Way(self._left + self._since, "replaced", 0),
            Way(self._front, "resumed", 0),
        )

    def _in_reach(self, *ways: Way) -> Ways | None:
        """Those that do not stand at the prediction's end, one for each place."""
        places: dict[int, Way] = {}
        for way in ways:
            if way.at < len(self._tokens):
                places.setdefault(way.at, way)
        return tuple(places.values()) or None

    def follow(self, state: Ways, token: int) -> Ways | None:
        held = [Way(way.at + 1, way.how, way.run + 1) for way in state if self._tokens[way.at] == token]
        if not held and state[0].how == "follows":  # somebody else drafted a token that leaves the prediction
            held = [Way(state[0].at, "inserted", 0), Way(state[0].at + 1, "replaced", 0)]
        return self._in_reach(*held)

    def candidates(self, state: Ways, limit: int) -> list[Candidate]:
        found: dict[int, Candidate] = {}
        for at, how, run in state:
            bucket = next((index for index, edge in enumerate(RUNS) if run <= edge), len(RUNS))
            feature = (how, bucket) if how == "follows" else (how, bucket, min(self._since, SURE))
            token = self._tokens[at]
            found.setdefault(token, Candidate(token, LIKELY[how], feature))
        return list(found.values())[:limit]

    def read(self, context: Context) -> None:
        tokens = context.tokens
        for end in range(self._read + 1, len(tokens) + 1):
            self._see(tokens[end - 1], tokens[max(context.prompt_length, end - MATCH) : end])
        self._read = len(tokens)

    def _see(self, token: int, last: Sequence[int]) -> None:
        """The text's next token; `last` ends with it."""
        holds = self._at < len(self._tokens) and self._tokens[self._at] == token
        self.matched += holds
        if self._run >= SURE:
            if holds:
                self._at, self._run = self._at + 1, self._run + 1
                self._front = max(self._front, self._at)
                return
            self.divergences += 1
            self._left, self._since = self._at, 0
        self._since += 1
        if holds and self._run:
            self._at, self._run = self._at + 1, self._run + 1
        else:
            self._at, self._run = self._found(last)

    def _found(self, last: Sequence[int]) -> tuple[int, int]:
        """Behind the longest match of the last tokens, the nearest at or after the place that was left, else before.

        Returns:
            The place and the length of the match, 0 if there is none.
        """
        if self._places is None:  # a prediction that holds never asks
            self._places = {}
            for n in range(1, MATCH + 1):
                for end, key in enumerate(zip(*(self._tokens[skip:] for skip in range(n)), strict=False), n):
                    self._places.setdefault(key, []).append(end)
        for n in range(min(len(last), MATCH), 0, -1):
            if places := self._places.get(tuple(last[-n:])):
                index = bisect_left(places, self._left + 1)  # behind a token that is at or after it
                return places[min(index, len(places) - 1)], n
        return self._left, 0

    def figures(self) -> dict[str, Any]:
        return {"tokens": len(self._tokens), "matched": self.matched, "divergences": self.divergences}
