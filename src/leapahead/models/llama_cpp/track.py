"""The cells of one sequence in llama.cpp's KV cache, and the sequence ids that they belong to.

    root 0 ─┬─ 1 ─ 3      leaves 3, 4, 5 get the ids 0, 7, 8; a node belongs to the ids of all leaves below it:
            └─ 2 ─┬─ 4       node 0: {0, 7, 8}    1: {0}    2: {7, 8}    3: {0}    4: {7}    5: {8}
                  └─ 5    A node attends to the cells of its first id at positions up to its own: its ancestors, itself.

For that, every id in use owns the committed cells of the sequence too. An id costs only a bit in each cell, so a commit
moves no keys or values: ids of rejected leaves are removed from the cells behind the last node that they share with the
accepted path, a cell without ids is free, and an accepted leaf's id becomes the main id of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from leapahead.core.tree import TokenTree
from leapahead.models.captured import TopK
from leapahead.models.llama_cpp.context import Context

NewId: TypeAlias = Callable[["Track"], int]  # a sequence id that is not in use, for the track that needs it


class Track:
    """The cells of one sequence.

    Args:
        context: that they are in.
        new_id: gives further sequence ids.
        main: the first one.

    Attributes:
        main: the id that all `length` committed cells belong to.
        length: number of committed cells.
        copies: other ids -> how many of the first committed cells belong to them.
        tree: the last step's tree, until it is committed or discarded.
        leaf_ids: (leaf, id) of that tree.
        prompt: cells that the prompt takes once it is read.
        reserve: cells that are kept free for the sequence, those that it has taken included.
        top_k: captured after the last rows of its prompt.
        parent: the track that the first `shared` cells are counted with, see `cells.Cells`.
        shared: number of those cells.
        owner: see `Target.open`.
    """

    def __init__(self, context: Context, new_id: NewId, main: int) -> None:
        self.context, self._new_id, self.main = context, new_id, main
        self.copies: dict[int, int] = {}
        self.prompt, self.reserve, self.owner = 0, 0, ""
        self._reset()

    def _reset(self) -> None:
        self.length = 0
        self.tree: TokenTree | None = None
        self.leaf_ids: list[tuple[int, int]] = []
        self.top_k: TopK | None = None
        self.parent: Track | None = None
        self.shared = 0

    def empty(self) -> None:
        """Frees all cells; what was shared must have been handed over. The ids stay."""
        self._reset()
        for each in (self.main, *self.copies):
            self.context.remove(each)
        self.copies = dict.fromkeys(self.copies, 0)

    @property
    def cells(self) -> int:
        """Cells that it takes now, with those of a tree that waits for its commit and of a prompt still to be read."""
        return max(self.length + (len(self.tree) if self.tree is not None else 0), self.prompt)

    def keep(self, num_computed: int) -> None:
        """Makes ready for discarding nodes of the next forward, where that needs anything. Called before `place`."""

    def place(self, tree: TokenTree, num_computed: int = 0) -> list[list[int]]:
        """The ids of every node behind the first `num_computed`, those of its first leaf first."""
        if num_computed:
            return self._extend(tree, num_computed)
        self.tree = tree
        if len(tree) == 1:
            self.leaf_ids = [(0, self.main)]
            return [[self.main]]
        leaves = tree.leaf_list
        self.leaf_ids = list(zip(leaves, [self.main, *self._others(len(leaves) - 1)], strict=True))
        return self._ids(tree)

    def _extend(self, tree: TokenTree, num_computed: int) -> list[list[int]]:
        """Places the nodes that a tree has gained.

        A leaf that has children now gives its id to the first leaf below it. Any other new leaf has an id that is made
        to own the cells down to the computed node above it.
        """
        assert self.tree is not None, "nodes that never went through"
        assert num_computed == len(self.tree), "nodes that never went through"
        id_of, parents = dict(self.leaf_ids), tree.parent_list
        owner = {node: each for each, nodes in self._paths() for node in nodes}  # an id that owns each computed node
        placed, begun = list[tuple[int, int]](), list[tuple[int, int]]()  # begun: (leaf, computed node above it)
        for leaf in tree.leaf_list:
            node = leaf
            while node >= num_computed:
                node = parents[node]
            if node in id_of:
                placed.append((leaf, id_of.pop(node)))
            else:
                begun.append((leaf, node))
        used = self._in_use()
        for (leaf, node), each in zip(begun, self._others(len(begun), used), strict=True):
            self.context.copy(owner[node], each, self.length, self.length + tree.depth_list[node] + 1)
            placed.append((leaf, each))
        self.tree, self.leaf_ids = tree, placed
        return self._ids(tree)[num_computed:]

    def _others(self, count: int, used: Collection[int] = ()) -> list[int]:
        """So many ids, beside the main one and those in use, that own all committed cells."""
        while len(self.copies) + 1 < count + max(len(used), 1):
            self.copies[self._new_id(self)] = 0
        others = [other for other in self.copies if other not in used][:count]
        for other in others:
            if self.copies[other] and self.context.windowed and self._lost(other):
                self.context.remove(other)
                self.copies[other] = 0
            if self.copies[other] < self.length:
                self.context.copy(self.main, other, self.copies[other], self.length)
                self.copies[other] = self.length
        return others

    def _in_use(self) -> set[int]:
        """The ids that the last step's tree needs."""
        return {each for _, each in self.leaf_ids}

    def _lost(self, other: int) -> bool:
        """Whether llama.cpp has reused cells, passed by a sliding window, of only one of this id and the main one.

        It refuses a batch with a token that belongs to both then.
        """
        return self.context.first_position(other) != self.context.first_position(self.main)

    def _paths(self) -> list[tuple[int, list[int]]]:
        """Every id of the tree with its nodes, the leaf first."""
        assert self.tree is not None
        parents, found = self.tree.parent_list, []
        for leaf, each in self.leaf_ids:
            nodes = [leaf]
            while (parent := parents[nodes[-1]]) >= 0:
                nodes.append(parent)
            found.append((each, nodes))
        return found

    def _ids(self, tree: TokenTree) -> list[list[int]]:
        """The ids of every node."""
        ids: list[list[int]] = [[] for _ in range(len(tree))]
        for each, nodes in self._paths():
            for node in nodes:
                ids[node].append(each)
        return ids

    def commit(self, path: Sequence[int]) -> None:
        """Keeps the nodes `path` of the last step's tree, and frees the cells of all others."""
        assert self.tree is not None, "commit without a step"
        if len(self.tree) > 1:
            place = {node: index for index, node in enumerate(path)}
            parents, winner = self.tree.parent_list, -1
            for leaf, each in self.leaf_ids:
                node = leaf
                while node not in place:
                    node = parents[node]
                kept = place[node] + 1
                if node != leaf:
                    self.context.remove(each, self.length + kept)
                self.copies[each] = self.length + kept
                if kept == len(path) and winner < 0:
                    winner = each
            self.main = winner
            del self.copies[winner]
        self.length += len(path)
        self.leaf_ids, self.tree = [], None

    def discard_tree(self) -> bool:
        """Frees the cells of a tree that is not committed. False, and nothing is freed, where the model cannot forget.

        An interrupted step or commit may have left cells behind the committed ones under any id: all are cleared.
        """
        done = all([self.context.remove(each, self.length) for each in (self.main, *self.copies)])
        self.copies = {each: min(own, self.length) for each, own in self.copies.items() if each != self.main}
        self.leaf_ids, self.tree = [], None
        return done

    def release_ids(self, keep: int = 0) -> list[int]:
        """Gives ids back that no tree uses now, until `keep` are left beside the main one; returns them."""
        used = self._in_use()
        unused = [other for other in self.copies if other not in used]
        given = unused[: max(len(self.copies) - keep, 0)]
        for other in given:
            self.context.remove(other)
            del self.copies[other]
        return given
