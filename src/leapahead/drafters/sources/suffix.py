"""Suffix matching: continuations of the longest earlier occurrence of the text's suffix, in this text and in past ones.

    own       prompt and output of this request; the match is the suffix link of the automaton's newest state
    shared    past texts, in two volumes; the match in each is advanced with every token of this text

After SAM Decoding (2411.10666), with branches ranked by count as in SuffixDecoding (2411.04975). Shorter suffixes are
consulted where the longest one has few continuations, with a lower weight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import reduce
from math import log
from operator import add
from typing import Any, ClassVar

from leapahead.drafters.sources.past_texts import PastTexts, Volume
from leapahead.drafters.sources.suffix_automaton import Automaton, new_automaton
from leapahead.models.base import CHAIN
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Candidate, Feature, Source

DRAFT_LINKS = 16  # suffix links that a drafted token may follow; a repeated token has as many as occurrences
LEVELS = 3  # match lengths that are asked for continuations, longest first
BACK_OFF = 0.3  # weight of the next shorter match
LENGTH_BUCKETS = (1, 2, 3, 5, 8, 12, 20, 40)
MAX_CANDIDATES = 8
LOCATE_TOKENS = 32  # last tokens by which the text is located in past texts that have grown

Match = tuple[Automaton, int, int]  # automaton, state, length; a length of 0 is no match


class Suffix(Source):
    """Proposes what followed the longest suffix of the text that occurred before, then what followed shorter ones."""

    name: ClassVar[str] = "suffix"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self) -> None:
        self.automaton = new_automaton()
        self._shared: PastTexts | None = None
        self._located: dict[Volume, tuple[int, int, int]] = {}  # state, length, texts of the volume at that time

    def begin(self, sequence: SequenceView) -> None:
        if sequence.drafter_cache is not None:
            self._shared = sequence.drafter_cache.section(self.name, PastTexts)
        self.read(sequence)

    def read(self, sequence: SequenceView) -> None:
        tokens, known = sequence.text, self.automaton.tokens
        if known < len(tokens):
            self.automaton.extend(tokens[known:])
        if self._shared is not None:
            self._located = {volume: self._locate(volume, tokens, known) for volume in self._shared.volumes}

    def finish(self, sequence: SequenceView) -> None:
        if self._shared is not None:
            self._shared.add(sequence.text)

    def _locate(self, volume: Volume, tokens: Sequence[int], known: int) -> tuple[int, int, int]:
        """The match of the text in a volume: the former one advanced, or a new one if the volume has grown.

        Args:
            known: tokens that the former match has seen.
        """
        texts, automaton = len(volume.texts), volume.automaton
        state, length, former_texts = self._located.get(volume, (0, 0, -1))
        if former_texts >= 0:
            for index in range(known, len(tokens)):
                state, length = automaton.advance(state, length, tokens[index])
        if former_texts != texts:
            found = 0, 0
            for token in tokens[-LOCATE_TOKENS:]:
                found = automaton.advance(*found, token)
            if found[1] > length:
                state, length = found
        return state, length, texts

    def root(self, sequence: SequenceView) -> tuple[Match, ...]:
        """The match in the text itself, then those in past texts."""
        own, state = self.automaton, self.automaton.end
        matches = [(own, state, own.length(state))]
        for volume, (located, length, _) in self._located.items():
            matches.append((volume.automaton, volume.automaton.settled(located, length), length))
        return tuple(matches)

    def follow(self, state: tuple[Match, ...], token: int) -> tuple[Match, ...]:
        return tuple(
            [(automaton, *automaton.advance(at, length, token, DRAFT_LINKS)) for automaton, at, length in state]
        )

    def candidates(self, state: tuple[Match, ...], limit: int) -> list[Candidate]:
        wanted, factor = min(limit, MAX_CANDIDATES), 1.0
        weights: dict[int, float] = {}
        features: dict[int, Feature] = {}
        matches = [match for match in state if match[2]]
        for _ in range(LEVELS):
            if not matches or len(weights) >= wanted:
                break
            longest = max([match[2] for match in matches])
            level = [match for match in matches if match[2] == longest]  # of one length: the same suffix
            matches = [match for match in matches if match[2] < longest]
            counts, own = self._count(level, max(wanted // len(level), 4))
            for automaton, at, _ in level:
                if (at := automaton.link(at)) > 0:
                    matches.append((automaton, at, automaton.length(at)))
            if counts:
                bucket, share = bisect_left(LENGTH_BUCKETS, longest), factor / sum(counts.values())
                for token, count in counts.items():
                    if token in weights:
                        weights[token] += count * share
                    else:
                        weights[token] = count * share
                        features[token] = (bucket, count if count < 3 else 3, int(token in own))
                factor *= BACK_OFF
        total = reduce(add, weights.values(), 0.0)  # `sum` of later versions of Python rounds in another way
        chosen = sorted(weights, key=weights.__getitem__, reverse=True)[:limit]
        return [Candidate(token, log(weights[token] / total), features[token]) for token in chosen]

    def _count(self, level: Sequence[Match], limit: int) -> tuple[dict[int, int], set[int]]:
        """Counts of the tokens that followed matches of one length, and those of them that the text itself has."""
        counts: dict[int, int] = {}
        own: set[int] = set()
        for automaton, at, _ in level:
            for token, count in automaton.followers(at, limit):
                if token in counts:
                    counts[token] += count or 1
                else:
                    counts[token] = count or 1
                    if automaton is self.automaton:
                        own.add(token)
        return counts, own

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"states": len(self.automaton), "tokens": self.automaton.tokens}
        if self._shared is not None:
            figures["shared"] = self._shared.figures()
        return figures
