"""Prompt lookup: what followed the last few tokens the last times they stood in the text.

    text   ... the cat sat on the mat . the cat | sat on the
                   └─────┘ match of 2           └ draft

After Saxena, prompt-lookup-decoding (2023); chooses among several places by count, then recency, and through the dice.
"""

from __future__ import annotations

from collections import defaultdict, deque
from math import log
from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import Context, Drafter, Proposal, Step
from leapahead.models.base import CHAIN


class PromptLookup(Drafter):
    """Prompt lookup: drafts what followed the same last tokens earlier in prompt or output.

    Args:
        num_tokens: length of the draft.
        max_ngram: the longest match, tried first.
        min_ngram: the shortest match.
        places: at most so many latest places of an n-gram are remembered.
    """

    name: ClassVar[str] = "prompt_lookup"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, num_tokens: int = 10, max_ngram: int = 3, min_ngram: int = 1, places: int = 32) -> None:
        if num_tokens < 1 or places < 1:
            raise BadParameter(f"num_tokens={num_tokens} and places={places} must be at least 1")
        if not 1 <= min_ngram <= max_ngram:
            raise BadParameter(f"min_ngram={min_ngram} must be at least 1 and at most max_ngram={max_ngram}")
        self.num_tokens, self.max_ngram, self.min_ngram, self.places = num_tokens, max_ngram, min_ngram, places
        self._followed: dict[tuple[int, ...], deque[int]] = defaultdict(lambda: deque(maxlen=places))
        self._indexed = 0  # tokens before this index have been entered as what followed
        self._lookups = self._hits = self._accepted = 0

    def begin(self, context: Context) -> None:
        self._index(context.tokens)

    def _index(self, tokens: list[int]) -> None:
        for end in range(self._indexed, len(tokens)):
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self._followed[tuple(tokens[end - n : end])].append(end)
        self._indexed = len(tokens)

    def propose(self, context: Context, budget: Budget) -> Proposal:
        tokens = context.tokens
        self._lookups += 1
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            places = self._followed.get(tuple(tokens[-n:]))
            if places:
                self._hits += 1
                length = min(self.num_tokens, budget.nodes, budget.depth)
                return Proposal(TokenTree.chain(context.root, self._follow(context, list(places), length)))
        return Proposal(TokenTree.root(context.root))

    @staticmethod
    def _follow(context: Context, places: list[int], length: int) -> list[int]:
        """Goes along all places at once; where they part, keeps those with the token that ranks first."""
        text = context.tokens
        end, draft = len(text), list[int]()
        for depth in range(length):
            # A place that reaches the end of the text goes on in the draft: a period is drafted as often as it fits.
            follows = [text[p + depth] if p + depth < end else draft[p + depth - end] for p in reversed(places)]
            counts: dict[int, int] = {}  # in order of recency, which breaks ties
            for token in follows:
                counts[token] = counts.get(token, 0) + 1
            candidates = sorted(counts, key=lambda token: -counts[token])
            best = 0
            if len(candidates) > 1:
                best = int(context.rank(end + depth, candidates, [log(counts[t] / len(places)) for t in candidates])[0])
            draft.append(candidates[best])
            places = [p for p, token in zip(reversed(places), follows, strict=True) if token == candidates[best]][::-1]
        return draft

    def observe(self, context: Context, step: Step) -> None:
        self._accepted += step.verdict.accepted
        self._index(context.tokens)

    def figures(self) -> dict[str, Any]:
        return {
            "ngrams": len(self._followed),
            "hit_rate": round(self._hits / self._lookups, 4) if self._lookups else 0.0,
            "accepted_per_hit": round(self._accepted / self._hits, 4) if self._hits else 0.0,
        }
