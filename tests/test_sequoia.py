"""Sequoia's tree against all trees there are, the planner's way against it, and the measurement on toys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from helpers import PROMPT
from hypothesis import given
from hypothesis import strategies as st

from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models import loading
from leapahead.models.base import CHAIN, PROMPT_ROWS, TREE, read_prompt
from leapahead.models.toy import ToyTarget
from leapahead.planner.latency import LatencyProfile
from research import plots
from research.cli import main as research
from research.curves.sequoia import RANKED, RANKS, measured, require, sequoia
from research.sequoia_tree import Shape, best_for_cost, best_shape, greedy_shape, seconds_per_token, values

PROMPTS = (PROMPT, (4, 5, 6, 4, 5), (7, 1, 7, 2))
VECTORS = (
    (0.6, 0.2, 0.1, 0.05),
    (0.3, 0.3, 0.3),
    (0.9,),
    (0.5, 0.0, 0.1),
    (0.1, 0.5, 0.2),  # they need not fall
    (1.0, 0.0),
    (0.0, 0.0),
    (),
)
FAST, SLOW = LatencyProfile({1: 0.001, 64: 0.0012}), LatencyProfile({1: 0.02, 64: 0.03})


# ------------------------------------------------------------------------------------------------------ the tree


@cache
def every(nodes: int, depth: int, ranks: int) -> list[tuple[tuple[int, ...], ...]]:
    """All trees of exactly so many nodes, as the set of the paths of ranks to them; a node has each rank once."""
    if nodes == 1:
        return [((),)]
    return [((), *below) for below in forests(nodes - 1, depth - 1, ranks, 0)] if depth else []


def forests(nodes: int, depth: int, ranks: int, first: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Of so many nodes, under ranks from `first` on."""
    if not nodes:
        yield ()
    elif first < ranks:
        yield from forests(nodes, depth, ranks, first + 1)
        for size in range(1, nodes + 1):
            for tree in every(size, depth, ranks):
                for rest in forests(nodes - size, depth, ranks, first + 1):
                    yield (*((first, *path) for path in tree), *rest)


def worth(tree: tuple[tuple[int, ...], ...], ranks: tuple[float, ...]) -> float:
    return sum(float(np.prod([ranks[rank] for rank in path])) for path in tree)


def children(tree: tuple[tuple[int, ...], ...]) -> int:
    """The most of any node."""
    counts: dict[tuple[int, ...], int] = {}
    for path in tree[1:]:
        counts[path[:-1]] = counts.get(path[:-1], 0) + 1
    return max(counts.values(), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", VECTORS)
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("width", [None, 1, 2])
def test_no_tree_is_better(ranks: tuple[float, ...], depth: int, width: int | None) -> None:
    best = 0.0
    for nodes in range(1, 8):
        trees = [tree for tree in every(nodes, depth, len(ranks)) if children(tree) <= (width or nodes)]
        best = max([best, *(worth(tree, ranks) for tree in trees)])
        for shape in (best_shape(ranks, nodes, depth, width), greedy_shape(ranks, nodes, depth, width)):
            assert shape.expected == pytest.approx(best, abs=1e-12)
            check(shape, ranks, nodes, depth, width)
        if width is None:
            assert values(ranks, nodes, depth)[nodes, depth] == pytest.approx(best, abs=1e-12)


def check(shape: Shape, ranks: Any, nodes: int, depth: int, width: int | None) -> None:
    """It is a tree within its limits, and worth what it says."""
    tree = TokenTree(shape.ranks, shape.parents)  # parents before children
    assert (shape.parents.dtype, shape.ranks.dtype) == (np.int64, np.int64)
    pairs = list(zip(shape.parents.tolist(), shape.ranks.tolist(), strict=True))
    assert pairs[0] == (-1, 0)
    assert len(set(pairs)) == len(pairs) == len(shape) <= nodes
    assert shape.depth == tree.depths.max() <= depth
    assert np.bincount(shape.parents[1:], minlength=1).max() <= (width or len(ranks))
    assert shape.chances(ranks).sum() == pytest.approx(shape.expected, abs=1e-12)
    assert len(shape.drafted) == shape.depth
    assert sum(shape.drafted) == len(shape) - len(tree.leaves)
    assert shape.depth == 0 or shape.drafted[0] == 1


def shares() -> st.SearchStrategy[list[float]]:
    def scaled(pair: tuple[list[int], float]) -> list[float]:
        parts, whole = pair
        return [whole * part / max(sum(parts), 1) for part in parts]

    return st.tuples(st.lists(st.integers(0, 20), max_size=8), st.floats(0, 1)).map(scaled)


@given(shares(), st.integers(1, 40), st.integers(0, 12), st.none() | st.integers(1, 8))
def test_the_likeliest_nodes_are_the_best_tree(ranks: list[float], nodes: int, depth: int, width: int | None) -> None:
    """What the planner does needs no dynamic programme: the finding of this file."""
    best, grown = best_shape(ranks, nodes, depth, width), greedy_shape(ranks, nodes, depth, width)
    check(best, ranks, nodes, depth, width)
    check(grown, ranks, nodes, depth, width)
    assert grown.expected == pytest.approx(best.expected, abs=1e-9)


@given(shares(), st.integers(1, 40), st.integers(0, 12))
def test_the_table(ranks: list[float], nodes: int, depth: int) -> None:
    """It rises with nodes and depth, by less and less with nodes, and its corner is the tree's value."""
    table = values(ranks, nodes, depth)
    assert table.shape == (nodes + 1, depth + 1)
    assert (table[0] == 0).all()
    assert (table[1] == 1).all()
    assert (np.diff(table, axis=0) >= -1e-12).all()
    assert (np.diff(table[1:], axis=1) >= -1e-12).all()
    assert (np.diff(table[1:], n=2, axis=0) <= 1e-12).all()
    assert table[nodes, depth] == pytest.approx(best_shape(ranks, nodes, depth).expected, abs=1e-9)


def test_by_hand() -> None:
    ranks = (0.5, 0.3)
    shape = best_shape(ranks, 5, 9)
    # 1 + 0.5 + 0.3 + 0.25, and one of the two at 0.15 (the third at 0.125 is left)
    assert shape.expected == pytest.approx(2.2)
    assert shape.chances(ranks).tolist() == pytest.approx([1, 0.5, 0.3, 0.25, 0.15])
    assert shape.drafted in ([1, 1], [1, 2])
    chain = best_shape((0.8,), 4, 9)
    assert (chain.parents.tolist(), chain.drafted) == ([-1, 0, 1, 2], [1, 1, 1])
    star = greedy_shape((0.2, 0.4), 9, 1)
    assert (star.parents.tolist(), star.ranks.tolist(), star.depth) == ([-1, 0, 0], [0, 1, 0], 1)


@pytest.mark.parametrize("ranks", [(0.7, 0.4), (-0.1,), (float("nan"),), ((0.5,),)])
def test_shares_that_cannot_be(ranks: Any) -> None:
    for make in (values, best_shape, greedy_shape):
        with pytest.raises(BadParameter, match="shares that sum up to 1 at most"):
            make(ranks, 4, 4)  # type: ignore[operator]


@pytest.mark.parametrize("limits", [(0, 4, None), (4, -1, None), (4, 4, 0)])
def test_limits_that_cannot_be(limits: tuple[int, int, int | None]) -> None:
    for make in (best_shape, greedy_shape):
        with pytest.raises(BadParameter, match="is not possible: it has a root"):
            make((0.5,), *limits)


# ---------------------------------------------------------------------------------------------------------- cost

ACCEPTED = (0.6, 0.15, 0.08, 0.04, 0.02)


def test_a_dear_draft_is_left() -> None:
    shape, seconds = best_for_cost(ACCEPTED, lambda n: 0.02 + 0.001 * n, lambda n: 0.02, 64, 10)
    assert (len(shape), shape.depth, seconds) == (1, 0, pytest.approx(0.021))


def test_a_free_draft_goes_deep() -> None:
    flat = best_for_cost(ACCEPTED, lambda n: 0.02, lambda n: 0.0, 64, 10)
    assert (len(flat[0]), flat[1]) == (64, pytest.approx(0.02 / values(ACCEPTED, 64, 10)[64, 10]))
    chain = best_for_cost((0.9,), lambda n: 0.02, lambda n: 0.0, 64, 10)
    assert (len(chain[0]), chain[0].depth) == (11, 10)


def test_each_level_has_its_price() -> None:
    """The best of all (nodes, depth) where a level costs the same for all rows; rows count in what is told."""

    def target(n: int) -> float:
        return 0.02 + 0.0005 * n

    for price in (0.0005, 0.002, 0.006, 0.02):
        shape, seconds = best_for_cost(ACCEPTED, target, lambda n, price=price: price, 20, 6)
        sizes = [(n, d) for n in range(1, 21) for d in range(7)]
        others = [best_shape(ACCEPTED, n, d) for n, d in sizes]
        least = min((s.depth * price + target(len(s))) / s.expected for s in others)
        assert seconds == pytest.approx(least)
        assert seconds_per_token(shape, target, lambda n, price=price: price) == seconds
    shape, seconds = best_for_cost(ACCEPTED, target, lambda n: 0.001 * n, 20, 6)
    rows = sum(shape.drafted)
    assert rows > shape.depth
    assert seconds == pytest.approx((0.001 * rows + target(len(shape))) / shape.expected)
    # Where rows cost so much that the tree does not pay after all, it is not drafted.
    shape, seconds = best_for_cost((0.3, 0.3, 0.3), lambda n: 0.02, lambda n: 0.001 if n == 1 else 1.0, 20, 6)
    assert (len(shape), seconds) == (1, 0.02)


def test_without_a_limit_of_depth_the_likeliest_nodes_cost_more() -> None:
    """Equal in tokens, not in time: the last node of a grown tree may cost a forward of the draft."""

    def target(n: int) -> float:
        return 0.02

    def draft(n: int) -> float:
        return 0.01

    grown = [greedy_shape(ACCEPTED, n, n) for n in range(1, 65)]
    least = min(seconds_per_token(shape, target, draft) for shape in grown)
    shape, seconds = best_for_cost(ACCEPTED, target, draft, 64, 10)
    assert seconds < 0.95 * least
    assert shape.depth < greedy_shape(ACCEPTED, len(shape), 64).depth


# ------------------------------------------------------------------------------------------------- the measurement


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_knows_is_right_at_once(temperature: float) -> None:
    found = sequoia(
        ToyTarget(), ToyTarget(), PROMPTS, max_new_tokens=40, temperature=temperature, seed=3, seconds=(SLOW, FAST)
    )
    assert (found["tokens"], found["ranks"]) == (120, [1.0] + [0.0] * (RANKS - 1))
    assert found["tree"]["parents"] == list(range(-1, 10))
    assert found["tree"]["expected"] == 11
    assert found["tree"]["speedup"] > 5
    assert found["plain"] == pytest.approx(0.02)
    assert found["greatest_difference"] < 1e-9
    assert [row["nodes"] for row in found["rows"]] == list(range(1, 65))
    assert found["rows"][-1]["best"]["10"] == 11
    assert found["rows"][-1]["greedy"] == 64
    json.dumps(found, allow_nan=False)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_knows_nothing_is_right_by_chance(temperature: float) -> None:
    target, draft = ToyTarget(vocab_size=16, order=4), ToyTarget(vocab_size=16, order=4, seed=1)
    params = SamplingParams(temperature=temperature)
    counted = measured(target, draft, PROMPTS, 400, (), params)
    by_rank = np.array(counted.by_rank) / counted.tokens
    assert counted.tokens == 1200
    if temperature == 0:
        assert by_rank == pytest.approx([1 / 16] * RANKS, abs=0.04)
    else:  # the noise is common to both, and decides more often than the table
        assert by_rank[0] > 0.15
    found = sequoia(target, draft, PROMPTS, max_new_tokens=50, temperature=temperature, seconds=(SLOW, SLOW))
    assert found["tree"]["nodes"] == 1
    assert found["tree"]["drafted"] == []


class Mixed(ToyTarget):
    """The table of `ToyTarget` with noise on it."""

    def _compute_row(self, key: tuple[int, ...]) -> npt.NDArray[np.float64]:
        noise = np.random.default_rng([7, *(n + 1 for n in key)]).normal(scale=1.5, size=self.info.vocab_size)
        return super()._compute_row(key) + noise


def test_ranks_are_counted_as_a_drafter_would_try_them() -> None:
    """Token by token, from the draft's rows: by logits when greedy, with the noise added when sampling."""
    target, draft = ToyTarget(), Mixed()
    for params in (SamplingParams(), SamplingParams(temperature=0.8, seed=5)):
        by_rank, tokens = [0] * RANKS, 0
        for prompt in PROMPTS:
            session = target.open(prompt, params)
            read_prompt(target, session)
            for _ in range(30):
                chosen = target.step([session], [TokenTree.root(session.tokens[-1])])[0][0]
                row = draft.row(tuple(enumerate(session.tokens)))
                if session.sampler.noise is not None:
                    row = row / 0.8 + session.sampler.noise.at(len(session.tokens))
                rank = np.argsort(-row).tolist().index(chosen)
                by_rank[rank] += 1 if rank < RANKS else 0
                tokens += 1
                commit(session, chosen)
        assert measured(target, draft, PROMPTS, 30, (), params) == (by_rank, tokens)


def commit(session: Any, token: int) -> None:
    session.commit(Verdict((0,), (token,), 0))


def test_long_texts_are_read_in_parts() -> None:
    length = 2 * PROMPT_ROWS + 9
    assert measured(ToyTarget(), ToyTarget(), [PROMPT], length, (), SamplingParams()) == (
        [length] + [0] * (RANKS - 1),
        length,
    )


def test_texts_end_where_they_end() -> None:
    target = ToyTarget()
    plain = measured(target, target, [PROMPT], 30, (), SamplingParams())
    assert plain.tokens == 30
    end = int(target.row(tuple(enumerate(PROMPT))).argmax())
    assert measured(target, target, [PROMPT], 30, (end,), SamplingParams()).tokens == 1
    short = ToyTarget(context_length=12)  # of the draft: it must read all but has no room to go on
    assert measured(target, short, [PROMPT], 30, (), SamplingParams()).tokens == 12 - 1 - len(PROMPT)
    with pytest.raises(ContextOverflow, match="the context of the draft 5"):
        measured(target, ToyTarget(context_length=5), [PROMPT], 30, (), SamplingParams())


class Letters:
    """A tokenizer of so many letters; `shift` makes it another one."""

    eos_token_id = None

    def __init__(self, size: int, shift: int = 0) -> None:
        self.size, self.shift = size, shift

    def __len__(self) -> int:
        return self.size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % 7 for letter in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token + self.shift) for token in token_ids)

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **_: Any) -> str:
        raise NotImplementedError


def test_another_vocabulary_is_refused() -> None:
    target, other = ToyTarget(), ToyTarget(vocab_size=16)
    for tokenizers in ((None, None), (Letters(12), None)):
        with pytest.raises(Refused, match=r"a vocabulary of 16 tokens and .* one of 12, and without both tokenizers"):
            sequoia(target, other, PROMPTS, tokenizers=tokenizers)
    for one, another in ((target, other), (target, target)):
        with pytest.raises(Refused, match="neither is the beginning of the other"):
            require(one, another, (Letters(12), Letters(16, shift=1)))
    require(target, other, (Letters(12), Letters(16)))
    require(target, target, (None, Letters(16)))
    with pytest.raises(Refused, match="does not give its top-k tokens"):
        sequoia(target, ToyTarget(capabilities=frozenset({CHAIN, TREE})), PROMPTS)


def test_a_larger_vocabulary_guesses_what_the_target_has() -> None:
    class Wider(ToyTarget):
        """The rows of a toy of 12 tokens, and four more that are likelier."""

        def _compute_row(self, key: tuple[int, ...]) -> npt.NDArray[np.float64]:
            return np.concatenate((ToyTarget()._compute_row(key), np.full(4, 50.0)))

    target, draft = ToyTarget(), Wider(vocab_size=16)
    assert measured(target, draft, PROMPTS, 20, (), SamplingParams()).by_rank[0] == 60


def test_what_cannot_be_measured() -> None:
    with pytest.raises(BadParameter, match="no prompts"):
        sequoia(ToyTarget(), ToyTarget(), [])
    for wrong in ({"nodes": 0}, {"depth": -1}, {"ranked": RANKS - 1}):
        with pytest.raises(BadParameter, match="are not possible: nodes must be"):
            sequoia(ToyTarget(), ToyTarget(), PROMPTS, **wrong)  # type: ignore[arg-type]


def test_only_ranked_tokens_can_be_drafted() -> None:
    target = ToyTarget(vocab_size=400, sharpness=0.1)
    params = SamplingParams(temperature=1.0)
    few = measured(target, target, PROMPTS, 60, (), params)
    every_token = measured(target, target, PROMPTS, 60, (), params, ranked=400)
    assert few.by_rank[0] < 0.6 * every_token.tokens  # a flat table: most of it lies below the first 128
    assert RANKED < 400
    assert every_token.by_rank[0] == every_token.tokens == 180


# ------------------------------------------------------------------------------------------------------- the command


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [(SLOW, FAST), (SLOW, SLOW), (LatencyProfile({1: 0.02, 64: 0.021}), FAST)])
def test_the_figure(tmp_path: Path, seconds: tuple[LatencyProfile, LatencyProfile]) -> None:
    """Of a tree, of none, and of a large one."""
    found = sequoia(ToyTarget(), Mixed(), PROMPTS, nodes=20, max_new_tokens=30, temperature=1, seconds=seconds)
    plots.save(found, tmp_path / "x")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "x.svg").read_text()
    assert ("none, plain decoding" in svg) == (found["tree"]["nodes"] == 1)


@pytest.fixture
def lab(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with the tiny model as the bundled one."""
    monkeypatch.setattr(loading, "bundled", lambda: str(tiny_folder))

    def invoke(*args: str) -> Result:
        result = CliRunner(env={"COLUMNS": "160"}).invoke(research, args)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.mark.slow
def test_the_command(lab: Any, tmp_path: Path) -> None:
    """Model and draft are the bundled one."""
    few = ("--task", "code", "--limit", "1", "--max-new-tokens", "8", "--nodes", "8", "--depth", "3")
    result = lab("sequoia", *few, "--out", str(tmp_path / "s"))
    assert result.exit_code == 0
    assert "the tree that pays: " in result.stdout
    known = json.loads((tmp_path / "s.json").read_text())["tree"]
    assert ("larger limits may give a faster one" in result.stdout) == (known["depth"] == 3 or known["nodes"] == 8)
    found = json.loads((tmp_path / "s.json").read_text())
    assert (found["figure"], found["draft"], found["conditions"]["data"]) == ("sequoia", "bundled", "1 code prompts")
    assert (found["tokens"], found["ranks"][0]) == (8, 1)
    assert list(found["rows"][0]["best"]) == ["1", "2", "3"]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert lab("sequoia", "--draft", "/no/such/folder", *few, "--out", str(tmp_path / "t")).stderr.startswith(
        "error: there is no folder '/no/such/folder'"
    )
    assert not (tmp_path / "t.json").exists()
