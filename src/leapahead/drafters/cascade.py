"""The drafter "cascade": draft models among themselves, as in cascade speculative drafting (2312.11462).

    vertical      the draft forwards of a model verify guesses of its own next tokens, by the next smaller model or, at
                  the bottom, by n-grams of its own choices: the same draft in fewer draft forwards
    horizontal    the largest model drafts the first positions, the next one those behind them, and n-grams of the text
                  and of the target's choices the last ones

Both are arrangements of sources; drafts are planned and verified as those of the drafter `draft_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.parameters import is_left_out, whole
from leapahead.drafters import draft_models
from leapahead.drafters.base import Host
from leapahead.drafters.draft_forwards import DraftForwards
from leapahead.drafters.draft_models import BUNDLED, DraftModel
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.computed import numbered
from leapahead.drafters.sources.guessed import GuessedSource, Guesser, HitRate
from leapahead.drafters.sources.guesses import ModelGuesser, RowsGuesser
from leapahead.drafters.sources.later import Later
from leapahead.drafters.sources.recycling import Recycling
from leapahead.drafters.sources.suffix import Suffix
from leapahead.models.base import CHAIN, TREE
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source


class Cascade(Planned):
    """Cascade speculative drafting (2312.11462): a draft model is itself decoded with cheaper drafts.

    Args:
        draft: the draft models, largest first, in a list or divided by commas, see `draft_model`; for the bundled
            model, by default its own. Each one's draft forwards verify tokens that the next one guesses; those of the
            last one are guessed by what it chose after the same tokens before.
        lengths: how many positions of the draft each model drafts, in a list or divided by commas, as in 4,2 for two
            models; n-grams (suffix and recycling) draft those behind them. "" if the first model drafts all positions.
        ahead: guess never more than so many tokens for one draft forward; exactly so many where `nodes` is fixed; 0 for
            no guesses.
        longest: never compare more than so many tokens of a context for those guesses; 1 for a bigram, as published.
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
        chain: no branches.
        seed_aware: rank candidates with the Gumbel noise when sampling; false for comparison.
    """

    name: ClassVar[str] = "cascade"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(
        self,
        draft: Any = None,
        lengths: Any = "",
        ahead: int = 3,
        longest: int = 4,
        nodes: int = 0,
        chain: bool = False,
        seed_aware: bool = True,
    ) -> None:
        super().__init__(nodes, seed_aware=seed_aware, chain=chain)
        self._drafts = None if is_left_out(draft) else draft_models.parsed(draft)
        self.lengths = _lengths(lengths, len(self._drafts or [BUNDLED]))
        self.ahead, self.longest = whole("ahead", ahead), whole("longest", longest, least=1)

    def attach(self, host: Host) -> None:
        drafts = draft_models.needed(self.name, self._drafts, host.info.name)
        models = host.draft_models.all(drafts, host.target, host.tokenizer)
        check_models(self.name, models, verify=self.ahead > 0)
        self.draft_forwards = DraftForwards(models, host.acceptance, nodes=self.nodes)
        self._hits = [HitRate() for _ in models]
        super().attach(host)

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        assert self.draft_forwards is not None, "it was not attached"
        models, planned = self.draft_forwards.models, self.draft_forwards.planned
        names, drafts = numbered(models), list[GuessedSource]()
        ends = list(accumulate(self.lengths)) or [0 if not self.chain else self.nodes] * len(models)
        for level in reversed(range(len(models))):  # each one is guessed for by the one behind it
            model, hits = models[level], self._hits[level]
            assert isinstance(model, DraftModel)
            guesser: Guesser | None = None
            if self.ahead and drafts:
                guesser = ModelGuesser(self.ahead, planned, hits, drafts[-1])
            elif self.ahead:
                guesser = RowsGuesser(self.ahead, planned, hits, self.longest)
            first = 0 if not level else ends[level - 1] if self.lengths else NEVER
            drafts.append(
                GuessedSource(
                    model, model.target, names[level], guesser, first, ends[level], seed_aware=self.seed_aware
                )
            )
        later = [Later(source, ends[-1]) for source in (Suffix(), Recycling())] if self.lengths else []
        return [*reversed(drafts), *later]


NEVER = 1 << 30  # the depth at which a draft model begins that serves for guesses only


def _lengths(given: Any, models: int) -> list[int]:
    """The option `lengths` as numbers, one for each draft model; none where it is empty."""
    if isinstance(given, str):
        given = [part.strip() for part in given.split(",") if part.strip()]
    parts = list(given) if isinstance(given, Sequence) else [given]
    found = [
        whole("lengths", int(part) if isinstance(part, str) and part.isdecimal() else part, least=1) for part in parts
    ]
    if found and len(found) != models:
        raise BadParameter(
            f"lengths={','.join(map(str, found))} is not possible with {models} draft "
            f"model{'s' if models > 1 else ''}: it must have a number for each of them, largest model first"
        )
    return found


def check_models(drafter: str, models: Sequence[DraftModel], verify: bool) -> None:
    """Refuses draft models that a drafter cannot decode speculatively.

    Args:
        drafter: its name.
        models: loaded.
        verify: whether their forwards are to verify guesses.

    Raises:
        Refused: naming the model and what to use.
    """
    for model in models:
        info = model.target.info
        if info.mask_token >= 0:
            raise Refused(
                f"the drafter {drafter!r} cannot use the draft model {info.name}, which gives several depths in one "
                "forward by its mask token; use drafter='draft_model'"
            )
        if verify and TREE not in info.capabilities:
            raise Refused(
                f"the drafter {drafter!r} cannot use the draft model {info.name}, whose forwards cannot verify guesses "
                "since they take no token trees; use drafter='draft_model'"
            )
