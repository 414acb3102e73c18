"""Speculative sampling: its texts are as likely as plain decoding's, whatever the rule, and errors in it are caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import PROMPT, assert_same_text, run
from scipy.stats import chi2

from leapahead import Engine, Request
from leapahead.cli import main
from leapahead.core.errors import BadParameter
from leapahead.core.rejection import Draws
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.drafters.speculative_sampling import GENERATOR_KEY, SpeculativeSampling
from leapahead.models import loading
from leapahead.models.base import read_prompt
from leapahead.models.choices import Choices
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Proposal

WARM = SamplingParams(temperature=1.0, seed=3)
BATCH = 50


def texts(
    engine: Engine, drafter: Any, prompt: Sequence[int], count: int, params: SamplingParams
) -> Counter[tuple[int, ...]]:
    """How often each text of three tokens comes, over so many seeds."""
    stop = StopParams(max_new_tokens=3)
    requests = [Request(list(prompt), drafter, replace(params, seed=seed), stop) for seed in range(count)]
    handles = [engine.submit(request) for request in requests]
    engine.run(handles)
    return Counter(tuple(handle.tokens) for handle in handles)


def distribution(target: ToyTarget, params: SamplingParams, prompt: Sequence[int], length: int) -> dict[Any, float]:
    """Of plain sampling, exactly: text -> probability."""
    found: dict[Any, float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, p in found.items():
            scores = target.row(tuple(enumerate((*prompt, *text)))) / params.temperature
            weights = np.exp(scores - scores.max())
            kept = np.argsort(-weights)[: params.top_k or len(weights)]
            mask = np.zeros_like(weights)
            mask[kept] = weights[kept] / weights[kept].sum()
            longer |= {(*text, int(token)): p * mask[token] for token in np.flatnonzero(mask)}
        found = longer
    return found


def excess(found: Counter[tuple[int, ...]], expected: dict[Any, float]) -> float:
    """Chi-square of texts, as a multiple of what is exceeded once in a million."""
    count = sum(found.values())
    assert set(found) <= set(expected)
    frequent = {text for text, p in expected.items() if p * count >= 5}
    rest = 1 - sum(expected[text] for text in frequent)
    parts = [(found[text], expected[text] * count) for text in frequent]
    parts += [(sum(n for text, n in found.items() if text not in frequent), rest * count)] if rest * count >= 5 else []
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in parts)
    return float(statistic / chi2.isf(1e-6, len(parts) - 1))


def deviation(
    kind: type[SpeculativeSampling] = SpeculativeSampling, params: SamplingParams = WARM, **options: Any
) -> float:
    """Of texts of three tokens out of four: 64 texts."""
    target, draft = ToyTarget(vocab_size=4, sharpness=1.2), ToyTarget(vocab_size=4, sharpness=1.2, seed=6)
    engine = Engine(target, max_batch=BATCH)
    found = texts(engine, engine.drafter(kind, draft=draft, **options), (1, 2), 1200, params)
    return excess(found, distribution(target, params, (1, 2), 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"width": 1, "depth": 2},
        {"rule": "sequoia", "width": 3, "depth": 2},
        {"rule": "specinfer", "width": 2, "depth": 2},
        {"rule": "spectr", "width": 2, "depth": 2},
        {"rule": "sequoia", "width": 2, "depth": 3, "nodes": 5, "unsure": 0.5},
    ],
    ids=str,
)
def test_it_is_exact_in_distribution(options: dict[str, Any]) -> None:
    """One false alarm in a million."""
    assert deviation(**options) < 1


FILTERED = SamplingParams(temperature=0.7, top_k=2)


@pytest.mark.slow
def test_filters_apply_to_the_draft_as_to_the_target() -> None:
    assert deviation(params=FILTERED, width=2, depth=2) < 1


# ------------------------------------------------------------------------------------- errors that must be caught


class Mutated(SpeculativeSampling):
    """Its drafts are judged by something else than what they were drawn with."""

    def propose(self, sequences: Any, budgets: Any) -> list[Proposal]:
        proposals = super().propose(sequences, budgets)
        return [
            proposal._replace(judge=self.mutated(proposal.judge, sequence.params.seed))
            for proposal, sequence in zip(proposals, sequences, strict=True)
        ]

    def mutated(self, judge: Any, seed: int) -> Any:
        raise NotImplementedError


class Flattened(Mutated):
    """A q that is not the one that was drawn from."""

    name: ClassVar[str] = "flattened"

    def mutated(self, judge: Any, seed: int) -> Any:
        draws, rule, rng = judge.args
        flat = {node: [np.full(4, 0.25)] * len(some) for node, some in draws.qs.items()}
        return lambda choices: judge.func(Draws(draws.tree, draws.children, flat), rule, rng, choices)


class Shared(Mutated):
    """The draws and the tests use the same random numbers."""

    name: ClassVar[str] = "shared"

    def mutated(self, judge: Any, seed: int) -> Any:
        draws, rule, _ = judge.args
        same = np.random.Generator(np.random.Philox(key=np.array([seed, GENERATOR_KEY], dtype=np.uint64)))
        return lambda choices: judge.func(draws, rule, same, choices)


class Unfiltered(Mutated):
    """A p without the filters."""

    name: ClassVar[str] = "unfiltered"

    def mutated(self, judge: Any, seed: int) -> Any:
        class Raw:
            def __init__(self, choices: Choices) -> None:
                self.choices = choices

            def probabilities(self, nodes: Sequence[int]) -> Any:
                rows = np.exp(np.asarray(self.choices.logits)[list(nodes)] / 0.7)
                return rows / rows.sum(axis=1, keepdims=True)

        def judged(choices: Choices) -> Verdict:
            found: Verdict = judge(Raw(choices))
            return found

        return judged


@pytest.mark.slow
def test_mutations_are_caught() -> None:
    assert deviation(Flattened, width=2, depth=2) > 1
    assert deviation(Shared, width=1, depth=2) > 1
    with pytest.raises(AssertionError, match="set"):
        deviation(Unfiltered, params=FILTERED, width=2, depth=2)


# --------------------------------------------------------------------------------------------------- real models


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sequoia", "leviathan", "specinfer", "spectr"])
def test_the_bundled_models_are_exact_in_distribution(rule: str) -> None:
    """Texts of three tokens out of the three likeliest each, against probabilities without any draft."""
    loaded, draft = (loading.load(loading.bundled(name), dtype="float32") for name in ("tiny", "tiny-draft"))
    target, params = loaded.target, SamplingParams(temperature=1.2, top_k=3)
    assert loaded.tokenizer is not None
    prompt = loaded.tokenizer.encode("def add(a, b):\n    return")
    expected: dict[Any, float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, p in expected.items():
            session = target.open([*prompt, *text], params)
            read_prompt(target, session)
            (after,) = target.step([session], [TokenTree.root(session.tokens[-1])])[0].probabilities([0])
            longer |= {(*text, int(token)): p * after[token] for token in np.flatnonzero(after)}
            session.close()
        expected = longer
    assert len(expected) == 27
    options = {"rule": "sequoia", "width": 1} if rule == "leviathan" else {"rule": rule, "width": 3}
    engine = Engine(target, max_batch=BATCH)
    drafter = engine.drafter("speculative_sampling", draft=draft, depth=2, **options)
    found = texts(engine, drafter, prompt, 200, params)
    assert excess(found, expected) < 1
    turned = dict(zip(expected, reversed(expected.values()), strict=True))
    assert excess(found, turned) > 1  # it can fail
    one = engine.submit(Request(prompt, drafter, params, StopParams(max_new_tokens=60)))
    engine.run([one])
    assert one.stats.accepted > 5  # otherwise this would test plain sampling


# ---------------------------------------------------------------------------------------------------- behaviour


@pytest.mark.slow
def test_a_seed_gives_the_same_sample_again_and_greedy_the_plain_text() -> None:
    draft = ToyTarget(seed=6)
    for rule, width in product(("sequoia", "specinfer", "spectr"), (1, 3)):
        one, two = (run(ToyTarget(), SpeculativeSampling(draft, rule=rule, width=width), params=WARM) for _ in "ab")
        assert one.tokens == two.tokens
        assert_same_text(ToyTarget(), SpeculativeSampling(draft, rule=rule, width=width))


@pytest.mark.parametrize("unsure", [0.0, 0.3, 1.0])
def test_greedily_it_stops_where_the_draft_model_is_unsure_at_temperature_1(unsure: float) -> None:
    draft, tokens = ToyTarget(sharpness=1.0), list(PROMPT)
    done = assert_same_text(ToyTarget(), SpeculativeSampling(draft, unsure=unsure), stop=StopParams(max_new_tokens=40))
    sure = []
    for step in done.steps:
        drafted = step.tree.token_list[1:]
        rows = [draft.row(tuple(enumerate([*tokens, *drafted[:depth]]))) for depth in range(len(drafted))]
        sure += [(np.exp(row) / np.exp(row).sum()).max() for row in rows]
        tokens += step.tokens
    assert (done.stats.drafted == 0) == (unsure == 1.0)
    assert (min(sure, default=1.0) < 0.3) == (unsure == 0.0)


def test_nothing_is_drawn_where_the_draft_model_allows_tokens_only_that_the_target_does_not_have() -> None:
    params = SamplingParams(temperature=1.0, top_k=1, seed=3)
    draft = ToyTarget(vocab_size=24, seed=6)
    found = run(ToyTarget(vocab_size=12), SpeculativeSampling(draft), params=params)
    assert found.tokens == run(ToyTarget(vocab_size=12), "plain", params=params).tokens
    assert {len(step.tree) == 1 for step in found.steps[:-4]} == {True, False}


def test_it_announces_another_text_and_check_refuses_it_when_sampling() -> None:
    assert not SpeculativeSampling.same_text
    assert DraftModelDrafter.same_text
    options = ["--draft", "bundled", "--dtype", "float32", "--limit", "1", "--max-new-tokens", "8"]
    found = CliRunner().invoke(main, ["check", "-d", "speculative_sampling", *options, "-t", "1"])
    assert "exact in distribution, not in text" in found.output


def test_impossible_options_are_refused_by_name() -> None:
    with pytest.raises(BadParameter, match=r"needs draft=\.\.\., the smaller model"):
        SpeculativeSampling()
    with pytest.raises(BadParameter, match="there is no rule 'x'; there are specinfer, sequoia, spectr"):
        SpeculativeSampling(ToyTarget(), rule="x")
    with pytest.raises(BadParameter, match="width=0"):
        SpeculativeSampling(ToyTarget(), width=0)
    with pytest.raises(BadParameter, match="takes one draft model"):
        SpeculativeSampling([ToyTarget(), ToyTarget()])
