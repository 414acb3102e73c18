"""Sampling, tested by exact enumeration, as equality under a seed, as a distribution, and against Transformers.

The statistical tests use fixed seeds, so their results do not vary. Their false-alarm rate is that of a *new* choice of
seeds or noise: each requires p > ALARM / 20, and there are fewer than 20, so the probability that any of them fails by
chance is at most ALARM = 1e-4.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from helpers import PROMPT, Oracle, RandomTrees, Scattered, Scripted, full_text, pruned, run, trees
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from leapahead.core.bias import LogitBias
from leapahead.core.errors import BadLogits, BadParameter
from leapahead.core.filters import floors
from leapahead.core.noise import GumbelNoise
from leapahead.core.processors import PrefixFree
from leapahead.core.sampling import LEAST_TEMPERATURE, UNSETTLED, Sampler, SamplingParams, checked
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, IntArray, TokenTree
from leapahead.core.verify import verify
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.drafters.speculative_sampling import SpeculativeSampling
from leapahead.models.base import read_prompt
from leapahead.models.choices import Choices
from leapahead.models.toy import ToySession, ToyTarget
from leapahead.planner.draft import SequenceView

ALARM = 1e-4
THRESHOLD = ALARM / 20

Joint = dict[tuple[tuple[int, ...], int], Fraction]  # (emitted tokens, how many were drafted) -> probability


def root_choice(logits: Any, params: SamplingParams, tokens: Sequence[int] = (0,), prompt_length: int = 1) -> int:
    """What a sampler chooses after `tokens`, of which some were the prompt, the others committed one by one."""
    live = list(tokens[:prompt_length])
    sampler = Sampler(params, live, logits.shape[-1], like(logits))
    for token in tokens[prompt_length:]:
        live.append(token)
        sampler.committed()
    return int(sampler.choose(logits, TokenTree.root(live[-1]), np.array([0]))[0])


def like(array: Any) -> Callable[[np.ndarray], Any]:
    """Moves numpy arrays to the kind of `array`."""
    if isinstance(array, np.ndarray):
        return lambda a: a
    import torch

    return torch.from_numpy


def scores_of(logits: Any, params: SamplingParams, tokens: Sequence[int] = (0,), prompt_length: int = 1) -> Any:
    live = list(tokens[:prompt_length])
    sampler = Sampler(params, live, logits.shape[-1], like(logits))
    live += tokens[prompt_length:]
    sampler.committed()
    nodes = np.zeros(len(logits), dtype=np.int64)
    return sampler.scores(logits, TokenTree.root(live[-1]), nodes)


# ------------------------------------------------------------------------------------------- exact enumeration
#
# The noise of a position is replaced by u, one of `grid` equally likely numbers, and choosing by the inverse of the
# cumulative distribution, whose steps lie on that grid. Everything is then a finite sum of Fractions, and equality
# needs no tolerance.


class GridModel:
    """A distribution for every prefix, made of multiples of 1/grid; some are zero."""

    def __init__(self, vocab: int, grid: int, seed: int) -> None:
        self.vocab, self.grid, self.seed = vocab, grid, seed
        self._weights: dict[tuple[int, ...], list[int]] = {}

    def weights(self, prefix: tuple[int, ...]) -> list[int]:
        """int [vocab] that sums to grid."""
        if prefix not in self._weights:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            cuts = np.sort(rng.integers(0, self.grid + 1, self.vocab - 1))
            self._weights[prefix] = np.diff([0, *cuts, self.grid]).tolist()
        return self._weights[prefix]

    def p(self, prefix: tuple[int, ...]) -> list[Fraction]:
        return [Fraction(w, self.grid) for w in self.weights(prefix)]

    def choose(self, prefix: tuple[int, ...], u: int) -> int:
        """The token whose part of the grid holds u."""
        return next(t for t, edge in enumerate(itertools.accumulate(self.weights(prefix))) if u < edge)

    def text(self, noise: Sequence[int], prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Plain decoding under this noise, one number a position."""
        for u in noise[len(prefix) :]:
            prefix = (*prefix, self.choose(prefix, u))
        return prefix


def every_tree(vocab: int, nodes: int) -> Iterator[TokenTree]:
    """All trees with up to `nodes` drafted nodes: every shape, order of candidates, and duplicate."""
    for n in range(nodes + 1):
        for parents in itertools.product(*(range(node) for node in range(1, n + 1))):
            for tokens in itertools.product(range(vocab), repeat=n):
                yield TokenTree(np.array([0, *tokens]), np.array([-1, *parents]))


def children(tree: TokenTree, node: int) -> list[int]:
    return np.flatnonzero(tree.parents == node).tolist()


def by_rule_1(model: GridModel, tree: TokenTree, node: int = 0, path: tuple[int, ...] = ()) -> Joint:
    """Accept, or zero and renormalise before the next candidate, in the order of the candidates."""
    joint: Joint = Counter()
    r, reach = model.p(path), Fraction(1)
    for child in children(tree, node):
        token = int(tree.tokens[child])
        for (emitted, drafted), p in by_rule_1(model, tree, child, (*path, token)).items() if r[token] else ():
            joint[emitted, drafted] += reach * r[token] * p
        reach *= 1 - r[token]
        if not reach:
            return joint
        r[token] = Fraction(0)
        r = [each / sum(r) for each in r]
    for token, p in enumerate(r):
        joint[(*path, token), len(path)] += reach * p
    return joint


def by_rule_2(model: GridModel, tree: TokenTree, node: int = 0, path: tuple[int, ...] = ()) -> Joint:
    """Sample, then look among the candidates."""
    joint: Joint = Counter()
    for token, p in enumerate(model.p(path)):
        child = next((c for c in children(tree, node) if tree.tokens[c] == token), None)
        if child is None:
            joint[(*path, token), len(path)] += p
        elif p:
            for outcome, q in by_rule_2(model, tree, child, (*path, token)).items():
                joint[outcome] += p * q
    return joint


def ours(model: GridModel, tree: TokenTree, noises: list[tuple[int, ...]]) -> tuple[Joint, Counter[tuple[int, ...]]]:
    """What one step emits over all noises, and the texts when plain decoding goes on after it."""
    joint: Joint = Counter()
    texts: Counter[tuple[int, ...]] = Counter()
    paths = [tuple(tree.path_tokens(node)) for node in range(len(tree))]
    for noise in noises:
        verdict = verify(tree, [model.choose(path, noise[len(path)]) for path in paths])
        joint[verdict.tokens, verdict.accepted] += Fraction(1, len(noises))
        texts[model.text(noise, verdict.tokens)] += 1
    return joint, texts


def nonzero(joint: Joint) -> Joint:
    return {outcome: p for outcome, p in joint.items() if p}


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "grid", "nodes"), [(2, 3, 4), (3, 4, 3), (5, 6, 2)])
def test_every_small_draft_leaves_the_joint_distribution_exactly_alone(vocab: int, grid: int, nodes: int) -> None:
    model = GridModel(vocab, grid, seed=vocab)
    for tree in every_tree(vocab, nodes):
        length = int(tree.depths.max()) + 1
        noises = list(itertools.product(range(grid), repeat=length))
        joint, texts = ours(model, tree, noises)
        assert texts == Counter(model.text(noise) for noise in noises)
        for text, count in texts.items():  # plain decoding's own distribution, by the chain rule
            assert Fraction(count, len(noises)) == math.prod(model.p(text[:i])[t] for i, t in enumerate(text))
        assert nonzero(joint) == nonzero(by_rule_1(model, tree)) == nonzero(by_rule_2(model, tree))


@given(trees(max_nodes=7, vocab=4), st.integers(0, 1000))
def test_larger_drafts_have_the_joint_distribution_of_the_classical_rules(tree: TokenTree, seed: int) -> None:
    tree = pruned(tree, tree.depths <= 3)
    model = GridModel(4, 4, seed)
    joint, _ = ours(model, tree, list(itertools.product(range(4), repeat=int(tree.depths.max()) + 1)))
    assert nonzero(joint) == nonzero(by_rule_1(model, tree)) == nonzero(by_rule_2(model, tree))


def test_a_rule_without_zeroing_is_detected() -> None:
    """The enumeration can fail: without zeroing, the distribution is far off."""
    p = [Fraction(n, 20) for n in (10, 6, 2, 1, 1)]
    wrong, reach = [Fraction(0)] * 5, Fraction(1)
    for token in (0, 1):
        wrong[token] += reach * p[token]
        reach *= 1 - p[token]
    wrong = [w + reach * each for w, each in zip(wrong, p, strict=True)]
    assert sum(abs(w - each) for w, each in zip(wrong, p, strict=True)) / 2 == Fraction(175, 1000)


class GridTarget(ToyTarget):
    """A toy whose sampler chooses by the grid; `noise` is the number of each new position."""

    def __init__(self, model: GridModel) -> None:
        super().__init__(vocab_size=model.vocab, order=3)
        self.model, self.noise = model, ()

    def open(self, *args: Any, **options: Any) -> ToySession:
        session = super().open(*args, **options)
        target, sampler = self, session.sampler

        def choose(logits: Any, tree: TokenTree, nodes: IntArray, *rest: Any) -> IntArray:
            chosen = []
            for node in nodes.tolist():
                prefix = (*sampler.tokens[sampler.prompt_length :], *tree.path_tokens(node))
                chosen.append(target.model.choose(prefix, target.noise[len(prefix)]))
            return np.array(chosen)

        sampler.choose = choose  # type: ignore[method-assign]
        return session


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_joint_distribution_of_three_tokens_through_the_loop(seed: int) -> None:
    """All noises, several steps a text, trees that differ from step to step: decoding and not only verifying."""
    model = GridModel(3, 4, seed)
    target = GridTarget(model)
    texts: Counter[tuple[int, ...]] = Counter()
    for noise in itertools.product(range(4), repeat=3):
        target.noise = noise
        done = run(target, RandomTrees(seed, nodes=5), [0], stop=StopParams(max_new_tokens=3))
        texts[tuple(done.tokens)] += 1
    for text in itertools.product(range(3), repeat=3):
        expected = math.prod(model.p(text[:i])[t] for i, t in enumerate(text))
        assert Fraction(texts[text], 64) == expected


# --------------------------------------------------------------------------------------------- equality by seed


HARD = SamplingParams(
    temperature=1.3,
    top_k=9,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    bad_words=((3,), (1, 2), (4, 5, 6)),
    min_new_tokens=6,
    eos_token_ids=(7,),
)


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{**vars(params), "seed": seed})


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [*(SamplingParams(temperature=t) for t in (0.3, 0.7, 1.0, 1.5)), SamplingParams(temperature=1, top_k=3), HARD],
    ids=["T0.3", "T0.7", "T1", "T1.5", "T1 top-k", "everything"],
)
def test_hundreds_of_seeds_give_plain_decodings_text(params: SamplingParams) -> None:
    target = ToyTarget(vocab_size=10, order=2, sharpness=1.5)
    stop = StopParams(max_new_tokens=10)
    accepted = 0
    for seed in range(50):
        seeded = with_seed(params, seed)
        text = full_text(target, params=seeded, stop=stop)
        done = run(target, Scattered(text, seed), params=seeded, stop=stop)
        assert [*PROMPT, *done.tokens] == text, f"seed {seed}"
        accepted += done.stats.accepted
    assert accepted > 50 * 5  # the trees contained the right path, so equality was tested


def test_different_seeds_give_different_texts() -> None:
    target = ToyTarget(sharpness=0.5)
    texts = {tuple(run(target, params=SamplingParams(temperature=1.0, seed=seed)).tokens) for seed in range(50)}
    assert len(texts) == 50


# ------------------------------------------------------------------------------------------------- distribution


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """The p-value; cells expecting fewer than 5 are pooled."""
    assert set(counts) <= set(expected)
    cells = [(counts[key], e) for key, e in expected.items() if e >= 5]
    pool = [(counts[key], e) for key, e in expected.items() if e < 5]
    if pool:
        observed, rest = sum(c for c, _ in pool), sum(e for _, e in pool)
        if rest >= 5:
            cells.append((observed, rest))
        else:
            cells[0] = (cells[0][0] + observed, cells[0][1] + rest)
    observed, wanted = np.array(cells).T
    return float(scipy_stats.chisquare(observed, wanted).pvalue)


def softmax(logits: np.ndarray) -> np.ndarray:
    mass = np.exp(logits - logits.max())
    return mass / mass.sum()


P = np.array([0.45, 0.25, 0.15, 0.1, 0.04, 0.01])


@pytest.mark.slow
def test_argmax_with_the_noise_has_the_distribution_over_positions() -> None:
    noise, n = GumbelNoise(11, len(P)), 20_000
    counts = Counter(int(np.argmax(np.log(P) + noise.at(position))) for position in range(n))
    assert chi_square(counts, {t: n * p for t, p in enumerate(P)}) > THRESHOLD


@pytest.mark.slow
def test_argmax_with_the_noise_has_the_distribution_over_seeds() -> None:
    n = 20_000
    counts = Counter(int(np.argmax(np.log(P) + GumbelNoise(seed, len(P)).at(7))) for seed in range(n))
    assert chi_square(counts, {t: n * p for t, p in enumerate(P)}) > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (1, -1)])
def test_neighbouring_positions_and_seeds_are_independent(seed_step: int, position_step: int) -> None:
    n, p = 10_000, P[:4] / P[:4].sum()

    def pick(seed: int, position: int) -> int:
        return int(np.argmax(np.log(p) + GumbelNoise(seed, 4).at(position)))

    pairs = Counter(
        (pick(i % 100, 2 + i // 100), pick(i % 100 + seed_step, 2 + i // 100 + position_step)) for i in range(n)
    )
    assert chi_square(pairs, {(a, b): n * p[a] * p[b] for a in range(4) for b in range(4)}) > THRESHOLD


@pytest.mark.parametrize(
    ("drafter", "temperature"),
    [
        pytest.param("plain", 0.7, marks=pytest.mark.slow),
        pytest.param("random", 1.4, marks=pytest.mark.slow),
        pytest.param("scattered", 0.7, marks=pytest.mark.slow),
    ],
)
def test_three_tokens_through_the_loop_have_their_joint_distribution(drafter: str, temperature: float) -> None:
    """Most bugs leave the first token right and bias the second; the oracle aims at one fixed text, so it is wrong."""
    target, n = ToyTarget(vocab_size=4, order=3, sharpness=1.0), 1500
    guess = [*PROMPT, 1, 0, 2]
    stop, counts = StopParams(max_new_tokens=3), Counter[tuple[int, ...]]()
    for seed in range(n):
        made = {"plain": lambda: None, "random": RandomTrees, "scattered": lambda s=seed: Scattered(guess, s, depth=2)}
        params = SamplingParams(temperature=temperature, seed=seed)
        counts[tuple(run(target, made[drafter](), params=params, stop=stop).tokens)] += 1

    def p(text: tuple[int, ...]) -> float:
        rows = (tuple(enumerate((*PROMPT, *text[:i]))) for i in range(3))
        return math.prod(float(softmax(target.row(s) / temperature)[t]) for s, t in zip(rows, text, strict=True))

    expected = {text: n * p(text) for text in itertools.product(range(4), repeat=3)}
    assert math.isclose(sum(expected.values()), n)
    assert chi_square(counts, expected) > THRESHOLD


def test_the_chi_square_detects_a_biased_rule() -> None:
    """The same test with new noise for every candidate, which is biased."""
    n, counts = 1500, Counter[int]()
    for seed in range(n):
        rng = np.random.default_rng(seed)
        first = int(rng.choice(6, p=P))
        counts[first if first == 1 else int(rng.choice(6, p=P))] += 1
    assert chi_square(counts, {t: n * p for t, p in enumerate(P)}) < THRESHOLD


# ---------------------------------------------------------------------------------------------- seed-aware drafts


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7, 20.0])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_drafter_with_the_true_distribution_is_accepted_always(temperature: float, depth: int) -> None:
    target = ToyTarget(vocab_size=12, order=2, sharpness=1.0)

    def draft(sequence: SequenceView, budget: Budget) -> TokenTree:
        tokens = list(sequence.tokens)
        for _ in range(min(depth, budget.depth)):
            logits = target.row(tuple(enumerate(tokens)))
            best_first = np.argsort(-logits, kind="stable")
            order = sequence.rank(len(tokens), best_first, logits[best_first])
            tokens.append(int(best_first[order[0]]))
        return TokenTree.chain(sequence.root, tokens[len(sequence.tokens) :])

    for seed in range(10):
        params = SamplingParams(temperature=temperature, seed=seed)
        done = run(target, Scripted(draft), params=params, stop=StopParams(max_new_tokens=6 * (depth + 1)))
        assert done.tokens == run(target, params=params, stop=StopParams(max_new_tokens=6 * (depth + 1))).tokens
        assert done.stats.acceptance_length == depth + 1
        assert done.stats.acceptance_rate == 1


def test_without_the_noise_the_same_drafter_is_often_wrong() -> None:
    """So the test above does depend on the noise."""
    target = ToyTarget(vocab_size=12, order=2, sharpness=1.0)

    def draft(sequence: SequenceView, budget: Budget) -> TokenTree:
        likeliest = int(np.argmax(target.row(tuple(enumerate(sequence.tokens)))))
        return TokenTree.chain(sequence.root, [likeliest][: budget.depth])

    stats = run(target, Scripted(draft), params=SamplingParams(temperature=1.0)).stats
    assert stats.acceptance_rate < 0.7


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.integers(0, 100), st.integers(0, 50))
def test_rank_is_the_order_of_log_probability_plus_noise(logp: list[float], seed: int, position: int) -> None:
    tokens = np.random.default_rng(seed).permutation(20)[: len(logp)]
    sampler = Sampler(SamplingParams(temperature=0.5, seed=seed), [0], 20)
    key = [p / 0.5 + float(GumbelNoise(seed, 20).at(position)[t]) for p, t in zip(logp, tokens, strict=True)]
    assert sampler.rank(position, tokens, logp).tolist() == sorted(range(len(logp)), key=lambda i: -key[i])
    greedy = Sampler(SamplingParams(), [0], 20)
    assert greedy.rank(position, tokens, logp).tolist() == list(range(len(logp)))


# ------------------------------------------------------------------------------------------------------- filters


def naive_filter(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p and min-p as their definitions say, one token at a time."""
    row = row.astype(np.float64) / params.temperature
    if params.top_k:
        edge = sorted(row, reverse=True)[min(params.top_k, len(row)) - 1]
        row = np.where(row < edge, -np.inf, row)
    if params.top_p < 1:
        p = softmax(row)
        row = np.array([s if sum(q for q in p if q > p[t]) < params.top_p else -np.inf for t, s in enumerate(row)])
    if params.min_p > 0:
        p = softmax(row)
        row = np.where(p < params.min_p * p.max(), -np.inf, row)
    return row


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"min_p": 0.02},
    {"min_p": 0.5},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_filters_are_their_definitions(filters: dict[str, Any], temperature: float, dtype: Any) -> None:
    logits = np.random.default_rng(0).normal(scale=2, size=(25, 40)).astype(dtype)
    params = SamplingParams(temperature=temperature, **filters)
    expected = np.stack([naive_filter(row, params) for row in logits])
    np.testing.assert_allclose(scores_of(logits, params), expected, rtol=1e-5)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_with_ties_are_their_definitions(filters: dict[str, Any]) -> None:
    """Half-precision logits tie often: tokens of one score stay or go together, and all count in the mass."""
    logits = np.random.default_rng(1).integers(-2, 4, size=(40, 24)).astype(np.float64) / 2
    params = SamplingParams(temperature=1.0, **filters)
    expected = np.stack([naive_filter(row, params) for row in logits])
    np.testing.assert_allclose(scores_of(logits, params), expected, rtol=1e-5)


def test_filters_work_beside_banned_tokens() -> None:
    logits = np.random.default_rng(0).normal(size=(10, 12))
    params = SamplingParams(temperature=1.0, top_k=6, top_p=0.8, bad_words=tuple((t,) for t in range(9)))
    scores = scores_of(logits, params)
    assert np.isneginf(scores[:, :9]).all()
    assert np.isfinite(scores).any(axis=1).all()


def test_greedy_skips_temperature_and_filters() -> None:
    logits = np.random.default_rng(0).normal(size=(6, 12))
    np.testing.assert_array_equal(scores_of(logits, SamplingParams(top_k=1, top_p=0.1, min_p=0.9)), logits)


@pytest.mark.parametrize("settle", [False, True])
def test_top_p_of_a_device_depends_on_no_order_of_sums(settle: bool) -> None:
    """A device adds in an order that depends on the number of rows, which drafts change. Here p ends at a token."""
    import torch

    random = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 10_000, generator=random)
    others = scores[:, torch.randperm(scores.shape[1], generator=random)]
    masses = torch.softmax(scores[0].double(), 0).sort(descending=True).values.cumsum(0)
    for p in masses[5:900:30].tolist():
        assert torch.equal(floors(scores, top_p=p, settle=settle)[0], floors(others, top_p=p, settle=settle)[0])


def test_logits_are_not_written_on() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 12))
    copy = logits.copy()
    scores_of(logits, HARD, tokens=[1, 2, 3, 1], prompt_length=2)
    np.testing.assert_array_equal(logits, copy)


# --------------------------------------------------------------------------------------------- Transformers' own


PREFIX, GIVEN = [1, 2, 3, 1, 4, 5, 4, 1], 3  # eight tokens, three of them the prompt


def as_transformers(params: SamplingParams, logits: np.ndarray) -> np.ndarray:
    """The same parameters through Transformers' processors and warpers, in its order."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers")
    chain = hf.LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words:
        chain.append(hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_new_tokens:
        eos = list(params.eos_token_ids)
        chain.append(hf.MinNewTokensLengthLogitsProcessor(GIVEN, params.min_new_tokens, eos))
    if params.temperature > 0:
        if params.temperature != 1:
            chain.append(hf.TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            chain.append(hf.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            chain.append(hf.TopPLogitsWarper(params.top_p))
        if params.min_p:
            chain.append(hf.MinPLogitsWarper(params.min_p))
    ids = torch.tensor([PREFIX] * len(logits))
    return chain(ids, torch.from_numpy(logits.astype(np.float32))).numpy()


BOTH_HAVE = [
    *({"temperature": 0.7, **filters} for filters in FILTERS),
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6},
    {"bad_words": ((3,), (4, 1, 6), (5, 1, 7), (1, 8))},
    {"min_new_tokens": 5, "eos_token_ids": (0, 2)},
    {"min_new_tokens": 6, "eos_token_ids": (0, 2)},
    {
        "repetition_penalty": 1.2,
        "bad_words": ((1, 8), (9,)),
        "min_new_tokens": 9,
        "eos_token_ids": (0,),
        "temperature": 1.3,
        "top_k": 15,
        "top_p": 0.9,
        "min_p": 0.03,
    },
]


@pytest.mark.parametrize("given", BOTH_HAVE, ids=str)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_scores_are_those_of_transformers(given: dict[str, Any], kind: str) -> None:
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(3).normal(scale=2, size=(20, 40)).astype(np.float32)
    params = SamplingParams(**given)
    mine = scores_of(logits if kind == "numpy" else torch.from_numpy(logits), params, PREFIX, GIVEN)
    np.testing.assert_allclose(np.asarray(mine), as_transformers(params, logits), rtol=1e-5)


# ------------------------------------------------------------------------------------ every node, its own prefix


def prefix_hash(prefixes: Any, logits: Any) -> Any:
    """A user's processor that depends on the whole prefix, for numpy and torch alike."""
    rows = [[math.sin(sum((i + 1) * int(t) for i, t in enumerate(row)) * (v + 1)) for v in range(logits.shape[-1])]
            for row in prefixes]  # fmt: skip
    bump = np.array(rows, dtype=np.float32)
    return logits + (bump if isinstance(logits, np.ndarray) else like(logits)(bump))


def ban_one(prefixes: Any, logits: Any) -> Any:
    """A user's processor that writes on what it is given and does not read the prefix."""
    logits[:, 2] = -math.inf
    return logits


ON_NODES = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.7},
    "bad words": {"bad_words": ((1,), (0, 2), (3, 0, 0), (2, 1, 3, 0))},
    "min new tokens": {"min_new_tokens": 4, "eos_token_ids": (0, 3)},
    "processor": {"processors": (prefix_hash,)},
    "prefix-free processor": {"processors": (PrefixFree(ban_one),)},
    "all": {
        "repetition_penalty": 0.8,
        "presence_penalty": -0.3,
        "frequency_penalty": 0.5,
        "bad_words": ((1, 1), (2,)),
        "min_new_tokens": 3,
        "eos_token_ids": (3,),
        "processors": (prefix_hash, PrefixFree(ban_one)),
        "top_k": 4,
        "top_p": 0.9,
    },
}


@pytest.mark.parametrize("kind", ["numpy", "torch", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 1.1])
@pytest.mark.parametrize("given_params", ON_NODES.values(), ids=ON_NODES)
def test_a_node_chooses_as_if_its_prefix_had_been_committed(
    given_params: dict[str, Any], temperature: float, kind: str
) -> None:
    params = SamplingParams(temperature=temperature, seed=5, **given_params)
    rng = np.random.default_rng(0)
    prompt, output = [1, 0, 3], [2, 1]
    for _ in range(6):
        nodes = int(rng.integers(1, 9))
        parents = [-1, *(int(rng.integers(0, n)) for n in range(1, nodes))]
        tree = TokenTree(np.array([output[-1], *rng.integers(0, 6, nodes - 1)]), np.array(parents))
        logits: Any = rng.normal(size=(nodes, 6)).astype(np.float32)
        if kind != "numpy":
            torch = pytest.importorskip("torch")
            logits = torch.from_numpy(logits).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
        live = list(prompt)
        sampler = Sampler(params, live, 6, like(logits))
        live += output
        sampler.committed()
        together = sampler.choose(logits, tree, np.arange(nodes)).tolist()
        for node in range(nodes):
            alone = [*prompt, *output, *tree.path_tokens(node)]
            assert together[node] == root_choice(logits[node : node + 1], params, alone, len(prompt))
        some = rng.permutation(nodes)[: nodes // 2 + 1]  # any rows in any order
        assert sampler.choose(logits[some], tree, some).tolist() == [together[node] for node in some]


def test_a_processor_is_called_once_a_depth_and_a_prefix_free_one_once() -> None:
    tree = TokenTree.from_paths(3, [[0, 1], [1, 1], [2]])
    calls: list[tuple[str, list[list[int]]]] = []

    def spy(name: str) -> Callable[[Any, Any], Any]:
        def processor(prefixes: Any, logits: Any) -> Any:
            calls.append((name, prefixes.tolist()))
            return logits

        return processor

    params = SamplingParams(processors=(spy("reads"), PrefixFree(spy("free"))))
    Sampler(params, [5, 3], 6).choose(np.zeros((6, 6)), tree, np.arange(6))
    reads = sorted(row for name, prefixes in calls if name == "reads" for row in prefixes)
    assert [name for name, _ in calls] == ["reads"] * 3 + ["free"]
    assert reads == sorted([5, 3, *tree.path_tokens(node)] for node in range(6))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["bfloat16", "float64"])
def test_the_type_that_a_processor_returns_counts_with_a_draft_as_without(kind: str, temperature: float) -> None:
    """In float32, 1e6 has steps of 1/16; in bfloat16, 8 has steps of 1/16."""
    import torch

    def processor(prefixes: Any, logits: Any) -> Any:
        assert logits.dtype == torch.float32
        return logits.to(getattr(torch, kind)) + (1e6 if kind == "float64" else 8)

    tree, logits = TokenTree.from_paths(3, [[1, 1], [0]]), torch.rand(4, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=temperature, seed=5, processors=(processor,))
    sampler = Sampler(params, [5, 3], 50, torch.from_numpy, on_device=True)
    together = sampler.choose(logits, tree, np.arange(4)).tolist()
    assert together == [int(sampler.choose(logits[[node]], tree, np.array([node]))) for node in range(4)]
    if not temperature:
        assert together == processor(None, logits).argmax(-1).tolist()


def test_a_processor_may_return_the_same_array_in_every_call() -> None:
    """Of a chain on an accelerator, every node is a call of its own."""
    kept = np.empty((1, 50), dtype=np.float32)

    def processor(prefixes: Any, logits: Any) -> Any:
        return np.add(logits, 1.0, out=kept)

    tree, logits = TokenTree.from_paths(3, [[1, 1, 2]]), np.random.default_rng(0).normal(size=(4, 50))
    sampler = Sampler(SamplingParams(processors=(processor,)), [5, 3], 50, on_device=True)
    assert sampler.choose(logits, tree, np.arange(4)).tolist() == logits.argmax(-1).tolist()


# ------------------------------------------------------------------------------------------- kinds of arrays, ties


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, seed=3), HARD], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_numpy_and_torch_choose_the_same(params: SamplingParams, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tree = TokenTree.from_paths(PREFIX[-1], [[1, 2, 3], [1, 4], [5]])
    logits = torch.from_numpy(np.random.default_rng(0).normal(scale=2, size=(40, len(tree), 30)))
    for each in logits.to(getattr(torch, dtype)):
        as_numpy = each.numpy() if dtype == "float64" else each.float().numpy()
        mine, theirs = (
            Sampler(params, list(PREFIX), 30, like(kind)).choose(kind, tree, np.arange(len(tree))).tolist()
            for kind in (as_numpy, each)
        )
        assert mine == theirs


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 1e4, "huge"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.02}], ids=str)
def test_the_choice_is_that_with_the_noise_of_all_tokens(filters: dict[str, Any], spread: Any, dtype: Any) -> None:
    """The noise is made of few tokens, yet none that could win is left out, whatever rounding does to the sums."""
    rng = np.random.default_rng(0)
    if spread == "huge":  # float32 has steps of 4 here, so that sums are rounded to equal numbers
        logits = (5e7 + rng.integers(-6, 2, size=(60, 2000))).astype(dtype)
    else:
        logits = rng.normal(scale=spread, size=(60, 2000)).astype(dtype)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=8, **filters), [0], 2000)
    tree = TokenTree.chain(0, [1] * 59)
    assert sampler.noise is not None
    noise = np.stack([sampler.noise.at(1 + depth) for depth in range(60)])
    expected = (sampler.scores(logits, tree, np.arange(60)) + noise).argmax(axis=1).tolist()
    assert sampler.choose(logits, tree, np.arange(60)).tolist() == expected


ON_A_DEVICE = {
    "plain": {},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "everything": {k: v for k, v in vars(HARD).items() if k != "temperature"},
}


@pytest.mark.parametrize("given_params", ON_A_DEVICE.values(), ids=ON_A_DEVICE)
@pytest.mark.parametrize("flat", [False, True])
def test_choosing_on_a_device_is_choosing_on_the_host(given_params: dict[str, Any], flat: bool) -> None:
    """Without waiting for the device, a choice is left open where top-p needs more than the likeliest tokens."""
    torch = pytest.importorskip("torch")
    params = SamplingParams(**{"temperature": 0.9, "seed": 4, **given_params})
    tree = TokenTree.from_paths(PREFIX[-1], [[1, 2, 3], [1, 4], [5]])
    logits = torch.from_numpy(np.random.default_rng(0).normal(scale=0.1 if flat else 3, size=(6, 3000)))
    nodes = np.arange(len(tree))
    host = Sampler(params, list(PREFIX), 3000).choose(logits.numpy(), tree, nodes).tolist()
    there = Sampler(params, list(PREFIX), 3000, torch.from_numpy, on_device=True)
    assert there.choose(logits, tree, nodes).tolist() == host
    left_open = there.choose(logits, tree, nodes, settle=False).tolist()
    assert left_open == ([UNSETTLED] * 6 if flat and given_params.get("top_k", 0) == 0 and given_params else host)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("best", [(0, 1), (3, 7), (2, 5, 6), tuple(range(8))])
def test_of_equal_logits_the_lowest_id_is_chosen(best: tuple[int, ...], kind: str) -> None:
    torch = pytest.importorskip("torch")
    logits = np.zeros((3, 8), dtype=np.float32)
    logits[:, best] = 1
    tree = TokenTree.chain(0, [1, 2])
    logits = logits if kind == "numpy" else torch.from_numpy(logits)
    chosen = Sampler(SamplingParams(), [0], 8, like(logits)).choose(logits, tree, np.arange(3))
    assert chosen.tolist() == [best[0]] * 3


# -------------------------------------------------------------------------------------------------------- Choices


def choices_on(tree: TokenTree, params: SamplingParams) -> tuple[ToySession, Choices]:
    target = ToyTarget(vocab_size=6)
    session = target.open(PROMPT, params)
    read_prompt(target, session)
    return session, target.step([session], [tree])[0]


@given(trees(max_nodes=6, vocab=6), st.data())
def test_choices_may_be_read_in_any_order_and_twice(tree: TokenTree, data: st.DataObject) -> None:
    tree = TokenTree(np.array([PROMPT[-1], *tree.tokens[1:]]), tree.parents)
    params = SamplingParams(temperature=1.0, presence_penalty=0.5)
    one_by_one = [choices_on(tree, params)[1][node] for node in range(len(tree))]
    nodes = data.draw(st.lists(st.integers(0, len(tree) - 1), min_size=1, max_size=len(tree)))
    choices = choices_on(tree, params)[1]
    assert choices.of(nodes).tolist() == [one_by_one[node] for node in nodes]
    assert choices.of(range(len(tree))).tolist() == one_by_one


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), HARD], ids=str)
def test_what_a_drafter_reads_after_the_commit_is_what_the_target_would_have_chosen_then(
    params: SamplingParams,
) -> None:
    """`observe` comes after the commit, and window nodes are read only there."""
    target = ToyTarget(vocab_size=10, order=2, sharpness=1.0)
    text = full_text(target, params=params)
    read = []

    class Reading(Scattered):
        def observe(self, sequence: SequenceView, step: Any) -> None:
            committed = sequence.tokens[: step.position + 1]
            for node in range(len(step.tree)):
                prefix = [*committed, *step.tree.path_tokens(node)]
                logits = target.row(tuple(enumerate(prefix)))[None]
                assert step.choices[node] == root_choice(logits, params, prefix, len(PROMPT))
                read.append(node)

    run(target, Reading(text), params=params)
    assert len(read) > 40


# ---------------------------------------------------------------------------------------------------- bad logits


EVERY_WAY = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"bad_words": ((0,),)},
]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("given_params", EVERY_WAY, ids=str)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_logits_without_a_choice_are_reported(bad: float, given_params: dict[str, Any], kind: str) -> None:
    logits: Any = np.full((2, 6), bad if bad == -math.inf else 0.5, dtype=np.float32)
    logits[1, 2] = bad
    logits[0] = 0.5  # the first row is fine
    if kind == "torch":
        logits = pytest.importorskip("torch").from_numpy(logits)
    sampler = Sampler(SamplingParams(**given_params), [2, 3], 6, like(logits))
    chosen = np.asarray(sampler.choose(logits, TokenTree.chain(3, [1]), np.arange(2)))
    assert chosen[0] >= 0
    with pytest.raises(BadLogits, match=r"the step of the test .*NaN, infinite or all banned"):
        checked(chosen, "the step of the test")


def test_banning_every_token_is_reported_by_the_engine() -> None:
    class Broken(ToyTarget):
        def logits(self, *given: Any) -> Any:
            return super().logits(*given) * math.nan

    params = SamplingParams(bad_words=((0,), (1,), (2,), (3,)))
    for target, banned in ((ToyTarget(vocab_size=4), True), (Broken(vocab_size=4), False)):
        with pytest.raises(BadLogits, match="position 5") as caught:
            run(target, params=params)
        assert caught.value.banned is banned


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("raises", [True, False])
def test_what_a_processor_does_after_a_prefix_that_is_not_reached_ends_no_text(
    temperature: float, raises: bool
) -> None:
    """As a trie of allowed texts does, which knows no prefix outside of it, and nothing behind its ends."""
    target, params = ToyTarget(), SamplingParams(temperature=temperature, seed=2)
    text = full_text(target, params=params, stop=StopParams(max_new_tokens=12))
    text.append(end := next(token for token in range(12) if token not in text))
    new = text[len(PROMPT) :]

    def only(prefixes: Any, logits: Any) -> Any:
        allowed = np.full(logits.shape, -math.inf)
        for row, prefix in enumerate(prefixes.tolist()):
            if prefix != text[: len(prefix)] or prefix == text:
                if raises:
                    raise KeyError(tuple(prefix))
            else:
                allowed[row, text[len(prefix)]] = logits[row, text[len(prefix)]]
        return allowed

    options: Any = {"params": replace(params, processors=(only,)), "prediction": [*new, 1]}
    drafters: list[Any] = ["prediction", "lookahead", "jacobi", DraftModelDrafter(ToyTarget(), depth=3)]
    for drafter in (*drafters, SpeculativeSampling(ToyTarget(seed=5), width=2)):
        found = run(target, drafter, stop=StopParams(max_new_tokens=24, stop_token_ids=(end,)), **options)
        assert (found.tokens, found.finish) == (new, ("stop", end))
    with pytest.raises(KeyError if raises else BadLogits, match=f"{end}\\)" if raises else f"position {len(text)}"):
        run(target, "prediction", **options)


# ----------------------------------------------------------------------------------------------------- parameters


NAN = math.nan


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", v) for v in (-0.1, 1e-300, 0.9 * LEAST_TEMPERATURE, NAN, math.inf, "1", None, True)),
        *(("temperature", v) for v in (1e39, 10**400)),
        *(("top_k", v) for v in (-1, 2.5, NAN, "3", None)),
        *(("top_p", v) for v in (0, -0.5, 1.01, NAN, "0.5", None)),
        *(("min_p", v) for v in (-0.1, 1.5, NAN, "0", None)),
        *(("repetition_penalty", v) for v in (0, -1, NAN, math.inf, "1", None)),
        *(("presence_penalty", v) for v in (NAN, math.inf, "1", None)),
        *(("frequency_penalty", v) for v in (NAN, -math.inf, "1", None)),
        *(("min_new_tokens", v) for v in (-1, 1.5, NAN, "1", None)),
        *(("seed", v) for v in (-1, 2**64, 0.5, NAN, "1", None)),
        *(("bad_words", v) for v in (((),), ((1,), ()), 3, "ab", None)),
        *(("bad_words", v) for v in ((3,), ((1, "a"),))),
        *(("eos_token_ids", v) for v in (2, "2", None, ("2",), (1.5,))),
        *(("processors", v) for v in (prefix_hash, None)),
    ],
)
def test_an_impossible_parameter_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(BadParameter) as refusal:
        SamplingParams(**{name: value})
    assert f"{name}={value!r} is not possible: it must be" in str(refusal.value)


def test_numpy_numbers_are_accepted_and_become_pythons() -> None:
    given: dict[str, Any] = {
        "temperature": np.float64(0.5),
        "top_p": np.float32(0.5),
        "min_p": np.int64(0),
        "top_k": np.int64(3),
        "seed": np.uint64(2**64 - 1),
        "min_new_tokens": np.int32(2),
        "eos_token_ids": (np.int64(1),),
        "bad_words": ((np.int64(1), 2), [3]),
    }
    params = SamplingParams(**given)
    assert params == SamplingParams(**{**given, "bad_words": ((1, 2), (3,))})
    assert {type(getattr(params, name)) for name in ("top_k", "seed", "min_p", "min_new_tokens")} == {int}
    assert type(params.top_p) is float
    assert repr(params.eos_token_ids) == "(1,)"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_at_the_least_temperature_sampling_is_greedy_and_overflows_nowhere(kind: str) -> None:
    logits: Any = np.random.default_rng(0).normal(scale=1e4, size=(20, 50)).astype(np.float32)
    likeliest = logits.argmax(axis=1).tolist()
    if kind == "torch":
        logits = pytest.importorskip("torch").from_numpy(logits)
    for filters in ({}, {"top_k": 9, "top_p": 0.9, "min_p": 0.1}):
        params = SamplingParams(temperature=LEAST_TEMPERATURE, seed=1, **filters)
        assert [root_choice(logits[row : row + 1], params) for row in range(20)] == likeliest


@pytest.mark.parametrize(
    "possible",
    [
        {"temperature": 0},
        {"temperature": LEAST_TEMPERATURE},
        {"top_k": 0},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"seed": 2**64 - 1},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2},
        {"presence_penalty": 10**30},
        {"frequency_penalty": 10**30},
        {"min_new_tokens": 0},
    ],
    ids=str,
)
def test_the_extreme_values_that_are_allowed_work(possible: dict[str, Any]) -> None:
    target = ToyTarget(vocab_size=6)
    params = SamplingParams(**{"temperature": 1.0, **possible})
    text = full_text(target, params=params)
    assert run(target, Oracle(text), params=params).stats.acceptance_length > 4


# --------------------------------------------------------------------------------------------------- large sizes


class Watched(list[int]):
    """Tokens of a text, and how many of them were read."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(found, list) else 1
        return found


def test_thousands_of_bad_words_do_not_each_read_the_text() -> None:
    words = tuple((first, (7 * first) % 50, last) for first in range(50) for last in range(50))
    tokens, logits = Watched([3, 5, 4, 28]), np.zeros((4, 50), dtype=np.float32)
    sampler = Sampler(SamplingParams(bad_words=(*words, (0,), (9,))), tokens, 50)
    tree = TokenTree.chain(28, [1, 7, 2])
    scores = sampler.scores(logits, tree, np.arange(4))
    banned = [set(np.flatnonzero(np.isinf(row)).tolist()) for row in scores]
    assert banned == [set(range(50)), {0, 9}, set(range(50)), {0, 9}]  # after 4 28 and after 1 7
    assert tokens.read < 1000


def test_a_long_text_is_not_copied_for_processors() -> None:
    tokens, lengths = Watched([1] * 10_000), list[int]()

    def reading(prefixes: Any, logits: Any) -> Any:
        lengths.append(prefixes.shape[1])
        assert (prefixes == 1).all()
        return logits

    for processor, once, then in ((PrefixFree(LogitBias({3: 1.0})), 0, 0), (reading, 10_000, 1)):
        sampler, tokens.read = Sampler(SamplingParams(processors=(processor,)), tokens, 6), 0
        for read in (once, once + then):
            sampler.choose(np.zeros((1, 6), dtype=np.float32), TokenTree.root(1), np.array([0]))
            assert tokens.read <= read + 10
            tokens.append(1)
            sampler.committed()
    assert lengths == [10_002, 10_003]


def test_penalties_of_a_draft_take_memory_for_its_tokens_not_for_those_of_the_text_too() -> None:
    size, depth = 8000, 40
    sampler = Sampler(SamplingParams(repetition_penalty=1.5), list(range(size - 1)), size)
    logits = np.ones((depth + 1, size), dtype=np.float32)
    tracemalloc.start()
    try:
        scores = sampler.scores(logits, TokenTree.chain(size - 2, [size - 1] * depth), np.arange(depth + 1))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert scores[0].argmax() == size - 1
    assert len(np.unique(scores[1:])) == 1
    assert most < 20 * logits.nbytes  # 1.3 MB
