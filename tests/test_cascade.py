"""Cascades: the draft model's own draft in fewer draft forwards, and cheaper drafts for later positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import GREEDY, FixedLatency, Run, Spelling, assert_same_text, run
from test_draft import FLAT, WARM, Blurred, Counting, timed

from leapahead import LLM, Engine, Request
from leapahead.bench.prompts import BUNDLED
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.stop import StopParams
from leapahead.drafters import registry
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.cascade import Cascade
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.drafters.draft_models import DraftModel
from leapahead.models.base import ALL, TREE
from leapahead.models.loading import bundled
from leapahead.models.toy import ToyTarget
from leapahead.planner.profile import LatencyProfiles

STOP = StopParams(max_new_tokens=80)
SAMPLINGS = pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])


def drafted(done: Run) -> list[tuple[list[int], list[int]]]:
    return [(step.tree.token_list, step.tree.parent_list) for step in done.steps]


def forwards(done: Run, name: str = "draft") -> float:
    """Draft forwards per step."""
    return float(done.stats.drafter[name]["forwards"]) / len(done.steps)


# ---------------------------------------------------------------------------------------------------------- vertical


@pytest.mark.slow
@SAMPLINGS
@pytest.mark.parametrize("seed_aware", [True, False], ids=["aware", "unaware"])
@pytest.mark.parametrize("ahead", [1, 4])
def test_the_draft_is_the_draft_models_own_in_fewer_draft_forwards(params: Any, seed_aware: bool, ahead: int) -> None:
    """Whatever is guessed, every step drafts the very tokens that the draft model alone drafts."""
    target, draft = ToyTarget(vocab_size=30), Blurred(0.3, vocab_size=30)
    options = {"nodes": 5, "chain": True, "seed_aware": seed_aware}
    alone = run(target, DraftModelDrafter(draft, **options), params=params, stop=STOP)
    found = assert_same_text(target, Cascade(draft, ahead=ahead, **options), params=params, stop=STOP)
    assert drafted(found) == drafted(alone)
    assert forwards(alone) > 4.8
    assert forwards(found) < 0.95 * forwards(alone)
    assert 0 < found.stats.drafter["draft"]["right"] <= found.stats.drafter["draft"]["guessed"]


@SAMPLINGS
def test_a_smaller_model_guesses_and_is_guessed_for_in_its_turn(params: Any) -> None:
    target, draft = ToyTarget(vocab_size=30), Blurred(0.3, vocab_size=30)
    smaller = Blurred(0.35, vocab_size=30)
    options = {"nodes": 5, "chain": True}
    alone = run(target, DraftModelDrafter(draft, **options), params=params, stop=STOP)
    found = assert_same_text(target, Cascade([draft, smaller], **options), params=params, stop=STOP)
    assert drafted(found) == drafted(alone)
    assert set(found.stats.drafted_by) == {"draft"}, "the smaller one only guesses"
    assert forwards(found) < 0.7 * forwards(alone)
    assert found.stats.drafter["draft2"]["right"] > 0


def test_a_twin_as_the_smaller_model_finds_a_draft_in_two_forwards() -> None:
    """Of the draft model: one verifies three guesses, the next one the last; without guesses there are five."""
    target, draft, twin = ToyTarget(vocab_size=30), Blurred(0.3, vocab_size=30), Blurred(0.3, vocab_size=30)
    found = run(target, Cascade([draft, twin], nodes=5, chain=True), stop=STOP)
    assert forwards(found) < 2.1


@SAMPLINGS
def test_trees_are_drafted_too(params: Any) -> None:
    target, draft = ToyTarget(vocab_size=30), Blurred(0.3, vocab_size=30)
    alone = run(target, DraftModelDrafter(draft, nodes=10), params=params, stop=STOP)
    found = assert_same_text(target, Cascade(draft, nodes=10), params=params, stop=STOP)
    assert found.stats.acceptance_length > 0.9 * alone.stats.acceptance_length
    assert forwards(found) < forwards(alone)


@pytest.mark.slow
@SAMPLINGS
def test_no_guesses_make_it_the_drafter_draft_model(params: Any) -> None:
    target, draft = ToyTarget(vocab_size=30), Blurred(0.3, vocab_size=30)
    for options in ({"nodes": 7}, {"nodes": 4, "chain": True}):
        alone = run(target, DraftModelDrafter(draft, **options), params=params, stop=STOP)
        found = run(target, Cascade(draft, ahead=0, **options), params=params, stop=STOP)
        assert drafted(found) == drafted(alone)
        assert found.stats.drafter["draft"]["forwards"] == alone.stats.drafter["draft"]["forwards"]


def test_where_guesses_are_free_more_is_drafted_and_where_rows_are_dear_none_is_guessed() -> None:
    """By the draft model's latency profile: as many guesses as give the most tokens per second of its forwards."""
    target, stop = ToyTarget(), StopParams(max_new_tokens=200)
    lengths = []
    for seconds in ({1: 0.2, 128: 0.2}, {1: 0.2, 2: 0.6, 128: 40.0}):
        drafter = Cascade(timed(Blurred(0.2), seconds), ahead=5)
        found = assert_same_text(target, drafter, stop=stop, latency=FixedLatency(target, FLAT))
        figures = found.stats.drafter["draft"]
        lengths.append((found.stats.acceptance_length, figures["guessed"] / figures["forwards"]))
    assert lengths[0][0] > 1.2 * lengths[1][0]
    assert lengths[0][1] > 2
    assert lengths[1][1] < 0.1


def test_what_a_text_taught_is_kept_for_the_next_one() -> None:
    """Contexts of the draft model's own choices, in a section of the drafter cache."""
    target, draft, cache = ToyTarget(vocab_size=30), Blurred(0.3, vocab_size=30), DrafterCache()
    rates = []
    for _ in range(2):
        found = run(target, Cascade(draft, nodes=5, chain=True), stop=STOP, drafter_cache=cache)
        rates.append(forwards(found))
    assert rates[1] < 0.9 * rates[0]
    assert "draft_rows" in cache.sections


# -------------------------------------------------------------------------------------------------------- horizontal


@SAMPLINGS
def test_later_positions_are_drafted_by_smaller_models_and_then_by_ngrams(params: Any) -> None:
    target = ToyTarget(vocab_size=12)
    drafts = [Blurred(0.1), Blurred(0.2)]
    drafter = Cascade(drafts, lengths="2,3", nodes=8, chain=True)
    found = assert_same_text(target, drafter, params=params, stop=STOP)
    whole = [step for step in found.steps if len(step.tree) == 9]
    assert len(whole) > 5
    for step in whole:
        assert set(step.proposal.sources[1:3]) == {"draft"}
        assert set(step.proposal.sources[3:6]) == {"draft2"}
        assert set(step.proposal.sources[6:]) <= {"suffix", "recycling"}
    assert forwards(found) < 2, "of the first model, for two positions"


@pytest.mark.slow
@SAMPLINGS
@pytest.mark.parametrize("options", [{}, {"nodes": 9}, {"nodes": 7, "chain": True}, {"ahead": 0}], ids=str)
@pytest.mark.parametrize("lengths", ["", "2,1"])
def test_the_text_is_that_of_plain_decoding(params: Any, options: dict[str, Any], lengths: str) -> None:
    target, drafts = ToyTarget(), [timed(Blurred(0.2)), timed(Blurred(0.5))]
    drafter = Cascade(drafts, lengths=lengths, **options)
    assert_same_text(target, drafter, params=params, stop=STOP, latency=FixedLatency(target, FLAT))


# ------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cascade", "ouroboros"])
@SAMPLINGS
def test_sequences_of_a_batch_draft_what_they_draft_alone(name: str, params: Any) -> None:
    draft, target = Counting(seed=3, vocab_size=20), ToyTarget(vocab_size=20)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    alone = [run(target, None, prompt, params=params, stop=STOP).tokens for prompt in prompts]
    engine = Engine(target)
    drafter = engine.drafter(name, draft=draft, nodes=4, chain=True)
    handles = [engine.submit(Request(prompt, drafter, params, stop=STOP)) for prompt in prompts]
    engine.run(handles)
    assert [handle.tokens for handle in handles] == alone
    assert draft.forwards <= 4 * max(handle.stats.steps for handle in handles) + 6, "shared by all sequences"
    assert draft.closed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cascade", "ouroboros"])
@pytest.mark.parametrize(
    "limits", [{"max_leaves": 2}, {"max_nodes": 6}, {"context_length": 40}, {"vocab_size": 9}], ids=str
)
def test_limits_of_the_draft_model_shorten_drafts_and_change_no_text(name: str, limits: dict[str, int]) -> None:
    drafter = registry.make(name, draft=Counting(**limits), nodes=6)
    done = assert_same_text(ToyTarget(), drafter, stop=STOP)
    assert done.stats.accepted > 0


@pytest.mark.parametrize("name", ["cascade", "ouroboros"])
def test_a_draft_model_that_fails_leaves_the_text_alone(name: str) -> None:
    class Failing(Counting):
        def step(self, *args: Any, **options: Any) -> Any:
            if self.forwards > 5:
                raise LeapaheadError("out of memory")
            return super().step(*args, **options)

    done = assert_same_text(ToyTarget(), registry.make(name, draft=Failing(), nodes=3))
    assert done.stats.drafter["draft"]["stopped"] == "out of memory"


def test_a_smaller_model_that_fails_is_only_missed() -> None:
    class Failing(Counting):
        def step(self, *args: Any, **options: Any) -> Any:
            if self.forwards > 5:
                raise LeapaheadError("out of memory")
            return super().step(*args, **options)

    done = assert_same_text(ToyTarget(), Cascade([Blurred(0.1), Failing()], nodes=4, chain=True), stop=STOP)
    assert done.stats.drafter["draft2"]["stopped"] == "out of memory"
    assert done.stats.acceptance_length > 2


class Masking(ToyTarget):
    """A draft model that says it has a mask token."""

    def __init__(self) -> None:
        super().__init__()
        self.info = self.info.__class__(**{**vars(self.info), "mask_token": 3})


@pytest.mark.parametrize("name", ["cascade", "ouroboros"])
def test_what_cannot_be_is_refused_by_name_at_construction(name: str) -> None:
    chains = ToyTarget(capabilities=ALL - {TREE})
    with pytest.raises(BadParameter, match=rf"the drafter '{name}' needs draft=..., a smaller model"):
        LLM(ToyTarget(), drafter=name)
    with pytest.raises(Refused, match=rf"'{name}' cannot use the draft model toy.*take no token trees"):
        LLM(ToyTarget(), drafter=name, draft=chains)
    with pytest.raises(Refused, match=rf"'{name}' cannot use the draft model toy.*its mask token"):
        LLM(ToyTarget(), drafter=name, draft=Masking())
    target = ToyTarget()
    one, other = (Spelling(lambda token, begin=begin: f"{begin}{token}") for begin in "ab")  # type: ignore[misc]
    with pytest.raises(BadParameter, match="another vocabulary than the target: token 0 is 'a0' in one and 'b0'"):
        Engine(target, tokenizer=one).drafter(name, draft=DraftModel(target, other, LatencyProfiles(target.info)))
    with pytest.raises(BadParameter, match="nodes=-1 is not possible"):
        registry.make(name, draft=ToyTarget(), nodes=-1)


@pytest.mark.slow
def test_a_draft_model_of_chains_is_possible_without_guesses() -> None:
    """With a number of nodes, since a toy is as fast as its draft model, of which a warning tells by chance."""
    llm = LLM(ToyTarget(), drafter="cascade", draft=ToyTarget(capabilities=ALL - {TREE}), ahead=0, nodes=4)
    result = llm.generate([1, 2], max_new_tokens=8)
    assert len(result.tokens) == 8
    assert result.stats.accepted_by["draft"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lengths": "4"}, "lengths=4 is not possible with 2 draft models"),
        ({"lengths": "4,x"}, "lengths='x' is not possible"),
        ({"lengths": "4,²"}, "lengths='²' is not possible"),
        ({"lengths": (4, 0)}, "lengths=0 is not possible"),
        ({"ahead": -1}, "ahead=-1 is not possible"),
        ({"longest": 0}, "longest=0 is not possible"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadParameter, match=says):
        Cascade([ToyTarget(), ToyTarget()], **options)


# ------------------------------------------------------------------------------------------------ the public interface


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cascade", "ouroboros"])
def test_the_bundled_models(name: str) -> None:
    """In float32, with branches, greedy and seeded, alone and together."""
    plain = LLM(dtype="float32", drafter="plain")
    llm = LLM(plain.target, tokenizer=plain.tokenizer, drafter=name, draft="bundled", nodes=8)
    prompts = ["def add(a, b):", "The sum of 3 and"]
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        expected = plain.generate(prompts, max_new_tokens=24, **options)  # type: ignore[arg-type]
        found = llm.generate(prompts, max_new_tokens=24, **options)  # type: ignore[arg-type]
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        assert sum(each.stats.accepted_by["draft"] for each in found) > 5


@pytest.mark.slow
@pytest.mark.parametrize("more", [("cascade", "lengths=2"), ("ouroboros", "length=3")], ids=lambda each: each[0])
def test_the_command_line(leapahead: Any, more: Sequence[str], tmp_path: Path) -> None:
    (name, option), page = more, tmp_path / "page.html"
    given = ["-d", name, "--draft", "bundled", "-o", "nodes=6", "-o", option, "--dtype", "float32"]
    checked = leapahead("check", *given, "--limit", "1", "--max-new-tokens", "12")
    assert checked.exit_code == 0, checked.output
    explained = leapahead("explain", *given, "--max-new-tokens", "8", "--out", str(page), "def add")
    assert explained.exit_code == 0, explained.output
    assert "draft" in page.read_text(encoding="utf-8")
    usual = leapahead("generate", "-d", name, "--max-new-tokens", "4", "x")  # with the bundled draft
    assert usual.exit_code == 0, usual.output
    refused = leapahead("generate", "-d", name, "-m", bundled(), "x")  # which is a folder like others
    assert (refused.exit_code, f"the drafter {name!r} needs --draft=" in refused.output) == (2, True)


@pytest.mark.slow
def test_a_part_of_the_target_drafts_and_the_draft_model_guesses_for_it() -> None:
    """An early exit, which lives in the target's cache, verifies guesses of the bundled draft model."""
    plain = LLM(dtype="float32", drafter="plain")
    options: dict[str, Any] = {"draft": ["self:first=3", "bundled"], "nodes": 5, "chain": True}
    llm = LLM(plain.target, tokenizer=plain.tokenizer, drafter="cascade", **options)
    for given in ({}, {"temperature": 1.0, "seed": 5}):
        expected = plain.generate("def add(a, b):", max_new_tokens=32, **given)  # type: ignore[arg-type]
        found = llm.generate("def add(a, b):", max_new_tokens=32, **given)  # type: ignore[arg-type]
        assert found.tokens == expected.tokens
        assert found.stats.drafter["draft"]["right"] > 0


@cache
def plainly() -> tuple[LLM, dict[str, list[list[int]]]]:
    """The bundled model, and its texts without any draft."""
    plain = LLM(dtype="float32", drafter="plain")
    return plain, {
        name: [each.tokens for each in plain.generate(list(BUNDLED), **TEXTS, **more)] for name, more in WAYS.items()
    }


TEXTS: dict[str, Any] = {"max_new_tokens": 128, "ignore_eos": True}
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 1.0, "seed": 3}}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cascade", {"nodes": 5, "chain": True}),
        ("cascade", {"nodes": 16}),
        ("cascade", {"draft": ["self:first=3", "bundled"], "lengths": "2,2", "nodes": 8}),
        ("ouroboros", {"nodes": 14, "length": 5, "chain": True}),
        ("ouroboros", {"nodes": 16}),
    ],
    ids=str,
)
def test_thousands_of_tokens_in_float32(name: str, options: dict[str, Any], batch: int) -> None:
    plain, expected = plainly()
    given: dict[str, Any] = {"draft": "bundled", "max_batch": batch, **options}
    llm = LLM(plain.target, tokenizer=plain.tokenizer, drafter=name, **given)
    for way, more in WAYS.items():
        found = [each.tokens for each in llm.generate(list(BUNDLED), **TEXTS, **more)]
        assert found == expected[way]
        assert sum(map(len, found)) > 1000
