"""Exact matching: the draft against the target's choices. Integers only, the same for greedy decoding and sampling.

`chosen[node]` is the target's own next token after `node`. Walking from the root while a child equals the chosen token
commits exactly what plain decoding would commit, whatever was drafted: every token is the target's choice given the
tokens before it. (With sampling the noise of the position is part of the choice, see `core.sampling`.)
"""

from __future__ import annotations

from itertools import pairwise
from operator import index
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


def checked_verdict(found: object, tree: TokenTree, vocab_size: int) -> Verdict | None:
    """What a drafter's own rule gave, as plain integers.

    None where it cannot be committed: where it is no path of the tree with a token after each node. A last token of -1
    says that none could be chosen.
    """
    if not isinstance(found, Verdict):
        return None
    try:
        path, tokens, accepted = tuple(map(index, found.path)), tuple(map(index, found.tokens)), index(found.accepted)
    except TypeError:
        return None
    nodes = range(1, len(tree))
    fits = (
        0 < len(path) == len(tokens) == accepted + 1
        and path[0] == 0
        and all(node in nodes and tree.parent_list[node] == above for above, node in pairwise(path))
        and all(tree.token_list[node] == token for node, token in zip(path[1:], tokens, strict=False))
        and -1 <= tokens[-1] < vocab_size
    )
    return Verdict(path, tokens, accepted) if fits else None


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
