"""Ouroboros (2402.13720): phrases by which a draft model decodes with lookahead, and which lengthen its drafts.

    text ── a ── b ── c ─┬─ x ── y ── z      a, b, c: the draft model's own; x y z, v w: phrases that the pool has of c,
                         └─ v ── w           verified in the same forward of the target

    draft model    each of its forwards verifies phrases of the last drafted token and moves a window of lookahead on,
                   whose n-grams enter the pool
    target         what it chose along every path of the tree enters the pool, behind rejected tokens too: a phrase that
                   was drafted comes back as the target would have it

The pool and the window are those of the drafter `lookahead`.
"""

from __future__ import annotations

from math import log
from typing import Any, ClassVar

from leapahead.core.tree import TokenTree, TreeBuilder
from leapahead.drafters.pool import NgramPool
from leapahead.drafters.sources.computed import Path
from leapahead.drafters.sources.guessed import GuessedSource, Guesser, HitRate
from leapahead.drafters.sources.past_phrases import PastPhrases, WarmPool
from leapahead.drafters.window import Window
from leapahead.models.base import CHAIN
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.source import Candidate, Source

DEEPEST = 7  # places within a phrase, from this one on, whose acceptance is estimated together


class LookaheadGuesser(Guesser):
    """Guesses by the pool's phrases of the last drafted token, and keeps a window of lookahead below it.

    Args:
        pool: of the sequence.
        window: of the draft model.
        planned, hits: see `Guesser`.
    """

    def __init__(self, pool: NgramPool, window: Window, planned: bool, hits: HitRate) -> None:
        super().__init__(pool.ngram - 1, planned, hits)
        self.pool, self.window = pool, window
        self._next = -1  # the position that the window's root must have when sampling
        self._tree = TokenTree.root(0)

    def length(self, source: GuessedSource) -> int:
        """All of its phrases together with the window, or nothing where these rows do not pay."""
        if not self.planned:
            return self.most
        profile, rows = source.model.latency.profile(1), max(len(self._tree), self.window.width * self.most)
        tokens = sum(self.hits.rate**n for n in range(self.most + 1))
        return self.most if tokens / profile(rows) > 1 / profile(1) else 0

    def guess(self, source: GuessedSource, path: Path, tokens: int) -> list[Path]:
        sequence, root = self.sequence, path[-1] if path else self.sequence.root
        position = len(sequence.tokens) + len(path)
        if self._next < 0 or (sequence.sampled and position != self._next):
            self.window.begin(sequence, self.pool.peek, root)
        builder = TreeBuilder(root)
        tails = self.pool.get(root)
        for index in sequence.rank(position, [tail[0] for tail in tails], [-log(n) for n in range(1, len(tails) + 1)]):
            builder.add_path(tails[index][:tokens])
        self.window.add(builder)
        self._tree = builder.build()
        return [(*path, *self._tree.path_tokens(leaf)) for leaf in self._tree.leaf_list if leaf]

    def observe(self, source: GuessedSource, path: Path, right: int) -> None:
        chosen = [source.choice((*path, *self._tree.path_tokens(tip))) for tip in self.window.tips]
        tokens = [token for token in chosen if token is not None]
        if len(tokens) < len(chosen):  # the draft model's limits left nodes out
            self._next = -1
            return
        for key, tail in self.window.advance(self.sequence, self._tree.token_list[0], tokens, right + 1):
            self.pool.add(key, tail)
        self._next = len(self.sequence.tokens) + len(path) + right + 1


class Phrases(Source):
    """Proposes phrases of the pool behind what the draft model has drafted. A state is a path.

    Args:
        pool: of the sequence.
        draft: the source of the draft model.
        most: greatest number of phrases after one token (K).
        first: depth of the nodes after which there are phrases, at least.
    """

    name: ClassVar[str] = "phrase"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, pool: WarmPool, draft: GuessedSource, most: int, first: int = 0) -> None:
        self.pool, self.draft, self.most, self.first = pool, draft, most, first
        self._read = 0

    def begin(self, sequence: SequenceView) -> None:
        self._sequence = sequence
        if sequence.drafter_cache is not None:
            self.pool.past = sequence.drafter_cache.section("phrases", PastPhrases)
        self.pool.add_text(sequence.text)
        self._read = len(sequence.text)

    def read(self, sequence: SequenceView) -> None:
        text = sequence.text
        if self._read < len(text):
            self.pool.add_text(text, start=self._read)
            self._read = len(text)

    def observe(self, sequence: SequenceView, step: Step) -> None:
        tree = step.tree
        choices, tail = step.choices.of(range(len(tree))).tolist(), self.pool.ngram - 1
        for leaf in reversed(tree.leaf_list):
            path = tree.path(leaf)
            chosen = [choices[node] for node in path]
            self.pool.add_text(chosen)
            for depth in range(len(path) - tail + 1):
                self.pool.add(tree.token_list[path[depth]], tuple(chosen[depth : depth + tail]))
        self.read(sequence)  # last, so that the committed text is the most recent

    def finish(self, sequence: SequenceView) -> None:
        if self.pool.past is not None:
            self.pool.past.enter(self.pool.ngrams())

    def root(self, sequence: SequenceView) -> Path:
        return ()

    def follow(self, state: Path, token: int) -> Path:
        return (*state, token)

    def candidates(self, state: Path, limit: int) -> list[Candidate]:
        start = next((depth for depth in range(len(state) + 1) if not self.draft.has_candidates(state[:depth])), None)
        if start is None or start < self.first:
            return []
        phrase = state[start:]
        tails = self.pool.known(state[start - 1] if start else self._sequence.root)[: self.most]
        matching = [tail[len(phrase)] for tail in tails if tail[: len(phrase)] == phrase and len(tail) > len(phrase)]
        tokens = list(dict.fromkeys(matching))[:limit]
        weights = [1 / (rank + 1) for rank in range(len(tokens))]
        feature = (min(len(phrase), DEEPEST),)
        return [
            Candidate(token, log(weight / sum(weights)), feature) for token, weight in zip(tokens, weights, strict=True)
        ]

    def figures(self) -> dict[str, Any]:
        return self.pool.figures()
