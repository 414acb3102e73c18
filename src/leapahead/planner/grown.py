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

from leapahead.drafter import Ask, Context, Drafter, Proposal, Step
from leapahead.drafters.sources import Source
from leapahead.drafters.sources.lookahead import LookaheadSource
from leapahead.errors import BadParameter
from leapahead.planner.calibration import Trust
from leapahead.planner.cost import CostCurve
from leapahead.planner.grow import Growth
from leapahead.planner.machine import Machine, machine_of
from leapahead.planner.plan import worth
from leapahead.target import TREE, Target
from leapahead.tree import Budget, TokenTree, TreeBuilder

LONGEST_REST = 32  # steps without asking the sources
PRICE = 0.01  # of a plain step, that asking in vain may take of each
USUAL_NODES = 8  # of a tree, when the price of a window is looked at
RECENT = 0.1  # weight of the newest step


class Grown(Drafter):
    """A drafter made of sources: its tree is grown node by node, as large as pays or as large as is said.

    Args:
        nodes: draft so many nodes every step, whatever they cost; 0 for what pays.
        max_nodes: never more.
        dice: rank candidates under the dice when sampling; without, for comparison, by what is likely alone.
    """

    def __init__(self, nodes: int = 0, max_nodes: int = 128, dice: bool = True) -> None:
        if nodes < 0 or max_nodes < 1:
            raise BadParameter(f"nodes={nodes} must be at least 0 and max_nodes={max_nodes} at least 1")
        self.nodes, self.max_nodes, self.dice = nodes, max_nodes, dice
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
        growths: dict[int, Growth] = {}
        machine = machine_of(target)
        for index, drafter in enumerate(drafters):
            _, context, budget = asks[index]
            drafter._growth = None
            sources = drafter._enter(target)
            if not sources or min(budget.nodes, budget.depth) < 1:
                continue
            if drafter._resting > 0 and not drafter.nodes:
                drafter._resting -= 1
                continue
            leaves = budget.leaves if TREE in target.capabilities else 1
            within = Budget(min(budget.nodes, drafter.max_nodes), budget.depth, leaves)
            for source in sources:
                source.read(context)
            growths[index] = drafter._growth = Growth(
                context, sources, machine.calibration, within, drafter.dice, drafter._trust
            )
        if not growths:
            return found
        curve = machine.curve(target, len(asks))
        probing = {index: probes for index in growths if (probes := drafters[index]._probing(curve, len(asks)))}
        extra = len(asks) * max(probing.values(), default=0) if target.pads else sum(probing.values())
        kept = {index: growth.take_all(size) for index, growth in growths.items() if (size := drafters[index].nodes)}
        free = {index: growth for index, growth in growths.items() if index not in kept}
        others = len(asks) - len(free) + sum(kept.values()) - len(kept)  # rows that are there in any case
        tallest = max(kept.values(), default=1)

        def seconds(rows: int) -> float:
            """Of the whole batch, the free trees having so many rows; with padding all are as tall as the tallest."""
            whole = len(asks) * max(rows // len(free), tallest) if target.pads else rows + others
            return curve(whole + extra)

        if free:
            sizes = worth(list(free.values()), seconds, curve.sizes, machine.drafting, padded=target.pads)
            kept |= dict(zip(free, sizes, strict=True))
        for index, growth in growths.items():
            found[index] = growth.proposal(kept[index])
            drafters[index]._settle(kept[index] > 1, machine.drafting(0) / curve(len(asks)))
            if index in probing:
                found[index] = drafters[index]._probe(found[index], asks[index].budget)
        spent = perf_counter() - began + sum(drafters[index]._take_observed() for index in growths)
        machine.drafted(spent, sum(kept.values()) - len(kept))
        return found

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

    def finish(self, context: Context) -> None:
        for source in self.sources or ():
            source.finish(context)

    def figures(self) -> dict[str, Any]:
        told: dict[str, Any] = {source.name: source.figures() for source in self.sources or ()}
        if self._left_out:
            told["left_out"] = self._left_out
        if self._machine is not None:
            told |= self._machine.figures()
        return told
