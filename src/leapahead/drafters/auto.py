"""`auto`, the default drafter: one tree from many sources, as large as it pays on this machine and for this text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.text import Tokenizer
from leapahead.drafters import draft_models
from leapahead.drafters.base import Context
from leapahead.drafters.planned import Grown
from leapahead.planner.source import Source
from leapahead.drafters.sources.datastore import Datastore
from leapahead.drafters.sources.lookahead import LookaheadSource
from leapahead.drafters.sources.ngram import Ngrams
from leapahead.drafters.sources.prediction import Prediction
from leapahead.drafters.sources.recycling import SAMPLED, Recycling
from leapahead.drafters.sources.suffix import Suffix
from leapahead.models.base import Target

SOURCES: dict[str, Callable[[], Source]] = {
    "prediction": Prediction,
    "ngram": Ngrams,
    "suffix": Suffix,
    "recycling": Recycling,
    "lookahead": LookaheadSource,
}
USUAL = ("prediction", "suffix", "recycling", "lookahead")  # n-grams know nothing that the automaton does not


class Auto(Grown):
    """Drafts what pays, from every source that the target can serve; decodes plainly where nothing pays.

    Args:
        sources: their names, divided by commas; by default prediction, suffix, recycling and lookahead.
        datastore: a file that `leapahead datastore build` has written, as one more source.
        draft: a draft model, as one more source; or several, see `draft_model`.
        nodes: draft so many nodes every step, whatever they cost; 0 for what pays.
        max_nodes: never more.
        dice: rank candidates under the dice when sampling; false for comparison.
    """

    name: ClassVar[str] = "auto"
    predicts: ClassVar[bool] = True
    prompt_top_k: ClassVar[int] = SAMPLED

    def __init__(
        self,
        sources: str = "",
        datastore: str = "",
        draft: Any = None,
        nodes: int = 0,
        max_nodes: int = 128,
        seed_aware: bool = True,
    ) -> None:
        super().__init__(nodes, max_nodes, seed_aware)
        self._wanted = [name.strip() for name in sources.split(",") if name.strip()] or list(USUAL)
        if unknown := [name for name in self._wanted if name not in SOURCES]:
            raise BadParameter(f"there is no source {unknown[0]!r}; there are {', '.join(SOURCES)}")
        self._store = Datastore(datastore) if datastore else None
        self._drafts = draft_models.given(draft) if draft else []

    def check_target(self, target: Target) -> None:
        self._models = draft_models.resolved(self._drafts, target)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        draft_models.check(self._drafts, tokenizer)
        if self._store is not None:
            self._store.check_tokenizer(tokenizer)

    def begin(self, context: Context) -> None:
        super().begin(context)
        if self._store is not None:
            self._store.check_vocabulary(context.vocab_size)

    def make(self) -> list[Source]:
        sources = [SOURCES[name]() for name in self._wanted if name != "prediction" or self._context.prediction]
        return [*sources, *([self._store] if self._store is not None else []), *draft_models.sources(self._models)]
