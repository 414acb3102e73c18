"""The tree sizes that pay: how many nodes of each sequence's tree are drafted in one joint forward.

    yield(n) = sequences + sum of P over the n nodes taken       tokens that the step is expected to commit
    rate(n)  = yield(n) / (T(rows) + drafting time)              tokens per second

Nodes are taken in the order of falling P over all sequences, and the n of the greatest rate is kept. T may have steps
(another kernel is chosen, a block is filled), so the rate may fall before it rises to its maximum. The search ends when
no greater n can win even if every further node were as likely as the next one.

Where a target replays (`TargetInfo.replays`), the committed tokens that its state has not read take rows too, and a
draft that is not accepted whole makes the next forward longer: of a chain of k nodes whose last one is accepted with
P_k, by 1 + sum of P - (k + 1) P_k tokens on average, and with 1 - P_k by those that are replayed already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from leapahead.core.tree import TokenTree
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
        replays: whether the target replays the committed tokens of drafts that are not accepted whole.
        replay: tokens that are replayed in this step, of each sequence that is known.
        branches: whether trees may have branches, and every path of one takes as many rows as the longest.
    """

    sequences: int
    padded: bool
    latency: LatencyProfiles
    drafting: DraftingTime
    resizing: float = 0.0
    replays: bool = False
    replay: Sequence[int] = ()
    branches: bool = False

    def rows(self, kept: Mapping[int, int], trees: Sequence[TokenTree] = ()) -> int:
        """Rows of the forward if so many nodes of each tree are kept, roots counted.

        Args:
            kept: by index of the sequence.
            trees: of all sequences, which count where branches take rows of their own.
        """
        if self.branches and trees:
            (tree,), (ahead,) = trees, self.replay
            return tree.num_leaves * (1 + ahead + max(tree.depth_list))
        sizes = [kept.get(index, 1) + ahead for index, ahead in enumerate(self.replay)]
        if self.padded:
            return self.sequences * max(sizes)
        return sum(sizes) + self.sequences - len(sizes)

    def ahead(self, indices: Iterable[int]) -> Ahead:
        """The rows before the nodes that these sequences draft."""
        drafting = list(indices)
        others = [1 + ahead for index, ahead in enumerate(self.replay) if index not in set(drafting)]
        rows = sum(others) + self.sequences - len(self.replay)
        return Ahead(
            [self.replay[index] for index in drafting], rows, max(others, default=1), self.replays, self.branches
        )

    def longest_back_off(self, seconds: float) -> int:
        """The longest back-off, in steps, of a draft that takes so many seconds."""
        plain = self.latency.profile(self.sequences)(self.sequences)
        return min(LONGEST_BACK_OFF, int(seconds / plain / COST_SHARE))


class Ahead(NamedTuple):
    """Rows of a step that are not nodes of its trees.

    Attributes:
        replay: tokens that are replayed before the root, of each tree.
        others: rows of all sequences that draft nothing.
        longest: the most of one of these.
        replays: whether a draft that is not accepted whole is read again.
        branches: whether every path of a tree takes as many rows as the longest.
    """

    replay: Sequence[int]
    others: int = 0
    longest: int = 1
    replays: bool = False
    branches: bool = False


def best_sizes(
    searches: Sequence[TreeSearch],
    seconds: Callable[[int], float],
    sizes: Sequence[int],
    drafting: Callable[[int], float] = lambda nodes: 0.0,
    padded: bool = False,
    sequences: int | None = None,
    ahead: Ahead | None = None,
) -> list[int]:
    """How many nodes of each tree to keep, the root counted.

    Args:
        searches: one per sequence, with nothing taken.
        seconds: T(rows).
        sizes: numbers of rows at which T is evaluated beyond the present one.
        drafting: seconds that a step takes outside the forward, by number of drafted nodes.
        padded: whether every sequence takes as many rows as the longest of them.
        sequences: of the step, all of which commit a token; by default those that draft.
        ahead: rows that are not nodes of these trees.
    """
    roots = len(searches)
    sequences = sequences or roots
    ahead = ahead or Ahead([0] * roots, sequences - roots)
    taken: list[int] = []  # the search of each node
    lengths = [1 + replay for replay in ahead.replay]
    trees = [(0, 0.0, 1.0)] * roots  # of each the greatest depth, the sum of P, and that of its deepest nodes
    padded = padded and not ahead.branches
    total = float(sequences)

    def cost(rows: int, nodes: int) -> float:
        is_padded = padded and (nodes > 0 or not ahead.replays)
        size = sequences * max(rows // roots, ahead.longest) if is_padded else rows + ahead.others
        return seconds(size) + drafting(nodes) + (later(size) if nodes and ahead.replays else 0.0)

    def later(size: int) -> float:
        """Expected seconds of the next forward for tokens of these trees that are read again."""
        again = [
            1.0 + expected - (deepest + 1) * whole + (1.0 - whole) * replay if deepest else 0.0
            for replay, (deepest, expected, whole) in zip(ahead.replay, trees, strict=True)
        ]
        half = (size + 1) // 2
        row = max(0.0, seconds(size) - seconds(half)) / (size - half)
        return (sequences * max(again) if padded else sum(again)) * row

    def rows_now() -> int:
        return roots * max(lengths) if padded else sum(lengths)

    first = rows_now()
    best, kept = total / cost(sum(lengths) if ahead.replays else first, 0), 0
    order = _Order(searches)
    while len(taken) < MOST and (index := order.first()) is not None:
        chance = searches[index].next
        rows = rows_now()
        unused = rows - sum(lengths)  # padding that nodes may fill at no cost
        if not _may_win(best, total + unused * chance, chance, rows, lambda size: cost(size, size - first), sizes):
            break
        was_taken = searches[index].take()
        order.update(index)
        if not was_taken:
            continue
        taken.append(index)
        total += chance
        deepest, expected, whole = trees[index]
        now = searches[index].deepest
        trees[index] = (now, expected + chance, chance if now > deepest else whole + chance)
        longest = 1 + ahead.replay[index] + now
        lengths[index] = searches[index].leaves * longest if ahead.branches else lengths[index] + 1
        rate = total / cost(rows_now(), len(taken))
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
