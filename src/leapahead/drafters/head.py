"""The drafter "head": one or several trained heads alone, under exact matching."""

from __future__ import annotations

from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import is_left_out
from leapahead.drafters import trained_heads
from leapahead.drafters.base import Host
from leapahead.drafters.draft_forwards import DraftForwards
from leapahead.drafters.planned import Planned
from leapahead.drafters.probe_groups import ProbeGroups
from leapahead.models.base import CHAIN
from leapahead.models.loading import BUNDLED
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source


class HeadDrafter(Planned):
    """A trained head (EAGLE-3, MTP, Medusa, Hydra, DFlash and others) drafts from the target's hidden states.

    Probes (PaSS, SPACE) draft as further rows of its forwards. The text is plain decoding's.

    Args:
        head: the folder of the head; several in a list, or divided by commas; "mtp" for the MTP modules in the model's
            own checkpoint; "bundled" for the bundled model's head. Required, but for the bundled model, whose own head
            is the default.
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
        depth: run exactly so many forwards of the head in every step; 0 for as many as `nodes` needs, or as pay where
            that is 0 too. One forward of EAGLE or Hydra is one level of the tree; one of Medusa, P-EAGLE or DFlash
            gives all. Probes have no forward of their own.
        chain: no branches.
        seed_aware: rank candidates with the Gumbel noise when sampling; false for comparison.
    """

    name: ClassVar[str] = "head"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(
        self, head: Any = None, nodes: int = 0, depth: int = 0, chain: bool = False, seed_aware: bool = True
    ) -> None:
        super().__init__(nodes, seed_aware=seed_aware, depth=depth, chain=chain)
        self._heads = None if is_left_out(head) else trained_heads.parsed(head)

    def attach(self, host: Host) -> None:
        if self._heads is None and host.info.name != BUNDLED:
            raise BadParameter(
                f"the drafter 'head' needs head=..., the folder of a head that was trained for {host.info.name}; "
                "`leapahead train-head` trains one"
            )
        heads, probes = host.heads.all(self._heads or trained_heads.parsed(BUNDLED), host.target)
        self.draft_forwards = DraftForwards(heads, host.acceptance, self.depth, self.nodes) if heads else None
        self.probes = ProbeGroups(probes) if probes else None
        super().attach(host)

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        found: list[Source] = []
        for each in (self.draft_forwards, self.probes):
            found += [] if each is None else each.sources()
        return found
