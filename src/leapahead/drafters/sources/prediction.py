"""Predicted output: the user gives the expected text, as when a file is edited or a template filled.

    prediction   a b c d e f g h          text  a b c X | ?
                       │ │ └ "replaced": d became X, so e comes next
                       │ └ "inserted": X was inserted, so d comes next
                       └ the text left the prediction here; "found": another occurrence of X, as after a deletion

Like OpenAI's predicted outputs, as a draft: wrong parts cost time and never change the text. While the text follows the
prediction, there is one position to continue from. After a divergence there are several, and each is proposed until
some tokens have matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from leapahead.models.base import CHAIN
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Candidate, Feature, Source

MAX_MATCH = 4  # greatest number of tokens by which a position is found after a divergence
CERTAIN = 3  # matching tokens from which on there is no doubt about the position
RUN_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 16, 32)
LOG_PROBABILITIES = {"follows": -0.05, "found": -0.7, "inserted": -1.4, "replaced": -1.4, "resumed": -2.0}
KINDS = {kind: index for index, kind in enumerate(LOG_PROBABILITIES)}  # as a candidate's feature


class Alignment(NamedTuple):
    """One hypothesis of the position in the prediction at which the text continues.

    Attributes:
        at: index of the next token in the prediction.
        kind: why it may continue there. "follows": it has followed the prediction so far; "found": the last tokens
            occur there; "inserted" or "replaced": tokens were inserted or replaced at the divergence; "resumed": it
            returns to the furthest position, having gone back in the prediction.
        run: number of matching tokens before it.
    """

    at: int
    kind: str
    run: int


Alignments = tuple[Alignment, ...]  # a state: the hypotheses that agree with the drafted tokens, likeliest first


class Prediction(Source):
    """Proposes the continuation of `SequenceView.prediction`; nothing without a prediction."""

    name: ClassVar[str] = "prediction"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self) -> None:
        self._tokens: Sequence[int] = ()
        self._searched: str | None = None  # the prediction with a character for each token
        self._num_read = 0  # tokens of the text
        self._at = 0  # next position in the prediction
        self._run = CERTAIN  # matching tokens before it; the beginning is certain
        self._left = self._since = 0  # where the text left the prediction, and how many tokens ago
        self._furthest = 0  # the furthest position after a token that certainly matched
        self.matched = self.divergences = 0

    def begin(self, sequence: SequenceView) -> None:
        self._tokens, self._num_read = sequence.prediction, sequence.prompt_length
        self.read(sequence)

    def root(self, sequence: SequenceView) -> Alignments | None:
        if self._run >= CERTAIN:
            back = [Alignment(self._furthest, "resumed", 0)] if self._at < self._furthest else []
            return self._distinct(Alignment(self._at, "follows", self._run), *back)
        return self._distinct(
            *([Alignment(self._at, "found", self._run)] if self._run else ()),
            Alignment(self._left, "inserted", 0),
            Alignment(self._left + self._since, "replaced", 0),
            Alignment(self._furthest, "resumed", 0),
        )

    def _distinct(self, *alignments: Alignment) -> Alignments | None:
        """Those before the end of the prediction, one for each position; None if there are none."""
        found: dict[int, Alignment] = {}
        for alignment in alignments:
            if alignment.at < len(self._tokens):
                found.setdefault(alignment.at, alignment)
        return tuple(found.values()) or None

    def follow(self, state: Alignments, token: int) -> Alignments | None:
        agreeing = [Alignment(at + 1, kind, run + 1) for at, kind, run in state if self._tokens[at] == token]
        if not agreeing and state[0].kind == "follows":  # another source drafted a token that leaves the prediction
            agreeing = [Alignment(state[0].at, "inserted", 0), Alignment(state[0].at + 1, "replaced", 0)]
        return self._distinct(*agreeing)

    def candidates(self, state: Alignments, limit: int) -> list[Candidate]:
        found: dict[int, Candidate] = {}
        for at, kind, run in state:
            bucket = next((index for index, edge in enumerate(RUN_BUCKETS) if run <= edge), len(RUN_BUCKETS))
            feature: Feature = (KINDS[kind], bucket)
            if kind != "follows":
                feature = (*feature, min(self._since, CERTAIN))
            token = self._tokens[at]
            found.setdefault(token, Candidate(token, LOG_PROBABILITIES[kind], feature))
        return list(found.values())[:limit]

    def read(self, sequence: SequenceView) -> None:
        tokens = sequence.tokens
        for end in range(self._num_read + 1, len(tokens) + 1):
            self._advance(tokens[end - 1], tokens[max(sequence.prompt_length, end - MAX_MATCH) : end])
        self._num_read = len(tokens)

    def _advance(self, token: int, last: Sequence[int]) -> None:
        """Moves on by the text's next token; `last` ends with it."""
        matches = self._at < len(self._tokens) and self._tokens[self._at] == token
        self.matched += matches
        if self._run >= CERTAIN:
            if matches:
                self._at, self._run = self._at + 1, self._run + 1
                self._furthest = max(self._furthest, self._at)
                return
            self.divergences += 1
            self._left, self._since = self._at, 0
        self._since += 1
        if matches and self._run:
            self._at, self._run = self._at + 1, self._run + 1
        else:
            self._at, self._run = self._find(last)

    def _find(self, last: Sequence[int]) -> tuple[int, int]:
        """The longest match of the last tokens: the nearest after the divergence, else the last one before it.

        Returns:
            The position after it and its length, 0 if there is none.
        """
        if self._searched is None:  # made at the first divergence
            self._searched = _characters(self._tokens)
        found = self._left, 0
        for n in range(1, min(len(last), MAX_MATCH) + 1):
            key = _characters(last[-n:])
            at = self._searched.find(key, max(0, self._left + 1 - n))  # its last token is at or after the divergence
            if at < 0 and (at := self._searched.rfind(key)) < 0:
                break  # nor is anything longer there
            found = at + n, n
        return found

    def figures(self) -> dict[str, Any]:
        return {"tokens": len(self._tokens), "matched": self.matched, "divergences": self.divergences}


def _characters(tokens: Sequence[int]) -> str:
    """A string in which tokens are found fast, without an index of them. Vocabularies are smaller than Unicode."""
    return "".join(map(chr, tokens))
