"""Whether a draft model should look once more, and where.

A look is one forward of the draft over places of the tree that it does not know yet. It pays while

    (tokens that it is expected to bring) / (seconds that it takes)  >  tokens a second without it

What a place brings is P(place) x p(one of the draft's first w choices is right) x (1 - what others guess there), as if
they were independent; the seconds are those of the draft's rows and of w further rows of the target a place; w is what
pays best. EAGLE-2 (2406.16858) expands by value too, in a fixed number of levels of a fixed width; here both follow
from the two cost curves.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple
from weakref import WeakSet

from leapahead.drafters.base import Proposal
from leapahead.drafters.draft_runner import Path
from leapahead.drafters.sources.draft import DraftSource
from leapahead.models.base import Target
from leapahead.planner.acceptance import Calibration
from leapahead.planner.profile import machine_of
from leapahead.planner.tree_search import MOST, Growth, first_choice

HOPE, NEXT = 0.6, 0.08  # that a draft's first choice is right, and one of the next, before any was seen
CHOICES = 4  # of a place, at most, that are hoped for when it is looked at
WIDEST = 16  # places of one sequence in one look
LONGEST_REST = 32  # steps without a look, or without asking any source
PRICE = 0.01  # of a plain step, that looking or asking in vain may take of each


_compared: WeakSet[Target] = WeakSet()  # drafts that seemed slow and were measured beside their target


class Place(NamedTuple):
    """Where a draft may look.

    Attributes:
        chance: that the text comes there and that nobody else knows how it goes on.
        right: that the first of the source's choices there is right, or one of the first two, ...
        path: the place.
        source: that does not know it yet.
    """

    chance: float
    right: tuple[float, ...]
    path: Path
    source: DraftSource


class Looks:
    """All looks of one step.

    Args:
        target: the model that decodes.
        sequences: of the step.

    Attributes:
        seconds: that they have taken.
    """

    def __init__(self, target: Target, sequences: int) -> None:
        self.target, self.sequences = target, sequences
        self.seconds = 0.0
        self._rounds: Counter[Target] = Counter()

    def more(self, growths: dict[int, Growth], kept: dict[int, int], depths: dict[int, int]) -> bool:
        """Looks once more, if that pays or is wanted.

        Args:
            growths: the trees so far, by sequence.
            kept: how many of their nodes are drafted as things stand, the root counted.
            depths: how many looks of each are wanted; 0 for what pays.

        Returns:
            False where it is enough.
        """
        drafts = {
            id(source.target): source.target
            for growth in growths.values()
            for source in growth.sources
            if isinstance(source, DraftSource) and source.able
        }
        best: tuple[float, list[Place]] = (0.0, [])
        for draft in drafts.values():
            if not self._rounds[draft] and self._too_slow(draft, growths, depths):
                continue
            gain, chosen = self._worthwhile(draft, growths, kept, depths)
            if chosen and gain > best[0]:
                best = gain, chosen
        return bool(best[1]) and self._look(best[1])

    def _too_slow(self, draft: Target, growths: dict[int, Growth], depths: dict[int, int]) -> bool:
        """Whether a token of the draft takes as long as one of the target: said once, and the draft is left alone."""
        if all(depths[index] for index in growths):
            return False  # its looks are the user's wish
        own = machine_of(draft).curve(draft, self.sequences)(self.sequences)
        whole = machine_of(self.target).curve(self.target, self.sequences)(self.sequences)
        if own < whole:
            return False
        if draft not in _compared:  # one curve may be of a busier hour than the other
            _compared.add(draft)
            for each in (draft, self.target):
                machine_of(each).again(each)
            return self._too_slow(draft, growths, depths)
        told = (
            f"the draft model {draft.name} takes {1e3 * own:.1f} ms a token and the target {self.target.name} "
            f"{1e3 * whole:.1f} ms, so it cannot make it faster; use a smaller one"
        )
        warnings.warn(told, UserWarning, stacklevel=2)
        for index, growth in growths.items():
            for source in growth.sources:
                if isinstance(source, DraftSource) and source.target is draft and not depths[index]:
                    assert source.following is not None
                    source.following.fail(told)
        return True

    def _worthwhile(
        self, draft: Target, growths: dict[int, Growth], kept: dict[int, int], depths: dict[int, int]
    ) -> tuple[float, list[Place]]:
        """The places where this draft should look, and by how many tokens that is better than the same time without."""
        machine, own = machine_of(self.target), machine_of(draft)
        curve, theirs = machine.curve(self.target, self.sequences), own.curve(draft, self.sequences)
        rows = self.sequences * max(kept.values()) if self.target.pads else sum(kept.values())
        rows = max(rows, self.sequences)
        tokens = sum(sum(growth.expected[: kept[index]]) for index, growth in growths.items())
        tokens += self.sequences - len(growths)
        time = curve(rows) + machine.drafting(rows - self.sequences) + self.seconds
        found, missed, opening, wanted, probing = [], 0, 0.0, False, False
        for index, growth in growths.items():
            for which, source in enumerate(growth.sources):
                if not isinstance(source, DraftSource) or source.target is not draft or not source.able:
                    continue
                if self._rounds[draft] >= depths[index] > 0 or (source.resting and not depths[index]):
                    continue
                wanted |= depths[index] > 0
                assert source.following is not None
                if source.following.opened:
                    missed += source.following.missed
                else:  # the prompt is read once, for all tokens that may come
                    opening += theirs(source.following.missed) / max(1, growth.budget.depth)
                found += _places(growth, which, machine.calibration)
                if source.idle * PRICE * curve(self.sequences) > theirs(source.following.missed + 1):
                    probing |= not self._rounds[draft]  # nothing has paid for long; but does it still not?
        found.sort(key=_hope, reverse=True)
        if wanted:
            return float("inf"), found
        rate, best, chosen = tokens / time, 0.0, 0
        sums = [0.0] * CHOICES  # of tokens, by choices a place
        for count, place in enumerate(found, 1):
            look = opening + theirs(missed + count) - curve(rows)
            for width, right in enumerate(place.right, 1):
                sums[width - 1] += place.chance * right
                new = width * count
                more = self.sequences * -(-new // len(growths)) if self.target.pads else new
                gain = sums[width - 1] - rate * (look + curve(rows + more))
                if gain > best:
                    best, chosen = gain, count
        if probing and not chosen:
            return float("inf"), [place for place in found if not place.path][:1]
        return best, found[:chosen]

    def _look(self, chosen: Sequence[Place]) -> bool:
        """One forward of a draft model at these places."""
        began = perf_counter()
        paths: dict[DraftSource, list[Path]] = {}
        for place in chosen:
            paths.setdefault(place.source, []).append(place.path)
        forward = DraftSource.look(list(paths.items()))
        if forward is not None:
            machine_of(chosen[0].source.target).observed(forward)
        self._rounds[chosen[0].source.target] += 1
        self.seconds += perf_counter() - began
        return forward is not None

    def settle(self, growths: dict[int, Growth], proposals: Sequence[Proposal]) -> None:
        """Tells the drafts that have looked whether something came of it."""
        if not self.seconds:
            return
        plain = machine_of(self.target).curve(self.target, self.sequences)(self.sequences)
        longest = min(LONGEST_REST, int(self.seconds / plain / PRICE))
        for index, growth in growths.items():
            for source in growth.sources:
                if isinstance(source, DraftSource) and source.idle == 0:
                    source.settle(useful=len(proposals[index].tree) > 1, longest=longest)


def _places(growth: Growth, which: int, calibration: Calibration) -> list[Place]:
    """Places of a tree that its source number `which` does not know, best first."""
    source = growth.sources[which]
    assert isinstance(source, DraftSource)
    first = calibration.estimate(first_choice(source.name, growth.how), HOPE)
    others = [calibration.estimate((source.name, growth.how, rank), NEXT) for rank in range(1, CHOICES)]
    right = tuple(min(MOST, sum_) for sum_ in accumulate((first, *others)))
    found = [
        Place(chance * (1.0 - known), right, path, source)
        for path, chance, known in growth.places(which)
        if not source.knows(path)
    ]
    return sorted(found, key=_hope, reverse=True)[:WIDEST]


def _hope(place: Place) -> float:
    """By which places are tried: the tokens that the source's first choice there is expected to bring."""
    return place.chance * place.right[0]
