"""Drives a drafter for a host that decodes by itself: from one forward's tokens to the drafts of the next one.

    Batch ──> sequences (by id) ── steps ──> drafter.observe
                                └─ views, budgets ──> drafter.propose ──> one chain for each request

The drafter is `auto`, the planner the engine's; the times that it plans with are those between two calls, which hold
the host's scheduling and the forward. This module knows nothing of vLLM: a `Batch` is all that it is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from time import perf_counter

from leapahead.core.errors import BadParameter
from leapahead.core.text import Tokenizer
from leapahead.core.tree import Budget
from leapahead.drafters.auto import Auto
from leapahead.drafters.base import Host
from leapahead.drafters.cache import DrafterCache
from leapahead.integrations.vllm import sequences
from leapahead.integrations.vllm.batch import Batch
from leapahead.integrations.vllm.figures import Figures
from leapahead.integrations.vllm.options import Options
from leapahead.integrations.vllm.verified import ForwardRows
from leapahead.models.base import TOP_K, Cost, TargetInfo
from leapahead.planner.compiled import acceptance_table
from leapahead.planner.draft import Forward, SequenceView, Step
from leapahead.planner.profile import LatencyProfiles
from leapahead.planner.source import Source

NOTHING = Budget(0, 0, 1)
RATE = 0.05  # weight of the newest step in the estimate of a sequence's drafting time
MISSED = 8  # forwards in a row without logits after which drafts do without them


class Chains(Auto):
    """`auto` for a host: sequences that must not draft have no sources, but their steps count for the planner.

    Attributes:
        plain: the views of these sequences.
    """

    def __init__(self, options: Options, most: int) -> None:
        if options.nodes > most:
            raise BadParameter(
                f"nodes={options.nodes} is not possible with num_speculative_tokens={most} in the speculative config; "
                "raise that one, or leave nodes out"
            )
        super().__init__(options.sources, options.datastore, nodes=options.nodes, max_nodes=most, seed_aware=False)
        self.plain: set[SequenceView] = set()

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [] if sequence in self.plain else super().make_sources(sequence)

    def close(self, sequence: SequenceView) -> None:
        super().close(sequence)
        self.plain.discard(sequence)


class Adapter:
    """The drafts of one host.

    Args:
        info: of the target. Without the capability "top_k", the sources that need logits are left out.
        most: drafted tokens of a request, at most.
        options: of the user.
        tokenizer: of the target; None where it is not known.
        cache: what is kept from one text to the next; None for nothing.
        clock: gives the time in seconds.

    Attributes:
        figures: what it has drafted.
        drafter: of all requests.
        live: the requests that are not over, by id.
        cache: as given; a new one is that of the requests that begin afterwards.

    Raises:
        LeapaheadError: the options are not possible for this target.
    """

    def __init__(
        self,
        info: TargetInfo,
        most: int,
        options: Options,
        tokenizer: Tokenizer | None = None,
        cache: DrafterCache | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._info, self._most, self._options, self._tokenizer = info, most, options, tokenizer
        self.cache, self._clock = cache, clock
        self.figures = Figures()
        self.live: dict[str, sequences.Sequence] = {}
        self._requests = 0  # of the batch
        self._ended: float | None = None  # when the last call ended
        self._each = 0.0  # seconds that drafting takes for one sequence
        self._turn = 0
        self._missed = 0
        self._latency = LatencyProfiles(info, clock=clock)
        self._acceptance = acceptance_table()
        self.drafter = self._attached(info)

    def _attached(self, info: TargetInfo) -> Chains:
        drafter = Chains(self._options, self._most)
        host = Host(info, self._latency, self._acceptance, self._tokenizer, running=lambda: self._requests)
        drafter.attach(host)
        return drafter

    # ------------------------------------------------------------------------------------------------- a step

    def step(self, batch: Batch) -> list[list[int]]:
        """The drafts that follow on a forward: a list of tokens for each request, empty for none."""
        began = self._clock()
        self._requests = len(batch.new)
        self._end(batch)
        active, steps = self._read(batch, began)
        if steps:
            self.drafter.observe([view for view, _ in steps], [step for _, step in steps])
        if self._missed >= MISSED:
            self._give_up_logits()
            active = []
        drafts = self._propose(batch, active)
        self._ended = self._clock()
        self.figures.add(self._ended - began, len(active))
        return drafts

    def reset(self) -> None:
        """Forgets all sequences, after an error: those that go on are met as new ones."""
        live, self.live, self._ended = list(self.live.values()), {}, None
        for sequence in live:
            self.drafter.close(sequence.view)

    def _give_up_logits(self) -> None:
        """Goes on without the sources that need logits."""
        warnings.warn(
            "the logits of vLLM's steps cannot be read, so drafting goes on without token recycling and sibling rows",
            UserWarning,
            stacklevel=2,
        )
        self.reset()
        self._missed = 0
        self._info = replace(self._info, capabilities=self._info.capabilities - {TOP_K})
        self.drafter = self._attached(self._info)

    def close(self) -> None:
        """Ends all sequences; what was learned is kept."""
        for name in list(self.live):
            self._finish(name)
        self.keep()

    def keep(self) -> None:
        """Writes what was learned of the times of steps."""
        self._latency.keep()

    def _end(self, batch: Batch) -> None:
        """Ends the requests that are over."""
        alive = batch.alive
        for name in [name for name in self.live if name not in alive]:
            self._finish(name)

    def _finish(self, name: str) -> None:
        sequence = self.live.pop(name)
        # A prompt's placeholders of images may be outside the vocabulary; a drafter cache with them cannot be loaded.
        if sequence.request.drafts and max(sequence.tokens) < self._info.vocab_size:
            self.drafter.finish(sequence.view)
        self.drafter.close(sequence.view)

    # ------------------------------------------------------------------------------ what the forward has committed

    def _read(self, batch: Batch, began: float) -> tuple[list[int], list[tuple[SequenceView, Step]]]:
        """Brings all sequences up to date.

        Returns:
            The rows of the batch with a sequence that goes on, and the steps of those that were known before.
        """
        lengths: list[int] = batch.lengths[: self._requests].tolist()
        longest = max(map(len, batch.new), default=0)
        endings = sequences.endings(batch.texts, lengths, longest)
        active: list[int] = []
        known: list[tuple[int, sequences.Sequence]] = []
        irregular = self._ended is None
        for row, (name, new) in enumerate(zip(batch.ids, batch.new, strict=True)):
            sequence = self.live.get(name)
            if not new:  # its prompt goes on
                irregular = True
                if sequence is not None:
                    sequence.proposal = None
                continue
            active.append(row)
            if sequence is not None and sequence.follows(endings[row], lengths[row], list(new)):
                known.append((row, sequence))
                continue
            irregular = True
            if sequence is not None:
                self.figures.resynchronised += 1
                if sequence.catches_up(batch.texts[row], lengths[row]):
                    continue
                self.drafter.close(sequence.view)
            self._begin(name, batch, row, lengths[row])
        return active, self._steps(batch, known, self._forward(batch, began, irregular, max(lengths, default=0)))

    def _begin(self, name: str, batch: Batch, row: int, length: int) -> None:
        request = batch.describe(name)
        sequence = sequences.Sequence.of(
            batch.texts[row], length, len(batch.new[row]), request, self._info.vocab_size, self.cache
        )
        if not request.drafts:
            self.drafter.plain.add(sequence.view)
        self.drafter.begin(sequence.view)
        self.live[name] = sequence

    def _forward(self, batch: Batch, began: float, irregular: bool, context: int) -> Forward:
        """The forward, timed from the last call on; marked as another kind of forward where prompts were read too."""
        drafted = sum(batch.verified) if batch.verified is not None else 0
        rows = self._requests + drafted
        read = max((batch.rows or rows) - rows, int(irregular))
        seconds = began - self._ended if self._ended is not None else 0.0
        return Forward(seconds, Cost(rows, self._requests, context, read), drafted=drafted)

    def _steps(
        self, batch: Batch, known: Sequence[tuple[int, sequences.Sequence]], forward: Forward
    ) -> list[tuple[SequenceView, Step]]:
        verified = batch.verified
        found: list[tuple[SequenceView, Step]] = []
        starts = [0]
        for count in verified if verified is not None else [0] * self._requests:
            starts.append(starts[-1] + count + 1)
        rows = ForwardRows(batch.logits) if batch.logits is not None and len(batch.logits) == starts[-1] else None
        if verified is None:  # a request may have drafted tokens, so its first row is not known
            rows = None
        for row, sequence in known:
            new = batch.new[row]
            step = sequence.step(new, None if verified is None else verified[row], rows, starts[row], forward)
            if step is None:
                self.figures.resynchronised += 1
            else:
                self.figures.count(step)
                forward.committed.append(len(step.tokens))
                found.append((sequence.view, step))
            sequence.proposal = None
            sequence.extend(new)
        if rows is None and found and self.drafter.capture.top_k:
            self._missed += 1
            return []
        self._missed = 0
        return found

    # ----------------------------------------------------------------------------------------------- the drafts

    def _propose(self, batch: Batch, active: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in batch.new]
        if not active:
            return drafts
        chosen = [self.live[batch.ids[row]] for row in active]
        most = self._most if batch.most is None else min(self._most, batch.most)
        budgets = [self._budget(sequence, most) for sequence in chosen]
        asking = self._take_turns(budgets)
        began = self._clock()
        found = self.drafter.propose([sequence.view for sequence in chosen], budgets)
        if asking and any(len(proposal.tree) > 1 for proposal in found):
            self._each += RATE * ((self._clock() - began) / asking - self._each)
        for row, sequence, proposal in zip(active, chosen, found, strict=True):
            sequence.proposal = proposal
            inside = takewhile(lambda token: token < self._info.vocab_size, proposal.tree.token_list[1:])
            drafts[row] = list(inside)  # up to the first placeholder of an image, see `_finish`
        return drafts

    def _budget(self, sequence: sequences.Sequence, most: int) -> Budget:
        """What may be drafted: nothing beyond the last token that the request can get."""
        if not sequence.request.drafts:
            return NOTHING
        room = min(self._info.context_length, sequence.request.longest) - len(sequence.tokens) - 1
        most = min(most, room)
        return Budget(most, most, 1) if most > 0 else NOTHING

    def _take_turns(self, budgets: list[Budget]) -> int:
        """Leaves a budget to as many sequences as fit into the time for drafting; returns how many that are."""
        asking = [index for index, budget in enumerate(budgets) if budget is not NOTHING]
        if self._options.nodes or not asking or not self._each:
            return len(asking)
        plain = self._latency.profile(self._requests)(self._requests)
        fit = max(1, int(self._options.share * plain / self._each))
        if fit >= len(asking):
            return len(asking)
        first, self._turn = self._turn % len(asking), self._turn + fit
        for index in (*asking[first:], *asking[:first])[fit:]:
            budgets[index] = NOTHING
        return fit
