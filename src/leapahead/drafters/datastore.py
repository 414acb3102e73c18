"""The drafter "datastore": retrieval from a corpus alone (REST, 2311.08252)."""

from __future__ import annotations

from typing import ClassVar

from leapahead.core.errors import BadParameter
from leapahead.drafters.base import Host
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.datastore import Datastore
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source


class DatastoreDrafter(Planned):
    """REST: what followed the last tokens in a corpus of one's own, see `leapahead datastore build`.

    Args:
        file: the datastore.
        nodes: draft so many nodes in every step; 0 for as many as pay.
    """

    name: ClassVar[str] = "datastore"
    needs: ClassVar[frozenset[str]] = Datastore.needs

    def __init__(self, file: str = "", nodes: int = 16) -> None:
        super().__init__(nodes)
        if not file:
            raise BadParameter("the drafter 'datastore' needs file=..., which `leapahead datastore build` writes")
        self.file = file
        self.make_sources(None)  # refuses a file that cannot be read

    def attach(self, host: Host) -> None:
        super().attach(host)
        check_datastore(self.file, host)

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [Datastore(self.file)]


def check_datastore(file: str, host: Host) -> None:
    """Refuses a datastore that was not built for the target.

    Raises:
        BadParameter: it has another tokenizer, or token ids outside the target's vocabulary.
    """
    source = Datastore(file)
    if host.tokenizer is not None:
        source.check_tokenizer(host.tokenizer)
    source.check_vocabulary(host.info.vocab_size)
