"""What guesses a draft model's next tokens: its own earlier rows, or a smaller draft model.

    RowsGuesser     what it chose after the same last tokens before: n-grams of the draft model
    ModelGuesser    a smaller draft model, which may be guessed for in its turn

The last level of cascade speculative drafting (2312.11462) is a bigram of a corpus. Here it is made of the rows that
the draft model computes, as Token Recycling (2408.08696) makes one of the target's, with contexts of up to four tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from leapahead.drafters.sources.computed import Path
from leapahead.drafters.sources.guessed import GuessedSource, Guesser, HitRate, Wanted
from leapahead.drafters.sources.recycling import Recycling
from leapahead.planner.draft import SequenceView

SECTION = "draft_rows"  # of the drafter cache: what the smallest draft model chose


class RowsGuesser(Guesser):
    """Guesses by the draft model's own likeliest tokens of the last time that it was in the same context.

    Args:
        most, planned, hits: see `Guesser`.
        longest: greatest number of tokens of a context that are compared; 1 for a bigram.
    """

    def __init__(self, most: int, planned: bool, hits: HitRate, longest: int) -> None:
        super().__init__(most, planned, hits)
        self.recycling = Recycling(longest=longest)
        self.recycling.name = SECTION  # type: ignore[misc]

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        self.recycling.begin(sequence)

    def guess(self, source: GuessedSource, path: Path, tokens: int) -> list[Path]:
        recycling, sequence, found = self.recycling, self.sequence, path
        state = recycling.root(sequence)
        for token in path:
            state = recycling.follow(state, token)
        while len(found) < len(path) + tokens:
            position = len(sequence.tokens) + len(found)
            if sequence.sampled and source.seed_aware:
                score = partial(sequence.scores, position)
                candidates = recycling.seed_aware_candidates(state, 1, score)
            else:
                candidates = recycling.candidates(state, 1)
            if not candidates:
                break
            found = (*found, candidates[0].token)
            state = recycling.follow(state, candidates[0].token)
        return [found] if len(found) > len(path) else []

    def keep(self, source: GuessedSource, paths: Sequence[Path]) -> None:
        recycling = self.recycling
        text = recycling.root(self.sequence)
        for path in paths:
            tokens, logp, _ = source.row(path)
            if len(tokens):
                k = recycling.k
                recycling.keep([(*text, *path)[-recycling.longest :]], tokens[None, :k], logp[None, :k])


class ModelGuesser(Guesser):
    """Guesses by a smaller draft model's own text, one of its draft forwards for all sequences at a time.

    Args:
        most, planned, hits: see `Guesser`.
        smaller: that draft model, as a source of the same sequence.
    """

    costs_forward = True

    def __init__(self, most: int, planned: bool, hits: HitRate, smaller: GuessedSource) -> None:
        super().__init__(most, planned, hits)
        self.smaller = smaller

    def seconds(self, tokens: int) -> float:
        return tokens * self.smaller.model.latency.profile(1)(1)

    def guess(self, source: GuessedSource, path: Path, tokens: int) -> list[Path]:
        return self.guess_together([Wanted(self, source, path, tokens, verified=True)])[0]

    @classmethod
    def guess_together(cls, wanted: Sequence[Wanted]) -> list[list[Path]]:
        growing = [
            (each.guesser.smaller, each.path, len(each.path) + each.tokens)
            for each in wanted
            if isinstance(each.guesser, ModelGuesser)
        ]
        found = [path for _, path, _ in growing]
        while True:
            lacking: list[tuple[GuessedSource, list[Path]]] = []
            for index, (smaller, _, length) in enumerate(growing):
                while len(found[index]) < length and (token := smaller.choice(found[index])) is not None:
                    found[index] = (*found[index], token)
                if len(found[index]) < length and smaller.can_draft:
                    lacking.append((smaller, [found[index]]))
            if not lacking or type(lacking[0][0]).draft(lacking) is None:
                break
            if all(smaller.choice(path) is None for smaller, (path,) in lacking):
                break  # its limits do not allow more
        return [[path] if len(path) > len(begin) else [] for path, (_, begin, _) in zip(found, growing, strict=True)]
