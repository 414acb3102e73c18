"""The sources one at a time, each as a drafter of its own: for comparison, and for those who want just that one."""

from __future__ import annotations

from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.text import Tokenizer
from leapahead.drafters import draft_models
from leapahead.drafters.base import Context
from leapahead.drafters.planned import Grown
from leapahead.planner.source import Source
from leapahead.drafters.sources.datastore import Datastore
from leapahead.drafters.sources.draft import DraftSource
from leapahead.drafters.sources.ngram import Ngrams
from leapahead.drafters.sources.prediction import Prediction
from leapahead.drafters.sources.recycling import SAMPLED, Recycling
from leapahead.drafters.sources.suffix import Suffix
from leapahead.models.base import Target


class Ngram(Grown):
    """Multi-level n-grams: what followed the last 1, 2, ... tokens earlier, the longest match first.

    Args:
        longest: tokens of a match, at most.
        nodes: draft so many nodes every step; 0 for as many as pay.
    """

    name: ClassVar[str] = "ngram"
    needs: ClassVar[frozenset[str]] = Ngrams.needs

    def __init__(self, longest: int = 8, nodes: int = 16) -> None:
        super().__init__(nodes)
        self.longest = longest
        self.make()  # refuses what is not possible

    def make(self) -> list[Source]:
        return [Ngrams(self.longest)]


class SuffixDrafter(Grown):
    """A suffix automaton over prompt and output: the longest earlier match, whatever its length.

    Args:
        nodes: draft so many nodes every step; 0 for as many as pay.
    """

    name: ClassVar[str] = "suffix"
    needs: ClassVar[frozenset[str]] = Suffix.needs

    def __init__(self, nodes: int = 16) -> None:
        super().__init__(nodes)

    def make(self) -> list[Source]:
        return [Suffix()]


class TokenRecycling(Grown):
    """Token Recycling: the target's own last top-k after each token.

    Args:
        k: continuations of a place; 0 for 8 when greedy and 128 when sampling.
        longest: tokens of a place, at most; 1 as published.
        nodes: draft so many nodes every step; 0 for as many as pay.
    """

    name: ClassVar[str] = "recycling"
    needs: ClassVar[frozenset[str]] = Recycling.needs
    prompt_top_k: ClassVar[int] = SAMPLED

    def __init__(self, k: int = 0, longest: int = 4, nodes: int = 16) -> None:
        super().__init__(nodes)
        self.k, self.longest = k, longest
        self.make()

    def make(self) -> list[Source]:
        return [Recycling(self.k, self.longest)]


class DatastoreDrafter(Grown):
    """REST: what followed the last tokens in a corpus of one's own, see `leapahead datastore build`.

    Args:
        file: the datastore.
        nodes: draft so many nodes every step; 0 for as many as pay.
    """

    name: ClassVar[str] = "datastore"
    needs: ClassVar[frozenset[str]] = Datastore.needs

    def __init__(self, file: str = "", nodes: int = 16) -> None:
        super().__init__(nodes)
        if not file:
            raise BadParameter("the drafter 'datastore' needs file=..., which `leapahead datastore build` writes")
        self._source = Datastore(file)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        self._source.check_tokenizer(tokenizer)

    def begin(self, context: Context) -> None:
        super().begin(context)
        self._source.check_vocabulary(context.vocab_size)

    def make(self) -> list[Source]:
        return [self._source]


class DraftModel(Grown):
    """A smaller model drafts, under the match rule: the text is plain decoding's, greedy and seeded.

    Args:
        draft: the model that drafts: a name, a folder, a GGUF file, "bundled", or a loaded one; several in a list, or
            divided by commas; or the target itself, with less to compute: "self:skip", "self:skip=LAYERS",
            "self:first=N", "self:int8".
        nodes: draft so many nodes every step; 0 for as many as pay.
        depth: look so many times a step, each time at up to 16 places; 0 for what pays.
        chain: no branches.
        dice: rank candidates under the dice when sampling; false for comparison.
    """

    name: ClassVar[str] = "draft_model"
    needs: ClassVar[frozenset[str]] = DraftSource.needs

    def __init__(
        self, draft: Any = None, nodes: int = 0, depth: int = 0, chain: bool = False, seed_aware: bool = True
    ) -> None:
        super().__init__(nodes, seed_aware=seed_aware, depth=depth, chain=chain)
        if draft is None or draft == "":
            raise BadParameter("the drafter 'draft_model' needs draft=..., the smaller model")
        self._drafts = draft_models.given(draft)

    def check_target(self, target: Target) -> None:
        self._models = draft_models.resolved(self._drafts, target)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        draft_models.check(self._drafts, tokenizer)

    def make(self) -> list[Source]:
        return list(draft_models.sources(self._models))


class PredictionDrafter(Grown):
    """The user's own expectation of the text, given as prediction=..., for edits and templates.

    Args:
        nodes: draft so many nodes every step; 0 for as many as pay.
    """

    name: ClassVar[str] = "prediction"
    needs: ClassVar[frozenset[str]] = Prediction.needs
    predicts: ClassVar[bool] = True

    def __init__(self, nodes: int = 16) -> None:
        super().__init__(nodes)

    def make(self) -> list[Source]:
        return [Prediction()]
