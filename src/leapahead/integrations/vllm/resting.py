"""Steps of a batch in which the drafting of all requests is suspended: their tokens are only kept, and read afterwards.

    asked, observed | rests, rests, ... | asked        a back-off of the planner, of which the first step is observed

In a resting step nothing can be drafted, so nothing is prepared for it either. What counts for the planner (the time of
the step, and that it was a plain one) is told at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from leapahead.drafters.auto import Auto
from leapahead.integrations.vllm.batch import Batch
from leapahead.integrations.vllm.options import Options
from leapahead.planner.draft import Forward, SequenceView
from leapahead.planner.source import Source

MOST = 32  # steps of a rest where nothing at all can be drafted, as of sampled requests on a CPU


class Chains(Auto):
    """`auto` for a host: sequences that must not draft have no sources, but their steps count for the planner.

    Attributes:
        plain: the views of these sequences.
    """

    def __init__(self, options: Options, most: int) -> None:
        super().__init__(options.sources, options.datastore, nodes=options.nodes, max_nodes=most, seed_aware=False)
        self.plain: set[SequenceView] = set()

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [] if sequence in self.plain else super().make_sources(sequence)

    def close(self, sequence: SequenceView) -> None:
        super().close(sequence)
        self.plain.discard(sequence)

    def suspended(self, sequences: Iterable[SequenceView]) -> int:
        """For how many steps from now on no source of these sequences will be asked; 0 if one was asked just now."""
        if self.nodes:
            return 0
        found = [self._sequences[sequence] for sequence in sequences]
        if any(each.asked for each in found):  # what the target chooses is compared with the candidates
            return 0
        return min((each.back_off.remaining for each in found), default=MOST)

    def rest(self, forward: Forward) -> None:
        """Takes a plain step of all sequences into account, which are not asked after it."""
        latency, count = self.host.latency, forward.cost.sequences
        latency.observe(forward)
        guard, profile = self._guards.get(count), latency.profile(count)
        if guard is not None and not profile.fixed:
            guard.observe_plain(profile(count))

    def wake(self, sequences: Iterable[SequenceView], steps: int) -> None:
        """So many steps of a rest are over."""
        self._vain += steps
        for sequence in sequences:
            back_off = self._sequences[sequence].back_off
            back_off.remaining = max(back_off.remaining - steps, 0)


class Rest:
    """A rest of the requests of a batch.

    Args:
        batch: before it; None for a rest that never begins.
        steps: for how many steps it lasts, at most.

    Attributes:
        ids: of the requests, in the order of the rows.
        tokens: the tokens of each step so far, one for each request.
    """

    def __init__(self, batch: Batch | None = None, steps: int = 0) -> None:
        self.ids: list[str] = [] if batch is None else list(batch.ids)
        self.tokens: list[list[int]] = []
        self._lengths = np.array([] if batch is None else batch.lengths[: len(self.ids)]) + 1  # after the next step
        self._steps = steps

    def takes(self, batch: Batch) -> bool:
        """Whether a forward is the next step of this rest; its tokens are kept then.

        It is not where requests have come, gone, or changed their rows, where prompts were read, drafts verified, or
        steps missed.
        """
        if len(self.tokens) >= self._steps or batch.rows != len(self.ids) or list(batch.ids) != self.ids:
            return False
        tokens = [each[0] for each in batch.new if len(each) == 1]
        if len(tokens) < len(self.ids) or batch.verified is None or any(batch.verified):
            return False
        if not np.array_equal(batch.lengths[: len(self.ids)], self._lengths):
            return False
        self.tokens.append(tokens)
        self._lengths += 1
        return True
