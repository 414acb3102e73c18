"""`auto`, the default drafter: one tree from many sources, as large as it pays on this machine and for this text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import is_left_out, whole
from leapahead.drafters import draft_models, token_table, trained_heads
from leapahead.drafters.base import Host
from leapahead.drafters.draft_forwards import DraftForwards
from leapahead.drafters.planned import Planned
from leapahead.drafters.probe_groups import ProbeGroups
from leapahead.drafters.sources.datastore import Datastore, Store
from leapahead.drafters.sources.draft import DraftSource
from leapahead.drafters.sources.forward import ForwardModel
from leapahead.drafters.sources.grammar import Forced
from leapahead.drafters.sources.ngram import Ngrams
from leapahead.drafters.sources.prediction import Prediction
from leapahead.drafters.sources.recycling import Recycling
from leapahead.drafters.sources.siblings import Siblings
from leapahead.drafters.sources.suffix import Suffix
from leapahead.drafters.sources.token_table import TableSource
from leapahead.drafters.token_table import TokenTable
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source

SOURCES: dict[str, type[Source]] = {
    "prediction": Prediction,
    "grammar": Forced,
    "ngram": Ngrams,
    "suffix": Suffix,
    "recycling": Recycling,
    "siblings": Siblings,
    "table": TableSource,
}
# N-grams find nothing that the suffix automaton does not. A lookahead window would bring less than as many nodes.
DEFAULT = ("prediction", "grammar", "suffix", "recycling", "siblings", "table")
NO_TABLE = "no token table is stored for this model; `leapahead tune --table` makes one"


class Auto(Planned):
    """Drafts as many nodes as pay, from every source that the target can serve; decodes plainly where nothing pays.

    Args:
        sources: names of the sources that need no option of their own, in a list or divided by commas: prediction,
            grammar, ngram, suffix, recycling, siblings, table. By default all but ngram, and without table where no
            token table is stored for the target.
        datastore: a file that `leapahead datastore build` has written, as one more source.
        draft: a draft model, as one more source; or several, see `draft_model`.
        head: a trained head, as one more source; or several, see `head`.
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
        max_nodes: never draft more nodes of one sequence in a step; by default 128, or `nodes` if that is more.
        seed_aware: rank candidates with the Gumbel noise when sampling; false for comparison.
        draft_window: newest tokens that the draft model sees, see `draft_model`; 0 for all.
    """

    name: ClassVar[str] = "auto"
    takes_prediction: ClassVar[bool] = True

    def __init__(
        self,
        sources: str | Sequence[str] = "",
        datastore: str | Path = "",
        draft: Any = None,
        head: Any = None,
        nodes: int = 0,
        max_nodes: int | None = None,
        seed_aware: bool = True,
        draft_window: int = 0,
    ) -> None:
        super().__init__(nodes, max_nodes, seed_aware)
        given = sources.split(",") if isinstance(sources, str) else sources
        if not isinstance(given, (list, tuple)) or not all(isinstance(name, str) for name in given):
            raise BadParameter(
                f"sources={sources!r} is not possible: it must be names of {', '.join(SOURCES)}, divided by commas or "
                "in a list"
            )
        self._names = [name.strip() for name in given if name.strip()] or list(DEFAULT)
        if unknown := [name for name in self._names if name not in SOURCES]:
            raise BadParameter(f"there is no source {unknown[0]!r}; there are {', '.join(SOURCES)}")
        if twice := [name for name in self._names if self._names.count(name) > 1]:
            raise BadParameter(f"sources={sources!r} is not possible: it names {twice[0]!r} twice")
        self._named = bool(sources)
        self.takes_prediction = "prediction" in self._names  # type: ignore[misc]
        self._table: TokenTable | None = None
        self._store = Store(datastore, "datastore") if not is_left_out(datastore) else None
        self._drafts = [] if is_left_out(draft) else draft_models.parsed(draft)
        self.draft_window = whole("draft_window", draft_window)
        if draft_window and not self._drafts:
            raise BadParameter(f"draft_window={draft_window} needs draft=..., the model whose window it is")
        self._heads = [] if is_left_out(head) else trained_heads.parsed(head)

    def attach(self, host: Host) -> None:
        if self._store is not None:
            self._store.check(host.tokenizer, host.info.vocab_size)
        models: list[ForwardModel] = []
        if self._drafts:
            drafts = host.draft_models.all(self._drafts, host.target, host.tokenizer)
            draft_models.check_window(self.draft_window, drafts)
            models += drafts
        if self._heads:
            heads, probes = host.heads.all(self._heads, host.target)
            models += heads
            self.probes = ProbeGroups(probes) if probes else None
        if models:
            self.draft_forwards = DraftForwards(models, host.acceptance, self.depth, self.nodes)
        if "table" in self._names:
            self._table = token_table.stored(host.target)
            if self._table is None and self._named:
                self.left_out["table"] = NO_TABLE
        super().attach(host)

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        found: list[Source] = []
        for name in self._names:
            if name == "table":
                found += [TableSource(self._table)] if self._table is not None else []
            elif sequence is None or self._has_candidates(name, sequence):
                found.append(SOURCES[name]())
        if self._store is not None:
            found.append(Datastore(self._store))
        for each in (self.draft_forwards, self.probes):
            found += [] if each is None else each.sources()
        for source in found:
            if isinstance(source, DraftSource):
                source.window = self.draft_window
        return found

    @staticmethod
    def _has_candidates(name: str, sequence: SequenceView) -> bool:
        """Whether a source ever has candidates for this sequence."""
        return {"prediction": bool(sequence.prediction), "grammar": sequence.grammar is not None}.get(name, True)
