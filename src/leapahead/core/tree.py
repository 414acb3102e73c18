"""The draft of one step: a tree of tokens under the last committed token.

                 0 root = last committed token, at position p
                 ├─ 1 ── 3          a node's position is p + its depth;
                 └─ 2 ┬─ 4          it attends to all committed tokens, its ancestors and itself.
                      └─ 5

The picture is `TokenTree(tokens=[r, a, b, c, d, e], parents=[-1, 0, 0, 1, 2, 2])`; everything else is derived from
these two arrays. This module knows neither models nor probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import DraftError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Budget:
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


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Tokens and parents, parents before children.

    Attributes:
        tokens: int64 [nodes], token ids; node 0, the root, is the last committed token.
        parents: int64 [nodes], -1 for the root and the index of an earlier node for all others.

    Raises:
        DraftError: the arrays do not describe a tree in this order.
    """

    tokens: IntArray
    parents: IntArray

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens, dtype=np.int64)
        parents = np.asarray(self.parents, dtype=np.int64)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)
        n = len(tokens)
        if tokens.ndim != 1 or parents.shape != tokens.shape or n == 0:
            raise DraftError(f"a tree needs tokens and parents of one length, got {tokens.shape} and {parents.shape}")
        if parents[0] != -1 or (n > 1 and not (parents[1:].min() >= 0 and (parents[1:] < np.arange(1, n)).all())):
            raise DraftError(f"parents must be -1 and then indices of earlier nodes, got {parents.tolist()}")

    @classmethod
    def root(cls, token: int) -> TokenTree:
        """The tree of the root alone, which drafts nothing."""
        return cls(np.array([token]), np.array([-1]))

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int]) -> TokenTree:
        """A tree of one path."""
        return cls(np.array([root, *tokens]), np.arange(-1, len(tokens)))

    @classmethod
    def from_paths(cls, root: int, paths: Iterable[Sequence[int]], budget: Budget | None = None) -> TokenTree:
        """The trie of several paths: their common prefixes share nodes."""
        builder = TreeBuilder(root, budget)
        for path in paths:
            builder.add_path(path)
        return builder.build()

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenTree)
            and np.array_equal(self.tokens, other.tokens)
            and np.array_equal(self.parents, other.parents)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    @cached_property
    def depths(self) -> IntArray:
        """int64 [nodes]; 0 for the root."""
        depths = [0] * len(self)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                depths[node] = depths[parent] + 1
        return np.array(depths, dtype=np.int64)

    @cached_property
    def ancestor_mask(self) -> BoolArray:
        """bool [nodes, nodes]; row i is true at i and its ancestors: the nodes that node i attends to."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True)):
            found.setdefault(key, node)  # of equal siblings the first is the child
        return found

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` with the token, if there is one; the first of several."""
        return self._children.get((node, token))

    @cached_property
    def leaves(self) -> IntArray:
        """int64 [leaves]; nodes without children, in order."""
        inner = np.zeros(len(self), dtype=np.bool_)
        inner[self.parents[1:]] = True
        return np.flatnonzero(~inner)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = [node]
        while (node := int(self.parents[node])) >= 0:
            path.append(node)
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The drafted tokens from below the root to `node` (empty for the root)."""
        return [int(self.tokens[i]) for i in self.path(node)[1:]]

    @property
    def is_chain(self) -> bool:
        """Whether the tree is one path, its nodes in order."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())


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
        builder = cls(int(tree.tokens[0]), budget)
        builder.tokens = tree.tokens.tolist()
        builder.parents = tree.parents.tolist()
        builder._depths = tree.depths.tolist()
        builder._children = dict(tree._children)
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
        if parent in self._inner and len(self.tokens) - len(self._inner) >= budget.leaves:
            return None  # a second child adds a leaf
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._children[key] = node
        self._inner.add(parent)
        return node

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
        return TokenTree(np.array(self.tokens), np.array(self.parents))
