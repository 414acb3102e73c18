"""Decides below which nodes of a step's trees probes ride in the target's forward.

A group below a node is of use if the committed path ends there, which happens with the probability

    P(node) - the sum of P over its children

and then brings as many tokens in the next step as such groups did before. It costs its rows in this forward. Groups are
placed where the path likeliest ends, as many as pay:  (tokens that they are expected to bring) > (seconds that their
rows take) x (tokens per second without them). With a fixed number of nodes no time is read: the likeliest `FIXED`
places have groups. PaSS (2311.13581) has one group, behind the input; SPACE (2402.11809) one below every prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from leapahead.core.tree import Budget, Probes, TokenTree
from leapahead.drafters.sources.computed import numbered
from leapahead.drafters.sources.probes import ProbeSource
from leapahead.planner.draft import Proposal, SequenceView, Step
from leapahead.planner.sizing import COST_SHARE, StepPlan
from leapahead.planner.source import Source

FIXED = 8  # groups of one head in a tree with a fixed number of nodes
PRIOR, WEIGHT = 0.4, 8.0  # tokens that a group brings, if unknown, and how many observations that counts as
DECAY = 0.98  # of an observation, with each that follows


class ProbeModel(Protocol):
    """A head that consists of probes, loaded beside its target."""

    @property
    def source_name(self) -> str:
        """Who drafted a node, in reports; a number is added where several have the same."""

    def source(self, name: str) -> ProbeSource:
        """A new source, for one sequence."""


class Worth:
    """How many tokens the candidates of one group bring in the next step."""

    def __init__(self) -> None:
        self._tokens, self._steps = PRIOR * WEIGHT, WEIGHT

    def __float__(self) -> float:
        return self._tokens / self._steps

    def observe(self, tokens: int) -> None:
        """A step had candidates of a group, and so many committed tokens are attributed to them."""
        self._tokens, self._steps = DECAY * self._tokens + tokens, DECAY * self._steps + 1


class Place(NamedTuple):
    """Where a group may ride.

    Attributes:
        gain: the tokens that it is expected to bring.
        sequence: index of the sequence of the step.
        probes: the group.
        source: whose it is.
    """

    gain: float
    sequence: int
    probes: Probes
    source: ProbeSource


class ProbeGroups:
    """The probes of one drafter.

    Args:
        models: one or several.
    """

    def __init__(self, models: Sequence[ProbeModel]) -> None:
        self.models = list(models)
        self._worth: dict[tuple[str, bool], Worth] = {}  # by the name of a source, and whether the text is sampled

    def sources(self) -> list[ProbeSource]:
        """New sources, for one sequence."""
        return [model.source(name) for model, name in zip(self.models, numbered(self.models), strict=True)]

    def observe(self, sequence: SequenceView, sources: Sequence[Source], step: Step) -> None:
        """Learns what the groups of the step before have brought. To be called before the sources observe the step."""
        path = step.verdict.path[1 : step.verdict.accepted + 1]
        drafted = Counter(step.proposal.sources[node] for node in path) if step.proposal.sources else Counter[str]()
        for source in sources:
            if isinstance(source, ProbeSource) and source.has_rows:
                self._worth_of(source, sequence).observe(drafted[source.name])

    def place(
        self,
        proposals: Sequence[Proposal],
        sequences: Mapping[int, tuple[SequenceView, Sequence[Source]]],
        budgets: Sequence[Budget],
        plan: StepPlan | None = None,
        spent: float = 0.0,
    ) -> list[Proposal]:
        """The drafts of a step with their probes.

        Args:
            proposals: of all sequences of the step.
            sequences: those that may have probes, with their sources, by index.
            budgets: of all sequences.
            plan: of the step; None with a fixed number of nodes.
            spent: seconds that the step takes beside the forward and its usual drafting.
        """
        places = [
            place
            for index, (sequence, sources) in sequences.items()
            for place in self._places(index, proposals[index], sequence, sources, budgets[index].depth)
        ]
        places.sort(key=lambda place: place.gain, reverse=True)
        chosen = _likeliest(places) if plan is None else _paying(places, proposals, plan, spent)
        groups: dict[int, list[Probes]] = {}
        for place in chosen:
            groups.setdefault(place.sequence, []).append(place.probes)
            place.source.steps_without = 0
        return [
            proposal._replace(tree=proposal.tree.with_probes(groups[index])) if index in groups else proposal
            for index, proposal in enumerate(proposals)
        ]

    def _places(
        self, index: int, proposal: Proposal, sequence: SequenceView, sources: Sequence[Source], deepest: int
    ) -> list[Place]:
        """Where groups of one sequence may ride: no row lies deeper than the text may still reach."""
        tree, found = proposal.tree, []
        ends = endings(tree, [1.0] if proposal.expected is None else proposal.expected.tolist())
        for source in sources:
            if isinstance(source, ProbeSource):
                worth = float(self._worth_of(source, sequence))
                for node, chance in enumerate(ends):
                    probes = source.below(node, deepest - tree.depth_list[node])
                    if probes is not None:
                        found.append(Place(chance * worth, index, probes, source))
        return found

    def _worth_of(self, source: ProbeSource, sequence: SequenceView) -> Worth:
        return self._worth.setdefault((source.name, sequence.sampled), Worth())


def endings(tree: TokenTree, expected: Sequence[float]) -> list[float]:
    """The probability that the committed path ends at each node.

    Args:
        tree: the draft.
        expected: of each node, the probability that it is on the path.
    """
    found = list(expected)
    for node, parent in enumerate(tree.parent_list[1:], start=1):
        found[parent] -= expected[node]
    return [max(0.0, chance) for chance in found]


def _likeliest(places: Sequence[Place]) -> list[Place]:
    """The first `FIXED` places of each source."""
    counts, found = Counter[ProbeSource](), []
    for place in places:
        counts[place.source] += 1
        if counts[place.source] <= FIXED:
            found.append(place)
    return found


def _paying(places: Sequence[Place], proposals: Sequence[Proposal], plan: StepPlan, spent: float) -> list[Place]:
    """As many of the places, in their order, as bring most; and those of sources that had none for long.

    Rows of a latency profile may come in steps, so the search goes on where a single group does not pay.
    """
    curve = plan.profile
    sizes = [len(proposal.tree) + ahead for proposal, ahead in zip(proposals, plan.replay, strict=True)]
    others = plan.sequences - len(sizes)

    def seconds() -> float:
        return curve(plan.sequences * max(sizes) if plan.padded else sum(sizes) + others)

    alone = seconds()
    tokens = others + sum(1.0 if each.expected is None else float(each.expected.sum()) for each in proposals)
    rate = tokens / (alone + plan.drafting(sum(map(len, (each.tree for each in proposals))) - len(proposals)) + spent)
    best, count, gain = 0.0, 0, 0.0
    for number, place in enumerate(places, start=1):
        gain += place.gain
        sizes[place.sequence] += len(place.probes.tokens)
        value = gain - rate * (seconds() - alone)
        if value > best:
            best, count = value, number
    found = list(places[:count])
    served = {place.source for place in found}
    plain = curve(plan.sequences)
    for place in places[count:]:
        rows = plan.sequences * (1 + len(place.probes.tokens)) if plan.padded else len(place.probes.tokens) + 1
        if place.source not in served and place.source.steps_without * COST_SHARE * plain > curve(rows) - plain:
            served.add(place.source)
            found.append(place)  # it has not paid for long: is that still so?
    return found
