"""A draft model that is itself decoded speculatively: each of its forwards verifies guesses of its own next tokens.

    text ── a ── b ── ?             asked for: candidates after the path (a, b)
                 ├─ c ── d ── e     guessed: computed in the same draft forward
                 └─ f ── g

If the draft model chooses c after (a, b), the row of c has the candidates after (a, b, c), so the draft forward for
these is saved, and so on. The candidates are those that there are without guesses: the draft is the same, and is found
in fewer draft forwards (the vertical cascade of 2312.11462; with lookahead's guesses: Ouroboros, 2402.13720).

What guesses is in `guesses`; this module knows only how often it is right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from leapahead.drafters.sources.computed import Path, Row
from leapahead.drafters.sources.draft import DraftSource
from leapahead.drafters.sources.forward import ForwardModel
from leapahead.models.base import Target
from leapahead.models.choices import Rows
from leapahead.planner.draft import Forward, SequenceView
from leapahead.planner.source import Candidate, Score

SLOWNESS = 64  # draft forwards over which rates are averaged
FORGETTING = 256  # draft forwards without guesses in which most of a rate is forgotten


class HitRate:
    """How often guesses of one draft model's tokens are right, over all texts of a drafter.

    Attributes:
        rate: the share of first guesses that were what the draft model chose; 0.5 before there were any.
        run: guessed tokens that were right in a row, in the mean over draft forwards.
    """

    def __init__(self) -> None:
        self.rate, self.run = 0.5, 0.0
        self._first, self._runs = 0, 0

    def learn_first(self, hit: bool) -> None:
        self._first = min(self._first + 1, SLOWNESS)
        self.rate += (hit - self.rate) / (self._first + 1)

    def forget(self) -> None:
        """Called where nothing was guessed, so that it is tried again some time."""
        self.rate += (0.5 - self.rate) / FORGETTING

    def learn_run(self, right: int) -> None:
        self._runs = min(self._runs + 1, SLOWNESS)
        self.run += (right - self.run) / self._runs


class Wanted(NamedTuple):
    """Guesses that are wanted for a draft forward.

    Attributes:
        guesser: of the source.
        source: of the draft model whose tokens are guessed.
        path: after which they are guessed; one that the draft forward is asked for.
        tokens: how many, at most.
        verified: whether they take part in the forward; else the first one is only compared with its result.
    """

    guesser: Guesser
    source: GuessedSource
    path: Path
    tokens: int
    verified: bool


class Guesser(ABC):
    """Guesses what a draft model will choose, for one sequence.

    Args:
        most: greatest number of tokens that are guessed ahead.
        planned: whether fewer are guessed where they do not pay by the draft model's latency profile; else always
            `most`, and no time is read.
        hits: shared by all sequences.
    """

    costs_forward = False  # whether a guess costs a forward of another draft model

    def __init__(self, most: int, planned: bool, hits: HitRate) -> None:
        self.most, self.planned, self.hits = most, planned, hits

    def begin(self, sequence: SequenceView) -> None:
        """Called once."""
        self.sequence = sequence

    def length(self, source: GuessedSource) -> int:
        """How many tokens are worth guessing: as many as give the most tokens per second of a draft forward.

        With the rate h of right guesses, a forward with n guessed tokens gives 1 + h + .. + h^n tokens.
        """
        if not self.planned:
            return self.most
        profile = source.model.latency.profile(1)
        tokens = accumulate(self.hits.rate**n for n in range(self.most + 1))
        rates = [each / (profile(1 + n) + self.seconds(n)) for n, each in enumerate(tokens)]
        return rates.index(max(rates))

    def seconds(self, tokens: int) -> float:
        """What so many guesses cost beside the rows of the draft model that verifies them."""
        return 0.0

    @abstractmethod
    def guess(self, source: GuessedSource, path: Path, tokens: int) -> list[Path]:
        """Paths that begin with `path` and go on with at most so many guessed tokens, likeliest first."""

    @classmethod
    def guess_together(cls, wanted: Sequence[Wanted]) -> list[list[Path]]:
        """The guesses for all sequences of a draft forward, whose guessers are of this class."""
        return [each.guesser.guess(each.source, each.path, each.tokens) for each in wanted]

    def keep(self, source: GuessedSource, paths: Sequence[Path]) -> None:  # noqa: B027
        """Called when rows of a draft forward were kept, those after these paths."""

    def observe(self, source: GuessedSource, path: Path, right: int) -> None:  # noqa: B027
        """Called after a draft forward that verified the guesses after a path.

        Args:
            right: how many of them in a row were what the draft model chose.
        """


class GuessedSource(DraftSource):
    """A draft model with guesses of its tokens, for one sequence.

    Args:
        model, target, name: see `DraftSource`.
        guesser: of its tokens; None for none.
        first: depth of the nodes after which its candidates begin; the rows of shallower ones serve as guesses for
            another draft model only.
        until: depth at which they end; 0 for nowhere. No guess that is to save a draft forward reaches beyond it.
        width: greatest number of candidates after a node; 0 for no limit.
        seed_aware: whether its choices take the Gumbel noise into account when sampling.
    """

    def __init__(
        self,
        model: ForwardModel,
        target: Target,
        name: str,
        guesser: Guesser | None,
        first: int = 0,
        until: int = 0,
        width: int = 0,
        seed_aware: bool = True,
    ) -> None:
        super().__init__(model, target, name)
        self.guesser, self.first, self.until, self.width = guesser, first, until, width
        self.seed_aware = seed_aware
        self._chosen: dict[Path, int] = {}
        self._beside = self._guessed = self._right = 0

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        if self.guesser is not None:
            self.guesser.begin(sequence)

    def commit(self) -> None:
        super().commit()
        self._chosen = {}

    def keep(self, keys: Sequence[Any], found: Rows, rows: Sequence[int] | None = None) -> None:
        super().keep(keys, found, rows)
        if self.guesser is not None:
            self.guesser.keep(self, keys)

    # -------------------------------------------------------------------------------------- where it drafts

    def computable(self, path: Path) -> bool:
        return self.first <= len(path) and not (self.until and len(path) >= self.until)

    def has_candidates(self, state: Path) -> bool:
        return self.computable(state) and super().has_candidates(state)

    def _sure(self, state: Path) -> Row | None:
        row = super()._sure(state) if self.computable(state) else None
        return self._allowed(state, row) if row is not None and self.width else row

    def candidates(self, state: Path, limit: int) -> list[Candidate]:
        return super().candidates(state, min(limit, self.width or limit))

    def seed_aware_candidates(self, state: Path, limit: int, score: Score) -> list[Candidate]:
        return super().seed_aware_candidates(state, min(limit, self.width or limit), score)

    # ------------------------------------------------------------------------------------------- the guesses

    @property
    def beside(self) -> int:
        return self._beside

    def reach(self, path: Path) -> int:
        """As many depths as guesses are right in a row, for the path that they go on from."""
        guesser = self.guesser
        return 1 + round(guesser.hits.run) if guesser is not None and self._own(path) else 1

    def choice(self, path: Path) -> int | None:
        """The draft model's own next token after a path, as its first candidate there; None if it was not computed.

        With a grammar, it is the first one that this allows.
        """
        if (token := self._chosen.get(path)) is not None:
            return token
        if (row := self._rows.get(path)) is None or not len(row.tokens):
            return None
        tokens, logp, _ = self._allowed(path, row)
        best = 0
        if self._sequence.sampled and self.seed_aware:
            best = int(self._sequence.scores(len(self._sequence.tokens) + len(path), tokens, logp).argmax())
        self._chosen[path] = token = int(tokens[best])
        return token

    def row(self, path: Path) -> Row:
        """The likeliest tokens after a computed path that may be chosen there, and their log-probabilities."""
        return self._allowed(path, self._rows[path])

    def _allowed(self, path: Path, row: Row) -> Row:
        """What the grammar allows of a row; the whole where a guessed path has left the grammar, or none is allowed."""
        sequence = self._sequence
        if sequence.grammar is None or len(sequence.allowed(path)) < len(path):
            return row
        kept = np.array(sequence.grammar.allows(len(sequence.tokens), path, row.tokens.tolist()), dtype=np.bool_)
        return row._replace(tokens=row.tokens[kept], logp=row.logp[kept]) if kept.any() else row

    @property
    def can_draft(self) -> bool:
        """Whether the draft model is through with reading, or was when its first chunk was read."""
        if not (self.failed or self.opened):
            self.read_ahead()
        return not (self.failed or self.reading)

    def _own(self, path: Path) -> bool:
        """Whether all tokens of a path, from the depth at which this draft model begins, are its own choices."""
        return all(self.choice(path[:depth]) == path[depth] for depth in range(self.first, len(path)))

    def _wanted(self, paths: Sequence[Path]) -> Wanted | None:
        """The guesses that are wanted in a draft forward over these paths; None for none."""
        guesser, self._beside = self.guesser, 0
        if guesser is None or self.runner.crowded or (path := next(filter(self._own, paths), None)) is None:
            return None
        most = guesser.length(self)
        if self.until:
            most = min(most, self.until - 1 - len(path))
        if most < 1 and guesser.costs_forward:
            guesser.hits.forget()
            return None
        return Wanted(guesser, self, path, max(most, 1), verified=most > 0)

    @classmethod
    def draft(cls, wanted: Sequence[tuple[DraftSource, Sequence[Path]]]) -> Forward | None:
        guessing = [
            guess
            for source, paths in wanted
            if isinstance(source, GuessedSource) and (guess := source._wanted(paths)) is not None
        ]
        found = type(guessing[0].guesser).guess_together(guessing) if guessing else []
        beside: dict[DraftSource, list[Path]] = {}
        for each, guesses in zip(guessing, found, strict=True):
            verified = beside[each.source] = guesses if each.verified else []
            depths = range(len(each.path) + 1, max(map(len, verified), default=0) + 1)
            each.source._beside = len({path[:depth] for path in verified for depth in depths})
        forward = super().draft([(source, [*paths, *beside.get(source, ())]) for source, paths in wanted])
        for each, guesses in zip(guessing, found, strict=True) if forward is not None else ():
            each.source._learn(each, guesses)
        return forward

    def _learn(self, wanted: Wanted, guesses: Sequence[Path]) -> None:
        """Compares guesses with what the draft model chose."""
        guesser, path = wanted.guesser, wanted.path
        if (chosen := self.choice(path)) is None:
            return
        if guesses:
            guesser.hits.learn_first(any(each[len(path)] == chosen for each in guesses))
        if wanted.verified:
            right = 0
            while chosen is not None and (path := (*path, chosen)) in self._rows:
                chosen, right = self.choice(path), right + 1
            guesser.hits.learn_run(right)
            self._guessed, self._right = self._guessed + self._beside, self._right + right
            guesser.observe(self, wanted.path, right)

    def figures(self) -> dict[str, Any]:
        return {**super().figures(), "guessed": self._guessed, "right": self._right}
