"""The tree sizes that pay: how many nodes of each sequence's tree are drafted in one joint forward.

    yield(n) = sequences + sum of P over the n nodes taken       tokens that the step is expected to commit
    rate(n)  = yield(n) / (T(rows) + drafting time)              tokens per second

Nodes are taken in the order of falling P over all sequences, and the n of the greatest rate is kept. T may have steps
(another kernel is chosen, a block is filled), so the rate may fall before it rises to its maximum. The search ends when
no greater n can win even if every further node were as likely as the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from leapahead.planner.profile import DraftingTime, LatencyProfiles
from leapahead.planner.tree_search import TreeSearch

LONGEST_BACK_OFF = 32  # steps
COST_SHARE = 0.01  # of a plain step, that drafts which do not pay may cost on average
AHEAD = 8  # T is evaluated at least this many rows beyond the present number
MOST = 256  # drafted nodes of a step, whatever the latency profile promises


class StepPlan(NamedTuple):
    """What is fixed while the trees of one step are planned.

    Attributes:
        sequences: of the joint forward, whether they draft or not.
        padded: whether all of them take as many rows as the longest.
        latency: of the target.
        drafting: the time that a step takes outside its forward.
        resizing: seconds that a step with drafted nodes costs in addition, since the last one was plain and the next
            plain one will take longer.
    """

    sequences: int
    padded: bool
    latency: LatencyProfiles
    drafting: DraftingTime
    resizing: float = 0.0

    def rows(self, kept: Mapping[int, int]) -> int:
        """Rows of the forward if so many nodes of each tree are kept, roots counted."""
        if self.padded:
            return self.sequences * max(kept.values())
        return sum(kept.values()) + self.sequences - len(kept)

    def longest_back_off(self, seconds: float) -> int:
        """The longest back-off, in steps, of a draft that takes so many seconds."""
        plain = self.latency.profile(self.sequences)(self.sequences)
        return min(LONGEST_BACK_OFF, int(seconds / plain / COST_SHARE))


def best_sizes(
    searches: Sequence[TreeSearch],
    seconds: Callable[[int], float],
    sizes: Sequence[int],
    drafting: Callable[[int], float] = lambda nodes: 0.0,
    padded: bool = False,
    others: int = 0,
) -> list[int]:
    """How many nodes of each tree to keep, the root counted.

    Args:
        searches: one per sequence, with nothing taken.
        seconds: T(rows).
        sizes: numbers of rows at which T is evaluated beyond the present one.
        drafting: seconds that a step takes outside the forward, by number of drafted nodes.
        padded: whether every sequence takes as many rows as the longest of them.
        others: sequences of the step that draft nothing; each of them commits a token as well.
    """
    roots = len(searches)
    taken: list[int] = []  # the search of each node
    lengths = [1] * roots
    total = float(roots + others)
    best, kept = total / (seconds(roots) + drafting(0)), 0

    def cost(rows: int) -> float:
        return seconds(rows) + drafting(rows - roots)

    order = _Order(searches)
    while len(taken) < MOST and (index := order.first()) is not None:
        chance = searches[index].next
        rows = roots * max(lengths) if padded else roots + len(taken)
        unused = rows - roots - len(taken)  # padding that nodes may fill at no cost
        if not _may_win(best, total + unused * chance, chance, rows, cost, sizes):
            break
        was_taken = searches[index].take()
        order.update(index)
        if not was_taken:
            continue
        taken.append(index)
        lengths[index] += 1
        total += chance
        rows = roots * max(lengths) if padded else roots + len(taken)
        rate = total / (seconds(rows) + drafting(len(taken)))
        if rate > best:
            best, kept = rate, len(taken)
    found = [1] * roots
    for index in taken[:kept]:
        found[index] += 1
    return found


class _Order:
    """Searches by P of their likeliest node. A search is asked for it only when its bound is the greatest."""

    def __init__(self, searches: Sequence[TreeSearch]) -> None:
        self._searches = searches
        self._heap = [(-search.bound, index) for index, search in enumerate(searches)]
        heapify(self._heap)

    def first(self) -> int | None:
        """The search with the likeliest node; None if no search has any."""
        while self._heap:
            bound, index = self._heap[0]
            chance = self._searches[index].next
            if chance <= 0.0:
                heappop(self._heap)
            elif -bound > chance:  # the bound was not tight, so another search may have a likelier node
                heapreplace(self._heap, (-chance, index))
            else:
                return index
        return None

    def update(self, index: int) -> None:
        """To be called when a node was taken from the search that `first` gave."""
        heapreplace(self._heap, (-self._searches[index].bound, index))


def _may_win(
    best: float, total: float, chance: float, rows: int, seconds: Callable[[int], float], sizes: Sequence[int]
) -> bool:
    """Whether some number of further nodes, all as likely as `chance`, would beat the best rate.

    Only up to about twice the present rows are considered: P falls, and every node that is searched takes time.
    """
    further = (rows, rows + 1, *(n for n in sizes if rows + 1 < n <= AHEAD + 2 * rows))
    return any(total + (size - rows) * chance > best * seconds(size) for size in further)
