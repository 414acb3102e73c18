"""Exact matching: the draft against the target's choices. Integers only, the same for greedy decoding and sampling.

`chosen[node]` is the target's own next token after `node`. Walking from the root while a child equals the chosen token
commits exactly what plain decoding would commit, whatever was drafted: every token is the target's choice given the
tokens before it. (With sampling the noise of the position is part of the choice, see `core.sampling`.)
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, Protocol

from leapahead.core.tree import TokenTree


class Chosen(Protocol):
    """Gives the target's next token after a node."""

    def __getitem__(self, node: int, /) -> int: ...


class Verdict(NamedTuple):
    """What one step commits.

    Attributes:
        path: the nodes whose cache entries are kept, from the root (always node 0) downwards.
        tokens: the tokens to commit, as many as `path` has nodes: `tokens[i]` is the target's choice after `path[i]`.
            All but the last were drafted; the last, which is not in the cache, is the next root.
        accepted: how many of `tokens` were drafted. One less than their number, unless a stop cut the path.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    accepted: int

    def cut(self, length: int) -> Verdict:
        """The verdict with its first `length` tokens only.

        Raises:
            ValueError: `length` is less than 1 or greater than the number of tokens.
        """
        if not 1 <= length <= len(self.tokens):
            raise ValueError(f"cannot cut {len(self.tokens)} tokens to {length}")
        return Verdict(self.path[:length], self.tokens[:length], min(self.accepted, length))


def is_verdict(found: object, tree: TokenTree, vocab_size: int) -> bool:
    """Whether a drafter's own rule gave what can be committed: a path of the tree, and a token after each node."""
    if not isinstance(found, Verdict) or not 0 < len(found.path) == len(found.tokens) == found.accepted + 1:
        return False
    nodes = range(1, len(tree))
    return (
        found.path[0] == 0
        and all(node in nodes and tree.parent_list[node] == above for above, node in pairwise(found.path))
        and all(tree.token_list[node] == token for node, token in zip(found.path[1:], found.tokens, strict=False))
        and found.tokens[-1] < vocab_size
    )


def verify(tree: TokenTree, chosen: Chosen) -> Verdict:
    """Walks from the root while a child equals the chosen token. The last choice is the bonus token.

    Args:
        tree: the draft.
        chosen: int [nodes] or anything indexed by node; read along the path only.

    Returns:
        A verdict of at least 1 and at most depth + 1 tokens.
    """
    node, token = 0, int(chosen[0])
    path, tokens = [node], [token]
    while (child := tree.child(node, token)) is not None:
        node, token = child, int(chosen[child])
        path.append(node)
        tokens.append(token)
    return Verdict(tuple(path), tuple(tokens), accepted=len(path) - 1)
