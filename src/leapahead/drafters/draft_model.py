"""The drafter "draft_model": one or several draft models alone, under exact matching."""

from __future__ import annotations

from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import number
from leapahead.drafters import draft_models
from leapahead.drafters.base import Host
from leapahead.drafters.draft_forwards import DraftForwards
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.draft import DraftSource
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source


class DraftModelDrafter(Planned):
    """A smaller model drafts and the target verifies by exact matching: the text is plain decoding's.

    Args:
        draft: the model that drafts: a name, a folder, a GGUF file, "bundled", or a loaded one; several in a list, or
            divided by commas; or the target itself, with less to compute: "self:skip", "self:skip=LAYERS",
            "self:first=N", "self:int8".
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
        depth: run exactly so many draft forwards in every step, each over up to 16 paths; 0 for as many as `nodes`
            needs, or as pay where that is 0 too.
        chain: no branches, so never more nodes than draft forwards.
        seed_aware: rank candidates with the Gumbel noise when sampling; false for comparison.
        unsure: draft nothing after a path where the draft model's likeliest token has less probability; 0 for never.
            It is the fallback policy of BiLD (2302.07863).
    """

    name: ClassVar[str] = "draft_model"
    needs: ClassVar[frozenset[str]] = DraftSource.needs

    def __init__(
        self,
        draft: Any = None,
        nodes: int = 0,
        depth: int = 0,
        chain: bool = False,
        seed_aware: bool = True,
        unsure: float = 0.0,
    ) -> None:
        super().__init__(nodes, seed_aware=seed_aware, depth=depth, chain=chain)
        if draft is None or draft == "":
            raise BadParameter("the drafter 'draft_model' needs draft=..., the smaller model")
        if (least := number(unsure)) is None or not 0 <= least <= 1:
            raise BadParameter(f"unsure={unsure!r} is not possible: it must be a probability")
        self.unsure = least
        self._drafts = draft_models.parsed(draft)
        if chain and depth and nodes > (most := depth * len(self._drafts)):
            raise BadParameter(
                f"nodes={nodes} is not possible with depth={depth} and chain=True, since every draft forward adds one "
                f"node to a chain; give nodes={most}, another depth, or leave one of them out"
            )

    def attach(self, host: Host) -> None:
        models = host.draft_models.all(self._drafts, host.target, host.tokenizer)
        self.draft_forwards = DraftForwards(models, host.acceptance, self.depth, self.nodes)
        super().attach(host)

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        assert self.draft_forwards is not None, "it was not attached"
        sources = self.draft_forwards.sources()
        for source in sources:
            source.unsure = self.unsure
        return [*sources]
