"""The drafter "ouroboros" (2402.13720): a draft model that decodes with lookahead, its drafts lengthened by phrases."""

from __future__ import annotations

from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import flag, is_left_out, whole
from leapahead.drafters import draft_models
from leapahead.drafters.base import Host
from leapahead.drafters.cascade import check_models
from leapahead.drafters.draft_forwards import DraftForwards
from leapahead.drafters.draft_models import DraftModel
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.guessed import GuessedSource, HitRate
from leapahead.drafters.sources.past_phrases import WarmPool
from leapahead.drafters.sources.phrases import LookaheadGuesser, Phrases
from leapahead.drafters.window import Window
from leapahead.models.base import CHAIN
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source

CAPACITY = 100_000  # n-grams of a pool


class Ouroboros(Planned):
    """Ouroboros (2402.13720): the draft model decodes with lookahead, and phrases of its pool lengthen the drafts.

    Args:
        draft: the model that drafts, see `draft_model`; one. For the bundled model, by default its own.
        length: the draft model drafts never more than so many tokens of a path; where `nodes` is fixed, phrases go on
            behind so many only; 0 for as many as `nodes` needs, or as pay.
        phrases: K; verify never more than so many phrases after one token.
        window: W, columns of the draft model's window of lookahead.
        ngram: N; a phrase has one token less.
        guesses: G; never keep more than so many phrases of one token, nor have the draft model verify more.
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
        chain: the draft model drafts one path; phrases branch behind it all the same.
        seed_aware: rank candidates with the Gumbel noise when sampling; false for comparison.
        seed: seed of the random choice of prompt tokens that fill the window.
    """

    name: ClassVar[str] = "ouroboros"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(
        self,
        draft: Any = None,
        length: int = 0,
        phrases: int = 3,
        window: int = 5,
        ngram: int = 4,
        guesses: int = 5,
        nodes: int = 0,
        chain: bool = False,
        seed_aware: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(nodes, seed_aware=seed_aware)
        self._drafts = None if is_left_out(draft) else draft_models.parsed(draft)
        if self._drafts and len(self._drafts) > 1:
            raise BadParameter("the drafter 'ouroboros' takes one draft model; draft_model and cascade take several")
        self.length, self.phrases = whole("length", length), whole("phrases", phrases)
        self.window, self.ngram = whole("window", window, least=1), whole("ngram", ngram, least=2)
        self.guesses, self.seed = whole("guesses", guesses, least=1), whole("seed", seed)
        self.one_path = flag("chain", chain)

    def attach(self, host: Host) -> None:
        drafts = draft_models.needed(self.name, self._drafts, host.info.name)
        models = host.draft_models.all(drafts, host.target, host.tokenizer)
        check_models(self.name, models, verify=True)
        self.draft_forwards = DraftForwards(models, host.acceptance, nodes=self.nodes)
        self._hits = HitRate()
        super().attach(host)

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        assert self.draft_forwards is not None, "it was not attached"
        (model,), planned = self.draft_forwards.models, self.draft_forwards.planned
        assert isinstance(model, DraftModel)
        pool = WarmPool(self.ngram, self.guesses, CAPACITY)
        window = Window(self.window, self.ngram, self.seed)
        guesser = LookaheadGuesser(pool, window, planned, self._hits)
        draft = GuessedSource(
            model, model.target, model.source_name, guesser, 0, self.length, int(self.one_path), self.seed_aware
        )
        return [draft, Phrases(pool, draft, self.phrases, 0 if planned else self.length)]
