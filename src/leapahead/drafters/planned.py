"""Drafters made of sources: their tree is grown node by node, as large as pays or as large as is said.

    every source ──candidates──> growth ──likeliest first──> worth: yield / (T(rows) + drafting) ──> tree, or none

When nothing pays, steps are plain, and sources are asked only now and then: what they would have said is compared with
what the text then said, which costs no node, so drafting begins again as soon as it would pay.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.drafters.base import Ask, Context, Drafter, Proposal, Step
from leapahead.drafters.draft_forwards import LONGEST_REST, PRICE, Looks
from leapahead.planner.source import Source
from leapahead.drafters.sources.draft import DraftSource
from leapahead.drafters.sources.lookahead import LookaheadSource
from leapahead.models.base import TREE, Target
from leapahead.planner.acceptance import Trust
from leapahead.planner.latency import CostCurve
from leapahead.planner.profile import Machine, machine_of
from leapahead.planner.sizing import worth
from leapahead.planner.tree_search import Growth

USUAL_NODES = 8  # of a tree, when the price of a window is looked at
RECENT = 0.1  # weight of the newest step


class Grown(Drafter):
    """A drafter made of sources: its tree is grown node by node, as large as pays or as large as is said.

    Args:
        nodes: draft so many nodes every step, whatever they cost; 0 for what pays.
        max_nodes: never more.
        dice: rank candidates under the dice when sampling; without, for comparison, by what is likely alone.
        depth: greatest number of forwards of a draft model in a step; 0 for what pays.
        chain: no branches.
    """

    def __init__(
        self, nodes: int = 0, max_nodes: int = 128, seed_aware: bool = True, depth: int = 0, chain: bool = False
    ) -> None:
        if nodes < 0 or max_nodes < 1 or depth < 0:
            raise BadParameter(
                f"nodes={nodes} and depth={depth} must be at least 0 and max_nodes={max_nodes} at least 1"
            )
        self.nodes, self.max_nodes, self.seed_aware = nodes, max_nodes, seed_aware
        self.depth, self.chain = depth, chain
        self.sources: list[Source] | None = None
        self._machine: Machine | None = None
        self._growth: Growth | None = None
        self._trust = Trust()
        self._rest = self._resting = 0
        self._left_out: dict[str, str] = {}
        self._yield = 0.5  # drafted tokens that a step has brought lately
        self._observed = 0.0

    @abstractmethod
    def make(self) -> list[Source]:
        """New sources for a sequence."""

    def begin(self, context: Context) -> None:
        self._context = context

    def _enter(self, target: Target) -> list[Source]:
        """The sources that this target can serve; the others are told by name in the figures."""
        if self.sources is None:
            self.check_target(target)
            self.sources = []
            self._machine = machine_of(target)
            for source in self.make():
                if missing := sorted(source.needs - target.capabilities):
                    self._left_out[source.name] = f"{target.name} does not have {' and '.join(missing)}"
                else:
                    if isinstance(source, LookaheadSource):
                        source.judge = self._machine.judge(self._context.sampled)
                    source.begin(self._context)
                    self.sources.append(source)
        return self.sources

    def propose(self, context: Context, budget: Budget) -> Proposal:
        """Nothing: without a target there is no cost to plan with, see `propose_together`."""
        return Proposal(TokenTree.root(context.root))

    @classmethod
    def propose_together(cls, target: Target, asks: Sequence[Ask]) -> list[Proposal]:
        """All sequences of the step share one plan."""
        drafters = [cast("Grown", ask.drafter) for ask in asks]
        began = perf_counter()
        found = [Proposal(TokenTree.root(context.root)) for _, context, _ in asks]
        awake = [index for index, drafter in enumerate(drafters) if drafter._wakes(target, asks[index])]
        if not awake:
            return found
        machine = machine_of(target)
        curve = machine.curve(target, len(asks))
        probing = {index: probes for index in awake if (probes := drafters[index]._probing(curve, len(asks)))}
        extra = len(asks) * max(probing.values(), default=0) if target.pads else sum(probing.values())
        looks = Looks(target, len(asks))
        depths = {index: drafters[index].depth for index in awake}
        while True:
            growths = {index: drafters[index]._grow(target, asks[index]) for index in awake}
            kept = {index: growths[index].take_all(size) for index in awake if (size := drafters[index].nodes)}
            kept |= _free(target, len(asks), growths, kept, extra, looks.seconds)
            if not looks.more(growths, kept, depths):
                break
        for index, growth in growths.items():
            drafters[index]._growth = growth
            found[index] = growth.proposal(kept[index])
            drafters[index]._settle(kept[index] > 1, machine.drafting(0) / curve(len(asks)))
            if index in probing:
                found[index] = drafters[index]._probe(found[index], asks[index].budget)
        looks.settle(growths, found)
        spent = perf_counter() - began - looks.seconds + sum(drafters[index]._take_observed() for index in growths)
        machine.drafted(spent, sum(kept.values()) - len(kept))
        return found

    def _wakes(self, target: Target, ask: Ask) -> bool:
        """Whether its sources are asked in this step; they have read the text then."""
        self._growth = None
        sources = self._enter(target)
        if not sources or min(ask.budget.nodes, ask.budget.depth) < 1:
            return False
        if self._resting > 0 and not self.nodes:
            self._resting -= 1
            return False
        for source in sources:
            source.read(ask.context)
        return True

    def _grow(self, target: Target, ask: Ask) -> Growth:
        """A tree with nothing in it yet."""
        leaves = ask.budget.leaves if TREE in target.capabilities and not self.chain else 1
        within = Budget(min(ask.budget.nodes, self.max_nodes), ask.budget.depth, leaves)
        table, sources = machine_of(target).calibration, self.sources or []
        return Growth(ask.context, sources, table, within, self.seed_aware, self._trust)

    def _probing(self, curve: CostCurve, sequences: int) -> int:
        """Nodes of the windows that may pay."""
        probes = 0
        for source in self.sources or ():
            if isinstance(source, LookaheadSource) and (size := source.probes):
                usual = sequences * USUAL_NODES
                price = (curve(usual + sequences * size) / curve(usual) - 1) * (1 + self._yield)  # in tokens
                if price > source.hope and not self.nodes:
                    source.judge.too_dear()
                else:
                    probes += size
        return probes

    def _probe(self, proposal: Proposal, budget: Budget) -> Proposal:
        builder = TreeBuilder.of(proposal.tree, budget)
        for source in self.sources or ():
            if isinstance(source, LookaheadSource):
                source.probe(self._context, builder)
        probes = len(builder) - len(proposal.tree)
        assert proposal.expected is not None
        return Proposal(
            builder.build(),
            (*proposal.sources, *("window",) * probes),
            np.concatenate((proposal.expected, np.full(probes, np.nan))),  # nobody hopes for them
        )

    def _settle(self, drafted: bool, price: float) -> None:
        """Rests longer each time that nothing paid, as far as asking has a `price` worth it, in plain steps."""
        longest = min(LONGEST_REST, int(price / PRICE))
        self._rest = 0 if drafted else min(max(1, 2 * self._rest), longest)
        self._resting = self._rest

    def _take_observed(self) -> float:
        """Seconds of observing since it was asked last."""
        seconds, self._observed = self._observed, 0.0
        return seconds

    def observe(self, context: Context, step: Step) -> None:
        if self._growth is None:
            return  # a step of rest, which costs nothing; sources read what was said when they are asked next
        assert self._machine is not None  # it was asked
        began = perf_counter()
        if step.forward is not None:
            self._machine.observed(step.forward)
        for source in self.sources or ():
            source.observe(context, step)
        self._growth.learn(step)
        self._judge(step)
        self._yield += (step.verdict.accepted - self._yield) * RECENT
        self._observed += perf_counter() - began

    def _judge(self, step: Step) -> None:
        """Tells the window's judge what the step has brought and what it cost."""
        assert self._machine is not None
        if step.forward is None or (curve := self._machine.known_curve(step.forward.sequences)) is None:
            return
        for source in self.sources or ():
            if isinstance(source, LookaheadSource):
                source.judge.told(len(step.tokens), curve(step.forward.rows) / curve(step.forward.sequences))

    def opinions(self, tree: TokenTree) -> dict[str, npt.NDArray[np.float64]]:
        drafts = [source for source in self.sources or () if isinstance(source, DraftSource)]
        places = [(tuple(tree.path_tokens(int(parent))), token) for parent, token in _below_the_root(tree)]
        return {draft.name: np.array([np.nan, *(draft.q(*place) for place in places)]) for draft in drafts}

    def finish(self, context: Context) -> None:
        for source in self.sources or ():
            source.finish(context)

    def close(self) -> None:
        for source in self.sources or ():
            source.close()

    def figures(self) -> dict[str, Any]:
        told: dict[str, Any] = {source.name: source.figures() for source in self.sources or ()}
        if self._left_out:
            told["left_out"] = self._left_out
        if self._machine is not None:
            told |= self._machine.figures()
        return told


def _below_the_root(tree: TokenTree) -> list[tuple[int, int]]:
    """(parent, token) of every drafted node."""
    return list(zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True))


def _free(
    target: Target, sequences: int, growths: dict[int, Growth], fixed: dict[int, int], extra: int, spent: float
) -> dict[int, int]:
    """How many nodes of each tree whose size is free pay, the root counted.

    Args:
        sequences: of the step.
        growths: all that draft.
        fixed: sizes of those that are not free.
        extra: rows of windows.
        spent: seconds that drafting has taken already.
    """
    free = {index: growth for index, growth in growths.items() if index not in fixed}
    if not free:
        return {}
    machine = machine_of(target)
    curve = machine.curve(target, sequences)
    others = sequences - len(free) + sum(fixed.values()) - len(fixed)  # rows that are there in any case
    tallest = max(fixed.values(), default=1)

    def seconds(rows: int) -> float:
        """Of the whole batch, the free trees having so many rows; with padding all are as tall as the tallest."""
        whole = sequences * max(rows // len(free), tallest) if target.pads else rows + others
        return curve(whole + extra)

    def drafting(nodes: int) -> float:
        return spent + machine.drafting(nodes)

    return dict(zip(free, worth(list(free.values()), seconds, curve.sizes, drafting, padded=target.pads), strict=True))
