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
from leapahead.planner.latency import LatencyProfile
from leapahead.planner.profile import DraftingTime
from leapahead.planner.recent import NO_FORWARD, Recent
from leapahead.planner.tree_search import TreeSearch

LONGEST_BACK_OFF = 32  # steps
# Of a plain step, that drafts which do not pay may cost on average; where sizes are padded to buckets, a later start of
# drafting costs more, since drafted steps are to follow each other. After many steps in which all drafts were worth
# less than `FAR` of their cost, a back-off may be longer: one part in so many of them.
COST_SHARE, COST_SHARE_BUCKETS = 0.01, 0.02
VAIN_PART, FAR = 16, 0.5
WORTH = 1.02  # expected gain from which asking the sources in the next step is worth its time
SMALL = 1e-9  # a gain that is not known
CHAINS = (1, 3, 7, 15)  # drafted nodes of chains: one of them must pay if all of its tokens are right
AHEAD = 8  # T is evaluated at least this many rows beyond the present number
MOST = 256  # drafted nodes of a step, whatever the latency profile promises


class StepPlan(NamedTuple):
    """What is fixed while the trees of one step are planned.

    Attributes:
        sequences: of the joint forward, whether they draft or not.
        padded: whether all of them take as many rows as the longest.
        profile: of the target's forwards over so many sequences.
        drafting: the time that a step takes outside its forward.
        resizing: see `LatencyProfile.resizing`.
        replays: whether the target replays the committed tokens of drafts that are not accepted whole.
        replay: tokens that are replayed in this step, of each sequence that is known.
        branches: whether trees may have branches, and every path of one takes as many rows as the longest.
        recent: what the target is prepared for.
    """

    sequences: int
    padded: bool
    profile: LatencyProfile
    drafting: DraftingTime
    resizing: float = 0.0
    replays: bool = False
    replay: Sequence[int] = ()
    branches: bool = False
    recent: Recent = NO_FORWARD

    def seconds(self, rows: int) -> float:
        """See `LatencyProfile.planned`."""
        return self.profile.planned(rows, self.recent)

    @property
    def resized(self) -> float:
        """Seconds that a drafted step makes the next plain one longer; each of several in a row is charged once."""
        if not self.profile.changes_cost:
            return self.resizing
        return 0.0 if self.recent.last is not None and self.recent.last > self.sequences else self.profile.leaving

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
        drafting = dict.fromkeys(indices)
        others = [1 + ahead for index, ahead in enumerate(self.replay) if index not in drafting]
        rows = sum(others) + self.sequences - len(self.replay)
        return Ahead(
            [self.replay[index] for index in drafting], rows, max(others, default=1), self.replays, self.branches
        )

    def gain(
        self, searches: Mapping[int, TreeSearch], kept: Mapping[int, int], trees: Sequence[TokenTree], spent: float
    ) -> float:
        """What drafts are expected to gain, in plain steps without any drafting, which is not yet sunk there.

        Args:
            searches, kept: by index of the sequence: the search, and how many of its nodes are drafted, the root
                counted.
            trees: of all sequences.
            spent: seconds that draft forwards have taken in this step.

        Returns:
            0 where they do not pay.
        """
        if not (drafted := sum(kept.values()) - len(kept)):
            return 0.0
        profile, sequences = self.profile, self.sequences
        tokens = sequences - len(kept) + sum(sum(searches[index].expected[:size]) for index, size in kept.items())
        seconds = self.seconds(self.rows(kept, trees)) + self.resizing + self.drafting(drafted) + spent
        worth, cost = tokens / sequences, seconds / profile(sequences)
        if profile.changes_cost:  # there, the price of changes has decided, and a pause is a change
            return max(worth - cost, SMALL)
        return worth - cost if worth > WORTH * cost else 0.0

    def is_near(self, searches: Iterable[TreeSearch]) -> bool:
        """Whether the likeliest node of these trees is worth at least `FAR` of what it costs.

        Args:
            searches: of which the likeliest nodes were asked for.
        """
        profile, plain = self.profile, self.profile(self.sequences)
        cost = (profile(self.sequences + 1) - plain) * self.sequences / plain  # in tokens
        return any((each.expected[1] if len(each) > 1 else each.next) >= FAR * cost for each in searches)

    def can_pay(self, spent: float) -> bool:
        """Whether a draft of one sequence would pay if the target chose all of its tokens.

        Args:
            spent: see `gain`.
        """
        profile, sequences, plain = self.profile, self.sequences, self.profile(self.sequences)
        alone = self.rows({})
        for nodes in CHAINS:
            rows = self.rows({0: 1 + nodes}) if self.padded else alone + nodes
            seconds = profile(rows) + self.drafting(nodes) + spent
            if 1 + nodes / sequences > WORTH * seconds / plain:
                return True
        return False

    def longest_back_off(self, seconds: float, vain: int = 0) -> int:
        """The longest back-off, in steps, of a draft that takes so many seconds.

        Args:
            seconds: that drafting takes.
            vain: steps since a draft was near to paying.
        """
        steps = seconds / self.profile(self.sequences)
        if self.profile.changes_cost:
            return min(LONGEST_BACK_OFF, int(steps / COST_SHARE_BUCKETS))
        return min(LONGEST_BACK_OFF, max(int(steps / COST_SHARE), vain // VAIN_PART))


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
    step = _Step(seconds, drafting, padded, sequences, ahead or Ahead([0] * roots, sequences - roots))
    taken: list[int] = []  # the search of each node
    total = float(sequences)
    best, kept = total / step.plain, 0
    order = _Order(searches)
    while len(taken) < MOST and (index := order.first()) is not None:
        chance = searches[index].next
        if not step.may_win(best, total, chance, sizes):
            break
        was_taken = searches[index].take()
        order.update(index)
        if not was_taken:
            continue
        taken.append(index)
        step.take(index, searches[index], chance)
        total += chance
        rate = total / step.cost(step.rows, len(taken))
        if rate > best:
            best, kept = rate, len(taken)
    found = [1] * roots
    for index in taken[:kept]:
        found[index] += 1
    return found


class _Step:
    """What a step costs with the nodes that were taken so far.

    Args:
        seconds, drafting, padded, sequences, ahead: see `best_sizes`.
    """

    def __init__(
        self,
        seconds: Callable[[int], float],
        drafting: Callable[[int], float],
        padded: bool,
        sequences: int,
        ahead: Ahead,
    ) -> None:
        self._seconds, self._drafting, self._sequences, self._ahead = seconds, drafting, sequences, ahead
        self._padded = padded and not ahead.branches
        self._lengths = [1 + replay for replay in ahead.replay]  # rows of each tree, replayed tokens included
        # Of each tree: the greatest depth, the sum of P, and that of its deepest nodes.
        self._trees = [(0, 0.0, 1.0)] * len(self._lengths)
        self._first = self.rows

    @property
    def rows(self) -> int:
        """Of all trees."""
        return len(self._lengths) * max(self._lengths) if self._padded else sum(self._lengths)

    @property
    def plain(self) -> float:
        """The seconds of a step without drafted nodes."""
        return self.cost(sum(self._lengths) if self._ahead.replays else self._first, 0)

    def take(self, index: int, search: TreeSearch, chance: float) -> None:
        """A search has taken a node."""
        (deepest, expected, whole), now = self._trees[index], search.deepest
        self._trees[index] = (now, expected + chance, chance if now > deepest else whole + chance)
        longest = 1 + self._ahead.replay[index] + now
        self._lengths[index] = search.leaves * longest if self._ahead.branches else self._lengths[index] + 1

    def cost(self, rows: int, nodes: int) -> float:
        """The seconds of the step, where the trees have so many rows and drafted nodes."""
        ahead = self._ahead
        is_padded = self._padded and (nodes > 0 or not ahead.replays)
        longest = max(rows // len(self._lengths), ahead.longest)
        size = self._sequences * longest if is_padded else rows + ahead.others
        return self._seconds(size) + self._drafting(nodes) + (self._later(size) if nodes and ahead.replays else 0.0)

    def may_win(self, best: float, total: float, chance: float, sizes: Sequence[int]) -> bool:
        """Whether some number of further nodes, all as likely as `chance`, would beat the best rate.

        Only up to about twice the present rows are considered: P falls, and every node that is searched takes time.
        """
        rows = self.rows
        total += (rows - sum(self._lengths)) * chance  # padding that nodes may fill at no cost
        further = (rows, rows + 1, *(n for n in sizes if rows + 1 < n <= AHEAD + 2 * rows))
        return any(total + (size - rows) * chance > best * self.cost(size, size - self._first) for size in further)

    def _later(self, size: int) -> float:
        """Expected seconds of the next forward for tokens of these trees that are read again."""
        again = [
            1.0 + expected - (deepest + 1) * whole + (1.0 - whole) * replay if deepest else 0.0
            for replay, (deepest, expected, whole) in zip(self._ahead.replay, self._trees, strict=True)
        ]
        half = (size + 1) // 2
        row = max(0.0, self._seconds(size) - self._seconds(half)) / (size - half)
        return (self._sequences * max(again) if self._padded else sum(again)) * row


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
