"""Divides a token tree over devices, so that the largest part is as small as possible.

    root ─┬─ a ── b ── c        two devices:    root a b c        root d e
          └─ d ─┬─ e                                              root d f g      (d is computed twice)
                └─ f ── g

A part consists of whole root paths: every node has its ancestors in its own part, so no device needs the keys and
values of another one within a step. Leaves are taken in the order of a depth-first walk, and each part gets consecutive
ones, since neighbours in that order share the most ancestors. Of all such divisions one with the smallest greatest part
is found (by bisection of the allowed size, with a greedy filling for each). In lookahead decoding, leaves are the ends
of guessed n-grams and of the window's columns, so that this divides n-grams and columns (2402.02057, section 3.3).

This module knows trees alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from leapahead.core.tree import TokenTree


def split(tree: TokenTree, ahead: Sequence[int]) -> list[list[int]]:
    """The nodes of each part, rising; every part has the root, and every node is in at least one part.

    Args:
        tree: the draft.
        ahead: for each device, how many rows it computes beside its nodes.
    """
    if len(tree) == 1:
        return [[0] for _ in ahead]
    leaves = _leaves(tree)
    low, high = max(ahead) + 1, max(ahead) + len(tree)
    while low < high:
        size = (low + high) // 2
        if _filled(leaves, ahead, size) is None:
            low = size + 1
        else:
            high = size
    counts = _filled(leaves, ahead, low)
    assert counts is not None, "the whole tree fits into one part of its own size"
    parts, first = [], 0
    for count in counts:
        nodes = {0}
        for leaf, _ in leaves[first : first + count]:
            while leaf not in nodes:
                nodes.add(leaf)
                leaf = tree.parent_list[leaf]
        parts.append(sorted(nodes))
        first += count
    return parts


def _leaves(tree: TokenTree) -> list[tuple[int, tuple[int, int]]]:
    """The leaves in the order of a depth-first walk: each with the rows of its path, and how many of them are new.

    New are the nodes that are not on the path of the leaf before it.
    """
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(len(tree) - 1, 0, -1):  # the last child is pushed first
        children[tree.parent_list[node]].append(node)
    found: list[tuple[int, tuple[int, int]]] = []
    stack, new = [0], 0
    while stack:
        node = stack.pop()
        new += 1
        if children[node]:
            stack += children[node]
        else:
            found.append((node, (tree.depth_list[node] + 1, new)))
            new = 0
    return found


def _filled(leaves: Sequence[tuple[int, tuple[int, int]]], ahead: Sequence[int], size: int) -> list[int] | None:
    """How many leaves each part gets if none may have more than `size` rows; None where they do not suffice."""
    counts, at = [], 0
    for before in ahead:
        rows, count = before, 0
        while at < len(leaves):
            path, new = leaves[at][1]
            rows += new if count else path
            if rows > size:
                break
            count, at = count + 1, at + 1
        counts.append(count)
    return counts if at == len(leaves) else None
