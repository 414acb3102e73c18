"""Trees against naive definitions, on random shapes that have equal siblings too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers import paths_of, prefixes, trees
from hypothesis import given
from hypothesis import strategies as st

from leapahead.core.errors import DraftError
from leapahead.core.tree import Budget, TokenTree, TreeBuilder

some_paths = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8)
budgets = st.builds(Budget, nodes=st.integers(0, 12), depth=st.integers(0, 4), leaves=st.integers(1, 5))


def ancestors(tree: TokenTree, node: int) -> list[int]:
    """By following the parents: the root first, the node itself last."""
    parent = int(tree.parents[node])
    return [node] if parent < 0 else [*ancestors(tree, parent), node]


def siblings_differ(tree: TokenTree) -> bool:
    keys = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    return len(set(keys)) == len(keys)


@given(trees())
def test_paths_depths_and_mask_follow_from_the_parents(tree: TokenTree) -> None:
    for node in range(len(tree)):
        expected = ancestors(tree, node)
        assert tree.path(node) == expected
        assert tree.path_tokens(node) == [int(tree.tokens[i]) for i in expected[1:]]
        assert tree.depths[node] == len(expected) - 1
        assert np.flatnonzero(tree.ancestor_mask[node]).tolist() == expected


@pytest.mark.slow
@given(trees())
def test_leaves_are_the_nodes_without_children(tree: TokenTree) -> None:
    assert tree.leaves.tolist() == [node for node in range(len(tree)) if node not in tree.parents.tolist()]
    assert tree.num_leaves == len(tree.leaves)


@given(trees())
def test_lists_and_arrays_are_equal(tree: TokenTree) -> None:
    again = TokenTree.of_lists(tree.token_list, tree.parent_list, tree.depth_list)
    assert again == tree == TokenTree(again.tokens, again.parents)
    assert [array.dtype for array in (again.tokens, again.parents, again.depths, again.leaves)] == [np.int64] * 4
    assert (again.tokens.tolist(), again.parents.tolist()) == (tree.token_list, tree.parent_list)


def test_the_lists_hold_plain_integers() -> None:
    text = np.array([4, 5, 6])
    builder = TreeBuilder(text[0])
    builder.add_path(text)
    for tree in (TokenTree(text, [-1, 0, 1]), TokenTree.chain(text[0], text), TokenTree.root(text[0]), builder.build()):
        assert all(type(each) is int for each in (*tree.token_list, *tree.parent_list, *tree.depth_list))
    assert repr(TokenTree.chain(1, [2])) == "TokenTree([1, 2], [-1, 0])"


@given(trees(), st.integers(0, 4))
def test_child_is_the_first_child_with_the_token(tree: TokenTree, token: int) -> None:
    for node in range(len(tree)):
        found = [i for i in range(1, len(tree)) if tree.parents[i] == node and tree.tokens[i] == token]
        assert tree.child(node, token) == (found[0] if found else None)


@given(trees())
def test_is_chain_means_one_path_in_order(tree: TokenTree) -> None:
    assert tree.is_chain == (tree.path(len(tree) - 1) == list(range(len(tree))))


def test_the_picture_in_the_docstring() -> None:
    tree = TokenTree(np.array([9, 1, 2, 3, 4, 5]), np.array([-1, 0, 0, 1, 2, 2]))
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2]
    assert tree.leaves.tolist() == [3, 4, 5]
    assert tree.path_tokens(5) == [2, 5]


@given(some_paths)
def test_from_paths_is_the_trie(paths: list[list[int]]) -> None:
    tree = TokenTree.from_paths(7, paths)
    assert tree.tokens[0] == 7
    assert paths_of(tree) == prefixes(paths)  # each prefix is one node


@given(st.lists(st.integers(0, 9), max_size=6))
def test_a_chain_is_one_path(tokens: list[int]) -> None:
    chain = TokenTree.chain(5, tokens)
    assert chain.is_chain
    assert chain.path_tokens(len(tokens)) == tokens
    assert chain == TokenTree.from_paths(5, [tokens])


def within(tree: TokenTree, budget: Budget) -> bool:
    return len(tree) - 1 <= budget.nodes and tree.depths.max() <= budget.depth and len(tree.leaves) <= budget.leaves


@given(trees(), budgets)
def test_a_budget_allows_what_is_within_it(tree: TokenTree, budget: Budget) -> None:
    assert budget.allows(tree) == within(tree, budget)


@given(some_paths, budgets)
def test_a_builder_never_exceeds_its_budget(paths: list[list[int]], budget: Budget) -> None:
    tree = TokenTree.from_paths(0, paths, budget)
    assert within(tree, budget)
    assert siblings_differ(tree)
    assert set(paths_of(tree)) <= set(prefixes(paths))


@given(some_paths, some_paths, budgets)
def test_a_builder_that_begins_with_a_tree_keeps_the_budget(
    paths: list[list[int]], more: list[list[int]], budget: Budget
) -> None:
    tree = TokenTree.from_paths(0, paths, budget)
    builder = TreeBuilder.of(tree, budget)
    for path in more:
        builder.add_path(path)
    grown = builder.build()
    assert within(grown, budget)
    assert grown == TokenTree.from_paths(0, [*paths, *more], budget)  # as if built at once


@given(some_paths, budgets)
def test_a_builder_refuses_only_what_the_budget_forbids(paths: list[list[int]], budget: Budget) -> None:
    builder = TreeBuilder(0, budget)
    for path in paths:
        nodes = builder.add_path(path)
        tree = builder.build()
        assert tree.path_tokens(nodes[-1] if nodes else 0) == path[: len(nodes)]
        if len(nodes) < len(path):  # the next node would have broken the budget
            parent = nodes[-1] if nodes else 0
            larger = TokenTree(np.append(tree.tokens, path[len(nodes)]), np.append(tree.parents, parent))
            assert not within(larger, budget)


def test_adding_an_existing_node_is_allowed_beyond_the_budget() -> None:
    builder = TreeBuilder(0, Budget(nodes=2))
    assert builder.add_path([1, 2]) == [1, 2]
    assert builder.add_path([1, 2, 3]) == [1, 2]
    assert builder.add(0, 5) is None
    assert len(builder) == 3


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([], []),
        ([1, 2], [-1]),
        ([1], [0]),
        ([1, 2], [-1, -1]),
        ([1, 2], [-1, 1]),
        ([1, 2, 3], [-1, 2, 0]),
        ([1, 2], [0, -1]),
        ([[1, 2]], [[-1, 0]]),
    ],
)
def test_arrays_that_do_not_describe_a_tree_are_refused(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(DraftError):
        TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenTree([1, 1.7], [-1, 0]),
        lambda: TokenTree([1, 2], [-1, 0.5]),
        lambda: TokenTree([1, None], [-1, 0]),
        lambda: TokenTree([1, 1 << 70], [-1, 0]),
        lambda: TokenTree.chain(1, [2.7]),
        lambda: TokenTree.from_paths(1, [[2.7]]),
    ],
)
def test_what_is_no_whole_number_is_refused(make: Callable[[], TokenTree]) -> None:
    with pytest.raises(DraftError, match="must be whole numbers, got"):
        make()


def test_what_is_no_list_of_tokens_is_refused() -> None:
    with pytest.raises(DraftError, match="must be two lists, got"):
        TokenTree([[1, 2], [3]], [-1, 0])
    assert TokenTree.chain(1, (token for token in (2, 3))) == TokenTree.chain(1, [2, 3])  # type: ignore[arg-type]


def test_equality_is_of_tokens_and_parents() -> None:
    assert TokenTree.chain(1, [2, 3]) == TokenTree.chain(1, [2, 3])
    assert TokenTree.chain(1, [2, 3]) != TokenTree.from_paths(1, [[2], [3]])
    assert TokenTree.chain(1, [2, 3]) != TokenTree.chain(1, [2, 4])
    with pytest.raises(TypeError, match="unhashable"):
        hash(TokenTree.root(1))
