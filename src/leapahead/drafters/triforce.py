"""TriForce (2404.11912): the target drafts for itself over a retrieved part of its cache, and a small model for that.

    small model        streaming cache: first tokens and a window       g1 g2 ..     guesses, one by one
    target, retrieved  `budget` entries of the target's own cache       t1 t2 ..     verifies the guesses: one forward
      ... both again, until `depth` tokens were chosen
    target             all entries                                      verifies t1 t2 .. : the step

All levels match exactly: the middle one chooses as the target does, with its parameters and the noise of the position,
so a token of it is accepted wherever the entries that were left out do not change the choice. (The published code
samples at the inner level from the middle's distribution where it should from the residual, which is not exact.)

The middle level pays where reading the cache takes most of the target's forward; see `models.self_draft.retrieval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import is_left_out, whole
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters import draft_models
from leapahead.drafters.base import Drafter, Host, close_all
from leapahead.drafters.draft_models import DraftModel
from leapahead.drafters.draft_runner import Draft, DraftRunner, Path
from leapahead.models.base import CHAIN
from leapahead.planner.draft import Proposal, SequenceView

RANKED = 64  # likeliest tokens of the small model that are ranked with the noise
LEAST_CHUNKS = 4  # in a budget


@dataclass
class Following:
    """What the drafter keeps of one sequence.

    Attributes:
        middle: follows it with the target over a part of its cache.
        small: follows it with the small model; None where there is none.
    """

    middle: DraftRunner
    small: DraftRunner | None


class TriForce(Drafter):
    """TriForce (2404.11912): the target over a part of its cache drafts for the target, a small model for that part.

    For long texts and models of Transformers: a forward over `budget` entries of the target's own cache is faster than
    one over all of them. Drafts are chains.

    Args:
        budget: cache entries (one per token, of each layer and key head) that the middle level attends to, the newest
            ones among them; those of tokens committed since they were chosen come on top.
        chunk: entries are chosen in chunks of so many, by their mean key; the first chunk is always chosen.
        refresh: choose again after so many committed tokens.
        depth: draft exactly so many tokens in every step, fewer only at the end of a text.
        draft: the small model that drafts for the middle level, see `draft_model`; without, the middle drafts alone.
        draft_depth: the small model drafts so many tokens for each forward of the middle level.
        draft_window: newest tokens that the small model sees, behind the first 16; 0 for all.
        shortest: the length of a text, prompt included, from which on the middle level is used; by default more than
            `budget`. In shorter ones the small model drafts for the target, or nothing is drafted.
    """

    name: ClassVar[str] = "triforce"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})
    copies_target: ClassVar[bool] = True
    middle: DraftModel  # the target over a retrieved part of its cache; known after `attach`

    def __init__(
        self,
        budget: int = 1024,
        chunk: int = 8,
        refresh: int = 32,
        depth: int = 6,
        draft: Any = None,
        draft_depth: int = 2,
        draft_window: int = 512,
        shortest: int | None = None,
    ) -> None:
        self.budget, self.chunk = whole("budget", budget, 1), whole("chunk", chunk, 1)
        self.refresh, self.depth = whole("refresh", refresh, 1), whole("depth", depth, 1)
        self.draft_depth, self.draft_window = whole("draft_depth", draft_depth, 1), whole("draft_window", draft_window)
        self.shortest = self.budget + 1 if shortest is None else whole("shortest", shortest)
        if self.budget < LEAST_CHUNKS * self.chunk:
            raise BadParameter(
                f"budget={budget} is not possible with chunk={chunk}: it must hold at least {LEAST_CHUNKS} chunks; "
                f"give budget={LEAST_CHUNKS * self.chunk}, or a smaller chunk"
            )
        self._drafts = [] if is_left_out(draft) else draft_models.parsed(draft)
        if len(self._drafts) > 1:
            raise BadParameter("triforce takes one draft model; draft_model and auto take several")
        self._sequences: dict[SequenceView, Following] = {}

    def attach(self, host: Host) -> None:
        super().attach(host)
        self.middle = host.draft_models.retrieving(host.target, self.budget, self.chunk, self.refresh)
        self._small: DraftModel | None = None
        if self._drafts:
            (self._small,) = host.draft_models.all(self._drafts, host.target, host.tokenizer)
            draft_models.check_window(self.draft_window, [self._small])

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        """Both levels in turns, each forward over all sequences that still want tokens."""
        growing = [
            Growing(self._following(sequence), sequence, min(self.depth, budget.depth, budget.nodes), self.shortest)
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        while wanting := [each for each in growing if each.missing]:
            for _ in range(self.draft_depth):
                self._guess([each for each in wanting if each.guesses])
            self._choose(wanting)
        return [each.proposal() for each in growing]

    def _guess(self, growing: Sequence[Growing]) -> None:
        """ONE forward of the small model, for one more guess of each sequence."""
        if self._small is None or not growing:
            return
        with self._small.target.lock:
            for each, draft in _forward([(each.small, each.guessed_path) for each in growing if each.small], growing):
                each.guess(draft)

    def _choose(self, growing: Sequence[Growing]) -> None:
        """ONE forward of the middle level, over the guesses; where it is not used, they are the draft."""
        able = [each for each in growing if each.is_long]
        with self.middle.target.lock:
            for each, draft in _forward([(each.middle, each.guessed_path) for each in able], able):
                each.choose(draft)
        for each in growing:
            if not each.is_long:
                each.take_guesses()

    def _following(self, sequence: SequenceView) -> Following:
        """The runners of a sequence; the small model has read a further chunk of the text if it has not read all."""
        if (found := self._sequences.get(sequence)) is None:
            middle = DraftRunner(self.middle.target, sequence.tokens, sequence.params, sequence.owner)
            small = None
            if self._small is not None:
                small = DraftRunner(self._small.target, sequence.tokens, owner=sequence.owner, window=self.draft_window)
            found = self._sequences[sequence] = Following(middle, small)
        if (runner := found.small) is not None:
            runner.commit()  # where its window is full, it is read again
            if not runner.opened or runner.reading:
                runner.read_ahead()
        return found

    def close(self, sequence: SequenceView) -> None:
        if (found := self._sequences.get(sequence)) is not None:
            runners = [runner for runner in (found.middle, found.small) if runner is not None]
            close_all(self._sequences, sequence, [runner.close for runner in runners])

    def figures(self, sequence: SequenceView) -> dict[str, Any]:
        if (found := self._sequences.get(sequence)) is None:
            return {}
        runners = {"retrieval": found.middle, **({"draft": found.small} if found.small is not None else {})}
        return {
            name: {
                "model": runner.target.info.name,
                "forwards": runner.forwards,
                "seconds": runner.seconds,
                **({"stopped": runner.failed} if runner.failed else {}),
            }
            for name, runner in runners.items()
        }


class Growing:
    """The draft of one sequence in the making: the tokens that the middle level has chosen, and guesses behind them.

    Args:
        following: the runners of the sequence.
        sequence: the sequence.
        length: of the draft.
        shortest: see `TriForce`.

    Attributes:
        is_long: whether the middle level is used.
    """

    def __init__(self, following: Following, sequence: SequenceView, length: int, shortest: int) -> None:
        self.middle, self.small, self.sequence = following.middle, following.small, sequence
        self.is_long = len(sequence.tokens) >= shortest and self.middle.opened and not self.middle.failed
        self._path: list[int] = []
        self._guesses: list[int] = []
        self._by: list[str] = []
        self._chosen: dict[Path, int] = {}  # the middle's token after each path that it has computed
        self._guessed: dict[Path, int] = {}  # the small model's, likewise
        self._length = max(0, length) if self.is_long or self._can_guess else 0

    @property
    def _can_guess(self) -> bool:
        small = self.small
        return small is not None and small.opened and not small.reading and not small.failed

    @property
    def missing(self) -> int:
        """Tokens that are still to be chosen."""
        return self._length - len(self._path)

    @property
    def guesses(self) -> bool:
        """Whether the small model is to guess one more token: the middle adds one behind the last that it accepts."""
        return self._can_guess and len(self._guesses) < self.missing - self.is_long

    @property
    def guessed_path(self) -> Path:
        return (*self._path, *self._guesses)

    def guess(self, draft: Draft | None) -> None:
        """Takes the small model's candidates: the likeliest, or when sampling the best with this position's noise."""
        if draft is not None:
            tokens, logits = draft.choices.top_k(min(RANKED, draft.choices.width))
            for path, node in zip(draft.paths, draft.nodes, strict=True):
                row = node - draft.choices.num_computed
                known = tokens[row] < self.sequence.vocab_size
                position = len(self.sequence.tokens) + len(path)
                if len(best := self.sequence.rank(position, tokens[row][known], logits[row][known])):
                    self._guessed[path] = int(tokens[row][known][best[0]])
        if (token := self._guessed.get(self.guessed_path)) is not None:
            self._guesses.append(token)

    def choose(self, draft: Draft | None) -> None:
        """Takes what the middle chooses after the guesses, as far as these are what it chooses."""
        if draft is not None:
            chosen = draft.choices.of(draft.nodes).tolist()
            self._chosen.update(zip(draft.paths, chosen, strict=True))
        before = len(self._path)
        while self.missing and (token := self._chosen.get(tuple(self._path))) is not None:
            is_guessed = self._guesses[len(self._path) - before : len(self._path) - before + 1] == [token]
            self._path.append(token)
            self._by.append("draft" if is_guessed else "retrieval")
        self._guesses = []
        if len(self._path) == before:  # the middle cannot follow the text
            self._length = before

    def take_guesses(self) -> None:
        """The guesses are the draft, since the middle is not used."""
        self._path += self._guesses
        self._by += ["draft"] * len(self._guesses)
        if not self._guesses:
            self._length = len(self._path)
        self._guesses = []

    def proposal(self) -> Proposal:
        return Proposal(TokenTree.chain(self.sequence.root, self._path), ("", *self._by))


def _forward(
    wanted: Sequence[tuple[DraftRunner, Path]], growing: Sequence[Growing]
) -> list[tuple[Growing, Draft | None]]:
    """ONE forward over a path of each text, by runners of one draft model whose lock is held."""
    for runner, path in wanted:
        runner.add([path])
    drafts, _ = DraftRunner.forward([runner for runner, _ in wanted])
    return list(zip(growing, drafts, strict=True))
