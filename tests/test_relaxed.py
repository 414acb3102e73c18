"""Relaxed acceptance rules: each formula recomputed, exact at its strict limit, called lossy wherever it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import PROMPT, RandomTrees, assert_same_text, trees
from hypothesis import given
from hypothesis import strategies as st

from leapahead import LLM, BadParameter, Engine, Refused, Request, SamplingParams, StopParams, TokenTree
from leapahead.bench.cell import measure_cell
from leapahead.bench.contender import Configuration, Ours, Setting
from leapahead.bench.figures import overall
from leapahead.bench.report import cells
from leapahead.core.relaxed import FloatArray, Relaxed, Rollback, TopBeta, Typical, rule, verify_relaxed
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.drafters.registry import make
from leapahead.models.base import ALL, HIDDEN, LOGITS
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Step

RULES: list[Relaxed] = [Typical(), Typical(0.3, 0.09), TopBeta(), TopBeta(2, 0.7), Rollback(), Rollback(2.2)]
STRICT: list[Relaxed] = [Typical(1.0, 1e9), TopBeta(beta=1), TopBeta(tau=0.0), Rollback(0.0)]
VOCAB = 12
Spoken = Callable[..., Any]


def by_formula(used: Relaxed, p: FloatArray, token: int) -> bool:
    """The papers' tests, on probabilities."""
    if isinstance(used, Typical):
        entropy = -sum(q * np.log(q) for q in p if q > 0)
        return bool(p[token] > min(used.epsilon, used.delta * np.exp(-entropy)))
    if isinstance(used, TopBeta):
        likelier = int((p > p[token]).sum())
        return likelier < used.beta and bool(p[token] > 0) and bool(np.log(p.max() / p[token]) <= used.tau)
    assert isinstance(used, Rollback)
    return bool(p[token] > 0) and bool(-np.log(p[token]) <= used.rollback)


@pytest.mark.parametrize("used", RULES, ids=str)
def test_a_rule_is_its_formula(used: Relaxed) -> None:
    rng, seen = np.random.default_rng(0), set[bool]()
    for sharpness in (0.3, 1.0, 2.0, 4.0) * 25:
        logits = rng.normal(scale=sharpness, size=VOCAB)
        logits[rng.integers(VOCAB)] = -np.inf  # a banned token
        p = np.exp(logits) / np.exp(logits).sum()
        with np.errstate(divide="ignore"):
            found = used.accepts(np.log(p), np.arange(VOCAB))
        expected = [by_formula(used, p, token) for token in range(VOCAB)]
        assert found.tolist() == expected
        assert not found[np.isneginf(logits)].any()
        seen |= set(expected)
    assert seen == {True, False}


@given(trees(vocab=4), st.sampled_from(RULES), st.integers(0, 1000))
def test_the_path_is_the_longest_that_is_accepted_and_of_those_the_likeliest(
    tree: TokenTree, used: Relaxed, seed: int
) -> None:
    """Against the walk over all paths, with duplicate siblings and any shape."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=1.5, size=(len(tree), 4))
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    chosen = rng.integers(4, size=len(tree))

    def accepted(node: int) -> bool:
        parent, token = tree.parent_list[node], tree.token_list[node]
        return node == 0 or (
            accepted(parent) and (token == chosen[parent] or by_formula(used, np.exp(logp[parent]), token))
        )

    def path(node: int) -> list[int]:
        return [*path(tree.parent_list[node]), node] if node else [0]

    found = verify_relaxed(tree, chosen, logp.__getitem__, used)
    reachable = [node for node in range(len(tree)) if accepted(node)]
    longest = max(tree.depth_list[node] for node in reachable)
    likeliest = max(
        sum(logp[tree.parent_list[each], tree.token_list[each]] for each in path(node)[1:])
        for node in reachable
        if tree.depth_list[node] == longest
    )
    assert list(found.path) == path(found.path[-1])
    assert found.accepted == len(found.path) - 1 == longest
    assert sum(logp[node, token] for node, token in zip(found.path, found.tokens[:-1], strict=False)) == pytest.approx(
        likeliest
    )
    assert found.tokens == (*tree.tokens[list(found.path[1:])].tolist(), chosen[found.path[-1]])


# ------------------------------------------------------------------------------------------------------- decoding


def texts(llm: LLM, acceptance: str | Relaxed, **options: Any) -> list[list[int]]:
    prompts = [[*PROMPT, seed % VOCAB] for seed in range(4)]
    found = llm.generate(prompts, max_new_tokens=40, seed=3, acceptance=acceptance, **options)
    assert all(bool(result.lossy) == (acceptance != "exact") for result in found)
    return [result.tokens for result in found]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["auto", "lookahead", "recycling"])
def test_at_its_strict_limit_a_rule_is_exact(drafter: str, temperature: float) -> None:
    """In batches, with trees: the texts are plain decoding's, where the default parameters give others."""
    options: dict[str, Any] = {"nodes": 8} if drafter != "lookahead" else {}
    llm = LLM(ToyTarget(sharpness=0.5), drafter=drafter, drafter_cache=False, **options)
    plain = texts(llm, "exact", drafter="plain", temperature=temperature)
    strict = [used for used in STRICT if temperature == 0 or not isinstance(used, TopBeta)]
    for used in strict:
        assert texts(llm, used, temperature=temperature) == plain
    for name in ("lossy-typical", "lossy-top-beta", "lossy-bild"):
        assert texts(llm, name, temperature=temperature) != plain, name


@pytest.mark.parametrize("used", RULES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_token_is_the_targets_choice_or_passes_the_rule(used: Relaxed, temperature: float) -> None:
    """By the target's logits alone: temperature, top-k, a banned word and the path are part of p."""
    target, relaxed = ToyTarget(sharpness=0.7), 0
    params = SamplingParams(temperature=temperature, seed=5, top_k=6, bad_words=((4,),))
    engine = Engine(target)
    steps: list[Step] = []
    drafter = engine.drafter(make(RandomTrees, nodes=30))
    request = Request(PROMPT, drafter, params, StopParams(max_new_tokens=60), acceptance=used, on_step=steps.append)
    engine.run([engine.submit(request)])
    tokens = list(PROMPT)
    for step in steps:
        for node, token in zip(step.verdict.path, step.tokens, strict=True):
            logits = target.row(tuple(enumerate(tokens)))
            logits = np.where(np.arange(VOCAB) == 4, -np.inf, logits) / (temperature or 1)
            if temperature:
                logits = np.where(logits < np.sort(logits)[-6], -np.inf, logits)
            p = np.exp(logits) / np.exp(logits).sum()
            assert token != 4
            if token != step.choices[node]:
                assert by_formula(used, p, token)
                relaxed += 1
            tokens.append(token)
    assert relaxed > 0


def test_a_text_ends_where_it_would_and_no_ban_is_broken() -> None:
    llm = LLM(ToyTarget(sharpness=0.5), drafter="recycling", nodes=8, acceptance="lossy-bild:rollback=30")
    ended = set[int]()
    for end in range(12):
        banned = (end + 1) % 12
        found = llm.generate(PROMPT, max_new_tokens=60, stop_token_ids=[end], min_new_tokens=20, bad_words=[banned])
        assert banned not in found.tokens
        assert end not in found.tokens[:-1]
        assert len(found.tokens) >= 20
        ended.add(len(found.tokens))
    assert len(ended) > 2
    assert found.lossy == "lossy-bild:rollback=30"
    again = llm.generate(PROMPT, max_new_tokens=60, acceptance="exact")
    assert again.lossy == ""
    assert again.tokens == llm.generate(PROMPT, max_new_tokens=60, drafter="plain", acceptance="exact").tokens


def test_log_probabilities_are_those_of_the_text_that_was_committed() -> None:
    target = ToyTarget(sharpness=0.7)
    llm = LLM(target, drafter="recycling", nodes=8)
    found = llm.generate(PROMPT, max_new_tokens=30, logprobs=0, acceptance="lossy-bild")
    tokens = list(PROMPT)
    for each in found.logprobs:
        row = target.row(tuple(enumerate(tokens)))
        assert each.logprob == pytest.approx(float(row[each.token] - np.log(np.exp(row).sum())))
        tokens.append(each.token)
    assert tokens[len(PROMPT) :] == found.tokens


# ------------------------------------------------------------------------------------- the draft model that stops


@pytest.mark.parametrize(("unsure", "vocab_size"), [(0.0, VOCAB), (0.3, VOCAB), (1.0, VOCAB), (0.05, 400)])
def test_a_draft_model_stops_where_it_is_unsure(unsure: float, vocab_size: int) -> None:
    """BiLD's fallback: no node below a path after which the draft model's likeliest token has less probability.

    The larger vocabulary has more tokens than the drafter keeps of a row.
    """
    draft, target = ToyTarget(vocab_size, sharpness=1.0), ToyTarget(vocab_size)
    drafter = DraftModelDrafter(draft, depth=4, nodes=4, chain=True, unsure=unsure)
    done = assert_same_text(target, drafter, stop=StopParams(max_new_tokens=60))
    lengths, tokens = [], list(PROMPT)
    for step in done.steps:
        drafted = step.tree.token_list[1:]
        for depth in range(len(drafted)):
            row = draft.row(tuple(enumerate([*tokens, *drafted[:depth]])))
            assert (np.exp(row) / np.exp(row).sum()).max() >= unsure
        lengths.append(len(drafted))
        tokens += step.tokens
    assert (max(lengths) == 0) == (unsure == 1.0)
    assert (min(lengths[:-4]) == 4) == (unsure == 0.0)


# ------------------------------------------------------------------------------------------ refusals and reports


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("typical", "there are exact, lossy-typical, lossy-top-beta, lossy-bild"),
        ("exact:tau=1", "there are exact"),
        ("lossy-typical:tau=1", "KEY is epsilon or delta"),
        ("lossy-typical:epsilon", "must be KEY=VALUE"),
        ("lossy-typical:epsilon=x", "epsilon must be a number"),
        ("lossy-typical:epsilon=0.1,epsilon=0.2", "epsilon was given twice; give it once"),
        ("lossy-typical:epsilon=0", "above 0 and at most 1"),
        ("lossy-typical:delta=inf", "a finite number above 0"),
        ("lossy-top-beta:beta=1.5", "beta must be a whole number"),
        ("lossy-top-beta:beta=0", "at least 1"),
        ("lossy-top-beta:tau=nan", "at least 0"),
        ("lossy-bild:rollback=-1", "at least 0"),
        (3, "acceptance=3 is not possible"),
        (["lossy-bild"], r"acceptance=\['lossy-bild'\] is not possible"),
    ],
)
def test_what_is_no_rule_is_refused(given: Any, words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        rule(given)
    with pytest.raises(BadParameter, match=words):
        LLM(ToyTarget(), acceptance=given)


@pytest.mark.parametrize("used", [*RULES, Typical(0.123456789, 1e20), TopBeta(tau=np.float64(2.50000001))], ids=str)
def test_a_rule_is_read_as_it_is_written(used: Relaxed) -> None:
    assert rule(str(used)) == used
    assert str(used).startswith("lossy-")


def test_a_request_takes_a_rule_as_text() -> None:
    engine = Engine(ToyTarget())
    given = {"tokens": PROMPT, "drafter": engine.drafter("recycling")}
    assert Request(**given, acceptance="lossy-bild").acceptance == Rollback()
    assert Request(**given, acceptance="exact").acceptance is None
    with pytest.raises(BadParameter, match="acceptance='typical' is not possible"):
        Request(**given, acceptance="typical")


def test_a_drafter_with_a_rule_of_its_own_and_a_target_without_logits_are_refused() -> None:
    llm = LLM(ToyTarget(), draft=ToyTarget(), drafter="speculative_sampling")
    with pytest.raises(BadParameter, match="'speculative_sampling', which has an acceptance rule of its own"):
        llm.generate(PROMPT, acceptance="lossy-typical")
    poor = LLM(ToyTarget(capabilities=ALL - {HIDDEN, LOGITS}), drafter="recycling")
    with pytest.raises(Refused, match=r"the rule 'lossy-bild' needs logits.*; leave it out"):
        poor.generate(PROMPT, acceptance="lossy-bild")
    with pytest.raises(Refused, match=r"logprobs=2 needs logits.*; leave it out"):
        poor.generate(PROMPT, logprobs=2)


def measured(temperature: float) -> list[dict[str, Any]]:
    target, options = ToyTarget(sharpness=0.5), {"nodes": 8}
    chosen = [Configuration("recycling", options), Configuration("recycling", options, Rollback(30.0))]
    ours = [Ours(each.name, target, None, each.drafter, each.options, acceptance=each.acceptance) for each in chosen]
    contenders = [Ours("plain", target, None, "plain"), *ours]
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    setting = Setting(temperature, max_new_tokens=30)
    return measure_cell(contenders, prompts, setting, rounds=1, seed=0, judge=lambda *_: False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bench_counts_the_texts_that_differ_and_calls_them_lossy(temperature: float) -> None:
    plain, exact, lossy = ({"task": "toy", **row} for row in measured(temperature))
    assert exact["mismatches"] == 0
    assert "lossy" not in exact
    assert lossy["drafter"] == "recycling(nodes=8), lossy-bild:rollback=30"
    assert (lossy["mismatches"], lossy["lossy"]) == (0, 2)
    assert temperature or lossy["acceptance_length"] > exact["acceptance_length"]
    assert "lossy: 2" in cells(lossy)
    assert overall([lossy, lossy], [plain, plain], 0)["lossy"] == 4


def spoken(leapahead: Spoken, *arguments: str) -> Any:
    return leapahead("generate", "def add(a, b):", "--max-new-tokens", "24", *arguments)


@pytest.mark.slow
def test_the_command_line_says_lossy(leapahead: Spoken, tiny_folder: Any) -> None:
    given: Sequence[str] = ("-m", str(tiny_folder), "-d", "recycling", "-o", "nodes=8")
    done = spoken(leapahead, *given, "--acceptance", "lossy-bild:rollback=30")
    assert "lossy text (lossy-bild:rollback=30)" in done.stderr
    done = spoken(leapahead, *given, "--acceptance", "lossy-bild:rollback=30", "--json")
    assert '"lossy": "lossy-bild:rollback=30"' in done.stdout
    assert "lossy" not in spoken(leapahead, *given, "--json").stdout


def test_check_refuses_a_lossy_rule_by_name(leapahead: Spoken, tiny_folder: Any) -> None:
    done = leapahead("check", "-m", str(tiny_folder), "--acceptance", "lossy-typical")
    assert done.exit_code == 2
    assert "--acceptance=lossy-typical cannot be checked" in done.stderr
