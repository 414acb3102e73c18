"""The drafter "datastore": retrieval from a corpus alone (REST, 2311.08252)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import is_left_out
from leapahead.drafters.base import Host
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.datastore import Datastore, Store
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source


class DatastoreDrafter(Planned):
    """REST (2311.08252): what followed the last tokens in a corpus of yours.

    Args:
        file: the datastore, which `leapahead datastore build` writes; required.
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
    """

    name: ClassVar[str] = "datastore"
    needs: ClassVar[frozenset[str]] = Datastore.needs

    def __init__(self, file: str | Path = "", nodes: int = 16) -> None:
        super().__init__(nodes)
        if is_left_out(file):
            raise BadParameter(
                "the drafter 'datastore' needs file=... (-o file=... on the command line), a file that "
                "`leapahead datastore build` writes"
            )
        self.store = Store(file, "file")

    def attach(self, host: Host) -> None:
        super().attach(host)
        self.store.check(host.tokenizer, host.info.vocab_size)

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [Datastore(self.store)]
