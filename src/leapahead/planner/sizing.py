"""The trees that pay, for all sequences of a step together.

    yield(n) = sequences + sum of P over the n nodes taken       tokens that the step is expected to commit
    rate(n)  = yield(n) / (T(rows) + drafting)                   tokens a second

Nodes come likeliest first, whosever they are, and the best n of all is kept. Since T has steps in it (kernels change,
blocks fill), a worse n may lie before the best; growing ends when no n beyond can win, even if every further node were
as likely as the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from leapahead.planner.tree_search import Growth

AHEAD = 8  # rows beyond those that there are, at which T is looked at in any case
MOST = 256  # nodes of a step, whatever is said to be free


@dataclass(frozen=True)
class Rows:
    """How nodes become rows of a forward.

    Attributes:
        padded: every sequence has as many rows as the longest of them.
    """

    sequences: int
    padded: bool

    def __call__(self, nodes: int, longest: int) -> int:
        """`nodes` drafted in all, `longest` of one sequence; roots are counted here."""
        return self.sequences * (1 + longest) if self.padded else self.sequences + nodes


def worth(
    growths: Sequence[Growth],
    seconds: Callable[[int], float],
    sizes: Sequence[int],
    drafting: Callable[[int], float] = lambda nodes: 0.0,
    padded: bool = False,
) -> list[int]:
    """How many nodes of each tree to keep, the root counted.

    Args:
        growths: one per sequence, with nothing taken.
        seconds: T(rows).
        sizes: numbers of rows at which T is looked at beyond the present one.
        drafting: seconds that everything else takes, by nodes drafted.
        padded: see `Rows`.
    """
    rows = Rows(len(growths), padded)
    taken: list[int] = []  # whose each node is
    sizes_of = [1] * len(growths)
    total, longest = float(len(growths)), 0

    def cost(rows: int) -> float:
        return seconds(rows) + drafting(rows - len(growths))

    best, kept = total / (seconds(rows(0, 0)) + drafting(0)), 0
    heap = [(-growth.bound, index) for index, growth in enumerate(growths)]
    heapify(heap)
    while heap and len(taken) < MOST:
        bound, index = heap[0]
        chance = growths[index].next
        if chance <= 0.0:
            heappop(heap)
            continue
        if -bound > chance:  # another may be likelier
            heapreplace(heap, (-chance, index))
            if heap[0][1] != index:
                continue
        now = rows(len(taken), longest)
        free = now - rows.sequences - len(taken)  # padding that nodes may still fill
        if not _may_win(best, total + free * chance, chance, now, cost, sizes):
            break
        if not growths[index].take():
            heapreplace(heap, (-growths[index].bound, index))
            continue
        heapreplace(heap, (-growths[index].bound, index))
        taken.append(index)
        sizes_of[index] += 1
        total += chance
        longest = max(longest, sizes_of[index] - 1)
        rate = total / (seconds(rows(len(taken), longest)) + drafting(len(taken)))
        if rate > best:
            best, kept = rate, len(taken)
    found = [1] * len(growths)
    for index in taken[:kept]:
        found[index] += 1
    return found


def _may_win(
    best: float, total: float, chance: float, now: int, seconds: Callable[[int], float], sizes: Sequence[int]
) -> bool:
    """Whether some number of further nodes, all as likely as `chance`, would beat the best rate.

    Not more of them than twice those that there are: P falls, and each look at a node takes time.
    """
    further = (now, now + 1, *(n for n in sizes if now + 1 < n <= AHEAD + 2 * now))
    return any(total + (size - now) * chance > best * seconds(size) for size in further)
