"""The draft of one step: a tree of tokens under the last committed token.

                 0 root = last committed token, at position p
                 ├─ 1 ── 3          a node's position is p + its depth;
                 └─ 2 ┬─ 4          it attends to all committed tokens, its ancestors and itself.
                      └─ 5

Below nodes there may be probes: chains of rows that are computed with the tree and are no part of the draft, so they
are neither verified nor accepted. What they stand for are embeddings that were added to the target.

The picture is `TokenTree(tokens=[r, a, b, c, d, e], parents=[-1, 0, 0, 1, 2, 2])`; everything else is derived from
these two arrays. This module knows neither models nor probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import index
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import DraftError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

UNLIMITED = 1 << 30


class Budget(NamedTuple):
    """How large a draft may be.

    Attributes:
        nodes: greatest number of drafted nodes (the root is not counted).
        depth: greatest depth of a node. The engine sets it to what can still be committed, so that no draft reaches
            beyond the length limit or the context.
        leaves: greatest number of leaves; limited by targets that represent a tree by one sequence id per leaf.
    """

    nodes: int = UNLIMITED
    depth: int = UNLIMITED
    leaves: int = UNLIMITED

    def allows(self, tree: TokenTree) -> bool:
        """Whether a draft is within it."""
        drafted = len(tree) - 1  # at most so deep, and at most so many leaves
        return (
            drafted <= self.nodes
            and (drafted <= self.depth or max(tree.depth_list) <= self.depth)
            and (drafted <= self.leaves or tree.num_leaves <= self.leaves)
        )


class Probes(NamedTuple):
    """A chain of rows below a node that is computed and never accepted.

    Attributes:
        node: below which it hangs; its first row has the position of that node's children.
        tokens: ids of embeddings that were added to the target, one for each row; see `models.embeddings`.
    """

    node: int
    tokens: tuple[int, ...]


class TokenTree:
    """Tokens and parents, parents before children. A tree is never changed.

    Most trees are small and numpy takes about a microsecond a call, so a tree consists of lists, and the arrays are
    made when they are first read.

    Args:
        tokens: int [nodes], token ids; node 0, the root, is the last committed token.
        parents: int [nodes], -1 for the root and the index of an earlier node for all others.

    Attributes:
        token_list: the tokens.
        parent_list: the parents.
        depth_list: the depths; 0 for the root.
        probes: chains of rows below its nodes; usually none. They count neither as nodes nor as leaves.

    Raises:
        DraftError: the arrays are not of whole numbers, or do not describe a tree in this order.
    """

    token_list: list[int]
    parent_list: list[int]
    depth_list: list[int]
    probes: tuple[Probes, ...] = ()

    def __init__(self, tokens: npt.ArrayLike, parents: npt.ArrayLike) -> None:
        try:
            tokens, parents = np.asarray(tokens), np.asarray(parents)
        except ValueError:  # lists of several lengths
            raise DraftError(f"a tree's tokens and parents must be two lists, got {tokens!r} and {parents!r}") from None
        if (tokens.size and tokens.dtype.kind not in "iu") or (parents.size and parents.dtype.kind not in "iu"):
            raise DraftError(f"a tree's tokens and parents must be whole numbers, got {tokens} and {parents}")
        self.tokens = tokens = tokens.astype(np.int64, copy=False)
        self.parents = parents = parents.astype(np.int64, copy=False)
        if tokens.ndim != 1 or parents.shape != tokens.shape or not tokens.size:
            raise DraftError(f"a tree needs tokens and parents of one length, got {tokens.shape} and {parents.shape}")
        self.token_list, self.parent_list, self.depth_list = tokens.tolist(), parents.tolist(), [0]
        if self.parent_list[0] != -1:
            raise DraftError(f"parents must be -1 and then indices of earlier nodes, got {self.parent_list}")
        for node, parent in enumerate(self.parent_list[1:], start=1):
            if not 0 <= parent < node:
                raise DraftError(f"parents must be -1 and then indices of earlier nodes, got {self.parent_list}")
            self.depth_list.append(self.depth_list[parent] + 1)

    @classmethod
    def of_lists(cls, tokens: list[int], parents: list[int], depths: list[int]) -> TokenTree:
        """A tree that is known to be valid, of plain integers. It keeps the lists, and nothing is checked."""
        tree = cls.__new__(cls)
        tree.token_list, tree.parent_list, tree.depth_list = tokens, parents, depths
        return tree

    @classmethod
    def root(cls, token: int) -> TokenTree:
        """The tree of the root alone, which drafts nothing."""
        return cls.of_lists([int(token)], [-1], [0])

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int]) -> TokenTree:
        """A tree of one path."""
        nodes = _whole([root, *tokens])
        return cls.of_lists(nodes, list(range(-1, len(nodes) - 1)), list(range(len(nodes))))

    @classmethod
    def from_paths(cls, root: int, paths: Iterable[Sequence[int]], budget: Budget | None = None) -> TokenTree:
        """The trie of several paths: their common prefixes share nodes."""
        builder = TreeBuilder(root, budget)
        for path in paths:
            builder.add_path(path)
        return builder.build()

    def __len__(self) -> int:
        return len(self.token_list)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenTree)
            and self.token_list == other.token_list
            and self.parent_list == other.parent_list
            and self.probes == other.probes
        )

    __hash__ = None  # type: ignore[assignment]  # lists inside

    def __repr__(self) -> str:
        return f"TokenTree({self.token_list}, {self.parent_list})"

    @cached_property
    def tokens(self) -> IntArray:
        """int64 [nodes]."""
        return np.array(self.token_list, dtype=np.int64)

    @cached_property
    def parents(self) -> IntArray:
        """int64 [nodes]."""
        return np.array(self.parent_list, dtype=np.int64)

    @cached_property
    def depths(self) -> IntArray:
        """int64 [nodes]; 0 for the root."""
        return np.array(self.depth_list, dtype=np.int64)

    @cached_property
    def ancestor_mask(self) -> BoolArray:
        """bool [nodes, nodes]; row i is true at i and its ancestors: the nodes that node i attends to."""
        rows: list[bytearray] = []
        for node, parent in enumerate(self.parent_list):
            row = bytearray(rows[parent]) if node else bytearray(len(self))
            row[node] = True
            rows.append(row)
        return np.frombuffer(bytearray().join(rows), dtype=np.bool_).reshape(len(self), len(self))

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` with the token, if there is one; the first of several."""
        tokens, parents, child = self.token_list, self.parent_list, node
        try:
            while True:  # a list's own search is several times as fast as a loop over its elements
                child = tokens.index(token, child + 1)  # parents stand before their children
                if parents[child] == node:
                    return child
        except ValueError:
            return None

    @cached_property
    def leaves(self) -> IntArray:
        """int64 [leaves]; nodes without children, in order."""
        return np.array(self.leaf_list, dtype=np.int64)

    @property
    def leaf_list(self) -> list[int]:
        """The leaves as a list."""
        inner = set(self.parent_list)
        return [node for node in range(len(self)) if node not in inner]

    @property
    def num_leaves(self) -> int:
        """The number of leaves."""
        return len(self) + 1 - len(set(self.parent_list))  # every parent but -1 is an inner node

    def with_probes(self, probes: Sequence[Probes]) -> TokenTree:
        """The same draft with these probes.

        Raises:
            DraftError: one of them is empty, or hangs below a node that there is not.
        """
        for each in probes:
            if not each.tokens or not 0 <= each.node < len(self):
                raise DraftError(f"probes must be below one of {len(self)} nodes, and at least one of them, not {each}")
        tree = TokenTree.of_lists(self.token_list, self.parent_list, self.depth_list)
        tree.probes = tuple(probes)
        return tree

    @cached_property
    def computed(self) -> TokenTree:
        """What goes through the target: the tree with its probes as nodes behind all others, in their order."""
        if not self.probes:
            return self
        tokens, parents, depths = list(self.token_list), list(self.parent_list), list(self.depth_list)
        for node, ids in self.probes:
            parents += [node, *range(len(tokens), len(tokens) + len(ids) - 1)]
            depths += [depths[node] + 1 + place for place in range(len(ids))]
            tokens += ids
        return TokenTree.of_lists(tokens, parents, depths)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = [node]
        while (node := self.parent_list[node]) >= 0:
            path.append(node)
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The drafted tokens from below the root to `node` (empty for the root)."""
        return [self.token_list[i] for i in self.path(node)[1:]]

    def behind(self, tokens: list[int]) -> TokenTree:
        """The tree under a chain of tokens, the first of which becomes the root."""
        if not (n := len(tokens)):
            return self
        parents = [*range(-1, n - 1), *(parent + n for parent in self.parent_list)]
        depths = [*range(n), *(depth + n for depth in self.depth_list)]
        return TokenTree.of_lists([*tokens, *self.token_list], parents, depths)

    @property
    def is_chain(self) -> bool:
        """Whether the tree is one path, its nodes in order."""
        return self.depth_list[-1] == len(self) - 1


def _whole(tokens: list[int]) -> list[int]:
    """The tokens as plain integers; DraftError where one is no whole number."""
    try:
        return list(map(index, tokens))
    except TypeError:
        raise DraftError(f"a tree's tokens must be whole numbers, got {tokens}") from None


class TreeBuilder:
    """Builds a tree node by node, within a budget. No two siblings have the same token.

    Paths that several sources draft share the nodes of their common prefix, so the target computes each node once.

    Args:
        root: the last committed token.
        budget: unlimited by default.
    """

    def __init__(self, root: int, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self.tokens = [root]
        self.parents = [-1]
        self._depths = [0]
        self._children: dict[tuple[int, int], int] = {}
        self._inner: set[int] = set()

    @classmethod
    def of(cls, tree: TokenTree, budget: Budget | None = None) -> TreeBuilder:
        """A builder that adds to `tree`."""
        builder = cls(tree.token_list[0], budget)
        builder.tokens = list(tree.token_list)
        builder.parents = list(tree.parent_list)
        builder._depths = list(tree.depth_list)
        for node, key in enumerate(zip(builder.parents, builder.tokens, strict=True)):
            builder._children.setdefault(key, node)  # of equal siblings the first is the child
        builder._inner = set(builder.parents[1:])
        return builder

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int | None:
        """Adds a node below `parent`.

        Returns:
            Its index; that of the existing child if one has the token; None if the budget does not allow another node.
        """
        key = (parent, token)
        node = self._children.get(key)
        if node is not None:
            return node
        budget = self.budget
        if len(self.tokens) > budget.nodes or self._depths[parent] >= budget.depth:
            return None
        if parent in self._inner and self.leaves >= budget.leaves:
            return None  # a second child adds a leaf
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._children[key] = node
        self._inner.add(parent)
        return node

    @property
    def leaves(self) -> int:
        """The number of nodes without children."""
        return len(self.tokens) - len(self._inner)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` with the token, if there is one."""
        return self._children.get((node, token))

    def add_path(self, tokens: Iterable[int], parent: int = 0) -> list[int]:
        """Adds a chain below `parent`, as far as the budget allows; returns its nodes."""
        nodes = []
        for token in tokens:
            node = self.add(parent, token)
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def build(self) -> TokenTree:
        """The tree so far."""
        return TokenTree.of_lists(_whole(self.tokens), list(map(int, self.parents)), list(self._depths))
