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
from dataclasses import dataclass, field
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
        token_list: the tokens as plain integers. Most trees are small, and numpy takes a microsecond a call.
        parent_list: the parents, likewise.
        depth_list: the depths, likewise.

    Raises:
        DraftError: the arrays do not describe a tree in this order.
    """

    tokens: IntArray
    parents: IntArray
    token_list: list[int] = field(init=False, repr=False)
    parent_list: list[int] = field(init=False, repr=False)
    depth_list: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens, dtype=np.int64)
        parents = np.asarray(self.parents, dtype=np.int64)
        if tokens.ndim != 1 or parents.shape != tokens.shape or not tokens.size:
            raise DraftError(f"a tree needs tokens and parents of one length, got {tokens.shape} and {parents.shape}")
        parent_list = parents.tolist()
        if parent_list[0] != -1:
            raise DraftError(f"parents must be -1 and then indices of earlier nodes, got {parent_list}")
        depth_list = [0] * len(parent_list)
        for node in range(1, len(parent_list)):
            parent = parent_list[node]
            if not 0 <= parent < node:
                raise DraftError(f"parents must be -1 and then indices of earlier nodes, got {parent_list}")
            depth_list[node] = depth_list[parent] + 1
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "token_list", tokens.tolist())
        object.__setattr__(self, "parent_list", parent_list)
        object.__setattr__(self, "depth_list", depth_list)

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
        return len(self.token_list)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenTree)
            and self.token_list == other.token_list
            and self.parent_list == other.parent_list
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    @cached_property
    def depths(self) -> IntArray:
        """int64 [nodes]; 0 for the root."""
        return np.array(self.depth_list, dtype=np.int64)

    @cached_property
    def ancestor_mask(self) -> BoolArray:
        """bool [nodes, nodes]; row i is true at i and its ancestors: the nodes that node i attends to."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parent_list[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` with the token, if there is one; the first of several."""
        for child in range(node + 1, len(self.parent_list)):
            if self.parent_list[child] == node and self.token_list[child] == token:
                return child
        return None

    @cached_property
    def leaves(self) -> IntArray:
        """int64 [leaves]; nodes without children, in order."""
        inner = set(self.parent_list)
        return np.array([node for node in range(len(self)) if node not in inner], dtype=np.int64)

    @property
    def num_leaves(self) -> int:
        """The number of leaves."""
        return len(self) + 1 - len(set(self.parent_list))  # every parent but -1 is an inner node

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = [node]
        while (node := self.parent_list[node]) >= 0:
            path.append(node)
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The drafted tokens from below the root to `node` (empty for the root)."""
        return [self.token_list[i] for i in self.path(node)[1:]]

    @property
    def is_chain(self) -> bool:
        """Whether the tree is one path, its nodes in order."""
        return self.depth_list[-1] == len(self) - 1


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
