"""The rejection rules by exact enumeration: the emitted tokens are distributed as p, and broken rules are detected.

Every claim about a distribution is a finite sum over all possible draws, but those that call `chi_square` or
`scipy_stats`, which sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.stats as scipy_stats
from hypothesis import given, settings
from hypothesis import strategies as st

from leapahead.core.errors import DraftError
from leapahead.core.rejection import (
    RULES,
    Draws,
    FloatArray,
    Rule,
    Selection,
    draw_independent,
    draw_without_replacement,
    independent,
    k_sequential,
    verify_draws,
    without_replacement,
)
from leapahead.core.tree import TokenTree, TreeBuilder
from leapahead.core.verify import Verdict

EXACT = 1e-12
VISIBLE = 1e-3  # a broken rule is off by more than this
FALSE_ALARM = 1e-6  # of each chi-square test, were its seed drawn anew

Drawn = Iterable[tuple[list[int], float]]  # what may be drawn, in order, and how probably
Drawing = Callable[[Sequence[FloatArray]], Drawn]

# -------------------------------------------------------------------------------------------------- enumeration


def replaced(qs: Sequence[FloatArray]) -> Drawn:
    """All draws, the i-th from qs[i] whatever the others are."""
    for tokens in product(range(len(qs[0])), repeat=len(qs)):
        weight = float(np.prod([q[token] for q, token in zip(qs, tokens, strict=True)]))
        if weight > 0:
            yield list(tokens), weight


def distinct(qs: Sequence[FloatArray], drawn: tuple[int, ...] = (), weight: float = 1.0) -> Drawn:
    """All draws, the i-th from qs[i] without those before, renormalised; fewer where nothing is left."""
    left = np.zeros(0) if len(drawn) == len(qs) else np.array(qs[len(drawn)])
    left[[token for token in drawn if len(left)]] = 0
    if not left.sum() > 0:
        yield list(drawn), weight
        return
    for token in np.flatnonzero(left).tolist():
        yield from distinct(qs, (*drawn, token), weight * float(left[token] / left.sum()))


DRAWING: dict[str, Drawing] = {"specinfer": replaced, "sequoia": distinct, "spectr": replaced}


def emitted(p: FloatArray, qs: Sequence[FloatArray], drawn: Drawn, rule: Rule) -> tuple[FloatArray, float]:
    """What the rule emits in all, float64 [vocab], and how probably that is one of the draws."""
    out, accepted = np.zeros(len(p)), 0.0
    for tokens, weight in drawn:
        selection = rule(p, tokens, qs[: len(tokens)])
        assert selection.residual.min() >= 0
        assert selection.residual.sum() == pytest.approx(1, abs=EXACT)
        left = weight
        for token, accept in zip(tokens, selection.accept, strict=True):
            assert 0 <= accept <= 1
            out[token] += left * accept
            accepted += left * accept
            left *= 1 - accept
        out += left * selection.residual
    return out, accepted


def error(p: FloatArray, qs: Sequence[FloatArray], drawn: Drawn, rule: Rule) -> float:
    """The largest deviation from p: the check that every rule passes and every mutation fails."""
    return float(abs(emitted(p, qs, drawn, rule)[0] - p).max())


def distributions(rng: np.random.Generator, count: int, vocab: int, zeros: float = 0.25) -> list[FloatArray]:
    """Random distributions, flat and peaked ones, some tokens at 0."""
    found = []
    for _ in range(count):
        values = rng.dirichlet(np.full(vocab, rng.choice([0.3, 1.0, 3.0])))
        values[(rng.random(vocab) < zeros) & (np.arange(vocab) != values.argmax())] = 0
        found.append(values / values.sum())
    return found


@st.composite
def pairs(draw: st.DrawFn, count: int = 2) -> list[FloatArray]:
    """Distributions over one small vocabulary, with zeros, tiny values, and often equal or disjoint ones."""
    vocab = draw(st.integers(3, 5))
    value = st.sampled_from([0.0, 0.0, 1e-300, 1e-17, 1e-9, 1.0, 1.0]) | st.floats(0, 1, allow_subnormal=True)
    found = []
    for _ in range(count):
        values = np.array(draw(st.lists(value, min_size=vocab, max_size=vocab).filter(lambda v: sum(v) > 1e-3)))
        found.append(values / values.sum())
    if draw(st.integers(0, 4)) == 0:
        found[-1] = found[0].copy()
    return found


SPECIAL = {
    "equal": ([0.5, 0.3, 0.2, 0.0], [0.5, 0.3, 0.2, 0.0]),
    "nearly equal": ([0.5, 0.3, 0.2, 0.0], [0.5 + 1e-16, 0.3 - 1e-16, 0.2, 0.0]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]),
    "both certain, the same": ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
    "both certain, another": ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0]),
    "q certain": ([0.2, 0.3, 0.5], [0.0, 1.0, 0.0]),
    "p certain": ([0.0, 1.0, 0.0], [0.2, 0.3, 0.5]),
    "p beyond q": ([0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]),
    "q beyond p": ([0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
    "tiny": ([1e-300, 1.0, 0.0], [1.0, 1e-300, 5e-324]),
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("name", RULES)
def test_the_emitted_token_is_distributed_as_p_in_special_cases(name: str, case: str) -> None:
    p, q = map(np.array, SPECIAL[case])
    for count in range(4):
        qs = [q] * count
        assert error(p, qs, DRAWING[name](qs) if qs else [([], 1.0)], RULES[name]) < EXACT


@pytest.mark.slow
@settings(max_examples=40)
@given(pairs(), st.integers(1, 3))
def test_the_emitted_token_is_distributed_as_p(case: list[FloatArray], count: int) -> None:
    p, q = case
    for name, rule in RULES.items():
        assert error(p, [q] * count, DRAWING[name]([q] * count), rule) < EXACT, name


@pytest.mark.slow
@settings(max_examples=40)
@given(pairs(count=4))
def test_each_draw_may_come_from_its_own_distribution(case: list[FloatArray]) -> None:
    """SpecInfer's case, several draft models; without replacement it is exact as well."""
    p, *qs = case
    assert error(p, qs, replaced(qs), independent) < EXACT
    assert error(p, qs, distinct(qs), without_replacement) < EXACT


@pytest.mark.slow
@settings(max_examples=40)
@given(pairs())
def test_all_of_the_support_may_be_drafted(case: list[FloatArray]) -> None:
    """The cover property: nothing of p beyond the draft, and a draw is accepted for certain."""
    p, q = case
    for whole in [q, (q + 1e-3) / (q + 1e-3).sum()]:  # a support that may be short of p's, and one that is not
        qs = [whole] * len(p)
        out, accepted = emitted(p, qs, distinct(qs), without_replacement)
        assert abs(out - p).max() < EXACT
        assert accepted == pytest.approx(p[whole > 0].sum(), abs=EXACT)


@settings(max_examples=40)
@given(pairs())
def test_one_draw_is_accepted_as_often_as_the_distributions_overlap(case: list[FloatArray]) -> None:
    """1 - TV(p, q) = sum min(p, q): speculative sampling, whichever the rule."""
    p, q = case
    for name, rule in RULES.items():
        _, accepted = emitted(p, [q], DRAWING[name]([q]), rule)
        assert accepted == pytest.approx(1 - abs(p - q).sum() / 2, abs=EXACT), name


@pytest.mark.slow
@settings(max_examples=40)
@given(pairs(), st.integers(1, 3))
def test_nothing_of_the_residual_lies_on_a_rejected_draw_or_outside_of_p(case: list[FloatArray], count: int) -> None:
    """So the last token never repeats a rejected one, up to the last bits of what cannot happen."""
    p, q = case
    for name, rule in RULES.items():
        for tokens, weight in DRAWING[name]([q] * count):
            selection = rule(p, tokens, [q] * len(tokens))
            assert not selection.residual[p == 0].any()
            assert all(accept == 0 for token, accept in zip(tokens, selection.accept, strict=True) if p[token] == 0)
            rejected = weight * np.prod([1 - accept for accept in selection.accept])
            assert rejected * selection.residual[tokens].max(initial=0) < 1e-15


@pytest.mark.slow
def test_more_is_accepted_without_replacement_and_by_k_sequential() -> None:
    """On average; how often a drafted token is emitted, by rule.

    Measured over 60 such cases (4 tokens, two thirds of the q near p): with two draws specinfer 0.757, spectr 0.771,
    sequoia 0.804; with three 0.836, 0.851, 0.920.
    """
    rng = np.random.default_rng(0)
    for count in (2, 3):
        rates: dict[str, list[float]] = {name: [] for name in RULES}
        for i in range(24):
            p, q = distributions(rng, 2, vocab=4)
            q = q if i % 3 == 0 else (q + 2 * p) / 3
            for name, rule in RULES.items():
                rates[name].append(emitted(p, [q] * count, DRAWING[name]([q] * count), rule)[1])
        means = {name: float(np.mean(rates[name])) for name in RULES}
        assert means["sequoia"] > means["specinfer"]
        assert means["spectr"] > means["specinfer"]


# ---------------------------------------------------------------------------------------------------- mutations


def accepted_or_p(p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray]) -> Selection:
    """Broken: after a rejection p is sampled again, and not the residual."""
    return Selection(independent(p, tokens, qs).accept, p)


def never_renormalised(p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray]) -> Selection:
    """Broken: each draw is tested against p itself."""
    accept = tuple(independent(p, [token], [q]).accept[0] for token, q in zip(tokens, qs, strict=True))
    return Selection(accept, independent(p, tokens, qs).residual)


def by_p(p: FloatArray, qs: Sequence[FloatArray]) -> Drawn:
    """Broken: siblings are tried in the order of the target's opinion."""
    return [(sorted(tokens, key=lambda token: -p[token]), weight) for tokens, weight in replaced(qs)]


def picked(q: FloatArray, count: int) -> Drawn:
    """The likeliest tokens: no draws at all."""
    return [(np.argsort(-q, kind="stable")[: min(count, np.count_nonzero(q))].tolist(), 1.0)]


def filtered(q: FloatArray, keep: int = 2) -> FloatArray:
    """Top-k: what the drafter really drew from."""
    kept = np.where(q >= np.sort(q)[-keep], q, 0)
    return kept / kept.sum()


def if_it_fits(qs: Sequence[FloatArray]) -> Drawn:
    """There is room for one node: later draws stay only where they repeat the first."""
    return [([token for token in tokens if token == tokens[0]], weight) for tokens, weight in replaced(qs)]


MUTATIONS: dict[str, Callable[[FloatArray, FloatArray], float]] = {
    "p sampled again after a rejection": lambda p, q: error(p, [q] * 2, replaced([q] * 2), accepted_or_p),
    "later draws tested against p": lambda p, q: error(p, [q] * 2, replaced([q] * 2), never_renormalised),
    "without replacement, verified as if with": lambda p, q: error(p, [q] * 2, distinct([q] * 2), independent),
    "with replacement, K-SEQ without": lambda p, q: error(p, [q] * 2, distinct([q] * 2), k_sequential),
    "q before the filter": lambda p, q: error(p, [q] * 2, replaced([filtered(q)] * 2), independent),
    "q before the temperature": lambda p, q: error(p, [q], replaced([q**2 / (q**2).sum()]), independent),
    "siblings in the order of p": lambda p, q: error(p, [q] * 2, by_p(p, [q] * 2), independent),
    "top-k taken for draws": lambda p, q: error(p, [q] * 2, picked(q, 2), independent),
    "top-k taken for draws without replacement": lambda p, q: error(p, [q] * 2, picked(q, 2), without_replacement),
    "draws dropped for lack of room": lambda p, q: error(p, [q] * 2, if_it_fits([q] * 2), independent),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_seen(name: str) -> None:
    """The check can fail: in most random cases, by far more than rounding."""
    rng = np.random.default_rng(1)
    errors = [MUTATIONS[name](*distributions(rng, 2, vocab=4, zeros=0.0)) for _ in range(50)]
    assert np.median(errors) > VISIBLE


def overlap(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def one_uniform(p: FloatArray, q: FloatArray) -> FloatArray:
    """What is emitted where the uniform that drew the token, by its place on q's edges, also tests it."""
    out, edges = np.zeros(len(p)), [0.0, *np.cumsum(q)]
    for token in np.flatnonzero(q).tolist():
        selection = independent(p, [token], [q])
        accepted = overlap((edges[token], edges[token + 1]), (0.0, selection.accept[0]))
        out[token] += accepted
        out += (q[token] - accepted) * selection.residual
    return out


def test_one_uniform_for_drawing_and_testing_is_seen() -> None:
    rng = np.random.default_rng(2)
    errors = []
    for _ in range(50):
        p, q = distributions(rng, 2, vocab=4, zeros=0.0)
        errors.append(abs(one_uniform(p, q) - p).max())
    assert np.median(errors) > VISIBLE


def test_one_gumbel_noise_for_drawing_and_residual_is_seen() -> None:
    """Sampled 200,000 times: shared noise is biased; noise of its own for the residual is not."""
    rng = np.random.default_rng(3)
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.6, 0.25, 0.05, 0.1])
    count = 200_000
    with np.errstate(divide="ignore"):
        drawing, other = rng.gumbel(size=(2, count, 4))
        draft = (np.log(q) + drawing).argmax(axis=1)
        accept = np.array([independent(p, [token], [q]).accept[0] for token in range(4)])[draft]
        residual = np.log(independent(p, [0], [q]).residual)
        kept = rng.random(count) < accept
        for noise, biased in [(drawing, True), (other, False)]:
            out = np.where(kept, draft, (residual + noise).argmax(axis=1))
            counts = np.bincount(out, minlength=4)
            assert (scipy_stats.chisquare(counts, p * count).pvalue < FALSE_ALARM) == biased
            if biased:
                assert abs(counts / count - p).max() > 10 * VISIBLE  # ten standard deviations of the count and more


# ------------------------------------------------------------------------------------------------ verification

Model = Callable[[tuple[int, ...]], FloatArray]  # the distribution after some drafted tokens


class Scripted:
    """Replaces the generator: accepts or rejects by a script, so that all outcomes can be enumerated."""

    def __init__(self, accepts: Sequence[bool]) -> None:
        self.accepts, self.used = list(accepts), 0

    def random(self, size: int | None = None) -> Any:
        if size is not None:  # the residual: which token does not matter, its distribution is summed over
            return np.zeros(size)
        self.used += 1
        if self.used > len(self.accepts):
            raise IndexError
        return 0.0 if self.accepts[self.used - 1] else 1 - 1e-16


def probability(script: Sequence[bool], seen: Sequence[Selection]) -> float:
    """Of these answers to the accept tests of the selections along a path."""
    weight, answers = 1.0, iter(script)
    for selection in seen:
        for accept in selection.accept:
            yes = next(answers)
            weight *= accept if yes else 1 - accept
            if weight == 0:  # what is certain went the other way: this script cannot be followed
                return 0.0
            if yes:
                break
    return weight


def outcomes(draws: Draws, p: Callable[[int], FloatArray], rule: Rule) -> Iterator[tuple[Verdict, FloatArray, float]]:
    """All that `verify_draws` can do: its verdict, the distribution of its last token, and the probability."""
    scripts: list[tuple[bool, ...]] = [()]
    while scripts:
        script = scripts.pop()
        seen: list[Selection] = []

        def spied(p: FloatArray, tokens: Sequence[int], qs: Sequence[FloatArray], seen: list[Selection] = seen) -> Any:
            seen.append(rule(p, tokens, qs))
            return seen[-1]

        try:
            verdict = verify_draws(draws, p, Scripted(script), spied)  # type: ignore[arg-type]
        except IndexError:
            scripts += [(*script, True), (*script, False)]
            continue
        weight = probability(script, seen)
        if weight > 0:
            yield verdict, seen[-1].residual, weight


def models(seed: int, vocab: int) -> tuple[Model, Model]:
    """A target and a draft whose distributions depend on the whole prefix."""

    def model(which: int) -> Model:
        return cache(lambda prefix: distributions(np.random.default_rng([seed, which, *prefix]), 1, vocab)[0])

    return model(0), model(1)


def trees_drawn(draft: Model, count: int, drawing: Drawing) -> Iterator[tuple[Draws, float]]:
    """All trees of two levels, `count` draws at the root and one less below every child, with their probability."""
    root_qs = [draft(())] * count
    for tokens, weight in drawing(root_qs):
        alternatives = [list(drawing([draft((token,))] * (count - 1))) for token in dict.fromkeys(tokens)]
        for below in product(*alternatives):
            builder = TreeBuilder(0)
            nodes = [builder.add(0, token) for token in tokens]
            children, qs, total = {0: nodes}, {0: root_qs[: len(nodes)]}, weight
            for node, token, (drawn, share) in zip(dict.fromkeys(nodes), dict.fromkeys(tokens), below, strict=True):
                children[node] = [builder.add(node, t) for t in drawn]
                qs[node] = [draft((token,))] * len(drawn)
                total *= share
            yield Draws(builder.build(), {k: tuple(v) for k, v in children.items()}, qs), total  # type: ignore[misc]


def pairs_error(seed: int, vocab: int, count: int, drawing: Drawing, rule: Rule) -> float:
    """Over every tree that can be drawn and everything that the walk can do with it, summed up."""
    target, draft = models(seed, vocab)
    joint, total = np.zeros((vocab, vocab)), 0.0
    after = np.array([target((token,)) for token in range(vocab)])  # [first, second]
    for draws, weight in trees_drawn(draft, count, drawing):
        tree = draws.tree

        def p(node: int, tree: TokenTree = tree) -> FloatArray:
            return target(tuple(tree.path_tokens(node)))

        for verdict, last, chance in outcomes(draws, p, rule):
            total += weight * chance
            if verdict.accepted == 0:  # the second token comes from the next step
                joint += weight * chance * last[:, None] * after
            elif verdict.accepted == 1:
                joint[verdict.tokens[0]] += weight * chance * last
            else:
                joint[verdict.tokens[:2]] += weight * chance
    assert total == pytest.approx(1, abs=EXACT)
    return float(abs(joint - target(())[:, None] * after).max())


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "count", "seed"), [(3, 3, 0), (4, 2, 1), (5, 2, 2), (3, 2, 3)])
@pytest.mark.parametrize("name", RULES)
def test_pairs_of_tokens_are_distributed_as_the_target_says(name: str, vocab: int, count: int, seed: int) -> None:
    assert pairs_error(seed, vocab, count, DRAWING[name], RULES[name]) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drawing", "rule"),
    [(replaced, accepted_or_p), (replaced, never_renormalised), (distinct, independent), (distinct, k_sequential)],
)
def test_a_broken_rule_is_seen_in_the_pairs(drawing: Drawing, rule: Rule) -> None:
    """In some model: where the residual is one token, say, a broken rule may be right by chance."""
    assert max(pairs_error(seed, 4, 2, drawing, rule) for seed in range(3)) > VISIBLE


def chi_square(counts: Counter[tuple[int, ...]], wanted: FloatArray) -> float:
    """The p-value; cells expecting fewer than 5 are pooled, and what cannot happen must not."""
    total = sum(counts.values())
    observed = np.array([counts[cell] for cell in np.ndindex(wanted.shape)])
    expected = wanted.ravel() * total
    assert not observed[expected == 0].any()
    few = expected < 5
    expected = np.append(expected[~few], expected[few].sum())
    observed = np.append(observed[~few], observed[few].sum())
    possible = expected > 0
    return float(scipy_stats.chisquare(observed[possible], expected[possible] / expected.sum() * total).pvalue)


DRAW = {"specinfer": draw_independent, "sequoia": draw_without_replacement, "spectr": draw_independent}


def drawn_tree(draft: Model, name: str, count: int, rng: np.random.Generator) -> Draws:
    """A tree of two levels by the drawing functions."""
    builder = TreeBuilder(0)
    children: dict[int, tuple[int, ...]] = {}
    qs: dict[int, list[FloatArray]] = {}

    def grow(node: int, prefix: tuple[int, ...]) -> None:
        q = draft(prefix)
        nodes = [builder.add(node, token) for token in DRAW[name](q, count, rng)]
        children[node] = tuple(nodes)  # type: ignore[arg-type]
        qs[node] = [q] * len(nodes)

    grow(0, ())
    for child in dict.fromkeys(children[0]):
        grow(child, (builder.tokens[child],))
    return Draws(builder.build(), children, qs)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_sampled_pairs_are_distributed_as_the_target_says(name: str) -> None:
    """Drawing, verification and residual together, from one generator, as the drafter uses them."""
    target, draft = models(7, 4)
    rng = np.random.default_rng(4)
    counts: Counter[tuple[int, ...]] = Counter()
    duplicates = 0
    for _ in range(2500):
        draws = drawn_tree(draft, name, 3, rng)
        duplicates += len(set(draws.children[0])) < len(draws.children[0])
        tree = draws.tree
        verdict = verify_draws(draws, lambda node, tree=tree: target(tuple(tree.path_tokens(node))), rng, RULES[name])  # type: ignore[misc]
        tokens = verdict.tokens[:2]
        if len(tokens) == 1:
            tokens += tuple(draw_independent(target(tokens), 1, rng))
        counts[tokens] += 1
    assert (duplicates > 600) == (name != "sequoia")
    after = np.array([target((token,)) for token in range(4)])
    assert chi_square(counts, target(())[:, None] * after) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_a_copy_of_the_generator_that_drew_is_seen(copied: bool) -> None:
    """Seeding the drafter and the verifier alike is biased."""
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        draws = Draws(TokenTree.chain(0, draw_independent(q, 1, rng)), {0: (1,)}, {0: [q]})
        verdict = verify_draws(draws, lambda node: p, np.random.default_rng(seed) if copied else rng, independent)
        counts[verdict.tokens[:1]] += 1
    assert (chi_square(counts, p) < FALSE_ALARM) == copied


@given(st.sampled_from(sorted(RULES)), st.integers(0, 2**32), st.integers(1, 4))
def test_a_verdict_is_one_path_and_one_token_more(name: str, seed: int, count: int) -> None:
    target, draft = models(seed, 4)
    draws = drawn_tree(draft, name, count, np.random.default_rng(seed))
    tree, asked = draws.tree, []

    def p(node: int) -> FloatArray:
        asked.append(node)
        return target(tuple(tree.path_tokens(node)))

    verdict = verify_draws(draws, p, np.random.default_rng(seed + 1), RULES[name])
    assert asked == list(verdict.path) == tree.path(verdict.path[-1])
    assert len(verdict.tokens) == len(verdict.path) == verdict.accepted + 1
    assert list(verdict.tokens[:-1]) == tree.path_tokens(verdict.path[-1])
    assert tree.child(verdict.path[-1], verdict.tokens[-1]) is None  # a rejected draw has no residual
    assert target(verdict.tokens[:-1])[verdict.tokens[-1]] > 0
    assert verify_draws(draws, p, np.random.default_rng(seed + 1), RULES[name]) == verdict  # by the seed alone


@pytest.mark.parametrize("name", RULES)
def test_without_draws_p_is_sampled(name: str) -> None:
    draws = Draws(TokenTree.root(0), {}, {})
    p, rng = np.array([0.2, 0.0, 0.8]), np.random.default_rng(5)
    counts = Counter(verify_draws(draws, lambda node: p, rng, RULES[name]).tokens for _ in range(2000))
    assert chi_square(counts, p) > FALSE_ALARM


def test_the_last_token_ends_the_walk_even_if_a_node_carries_it() -> None:
    """Nodes that were not drawn may be in the tree; they are not walked into."""
    tree = TokenTree(np.array([0, 1, 2, 2]), np.array([-1, 0, 0, 2]))
    draws = Draws(tree, {0: (1,)}, {0: [np.array([0.0, 1.0, 0.0])]})
    for rule in RULES.values():
        verdict = verify_draws(draws, lambda node: np.array([0.0, 0.0, 1.0]), np.random.default_rng(6), rule)
        assert verdict == Verdict((0,), (2,), 0)


@pytest.mark.parametrize("name", RULES)
def test_a_perfect_draft_is_accepted_whole(name: str) -> None:
    """p == q: no test fails, so the path goes down to a leaf."""
    draft, _ = models(8, 4)
    rng = np.random.default_rng(7)
    for _ in range(200):
        draws = drawn_tree(draft, name, 2, rng)
        tree = draws.tree
        verdict = verify_draws(draws, lambda node, tree=tree: draft(tuple(tree.path_tokens(node))), rng, RULES[name])  # type: ignore[misc]
        assert verdict.accepted == 2
        assert verdict.path[1] == draws.children[0][0]  # and the first draw is the one


# ------------------------------------------------------------------------------------------------------ drawing


@pytest.mark.parametrize("draw", [draw_independent, draw_without_replacement])
def test_draws_come_in_their_order_with_their_probabilities(draw: Callable[..., list[int]]) -> None:
    """Ordered pairs: the second draw comes from q again, or from q without the first."""
    q, rng = np.array([0.5, 0.0, 0.3, 0.15, 0.05]), np.random.default_rng(8)
    counts = Counter(tuple(draw(q, 2, rng)) for _ in range(8_000))
    wanted = np.zeros((5, 5))
    for tokens, weight in (replaced if draw is draw_independent else distinct)([q, q]):
        wanted[tuple(tokens)] = weight
    assert chi_square(counts, wanted) > FALSE_ALARM  # and nothing of probability 0
    firsts = Counter({(token,): sum(n for pair, n in counts.items() if pair[0] == token) for token in range(5)})
    assert chi_square(firsts, q) > FALSE_ALARM


@pytest.mark.parametrize("draw", [draw_independent, draw_without_replacement])
def test_many_small_probabilities_and_a_narrow_softmax(draw: Callable[..., list[int]]) -> None:
    rng = np.random.default_rng(9)
    q = np.zeros(50_000)
    q[1::2] = rng.random(25_000)
    narrow = (q / q.sum()).astype(np.float32) * np.float32(1.0001)
    tokens = draw(narrow, 1000, rng)
    assert len(tokens) == 1000
    assert all(token % 2 for token in tokens)


@settings(max_examples=40)
@given(pairs(), st.integers(0, 7), st.integers(0, 2**32))
def test_draws_without_replacement_stop_where_the_support_does(case: list[FloatArray], count: int, seed: int) -> None:
    q = case[0]
    tokens = draw_without_replacement(q, count, np.random.default_rng(seed))
    assert len(tokens) == len(set(tokens)) == min(count, np.count_nonzero(q))
    assert all(q[token] > 0 for token in tokens)
    assert tokens == draw_without_replacement(q, count, np.random.default_rng(seed))
    again = draw_independent(q, count, np.random.default_rng(seed))
    assert len(again) == count
    assert all(q[token] > 0 for token in again)


def test_the_ends_of_a_uniform_draw_no_token_of_probability_0() -> None:
    class End:
        def __init__(self, value: float) -> None:
            self.value = value

        def random(self, size: int) -> FloatArray:
            return np.full(size, self.value)

    q = np.array([0.0, 0.3, 0.7, 0.0])
    assert draw_independent(q, 1, End(0.0)) == [1]  # type: ignore[arg-type]
    assert draw_independent(q, 1, End(1 - 2**-53)) == [2]  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- refusals

HALF = np.array([0.5, 0.5, 0.0])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("tokens", "qs", "says"),
    [
        ([0, 1], [HALF], "2 draws with 1 distributions"),
        ([2], [HALF], "token 2 cannot have been drawn"),
        ([3, 0], [HALF, HALF], "not all in a vocabulary of 3"),
        ([-1], [HALF], "not all in a vocabulary of 3"),
        ([0], [HALF[:2]], "shape"),
        ([0], [np.array([2.0, 1.0, -2.0])], "not a distribution"),
        ([0], [np.array([0.5, 0.4, 0.0])], "not a distribution"),
        ([0], [np.array([0.5, np.nan, 0.5])], "not a distribution"),
        ([0], [np.zeros(3)], "not a distribution"),
    ],
)
def test_draws_that_cannot_be_are_refused(rule: Rule, tokens: list[int], qs: list[FloatArray], says: str) -> None:
    with pytest.raises(DraftError, match=says):
        rule(HALF, tokens, qs)


def test_what_only_one_rule_refuses() -> None:
    other = np.array([0.4, 0.6, 0.0])
    with pytest.raises(DraftError, match="from one distribution"):
        k_sequential(HALF, [0, 1], [HALF, other])
    with pytest.raises(DraftError, match="token 0 cannot have been drawn"):
        without_replacement(HALF, [0, 0], [HALF, HALF])
    with pytest.raises(DraftError, match="token 0 cannot have been drawn"):
        without_replacement(HALF, [0, 1, 0], [HALF] * 3)  # nothing is left
    assert independent(HALF, [0, 0], [HALF, other]).accept[0] == 1


def test_p_must_be_a_distribution_too() -> None:
    for rule in RULES.values():
        with pytest.raises(DraftError, match=r"sum 1\.5"):
            rule(HALF * 1.5, [], [])


@pytest.mark.parametrize(
    ("children", "qs", "says"),
    [
        ({0: (1,)}, {}, "node 0 has 1 draws and 0 distributions"),
        ({}, {1: [HALF]}, "node 1 has 0 draws and 1 distributions"),
        ({0: (2,)}, {0: [HALF]}, "not all children"),
        ({0: (7,)}, {0: [HALF]}, "not all children"),
        ({0: (0,)}, {0: [HALF]}, "not all children"),
    ],
)
def test_draws_must_be_children(children: dict[int, tuple[int, ...]], qs: dict[int, Any], says: str) -> None:
    with pytest.raises(DraftError, match=says):
        Draws(TokenTree.chain(0, [1, 2]), children, qs)
