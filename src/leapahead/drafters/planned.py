"""Drafters made of sources: one tree from all of them, as large as it pays, or of a fixed size.

    every source ── candidates ──> tree search ── likeliest first ──> sizes: yield / (T(rows) + drafting) ──> trees

All sequences of a step are planned together, since they share the target's forward. While nothing pays, steps are plain
and drafting is suspended with exponential back-off. When sources are asked again, their candidates are compared with
what the target chose, which costs no node, so drafting starts again as soon as it pays.

A plan may be wrong, so the guard compares what drafted steps really cost and bring with plain steps, which are run now
and then for this (`planner.guard`). With a fixed number of nodes or of draft forwards, nothing is suspended.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import flag, whole
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import Drafter, Host, Probabilities, close_all
from leapahead.drafters.draft_forwards import DraftForwards, StepForwards
from leapahead.drafters.drafting import Drafting
from leapahead.drafters.probe_groups import ProbeGroups
from leapahead.drafters.sources.compiled import counterpart
from leapahead.models.base import BRANCHES, TREE, Capture
from leapahead.models.choices import PromptRows
from leapahead.planner.backoff import BackOff, suspend_together
from leapahead.planner.compiled import CompiledTable, search_class, sizes_that_pay, take_all
from leapahead.planner.draft import Forward, Proposal, SequenceView, Step
from leapahead.planner.guard import Guard
from leapahead.planner.profile import DraftingTime
from leapahead.planner.sizing import StepPlan
from leapahead.planner.source import Source
from leapahead.planner.tree_search import TreeSearch, proposals

MOST_BRANCHES = 4  # where each takes as many rows as the longest
MOST_NODES = 128  # of one sequence, where no limit is given


class Planned(Drafter):
    """Base of the drafters that are made of sources.

    Args:
        nodes: draft exactly so many nodes in every step, as far as there are candidates, whatever they cost; no time is
            read then. 0 for as many as pay.
        max_nodes: never more per sequence; by default 128, or `nodes`.
        seed_aware: rank candidates with the Gumbel noise of their positions when sampling; without, by their
            probability alone, for comparison.
        depth: run exactly so many forwards of each draft model in every step, as far as there are paths for it. 0 for
            as many as pay, or as `nodes` needs.
        chain: no branches.

    Raises:
        BadParameter: a number is not possible, or more nodes are to be drafted than the limit allows.

    Attributes:
        draft_forwards: of its draft models, set by drafters that have some before `Planned.attach` is called.
        probes: of its heads that are probes, likewise.
        left_out: source -> why this target cannot serve it.
    """

    def __init__(
        self,
        nodes: int = 0,
        max_nodes: int | None = None,
        seed_aware: bool = True,
        depth: int = 0,
        chain: bool = False,
    ) -> None:
        self.nodes, self.depth = whole("nodes", nodes), whole("depth", depth)
        self.max_nodes = max(MOST_NODES, nodes) if max_nodes is None else whole("max_nodes", max_nodes, least=1)
        if nodes > self.max_nodes:
            raise BadParameter(f"nodes={nodes} is more than max_nodes={max_nodes} allows; give one of the two")
        self.seed_aware, self.chain = flag("seed_aware", seed_aware), flag("chain", chain)
        self.draft_forwards: DraftForwards | None = None
        self.probes: ProbeGroups | None = None
        self.left_out: dict[str, str] = {}
        self._drafting_time = DraftingTime()
        self._observing = 0.0  # seconds that sources and estimates have taken to learn since they were asked last
        self._spent = 0.0  # seconds that the last proposal took, `observe` and `_resized` included
        self._guards: dict[int, Guard] = {}  # by number of sequences
        self._vain = 0  # steps since a draft paid, or was near to it
        self._since_gain = 0  # steps since the profile was told a gain
        self._forward: Forward | None = None  # since the last proposal
        self._drafted = 0  # nodes of the last proposal
        self._before = BackOff()  # of the text that ended last
        self._sequences: dict[SequenceView, Drafting] = {}

    @abstractmethod
    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        """New sources for a sequence; for None, all that there may be, of which only the class attributes are read."""

    # -------------------------------------------------------------------------------- the life of a sequence

    def attach(self, host: Host) -> None:
        super().attach(host)
        usable = []
        for source in self.make_sources(None):
            if missing := sorted((source.needs | source.capture.needs) - host.info.capabilities):
                self.left_out[source.name] = f"{host.info.name} does not have {' and '.join(missing)}"
            else:
                usable.append(source)
                self.capture |= source.capture
        self.plans = bool(usable) and not self.nodes
        self._suspends = not (self.nodes or (self.depth and self.draft_forwards))  # drafting, where it loses
        if not usable:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
            warnings.warn(
                f"the drafter {self.name!r} cannot draft for this target, so it decodes plainly ({reasons})",
                UserWarning,
                stacklevel=2,
            )

    def capture_of(self, tokens: Sequence[int], owner: str) -> Capture:
        # The likeliest tokens after those of a prompt bring less than they take (docs/research/acceptance.md).
        capture = self.capture if self.nodes else replace(self.capture, top_k=0)
        if not capture.hidden or self.draft_forwards is None:
            return capture
        return replace(capture, hidden_from=self.draft_forwards.known(tokens, owner))

    def prepare(self) -> None:
        if self.draft_forwards is not None:
            self.draft_forwards.prepare(self.host.latency, self.host.target)

    def begin(self, sequence: SequenceView) -> None:
        sources = [source for source in self.make_sources(sequence) if source.name not in self.left_out]
        if isinstance(self.host.acceptance, CompiledTable):
            sources = [counterpart(source, bool(sequence.source)) for source in sources]
        for source in sources:
            source.begin(sequence)
        if self.draft_forwards is not None:
            self.draft_forwards.end_slow(sources)
        self._sequences[sequence] = Drafting(sequence, sources, self._before)

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:
        for source in self._sequences[sequence].sources:
            source.read_prompt(sequence, rows)

    def observe(self, sequences: Sequence[SequenceView], steps: Sequence[Step]) -> None:
        for step in steps if self._reads_time else ():
            if step.forward is not self._forward:
                self._forward = step.forward
                self.host.latency.observe(step.forward)
        for sequence, step in zip(sequences, steps, strict=True):
            drafting = self._sequences[sequence]
            for source in drafting.sources if self.capture.hidden else ():
                if source.capture.hidden:
                    source.committed(sequence, step)
            if drafting.asked and drafting.search is not None:
                began = self.host.latency.clock()
                if self.probes is not None:
                    self.probes.observe(sequence, drafting.sources, step)
                drafting.search.observe(step)
                if not self.nodes and drafting.observe_choice(step):
                    self._vain = 0
                self._observing += self.host.latency.clock() - began
            drafting.asked = False  # a step without room for drafts follows without a proposal

    def _judge(self) -> None:
        """Tells the guard of the last forward, in which other drafters' sequences may have taken part."""
        forward, self._forward = self._forward, None
        if forward is None or not self._suspends or not forward.is_usual:
            return
        sequences, rows = forward.cost.sequences, forward.cost.rows
        guard, latency = self._guards.get(sequences), self.host.latency
        if guard is None or (rows <= sequences and guard.settled) or (profile := latency.profile(sequences)).fixed:
            return
        if len(forward.committed) != sequences or forward.drafted != self._drafted:
            guard.pass_by()
        elif rows > sequences:
            spent, expected = forward.seconds + self._spent, profile(rows) + self._spent
            guard.observe_drafted(spent, expected, sum(forward.committed) / sequences, profile(sequences))
        else:
            guard.observe_plain(profile(sequences))

    def finish(self, sequence: SequenceView) -> None:
        for source in self._sequences[sequence].sources:
            source.finish(sequence)

    def close(self, sequence: SequenceView) -> None:
        if (drafting := self._sequences.get(sequence)) is not None:
            self._before = drafting.back_off
            close_all(self._sequences, sequence, [source.close for source in drafting.sources])

    def figures(self, sequence: SequenceView) -> dict[str, Any]:
        drafting = self._sequences.get(sequence)
        found: dict[str, Any] = {source.name: source.figures() for source in drafting.sources} if drafting else {}
        if self.left_out:
            found["left_out"] = dict(self.left_out)
        coarse = (row for row in self.host.acceptance.rows(longest=3) if len(row["key"]) == 3)
        found["acceptance"] = {" ".join(map(str, row["key"])): row["p"] for row in coarse}
        found["milliseconds"] = self.host.latency.as_dict()
        return found

    def draft_probabilities(self, sequence: SequenceView, tree: TokenTree) -> Probabilities:
        parents = [tuple(tree.path_tokens(int(parent))) for parent in tree.parents[1:]]
        found = {}
        for source in self._sequences[sequence].sources:
            if (q := source.probabilities(parents, tree.tokens[1:].tolist())) is not None:
                found[source.name] = np.array([np.nan, *q])
        return found

    # ----------------------------------------------------------------------------------------- the proposal

    @property
    def _reads_time(self) -> bool:
        """Whether drafts depend on times: of a fixed number of nodes, only the forwards of draft models do."""
        return not self.nodes or self.draft_forwards is not None

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        began = self.host.latency.clock()
        self._judge()
        total = max(len(sequences), self.host.running())
        if (guard := self._guards.get(total)) is None:
            guard = self._guards[total] = Guard()
        self._spent, self._drafted = 0.0, 0
        self._vain, self._since_gain = self._vain + 1, self._since_gain + 1
        if self.draft_forwards is not None:
            self.draft_forwards.steps_without.update(self.draft_forwards.models)
        active = self._active(sequences, budgets, total, guard)
        if not active:
            return proposals(sequences, {}, {})
        if not self._reads_time:
            searches = self._searches(active, budgets)
            return self._probed(proposals(sequences, searches, take_all(searches, self.nodes)), active, budgets)
        plan = self._plan(sequences, total)
        forwards = None
        if self.draft_forwards is not None:
            sources = [source for drafting in active.values() for source in drafting.sources]
            forwards = StepForwards(self.draft_forwards, plan, sources, self.host.latency.clock)
        while True:
            searches = self._searches(active, budgets)
            if guard.suspended:  # the sources are asked all the same, and compared with what the target chooses
                kept = {index: 1 for index, search in searches.items() if search.next >= 0.0}
                break
            kept = self._sizes(searches, plan, forwards.seconds if forwards else 0.0)
            if forwards is None or not forwards.more(searches, kept):
                break
        forwarding = forwards.seconds if forwards else 0.0
        if plan.profile.changes_cost and not self.nodes:
            self._observe_gain(searches, kept, plan, forwarding)
        found = proposals(sequences, searches, kept)
        gain = 0.0 if self.nodes else plan.gain(searches, kept, [each.tree for each in found], forwarding)
        if not guard.suspended:
            found = self._probed(found, active, budgets, plan, forwarding)
        if not self.nodes:
            self._vain = 0 if gain or plan.is_near(searches.values()) else self._vain
            self._back_off(active, kept, plan, found, gain, forwarding)
        if not gain and len(sequences) > 1:
            waiting = [self._sequences[sequence] for sequence in sequences]
            suspend_together([each.back_off for each in waiting if each.back_off.remaining or not each.asked])
        if forwards is not None:
            forwards.settle(searches, {index: len(found[index].tree) > 1 for index in active})
        spent = self.host.latency.clock() - began + self._observing - forwarding
        self._observing = 0.0
        self._spent = spent + forwarding + plan.resized
        self._drafted = sum(len(each.tree) - 1 for each in found)
        self._drafting_time.observe(spent, sum(kept.values()) - len(kept))
        return found

    def _plan(self, sequences: Sequence[SequenceView], total: int) -> StepPlan:
        latency, info = self.host.latency, self.host.info
        profile, recent = latency.profile(total), latency.recent(total)
        return StepPlan(
            total,
            info.padded,
            profile,
            self._drafting_time,
            profile.resizing(recent),
            info.replays,
            [sequence.replay for sequence in sequences],
            self._has_branches(total),
            recent,
        )

    def _probed(
        self,
        found: list[Proposal],
        active: Mapping[int, Drafting],
        budgets: Sequence[Budget],
        plan: StepPlan | None = None,
        spent: float = 0.0,
    ) -> list[Proposal]:
        """The drafts of a step with the probes that ride with them; see `ProbeGroups.place`."""
        if self.probes is None:
            return found
        sequences = {index: (each.sequence, each.sources) for index, each in active.items()}
        return self.probes.place(found, sequences, budgets, None if self.nodes else plan, spent)

    def _active(
        self, sequences: Sequence[SequenceView], budgets: Sequence[Budget], total: int, guard: Guard
    ) -> dict[int, Drafting]:
        """The sequences whose sources are asked in this step, by index; none if the step must be a plain one."""
        drafting = [self._sequences[sequence] for sequence in sequences]
        # Where drafting is suspended for all, the step is a plain one anyway, and the latency profile is not read.
        if self._suspends and not all(each.back_off.remaining for each in drafting):
            wanted = guard.requests_plain(self.host.latency.profile(total).wants_plain)
            if wanted or guard.checking:
                for each in drafting:
                    each.asked = False
                return {}
        return {
            index: each
            for index, (each, budget) in enumerate(zip(drafting, budgets, strict=True))
            if self._asks(each, budget)
        }

    def _observe_gain(
        self, searches: Mapping[int, TreeSearch], kept: Mapping[int, int], plan: StepPlan, spent: float
    ) -> None:
        """Tells the profile what a drafted step gains now over one without drafting, changes of the size apart.

        Where the plan is a plain step, this is the gain of trees that fill a bucket.

        Args:
            spent: seconds that draft forwards have taken in this step.
        """
        profile, bucket = plan.profile, self.host.info.bucket
        if not any(size > 1 for size in kept.values()):
            room = max((bucket - plan.sequences % bucket) // len(searches), 1)
            kept = {index: min(search.take_all(room), room + 1) for index, search in searches.items()}
        drafted = sum(kept.values()) - len(kept)
        tokens = sum(sum(searches[index].expected[1:size]) for index, size in kept.items())
        plain = profile(plan.sequences)
        longer = profile(plan.sequences + drafted) - plain + plan.drafting(drafted) + spent
        profile.switches.observe_gain(tokens * plain / plan.sequences - longer, self._since_gain)
        self._since_gain = 0

    def _back_off(
        self,
        active: Mapping[int, Drafting],
        kept: Mapping[int, int],
        plan: StepPlan,
        proposals: Sequence[Proposal],
        gain: float,
        spent: float,
    ) -> None:
        """Suspends the sequences whose drafts do not pay.

        Args:
            gain, spent: see `StepPlan.gain`.
        """
        drafting = sum(size > 1 for size in kept.values()) or 1
        seconds = self._drafting_time(0)
        cost = (seconds + spent) / plan.profile(plan.sequences) / len(active)
        usual, longest = (plan.longest_back_off(seconds, vain) for vain in (0, self._vain))
        can_pay = gain > 0 or plan.can_pay(spent)
        for index, each in active.items():
            each.back_off.usual, each.can_pay = usual, can_pay
            is_probed = bool(proposals[index].tree.probes)  # whose candidates are for the next step
            each.back_off.update(is_probed or (gain > 0 and kept[index] > 1), longest, gain / drafting, cost)

    def _asks(self, drafting: Drafting, budget: Budget) -> bool:
        """Whether the sources of a sequence are asked in this step; they have read the text then."""
        has_room = bool(drafting.sources) and min(budget.nodes, budget.depth) >= 1
        drafting.asked = has_room and not (self._suspends and drafting.back_off.suspended())
        for source in drafting.readers if drafting.asked else ():
            source.read(drafting.sequence)
        return drafting.asked

    def _searches(self, active: Mapping[int, Drafting], budgets: Sequence[Budget]) -> dict[int, TreeSearch]:
        """The searches for the trees of these sequences, with nothing taken."""
        has_branches = self._has_branches(max(len(self._sequences), self.host.running()))
        return {index: self._search(drafting, budgets[index], has_branches) for index, drafting in active.items()}

    def _search(self, drafting: Drafting, budget: Budget, has_branches: bool) -> TreeSearch:
        leaves = budget.leaves if TREE in self.host.info.capabilities and not self.chain else 1
        if has_branches:
            leaves = min(budget.leaves, MOST_BRANCHES)
        if budget.nodes > self.max_nodes or budget.leaves != leaves:
            budget = Budget(min(budget.nodes, self.max_nodes), budget.depth, leaves)
        if drafting.search is None:
            table = self.host.acceptance
            drafting.search = search_class(table)(
                drafting.sequence, drafting.sources, table, budget, self.seed_aware, drafting.correction
            )
        else:
            drafting.search.begin(budget)
        return drafting.search

    def _sizes(self, searches: Mapping[int, TreeSearch], plan: StepPlan, spent: float) -> dict[int, int]:
        """How many nodes of each tree are drafted, the root counted.

        Args:
            searches: by index of the sequence.
            plan: of the step.
            spent: seconds that draft forwards have taken in this step.
        """
        return take_all(searches, self.nodes) if self.nodes else sizes_that_pay(searches, plan, spent)

    def _has_branches(self, sequences: int) -> bool:
        """Whether trees may have a few branches, although the target does not take trees of all shapes."""
        return BRANCHES in self.host.info.capabilities and sequences == 1 and not (self.nodes or self.chain)
