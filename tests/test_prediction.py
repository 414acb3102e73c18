"""A predicted text as a draft: the steps that it saves where it is right, and its recovery after a divergence."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import assert_same_text
from hypothesis import given, settings
from hypothesis import strategies as st

from leapahead import LLM, BadParameter
from leapahead.cli import main
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.drafters.sources.prediction import CERTAIN, LOG_PROBABILITIES, Prediction
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import SequenceView

VOCABULARY = 200
PROMPT = [1, 2, 3]
LENGTH = 120


@pytest.fixture(scope="module")
def target() -> ToyTarget:
    return ToyTarget(vocab_size=VOCABULARY, order=3)


@pytest.fixture(scope="module")
def plain(target: ToyTarget) -> list[int]:
    tokens = LLM(target, drafter="plain").generate(PROMPT, max_new_tokens=LENGTH).tokens
    assert len(set(tokens)) > 60  # it does not go round in circles
    return tokens


def predicted(target: ToyTarget, prediction: Any, **options: Any) -> Any:
    return LLM(target, drafter="prediction").generate(
        PROMPT, prediction=prediction, **{"max_new_tokens": LENGTH, **options}
    )


# ---------------------------------------------------------------------------------------------------------- texts


def others(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


EDITS = {
    "the text itself": lambda text: text,
    "one token replaced": lambda text: [*text[:50], 7, *text[51:]],
    "some tokens replaced": lambda text: [*text[:50], *others(6), *text[56:]],
    "some by fewer": lambda text: [*text[:50], *others(2), *text[60:]],
    "some by more": lambda text: [*text[:50], *others(9), *text[53:]],
    "tokens too few": lambda text: text[:50] + text[58:],
    "tokens too many": lambda text: [*text[:50], *others(8), *text[50:]],
    "one too few, and later one too many": lambda text: [*text[:30], *text[31:80], 9, *text[80:]],
    "the beginning lacks": lambda text: text[10:],
    "something before it": lambda text: others(12) + text,
    "every twentieth wrong": lambda text: [5 if at % 20 == 10 else token for at, token in enumerate(text)],
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_text_is_recovered(target: ToyTarget, plain: list[int], edit: str) -> None:
    result = predicted(target, EDITS[edit](plain))
    assert result.tokens == plain
    # The right text comes in 8 steps (16 drafted and one more); each divergence costs a few.
    most = {"the text itself": 8, "every twentieth wrong": 30, "one token replaced": 11}.get(edit, 21)
    assert result.stats.steps <= most, result.stats


def test_text_in_several_places_goes_on_at_the_nearest(target: ToyTarget, plain: list[int]) -> None:
    """A form whose fields differ: the same words lead to each."""
    label = [190, 191, 192, 193]
    form = [token for field in range(8) for token in (*label, *plain[8 * field : 8 * field + 6])]
    filled = [token for field in range(8) for token in (*label, 7, *plain[8 * field + 1 : 8 * field + 6])]
    asked = walk(form, filled)
    # In each field one token is a surprise, and what follows it may be another.
    assert sum(token in offered for offered, token in zip(asked, filled, strict=True)) >= len(filled) - 8
    first = sum(offered[:1] == [token] for offered, token in zip(asked, filled, strict=True))
    assert first >= len(filled) - 3 * 8


def test_a_copy_of_what_came_before_is_followed_and_left(plain: list[int]) -> None:
    """The text repeats a part of the prediction, then goes on where it was."""
    text = plain[:60] + plain[20:40] + plain[60:90]
    asked = walk(plain, text)
    surprises = [at for at, (offered, token) in enumerate(zip(asked, text, strict=True)) if token not in offered]
    assert surprises == [60]  # at its end both ways are offered: on with the copied part, and back


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_texts_are_plain_decodings_whatever_is_predicted(target: ToyTarget, temperature: float, seed: int) -> None:
    options = {"temperature": temperature, "seed": seed, "max_new_tokens": 60}
    expected = LLM(target, drafter="plain").generate(PROMPT, **options).tokens
    rng = random.Random(seed)
    wrong = [token if rng.random() < 0.8 else rng.randrange(VOCABULARY) for token in expected]
    for prediction in (expected, wrong, others(50, seed), [4], [], expected * 3):
        assert predicted(target, prediction, **options).tokens == expected
    assert predicted(target, expected, **options).stats.acceptance_length > 8  # seed-aware


def test_targets_of_chains_are_served(plain: list[int]) -> None:
    chains = ToyTarget(vocab_size=VOCABULARY, order=3, capabilities=frozenset({"chain", "logits"}))
    assert predicted(chains, [*plain[:50], 7, *plain[51:]]).tokens == plain


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.integers(0, 11), max_size=40))
def test_any_prediction_gives_plain_text(prediction: list[int]) -> None:
    target = ToyTarget(order=3)
    expected = LLM(target, drafter="plain").generate(PROMPT, max_new_tokens=30).tokens
    result = LLM(target, drafter="prediction").generate(PROMPT, prediction=prediction, max_new_tokens=30)
    assert result.tokens == expected


def test_without_a_prediction_nothing_is_drafted(target: ToyTarget, plain: list[int]) -> None:
    for options in ({}, {"prediction": None}, {"prediction": []}):
        result = LLM(target, drafter="prediction").generate(PROMPT, max_new_tokens=LENGTH, **options)
        assert result.tokens == plain
        assert result.stats.drafted == 0
    assert_same_text(ToyTarget(), "prediction")


# --------------------------------------------------------------------------------------------------------- source


def begun(prediction: list[int]) -> tuple[Prediction, SequenceView]:
    source = Prediction()
    sequence = SequenceView(Sampler(SamplingParams(), list(PROMPT), VOCABULARY), prediction=prediction)
    source.begin(sequence)
    return source, sequence


def offered(source: Prediction, sequence: SequenceView) -> list[tuple[int, str]]:
    """(token, why) of what may come next."""
    state = source.root(sequence)
    if state is None:
        return []
    kinds = list(LOG_PROBABILITIES)
    return [(each.token, kinds[each.feature[0]]) for each in source.candidates(state, 8)]


def walk(prediction: list[int], text: list[int]) -> list[list[int]]:
    """What is offered before each token of a text that comes one by one."""
    source, sequence = begun(prediction)
    found = []
    for token in text:
        found.append([each for each, _ in offered(source, sequence)])
        sequence.tokens.append(token)
        source.read(sequence)
    return found


def test_a_long_prediction_is_searched_without_an_index_of_its_n_grams() -> None:
    rng = random.Random(1)
    source, sequence = begun([rng.randrange(100_000) for _ in range(20_000)])
    sequence.tokens.append(100_000)
    tracemalloc.start()
    try:
        source.read(sequence)  # the first divergence
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert source.figures()["divergences"] == 1
    assert taken < 1_000_000


def test_after_a_divergence_every_reading_is_offered() -> None:
    source, sequence = begun([10, 11, 12, 13, 14, 15, 16, 17])
    assert offered(source, sequence) == [(10, "follows")]
    sequence.tokens += [10, 11, 12]
    source.read(sequence)
    assert offered(source, sequence) == [(13, "follows")]
    sequence.tokens.append(99)  # stands nowhere
    source.read(sequence)
    assert offered(source, sequence) == [(13, "inserted"), (14, "replaced")]
    sequence.tokens.append(16)  # so 13, 14 and 15 were left out
    source.read(sequence)
    assert offered(source, sequence)[0] == (17, "found")
    assert {token for token, _ in offered(source, sequence)} == {17, 13, 15}


def test_a_place_that_was_found_is_doubted_until_some_tokens_have_matched() -> None:
    source, sequence = begun([10, 11, 12, 13, 20, 21, 22, 23, 24, 25])
    sequence.tokens += [10, 11, 20]
    source.read(sequence)
    for token in (21, 22):
        assert offered(source, sequence)[0] == (token, "found")
        assert (12, "inserted") in offered(source, sequence)
        sequence.tokens.append(token)
        source.read(sequence)
    assert offered(source, sequence) == [(23, "follows")]
    assert CERTAIN == 3
    assert source.figures() == {"tokens": 10, "matched": 4, "divergences": 1}


def test_the_longest_match_wins_then_the_nearest_behind_then_the_nearest() -> None:
    #             0   1  2   3   4  5   6   7  8   9
    prediction = [30, 5, 31, 40, 5, 32, 41, 5, 33, 50]
    source, sequence = begun(prediction)
    sequence.tokens += [30, 5, 31, 99, 5]
    source.read(sequence)
    assert offered(source, sequence)[0] == (32, "found")  # the 5 behind place 3, not the one before
    source, sequence = begun(prediction)
    sequence.tokens += [30, 5, 31, 99, 41, 5]
    source.read(sequence)
    assert offered(source, sequence)[0] == (33, "found")  # two tokens
    source, sequence = begun(prediction)
    sequence.tokens += [30, 5, 31, 40, 5, 32, 41, 5, 33, 99, 5]
    source.read(sequence)
    assert offered(source, sequence)[0] == (33, "found")  # none behind: the last before


def test_drafted_tokens_are_followed() -> None:
    source, sequence = begun([10, 11, 12, 13, 14])
    state = source.root(sequence)
    for token in (10, 11, 12):
        state = source.follow(state, token)
    assert [each.token for each in source.candidates(state, 4)] == [13]
    state = source.follow(state, 77)  # of another drafter
    assert [each.token for each in source.candidates(state, 4)] == [13, 14]
    assert len(source.candidates(state, 1)) == 1
    assert source.follow(state, 78) is None
    assert source.follow(source.follow(source.follow(source.root(sequence), 10), 11), 12) is not None
    end = source.root(sequence)
    for token in (10, 11, 12, 13, 14):
        end = source.follow(end, token)
    assert end is None


def test_the_prompt_is_no_part_of_the_text() -> None:
    source, sequence = begun([*PROMPT, 10, 11])
    assert offered(source, sequence) == [(PROMPT[0], "follows")]


def test_features_are_finite_whatever_the_length() -> None:
    text = list(range(100)) + [100 + n % 50 for n in range(60)]
    source, sequence = begun(text)
    features = set()
    for token in text[:-1]:
        sequence.tokens.append(token)
        source.read(sequence)
        features |= {each.feature for each in source.candidates(source.root(sequence), 8)}
    assert len(features) < 12


# ------------------------------------------------------------------------------------------------------------ LLM


def test_predictions_for_several_prompts(target: ToyTarget) -> None:
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8]]
    llm = LLM(target, drafter="prediction", max_batch=2)
    plain = [result.tokens for result in llm.generate(prompts, max_new_tokens=40)]
    for given_, right in (
        (plain, [True, True, True]),
        ([plain[0], None, plain[2]], [True, False, True]),
        ([plain[0], np.array(plain[1]), []], [True, True, False]),
        (plain[1], [False, True, False]),
        (tuple(plain[1]), [False, True, False]),
    ):
        results = llm.generate(prompts, prediction=given_, max_new_tokens=40)
        assert [result.tokens for result in results] == plain
        assert [result.stats.acceptance_length > 8 for result in results] == right
    assert list(llm.stream(prompts[0], prediction=plain[0], max_new_tokens=40))[-1].result is not None


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        (7.5, r"a prediction must be text or token ids, or a list with one for each prompt, got 7\.5"),
        ([1.5], r"a prediction must be text or token ids, .* got 1\.5"),
        ([1, "a"], "2 predictions for 1 prompt is not possible; give one for all, or one for each"),
        ([[1], [2]], "2 predictions for 1 prompt is not possible"),
        ({"a": 1}, "a prediction must be text or token ids"),
        (b"abc", "a prediction must be text or token ids"),
        ("text", r"a prediction as text needs a tokenizer; pass tokenizer=\.\.\., or its token ids"),
        ([1, 200], "the prediction has 200, which is outside the vocabulary of 200"),
    ],
)
def test_what_is_no_prediction_is_told(target: ToyTarget, given_: Any, says: str) -> None:
    with pytest.raises(BadParameter, match=says):
        predicted(target, given_)


@pytest.mark.parametrize("drafter", ["lookahead", "jacobi", "plain"])
def test_a_drafter_that_makes_no_use_of_it_is_refused(target: ToyTarget, drafter: str) -> None:
    with pytest.raises(BadParameter, match=f"drafter '{drafter}' makes no use of a prediction; use auto or prediction"):
        LLM(target, drafter=drafter).generate(PROMPT, prediction=[1, 2])
    llm = LLM(target, drafter="prediction")
    with pytest.raises(BadParameter, match="makes no use of a prediction"):
        llm.generate(PROMPT, prediction=[1, 2], drafter=drafter)
    assert llm.generate(PROMPT, prediction=None, drafter=drafter, max_new_tokens=3).tokens


def test_a_prediction_that_is_none_of_the_sources_of_auto_is_refused(target: ToyTarget) -> None:
    llm = LLM(target, drafter="auto", sources="suffix")
    with pytest.raises(BadParameter, match="'auto' makes no use of a prediction; name prediction among its sources"):
        llm.generate(PROMPT, prediction=[1, 2])
    assert LLM(target, drafter="auto", sources="prediction").generate(PROMPT, prediction=[1, 2])


# --------------------------------------------------------------------------------------------------- command line


@pytest.mark.slow
def test_generate_with_a_prediction_of_text(tmp_path: Path) -> None:
    """With the bundled model. The predicted text is tokenised by itself, so its tokens may differ at its ends."""
    prompt = "def add(a, b):"
    llm = LLM(drafter="plain")
    plain = llm.generate(prompt, max_new_tokens=80, ignore_eos=True)
    half = len(plain.text) // 2
    (tmp_path / "expected.txt").write_text(plain.text[:half] + " something else " + plain.text[half:])
    args = ["--max-new-tokens", "80", "--ignore-eos", "--json", "--prediction", str(tmp_path / "expected.txt")]

    def run(*more: str) -> Any:
        return CliRunner(env={"NO_COLOR": "1"}).invoke(main, ["generate", prompt, *args, *more])

    done = run("-d", "prediction", "--compare", "--rounds", "1")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == plain.tokens
    assert found["compare"]["equal"]
    assert found["compare"]["plain"]["drafted"] == 0
    assert found["stats"]["acceptance_length"] > 4
    refused = run("-d", "lookahead")
    assert (refused.exit_code, refused.stderr) == (
        2,
        "error: drafter 'lookahead' makes no use of a prediction; use auto or prediction\n",
    )
    (tmp_path / "expected.txt").write_bytes(b"caf\xe9")
    assert "is not UTF-8 text" in run("-d", "prediction").stderr


def test_what_the_prediction_proposes_is_its_own_though_other_sources_know_the_text(
    target: ToyTarget, plain: list[int]
) -> None:
    """Else a client is told that its prediction was of no use."""
    llm = LLM(target, drafter="auto", nodes=8)
    for _ in range(3):  # from the second time on the suffixes of the earlier text are as certain
        stats = llm.generate(PROMPT, prediction=plain, max_new_tokens=LENGTH).stats
    assert stats.accepted > LENGTH / 2
    assert stats.accepted_by["prediction"] > stats.accepted / 2
