"""Decides when a draft model or a trained head runs another forward, and over which paths of the trees.

A draft forward computes paths of the tree of which the draft model has no candidates yet. It pays while

    (tokens that it is expected to add) / (seconds that it takes)  >  tokens per second without it

A path is expected to add P(path) x p(one of the draft model's first w candidates is right) x (1 - the sum of p over the
guesses of other sources there), as if these were independent. The seconds are those of the draft model's rows, and of w
further rows of the target for each path; w is chosen best. Where one forward of a head gives candidates of several
depths, all of them count, as if they were right equally often at each. EAGLE-2 (2406.16858) expands by value too, in a
fixed number of levels of a fixed width; here both follow from the two latency profiles.

With a fixed number of nodes no time is read: a draft forward is run while the trees lack nodes and it brings some, or
while it is expected to replace unlikely nodes by likelier ones. With a fixed number of forwards all of them are run.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

from leapahead.drafters.sources.computed import Path, numbered
from leapahead.drafters.sources.forward import ForwardModel, ForwardSource
from leapahead.models.base import Target
from leapahead.planner.acceptance import AcceptanceTable
from leapahead.planner.profile import LatencyProfiles
from leapahead.planner.sizing import COST_SHARE, StepPlan
from leapahead.planner.source import Source
from leapahead.planner.tree_search import MOST, TreeSearch, first_choice

FIRST_PRIOR, OTHER_PRIOR = 0.6, 0.08  # probability that the first candidate is right, and each other one, if unknown
CHOICES = 4  # candidates of a path, at most, that are expected to be drafted
WIDEST = 16  # paths of one sequence in one draft forward
# With a fixed number of nodes: the tokens that a forward must be expected to add where the tree has all its nodes, and
# the steps without a forward after which one is run all the same, since the text may have become easier to predict.
LEAST_GAIN, LONGEST_WITHOUT = 0.01, 64
FASTER = 0.7  # times the expected time: a draft forward that takes less is tried again soon
TOO_SLOW = "it is slower than the target"


class Place(NamedTuple):
    """A path that a draft model could compute.

    Attributes:
        chance: the probability that the text takes it and that no other source knows how it continues.
        right: the probability that the first of the draft model's candidates is right, or one of the first two, ...;
            where one forward gives candidates of several depths, the number of depths at which that is so in a row.
        reach: the number of those depths.
        path: from below the root.
        source: of the draft model and the sequence.
    """

    chance: float
    right: tuple[float, ...]
    reach: int
    path: Path
    source: ForwardSource

    @property
    def value(self) -> float:
        """By which paths are ordered: tokens that the first candidate is expected to add."""
        return self.chance * self.right[0]


Usable = tuple[TreeSearch, int, ForwardSource]  # the tree so far, and which of its sources the draft model's is


class DraftForwards:
    """The draft models of one drafter.

    Args:
        models: one or several.
        acceptance: estimates how often their candidates are right.
        depth: number of forwards of each draft model in every step; 0 if that is not fixed.
        nodes: number of nodes of every tree, for which as many forwards are run as are needed; 0 if it is not fixed.

    Attributes:
        planned: whether forwards are run where they pay by the latency profiles, since neither number is fixed.
        slow: the models that were measured to be slower than the target, which are not used.
        steps_without: of each model, steps since its last forward, of all texts, drafting suspended or not.
    """

    def __init__(
        self, models: Sequence[ForwardModel], acceptance: AcceptanceTable, depth: int = 0, nodes: int = 0
    ) -> None:
        self.models, self.acceptance, self.depth, self.nodes = list(models), acceptance, depth, nodes
        self.planned = not (depth or nodes)
        self.slow: list[ForwardModel] = []
        self.steps_without = Counter[ForwardModel]()

    def sources(self) -> list[ForwardSource]:
        """New sources, for one sequence."""
        return [model.source(name) for model, name in zip(self.models, numbered(self.models), strict=True)]

    def known(self, tokens: Sequence[int], owner: str) -> int:
        """How many tokens of a prompt there are whose hidden states no head needs, of those that are used."""
        return min((model.known(tokens, owner) for model in self.models if model not in self.slow), default=len(tokens))

    def end_slow(self, sources: Iterable[Source]) -> None:
        """Ends the drafts of models that are not used, before the prompt is read, whose states they would wait for."""
        for source in sources:
            if isinstance(source, ForwardSource) and source.model in self.slow and not source.failed:
                source.fail(TOO_SLOW)

    def prepare(self, latency: LatencyProfiles, target: Target | None) -> None:
        """Measures the draft models' latency profiles, outside of every request's time.

        A draft model that seems to be slower than the target is measured again, and so is the target: their stored
        profiles may be of times in which the machine was differently busy. What steps take later excludes none, since
        it may become slower for a while only: then its forwards do not pay, and are tried again.
        """
        if not self.planned:
            return  # the profiles are not read
        for model in self.models:
            model.prepare()
        if target is None or not (slow := self._slower(latency)):
            return
        for model in slow:
            model.measure()
        latency.measure(target)
        self.slow = self._slower(latency)
        for model in self.slow:
            own, whole = (each.profile(1)(1) for each in (model.latency, latency))
            warnings.warn(
                f"{model.title} takes {1e3 * own:.1f} ms per token and the target {target.info.name} "
                f"{1e3 * whole:.1f} ms, so it cannot make decoding faster; use a smaller one",
                UserWarning,
                stacklevel=2,
            )

    def _slower(self, latency: LatencyProfiles) -> list[ForwardModel]:
        """The draft models of which a forward over one row takes as long as one of the target."""
        plain = latency.profile(1)(1)
        return [model for model in self.models if model.latency.profile(1)(1) >= plain]


class StepForwards:
    """The draft forwards of one step.

    Args:
        forwards: of the drafter.
        plan: of the step.
        sources: of all sequences that draft.
        clock: gives the time in seconds.

    Attributes:
        seconds: that they have taken, reading of prompts included.
    """

    def __init__(
        self, forwards: DraftForwards, plan: StepPlan, sources: Iterable[Source], clock: Callable[[], float]
    ) -> None:
        self.forwards, self.plan, self._clock = forwards, plan, clock
        self.seconds = 0.0
        drafts = [source for source in sources if isinstance(source, ForwardSource)]
        self._runs: Counter[ForwardModel] = Counter()
        self._sizes: dict[Source, int] = {}  # of the tree when a draft model was run for it, the root counted
        self._read_ahead([source for source in drafts if source.reading])

    def more(self, searches: Mapping[int, TreeSearch], kept: Mapping[int, int]) -> bool:
        """Runs the draft forward that pays best, if one does or is still wanted; false if not.

        Args:
            searches: the trees so far, by sequence.
            kept: how many of their nodes would be drafted without it, the root counted.
        """
        best: tuple[float, list[Place]] = (-1.0, [])
        for model in self.forwards.models:
            usable = list(self._usable(model, searches))
            planned = self.forwards.planned
            gain, chosen = self._gain(model, usable, searches, kept) if planned else self._wanted(usable)
            if chosen and gain > best[0]:
                best = gain, chosen
        return bool(best[1]) and self._run(best[1])

    def settle(self, searches: Mapping[int, TreeSearch], drafted: Mapping[int, bool]) -> None:
        """Suspends the draft models after forwards from which nothing was drafted.

        Args:
            searches: by sequence.
            drafted: whether the draft of the sequence has any nodes.
        """
        if not self.seconds or not self.forwards.planned:
            return
        longest = self.plan.longest_back_off(self.seconds)
        for index, search in searches.items():
            for source in search.sources:
                if isinstance(source, ForwardSource) and source.steps_without == 0:
                    source.back_off.update(paid=drafted[index], longest=longest)

    def _wanted(self, usable: Sequence[Usable]) -> tuple[float, list[Place]]:
        """Where a draft model should run if the number of forwards or of nodes is fixed, and what it is hoped to add.

        With a fixed number of nodes, the k-th place is computed if its first candidate is likelier than the k-th node
        of the tree, counted from the least likely one; a node that the tree lacks has no probability. So the places do
        not depend on the other sequences of the step.
        """
        total, chosen = 0.0, list[Place]()
        for search, which, source in usable:
            places = self._places(search, which, source)
            if self.forwards.depth:
                total, chosen = float("inf"), [*chosen, *places]
                continue
            missing = min(self.forwards.nodes, search.budget.nodes) - (len(search) - 1)
            replaced = [0.0] * missing + sorted(search.expected[1:])
            gains = (place.value - chance for place, chance in zip(places, replaced, strict=False))
            added = list(takewhile(lambda gain: gain > 0, gains))
            lacking = missing > 0 and len(search) > self._sizes.get(source, 0)  # and its last forward brought nodes
            if lacking or sum(added) > LEAST_GAIN or source.steps_without > LONGEST_WITHOUT:
                self._sizes[source] = len(search)
                total, chosen = total + sum(added), [*chosen, *places[: max(1, len(added))]]
        return total, chosen

    def _gain(
        self,
        model: ForwardModel,
        usable: Sequence[Usable],
        searches: Mapping[int, TreeSearch],
        kept: Mapping[int, int],
    ) -> tuple[float, list[Place]]:
        """Where this draft model should run, and how many tokens that is better than the same time without it."""
        places = [place for search, which, source in usable for place in self._places(search, which, source)]
        places.sort(key=lambda place: place.value, reverse=True)
        if not usable:
            return 0.0, []
        plan = self.plan
        curve, own = plan.profile, model.latency.profile(plan.sequences)
        missing, opening, probing = 0, 0.0, False
        for search, _, source in usable:
            if source.opened:
                missing += source.missing + source.beside
            else:  # the prompt is read once, for all tokens that may follow
                opening += own(source.missing) / max(1, search.budget.depth)
            without = max(source.steps_without, self.forwards.steps_without[model])
            if without * COST_SHARE * curve(plan.sequences) > own(source.missing + 1):
                probing |= not self._runs[model]  # it has not paid for long: is that still so?
        rows = plan.rows(kept)
        tokens = float(plan.sequences - len(searches))
        tokens += sum(sum(search.expected[: kept[index]]) for index, search in searches.items())
        rate = tokens / (curve(rows) + plan.drafting(rows - plan.sequences) + self.seconds)
        best, chosen, depths = 0.0, 0, 0
        sums = [0.0] * CHOICES  # of tokens, by candidates of each path
        for count, place in enumerate(places, 1):
            seconds = opening + own(missing + count * place.source.rows) - curve(rows)
            depths += place.reach
            for width, right in enumerate(place.right, 1):
                sums[width - 1] += place.chance * right
                new = width * depths
                added = plan.sequences * -(-new // len(searches)) if plan.padded else new
                gain = sums[width - 1] - rate * (seconds + curve(rows + added))
                if gain > best:
                    best, chosen = gain, count
        if probing and not chosen:
            return float("inf"), [place for place in places if not place.path][:1]
        return best, places[:chosen]

    def _usable(self, model: ForwardModel, searches: Mapping[int, TreeSearch]) -> Iterator[Usable]:
        """The sources of a draft model that may run another forward in this step."""
        limit = self.forwards.depth or self.forwards.nodes
        if limit and self._runs[model] >= limit:
            return
        for search in searches.values():
            for which, source in enumerate(search.sources):
                if not isinstance(source, ForwardSource) or source.model is not model:
                    continue
                if source.failed or source.reading:
                    continue
                if limit or not source.back_off.remaining:
                    yield search, which, source

    def _places(self, search: TreeSearch, which: int, source: ForwardSource) -> list[Place]:
        """The paths of a tree that its source number `which` could compute, best first."""
        table, mode = self.forwards.acceptance, search.mode
        first = table.estimate(first_choice(source.name, mode), FIRST_PRIOR)
        others = [table.estimate((source.name, mode, rank), OTHER_PRIOR) for rank in range(1, CHOICES)]
        right = [min(MOST, total) for total in accumulate((first, *others))]
        found = [
            Place(chance * (1.0 - known), _in_a_row(right, reach := source.reach(path)), reach, path, source)
            for path, chance, known in search.states(which)
            if not source.has_candidates(path) and source.computable(path)
        ]
        return sorted(found, key=lambda place: place.value, reverse=True)[:WIDEST]

    def _run(self, chosen: Sequence[Place]) -> bool:
        """One draft forward over these paths; false if nothing came of it."""
        paths: dict[ForwardSource, list[Path]] = {}
        for place in chosen:
            paths.setdefault(place.source, []).append(place.path)
        self._read_ahead([source for source in paths if not source.opened])
        ready = [(source, some) for source, some in paths.items() if source.opened and not source.reading]
        began = self._clock()
        model = chosen[0].source.model
        forward = type(chosen[0].source).draft(ready) if ready else None
        is_faster = False  # than it was: only several forwards in a row show that, so it is tried again
        if forward is not None:
            profile = model.latency.profile(forward.cost.sequences)
            is_faster = not profile.fixed and forward.seconds < FASTER * profile(forward.cost.rows)
            model.latency.observe(forward)
        self._runs[model] += 1
        self.forwards.steps_without[model] *= is_faster
        self.seconds += self._clock() - began
        return forward is not None

    def _read_ahead(self, sources: Sequence[ForwardSource]) -> None:
        """Reads one chunk of each text for its draft model."""
        began = self._clock()
        for source in sources:
            source.read_ahead()
        self.seconds += self._clock() - began if sources else 0.0


def _in_a_row(right: Sequence[float], depths: int) -> tuple[float, ...]:
    """The expected number of depths, of so many, at which one of the candidates is right and was at all before."""
    return tuple(sum(p**depth for depth in range(1, depths + 1)) for p in right)
