"""The best shape of a draft tree where only the rank of a child tells how likely it is (Sequoia, 2402.12374).

                      root 1
              ┌─────────┼──────────┐            p[k]    chance that the child of rank k is accepted, if its parent was:
             p[0]      p[1]       p[2]                  the positional assumption (definition 3.1); their sum is <= 1
         ┌────┴────┐    │                       chance  product of p along the path of a node, 1 at the root (3.3)
     p[0]p[0] p[0]p[1]  p[1]p[0]                value   sum of chances of all nodes: tokens a step commits (3.4)

Two ways to it, `best_shape` by Sequoia's dynamic programme and `greedy_shape` by falling chance, and they always give
the same value. A node's chance does not depend on what else is in the tree, and no child's is above its parent's; so
the n likeliest nodes, of all that the limits of depth and width allow, are a tree already, and no other n sum up to
more. The dynamic programme is needed for no number of nodes, no depth and no width; it is kept as the paper has it, and
as the reference that tests compare the other with.

They differ where depth costs time. Each level of a tree that a draft model drafts is one forward of it, whatever it
brings. Sequoia takes this into account: of the best trees of all (nodes, depth) it takes that of the least time for a
token. Taking nodes by falling chance without a limit of depth can cost a draft forward for a single unlikely node.

It computes with numbers only, not with tokens or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.core.tree import IntArray, TokenTree

FloatArray = npt.NDArray[np.float64]
Seconds = Callable[[int], float]  # of a forward over so many rows

SLACK = 1e-3  # what rounding may add to a sum of shares


@dataclass(frozen=True, eq=False)
class Shape:
    """A tree without tokens: which of its parent's likeliest children each node is.

    Attributes:
        parents: int64 [nodes], -1 for the root and the index of an earlier node for all others.
        ranks: int64 [nodes], which child of its parent, 0 for the likeliest; 0 for the root.
        expected: tokens that a step with it commits, the target's own one counted.
    """

    parents: IntArray
    ranks: IntArray
    expected: float

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> IntArray:
        """int64 [nodes]; 0 for the root."""
        return TokenTree(self.ranks, self.parents).depths

    @property
    def depth(self) -> int:
        """Of the deepest node; as many forwards of a draft model as it takes to draft the tree."""
        return int(self.depths.max())

    @property
    def drafted(self) -> list[int]:
        """Rows of each of these forwards: the nodes at depth 0, 1, ... that have children."""
        depths = self.depths[np.unique(self.parents[1:])]
        return [int(rows) for rows in np.bincount(depths, minlength=self.depth)]

    def chances(self, ranks: Sequence[float]) -> FloatArray:
        """float64 [nodes]; the chance of each node by such acceptance of ranks."""
        found = np.ones(len(self))
        for node in range(1, len(self)):
            found[node] = found[self.parents[node]] * ranks[self.ranks[node]]
        return found


def values(ranks: Sequence[float], nodes: int, depth: int) -> FloatArray:
    """The greatest expected tokens of all trees with at most so many nodes and levels (2402.12374, algorithm 4).

    The paper's T (equation 1, with a depth), over b, and with "at most" for "exactly", so that it rises in both:

        V[m, l] = 1 + C[B, m-1]                                     B = number of ranks
        C[b, r] = max over 0 <= y <= r of C[b-1, r-y] + p[b] V[y, l-1]       r nodes below the b likeliest children

    Args:
        ranks: acceptance by rank, of as many ranks as a node may have children.
        nodes: greatest number, the root counted.
        depth: greatest depth of a node.

    Returns:
        float64 [nodes + 1, depth + 1]; the first row, a tree of nothing, is 0.

    Raises:
        BadParameter: no such shares, or a limit that not even the root satisfies.
    """
    chances, _ = _falling(ranks, nodes, depth, None)
    return _table(chances, nodes, depth)[0]


def best_shape(ranks: Sequence[float], nodes: int, depth: int, width: int | None = None) -> Shape:
    """The tree of greatest value by Sequoia's dynamic programme; of equal ones, one that needs no node in vain.

    It may have fewer nodes than are allowed, where further ones have no chance, or no place.

    Args:
        ranks: acceptance by rank. They need not fall; the likeliest are used.
        nodes: greatest number, the root counted.
        depth: greatest depth of a node.
        width: greatest number of children of a node; as many as there are ranks by default.

    Raises:
        BadParameter: no such shares, or a limit that not even the root satisfies.
    """
    chances, names = _falling(ranks, nodes, depth, width)
    table, children = _table(chances, nodes, depth)
    parents, found, expected = [-1], [0], [1.0]
    budgets = [(nodes, depth)]  # of the subtree below each node, itself counted
    for node, (size, levels) in enumerate(budgets):  # grows while it is walked: level after level
        left, placed = size - 1, []
        for rank in reversed(range(len(chances) if levels else 0)):
            some = children[levels][rank][left::-1] + chances[rank] * table[: left + 1, levels - 1]
            if size := int(some.argmax()):
                placed.append((rank, size))
                left -= size
        for rank, size in reversed(placed):
            parents.append(node)
            found.append(int(names[rank]))
            expected.append(expected[node] * float(chances[rank]))
            budgets.append((size, levels - 1))
    return Shape(np.array(parents), np.array(found), sum(expected))


def greedy_shape(ranks: Sequence[float], nodes: int, depth: int, width: int | None = None) -> Shape:
    """The likeliest nodes, one by one: how the planner grows its trees. Arguments and errors as for `best_shape`.

    O(nodes log nodes) where the dynamic programme takes O(ranks depth nodes^2), and each further node gives the best
    tree of one node more. Its value is that of `best_shape` under any limits, see above; what it lacks is the price of
    a level.
    """
    chances, names = _falling(ranks, nodes, depth, width)
    parents, found, expected, depths = [-1], [0], [1.0], [0]
    order = count()  # of equal chances the older one first
    heap: list[tuple[float, int, int, int]] = []  # (-chance, order, parent, rank), the next child of each node

    def offer(parent: int, rank: int) -> None:
        if rank < len(chances) and chances[rank] > 0 and depths[parent] < depth:
            heappush(heap, (-expected[parent] * float(chances[rank]), next(order), parent, rank))

    offer(0, 0)
    while heap and len(parents) < nodes:
        chance, _, parent, rank = heappop(heap)
        parents.append(parent)
        found.append(int(names[rank]))
        expected.append(-chance)
        depths.append(depths[parent] + 1)
        offer(parent, rank + 1)
        offer(len(parents) - 1, 0)
    return Shape(np.array(parents), np.array(found), sum(expected))


def seconds_per_token(shape: Shape, target_seconds: Seconds, draft_seconds: Seconds) -> float:
    """(forwards of the draft, level after level + T(nodes)) / expected tokens.

    A level's forward has as many rows as nodes that get children at it; 2402.12374, section 4.1, takes all for equal.
    What else a step needs (the draft reading what was committed beyond its own path) is left out, as there.
    """
    return (sum(map(draft_seconds, shape.drafted)) + target_seconds(len(shape))) / shape.expected


def best_for_cost(
    ranks: Sequence[float], target_seconds: Seconds, draft_seconds: Seconds, max_nodes: int, max_depth: int
) -> tuple[Shape, float]:
    """The tree that takes the least time for a token (2402.12374, section 4.1).

    Sought over all (nodes, depth) by (depth * t + T(nodes)) / V[nodes, depth], where t is the time of a forward of the
    draft over one row, and the same for all levels, as in the paper. Plain decoding, one node and no draft, is among
    them; it is taken as well if by the true rows of each level the tree found is slower.

    Args:
        ranks: acceptance by rank, of as many ranks as a node may have children.
        target_seconds: T(n) of the target.
        draft_seconds: the same of the draft.
        max_nodes: the root counted.
        max_depth: of a node.

    Returns:
        The tree, and its seconds per token by the true rows of each level (`seconds_per_token`).

    Raises:
        BadParameter: no such shares, or a limit that not even the root satisfies.
    """
    table = values(ranks, max_nodes, max_depth)
    seconds = np.array([target_seconds(nodes) for nodes in range(1, max_nodes + 1)])[:, None]  # [nodes, 1]
    prices = (seconds + draft_seconds(1) * np.arange(max_depth + 1)) / table[1:]  # [nodes, depth + 1]
    prices[table[1:] <= table[:-1]] = np.inf  # the tree is a smaller one's, whose T counts
    nodes, depth = np.unravel_index(int(prices.argmin()), prices.shape)
    plain, found = best_shape(ranks, 1, 0), best_shape(ranks, int(nodes) + 1, int(depth))
    priced = [(shape, seconds_per_token(shape, target_seconds, draft_seconds)) for shape in (plain, found)]
    return min(priced, key=lambda pair: pair[1])


def _falling(ranks: Sequence[float], nodes: int, depth: int, width: int | None) -> tuple[FloatArray, IntArray]:
    """The shares that are used, from the greatest down, and the rank that each of them is of."""
    shares = np.array(ranks, dtype=np.float64)
    if shares.ndim != 1 or not (shares >= 0).all() or not shares.sum() <= 1 + SLACK:
        raise BadParameter(f"acceptance by rank must be shares that sum up to 1 at most, not {shares.tolist()}")
    if nodes < 1 or depth < 0 or (width is not None and width < 1):
        raise BadParameter(f"a tree of nodes={nodes}, depth={depth}, width={width} is not possible: it has a root")
    names = np.argsort(-shares, kind="stable")[:width]
    return shares[names], names


def _table(chances: FloatArray, nodes: int, depth: int) -> tuple[FloatArray, list[FloatArray]]:
    """V and C of `values`: [nodes + 1, depth + 1], and for each depth [ranks + 1, nodes] (none at 0)."""
    table = np.zeros((nodes + 1, depth + 1))
    table[1:, 0] = 1
    left = np.arange(nodes)[:, None] - np.arange(nodes)  # [r, y]: nodes for the likelier children
    children = [np.zeros((0, 0))]
    for level in range(1, depth + 1):
        best = np.zeros((len(chances) + 1, nodes))
        for rank, chance in enumerate(chances):
            some = best[rank][left] + chance * table[:nodes, level - 1]  # where y > r, an entry that is not meant ...
            best[rank + 1] = np.where(left >= 0, some, 0).max(axis=1)  # ... and not taken
        table[1:, level] = 1 + best[-1]
        children.append(best)
    return table, children
