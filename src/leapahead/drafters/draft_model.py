"""The drafter "draft_model": one or several draft models alone, under exact matching."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import is_left_out, whole, within
from leapahead.drafters import draft_models
from leapahead.drafters.base import Host
from leapahead.drafters.draft_forwards import DraftForwards
from leapahead.drafters.learning import TOP_K, Learned, Learner, learner
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.draft import DraftSource
from leapahead.models.base import Capture
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.source import Source


class DraftModelDrafter(Planned):
    """A smaller model drafts and the target verifies by exact matching: the text is plain decoding's.

    Args:
        draft: the model that drafts, required: a name, a folder, a GGUF file, "bundled", or a loaded one; several in a
            list, or divided by commas; or the target itself, with less to compute: "self:skip", "self:skip=LAYERS",
            "self:first=N", "self:int8".
        nodes: draft exactly so many nodes in every step, as far as there are candidates; 0 for as many as pay.
        depth: run exactly so many draft forwards in every step, each over up to 16 paths; 0 for as many as `nodes`
            needs, or as pay where that is 0 too.
        chain: no branches.
        seed_aware: rank candidates with the Gumbel noise when sampling; false for comparison.
        learn: train the draft model where its drafts are rejected, after every so many texts (online speculative
            decoding, 2310.07177); 0 for never. It must be one model of Transformers, loaded by itself.
        learn_rate: learning rate of `learn`; 0 for 0.05 divided by the hidden size of the draft model.
        learned: folder that the trained draft model is written to when the engine is closed; "" for nowhere. It must
            be new, the draft model's own, or one that was written in this way before.
        unsure: draft nothing after a path where the draft model's likeliest token has less probability; 0 for never.
            It is the fallback policy of BiLD (2302.07863).
        draft_window: the draft model sees the first 16 tokens of a text and at most so many of the newest ones, at
            least 32, so that long texts do not make it slower (attention sinks and a window, StreamingLLM, 2309.17453);
            0 for all tokens.
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
        learn: int = 0,
        learn_rate: float = 0.0,
        learned: str | Path = "",
        unsure: float = 0.0,
        draft_window: int = 0,
    ) -> None:
        super().__init__(nodes, seed_aware=seed_aware, depth=depth, chain=chain)
        if is_left_out(draft):
            raise BadParameter("the drafter 'draft_model' needs draft=..., the smaller model")
        self.unsure = within("unsure", unsure, 0, 1, "a probability")
        self.draft_window = whole("draft_window", draft_window)
        self._drafts = draft_models.parsed(draft)
        self._check_learning(learn, learn_rate, learned)

    def _check_learning(self, learn: int, rate: float, learned: str | Path) -> None:
        """Takes the options of learning, or refuses them."""
        self.learner: Learner | None = None
        self._learn = whole("learn", learn)
        rate = self._learn_rate = within("learn_rate", rate, 0, sys.float_info.max, "a finite number of at least 0")
        self._learned = None if is_left_out(learned) else Learned(learned, self._drafts[0])
        if not learn:
            if rate or self._learned:
                raise BadParameter("learn_rate and learned need learn=N, the number of texts between two updates")
            return
        if len(self._drafts) > 1:
            raise BadParameter(f"learn={learn} is not possible with several draft models; give one")
        if self._learned is not None:
            self._learned.check()

    def attach(self, host: Host) -> None:
        models = host.draft_models.all(self._drafts, host.target, host.tokenizer)
        draft_models.check_window(self.draft_window, models)
        most = self.depth * sum(model.depths for model in models)
        if self.chain and self.depth and self.nodes > most:
            raise BadParameter(
                f"nodes={self.nodes} is not possible with depth={self.depth} and chain=True, since the draft forwards "
                f"add {most} nodes to a chain; give nodes={most}, another depth, or leave one of them out"
            )
        if self._learn:
            self.learner = learner(
                self._drafts[0], models[0], host.target, self._learn, self._learn_rate, self._learned
            )
            self.capture |= Capture(top_k=TOP_K)
        self.draft_forwards = DraftForwards(models, host.acceptance, self.depth, self.nodes)
        super().attach(host)

    def observe(self, sequences: Sequence[SequenceView], steps: Sequence[Step]) -> None:
        super().observe(sequences, steps)
        if self.learner is not None:
            for sequence, step in zip(sequences, steps, strict=True):
                self.learner.observe(sequence, step)

    def finish(self, sequence: SequenceView) -> None:
        super().finish(sequence)
        if self.learner is not None:
            self.learner.finish(sequence)

    def close(self, sequence: SequenceView) -> None:
        if self.learner is not None:
            self.learner.close(sequence)
        super().close(sequence)

    def release(self) -> None:
        if self.learner is not None:
            self.learner.release()

    def figures(self, sequence: SequenceView) -> dict[str, Any]:
        found = super().figures(sequence)
        return found if self.learner is None else {**found, "learning": self.learner.figures()}

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        assert self.draft_forwards is not None, "it was not attached"
        sources = self.draft_forwards.sources()
        for source in sources:
            source.unsure = self.unsure
            if isinstance(source, DraftSource):
                source.window = self.draft_window
        return [*sources]
