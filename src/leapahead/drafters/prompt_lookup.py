"""Prompt lookup: drafts what followed earlier occurrences of the last few tokens.

    text   ... the cat sat on the mat . the cat | sat on the
                   └─────┘ match of 2           └ draft

After Saxena, prompt-lookup-decoding (2023). Where several earlier occurrences continue differently, the continuation is
chosen by count, then by recency; when sampling, by the logarithm of its share plus the Gumbel noise of the position.
"""

from __future__ import annotations

from collections import defaultdict
from math import log
from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import whole
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import SequenceDrafter
from leapahead.models.base import CHAIN
from leapahead.planner.draft import Proposal, SequenceView, Step


class PromptLookup(SequenceDrafter):
    """Prompt lookup (Saxena, 2023): drafts what followed the same last tokens earlier in prompt or output.

    Args:
        num_tokens: draft exactly so many tokens in every step in which there is a match.
        max_ngram: tokens of the longest match, which is tried first.
        min_ngram: tokens of the shortest match.
        max_matches: never keep more than so many occurrences of one n-gram, the latest ones.
    """

    name: ClassVar[str] = "prompt_lookup"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, num_tokens: int = 10, max_ngram: int = 3, min_ngram: int = 1, max_matches: int = 32) -> None:
        self.num_tokens, self.max_ngram = whole("num_tokens", num_tokens, 1), whole("max_ngram", max_ngram, 1)
        self.min_ngram, self.max_matches = whole("min_ngram", min_ngram, 1), whole("max_matches", max_matches, 1)
        if min_ngram > max_ngram:
            raise BadParameter(f"min_ngram={min_ngram} must be at most max_ngram={max_ngram}")
        # n-gram -> indices of the tokens after its occurrences
        self._next: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._num_indexed = 0  # tokens that have been entered into `_next`
        self._lookups = self._hits = self._accepted = 0  # of the steps that were observed
        self._hit = False

    def begin(self, sequence: SequenceView) -> None:
        self._index(sequence.text)

    def _index(self, tokens: list[int]) -> None:
        for end in range(self._num_indexed, len(tokens)):
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                found = self._next[tuple(tokens[end - n : end])]
                found.append(end)
                del found[: -self.max_matches]
        self._num_indexed = len(tokens)

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        tokens = sequence.text
        self._hit = False
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            matches = self._next.get(tuple(tokens[-n:]))
            if matches:
                self._hit = True
                length = min(self.num_tokens, budget.nodes, budget.depth)
                draft = sequence.allowed(self._continuation(sequence, matches, length))
                return Proposal(TokenTree.chain(sequence.root, draft))
        return Proposal(TokenTree.root(sequence.root))

    @staticmethod
    def _continuation(sequence: SequenceView, matches: list[int], length: int) -> list[int]:
        """Follows all matches at once; where they continue differently, keeps those with the token that ranks first.

        Args:
            matches: indices of the tokens after the matches, rising.
        """
        text, position = sequence.text, len(sequence.tokens)
        end, draft = len(text), list[int]()
        for depth in range(length):
            # A match that reaches the end of the text continues in the draft, so that a repeated phrase fills it.
            tokens = [text[m + depth] if m + depth < end else draft[m + depth - end] for m in reversed(matches)]
            counts: dict[int, int] = {}  # in order of recency, which breaks ties
            for token in tokens:
                counts[token] = counts.get(token, 0) + 1
            candidates = sorted(counts, key=lambda token: -counts[token])
            best = 0
            if len(candidates) > 1:
                logp = [log(counts[token] / len(matches)) for token in candidates]
                best = int(sequence.rank(position + depth, candidates, logp)[0])
            draft.append(candidates[best])
            kept = [m for m, token in zip(reversed(matches), tokens, strict=True) if token == candidates[best]]
            matches = kept[::-1]
        return draft

    def observe(self, sequence: SequenceView, step: Step) -> None:
        self._lookups += 1
        self._hits += self._hit
        self._accepted += step.verdict.accepted
        self._index(sequence.text)

    def figures(self) -> dict[str, Any]:
        return {
            "ngrams": len(self._next),
            "hit_rate": round(self._hits / self._lookups, 4) if self._lookups else 0.0,
            "accepted_per_hit": round(self._accepted / self._hits, 4) if self._hits else 0.0,
        }
