"""Exact matching against a naive definition: what plain decoding emits while the draft agrees, plus one token."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import trees
from hypothesis import given
from hypothesis import strategies as st

from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict, verify


@st.composite
def trees_and_choices(draw: st.DrawFn) -> tuple[TokenTree, list[int]]:
    tree = draw(trees())
    return tree, draw(st.lists(st.integers(0, 3), min_size=len(tree), max_size=len(tree)))


def naive(tree: TokenTree, chosen: list[int], node: int = 0) -> list[int]:
    """Recursively: the choice after `node`, followed by the result of the first child with that token."""
    for child in range(1, len(tree)):
        if tree.parents[child] == node and tree.tokens[child] == chosen[node]:
            return [chosen[node], *naive(tree, chosen, child)]
    return [chosen[node]]


@given(trees_and_choices())
def test_verify_is_the_naive_walk(case: tuple[TokenTree, list[int]]) -> None:
    tree, chosen = case
    verdict = verify(tree, np.array(chosen))
    assert list(verdict.tokens) == naive(tree, chosen)


@given(trees_and_choices())
def test_a_verdict_is_one_path_and_the_choices_along_it(case: tuple[TokenTree, list[int]]) -> None:
    tree, chosen = case
    verdict = verify(tree, chosen)
    assert list(verdict.path) == tree.path(verdict.path[-1])
    assert verdict.tokens == tuple(chosen[node] for node in verdict.path)
    assert verdict.accepted == len(verdict.tokens) - 1
    assert list(verdict.tokens[: verdict.accepted]) == tree.path_tokens(verdict.path[-1])
    assert 1 <= len(verdict.tokens) <= tree.depths.max() + 1
    assert tree.child(verdict.path[-1], verdict.tokens[-1]) is None  # the bonus was not drafted


@given(trees_and_choices())
def test_only_the_path_is_read(case: tuple[TokenTree, list[int]]) -> None:
    tree, chosen = case
    read: list[int] = []

    class Spy:
        def __getitem__(self, node: int) -> int:
            read.append(node)
            return chosen[node]

    assert list(verify(tree, Spy()).path) == read


@given(trees(), st.lists(st.integers(0, 3), min_size=17, max_size=17))
def test_whatever_is_drafted_the_tokens_are_those_of_plain_decoding(tree: TokenTree, plain: list[int]) -> None:
    """The target chooses by depth alone here, as one text under one seed does: the verdict is a prefix of it."""
    verdict = verify(tree, [plain[depth] for depth in tree.depths])
    assert list(verdict.tokens) == plain[: len(verdict.tokens)]


@given(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 3))
def test_a_correct_chain_is_accepted_with_a_bonus_token(tokens: list[int], bonus: int) -> None:
    verdict = verify(TokenTree.chain(3, tokens), [*tokens, bonus])
    assert verdict == Verdict(tuple(range(len(tokens) + 1)), (*tokens, bonus), len(tokens))


def test_an_empty_draft_gives_the_one_token_of_plain_decoding() -> None:
    assert verify(TokenTree.root(3), [5]) == Verdict((0,), (5,), 0)


def test_of_equal_siblings_the_first_is_followed() -> None:
    tree = TokenTree(np.array([0, 1, 1, 2]), np.array([-1, 0, 0, 2]))  # only the second has children
    assert verify(tree, [1, 2, 2, 3]) == Verdict((0, 1), (1, 2), 1)  # shorter, and still exact


def test_equal_tokens_elsewhere_in_the_tree_do_not_match() -> None:
    tree = TokenTree(np.array([0, 1, 2, 3]), np.array([-1, 0, 1, 0]))
    assert verify(tree, [2, 9, 9, 9]).tokens == (2,)  # 2 is a child of 1, not of the root


@given(trees_and_choices(), st.data())
def test_a_cut_verdict_is_a_prefix(case: tuple[TokenTree, list[int]], data: st.DataObject) -> None:
    verdict = verify(*case)
    length = data.draw(st.integers(1, len(verdict.tokens)))
    cut = verdict.cut(length)
    assert cut.tokens == verdict.tokens[:length]
    assert cut.path == verdict.path[:length]  # as many cache entries as tokens: all but the last token's, and the root
    assert cut.accepted == sum(1 for i in range(length) if i < verdict.accepted)


@pytest.mark.parametrize("length", [0, -1, 4])
def test_a_cut_leaves_at_least_one_token_and_adds_none(length: int) -> None:
    with pytest.raises(ValueError, match="cannot cut 3 tokens"):
        Verdict((0, 1, 2), (5, 6, 7), 2).cut(length)
