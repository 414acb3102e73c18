"""The figures of research: their numbers against hand-computed ones and simulations, their files, their refusals.

Speed is never asserted: the cost curve is measured with a clock of our own.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from helpers import GREEDY, PROMPT, run
from hypothesis import given
from hypothesis import strategies as st

from leapahead.bench import tasks
from leapahead.bench.formula import compression_formula, drafts_yield
from leapahead.core.errors import BadParameter, ContextOverflow, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.drafters.lookahead import Lookahead
from leapahead.drafters.prompt_lookup import PromptLookup
from leapahead.inputs import encode
from leapahead.models import loading
from leapahead.models.base import CHAIN
from leapahead.models.choices import Choices
from leapahead.models.toy import Entries, ToySession, ToyTarget
from research import curves, drawn, plots, toy_overhead
from research.cli import COMMANDS
from research.cli import main as research
from research.curves.compression import fitted
from research.curves.cost import WARM_UP
from research.curves.expected import expected_speedup, expected_tokens
from research.curves.fit import fit
from research.curves.jacobi import blocks_of
from research.curves.match import LEAST_DRAFTS, match_length
from research.curves.pool import by_step, by_tokens

PROMPTS = (PROMPT, (4, 5, 6, 4, 5), (7, 1, 7, 2))


class ScriptTarget(ToyTarget):
    """Writes a text that is known beforehand, whatever was said."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__()
        self.text = text

    def row(self, attended: Entries) -> npt.NDArray[np.float64]:
        logits = np.zeros(self.info.vocab_size)
        logits[self.text[(attended[-1][0] + 1) % len(self.text)]] = 1
        return logits


# ---------------------------------------------------------------------------------------------------------- cost


class TimedTarget(ToyTarget):
    """Moves a clock of its own: T(n) = 3 + n, times what the round costs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now, self.pace = 0.0, 1.0
        self.sizes: list[int] = []

    def step(
        self, sessions: Sequence[ToySession], trees: Sequence[TokenTree], *args: Any, **more: Any
    ) -> list[Choices]:
        self.sizes.append(len(trees[0]))
        # A slow machine in the first two rounds of each context, then one that slows down from round to round.
        turn = (len(self.sizes) - 1) // 3 % 7
        self.now += (3 + len(trees[0])) * (100 if turn < 2 else 1 + turn)
        return super().step(sessions, trees, *args, **more)


def test_cost_is_measured_in_interleaved_rounds() -> None:
    target = TimedTarget()
    seen: list[tuple[int, int]] = []
    found = curves.cost(
        target,
        [1, 2, 3],
        contexts=(4, 9),
        sizes=(2, 8),
        rounds=5,
        clock=lambda: target.now,
        progress=lambda _, done, total: seen.append((done, total)),
    )
    rounds = [tuple(target.sizes[first : first + 3]) for first in range(0, len(target.sizes), 3)]
    assert len(rounds) == 2 * (5 + WARM_UP)
    assert all(sorted(each) == [1, 2, 8] for each in rounds)
    assert len(set(rounds)) > 1  # an order of its own
    rows = found["rows"]
    assert [(row["context"], row["nodes"]) for row in rows] == [(c, n) for c in (4, 9) for n in (1, 2, 8)]
    # Within a round the pace is one, so the relative cost is exact, though the seconds spread.
    for row in rows:
        exact = (3 + row["nodes"]) / 4
        assert row["relative"] == {"median": exact, "low": exact, "high": exact}
        assert row["milliseconds"]["low"] < row["milliseconds"]["median"] < row["milliseconds"]["high"]
        assert row["milliseconds"]["median"] == 1e3 * 5 * (3 + row["nodes"])  # the warm-up, at 100, is not in it
    assert seen[0] == (0, 14)
    assert seen[-1] == (13, 14)


def test_cost_refuses_what_cannot_be_measured() -> None:
    with pytest.raises(Refused, match="reads at most 4 nodes"):
        curves.cost(ToyTarget(max_nodes=4), [1])
    with pytest.raises(Refused, match="reads at most 1 nodes"):
        curves.cost(ToyTarget(capabilities=frozenset()), [1])
    with pytest.raises(ContextOverflow, match="a context of 512 tokens and a chain of 128 do not fit into the 600"):
        curves.cost(ToyTarget(context_length=600), [1])
    for wrong in ({"contexts": ()}, {"contexts": (0,)}, {"sizes": (0,)}, {"rounds": 0}):
        with pytest.raises(BadParameter):
            curves.cost(ToyTarget(), [1], **wrong)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- compression


def test_the_formula_by_hand() -> None:
    for window, s in {1: 1.24, 2: 1.41, 4: 1.62, 8: 1.86, 16: 2.11, 32: 2.37, 64: 2.62, 128: 2.88}.items():
        assert compression_formula(0.425, 3.106, 11, window) == pytest.approx(s, abs=0.006)
    assert drafts_yield(0.4, 4, 7) == pytest.approx(3.21, abs=0.006)
    assert drafts_yield(0.5, 1, 1) == 1.5  # the bonus, and one token half of the time
    assert drafts_yield(0.5, 1, 2) == 1.75
    assert drafts_yield(0.3, 6, 1) == pytest.approx(expected_tokens(0.3, 6))


def test_the_formula_by_simulation() -> None:
    rng = np.random.default_rng(0)
    right = rng.random((40_000, 3, 4)) < 0.6  # [steps, drafts, positions]
    accepted = np.logical_and.accumulate(right, axis=2).sum(axis=2).max(axis=1)
    assert 1 + accepted.mean() == pytest.approx(drafts_yield(0.6, 4, 3), abs=0.02)


@pytest.mark.parametrize(("alpha", "f"), [(0.425, 3.106), (0.2, 1.5), (0.8, 6.0), (0.6, 1.0)])
@pytest.mark.parametrize("ngrams", [(3, 5, 7), (5,)])
def test_the_fit_recovers_alpha_and_f(alpha: float, f: float, ngrams: tuple[int, ...]) -> None:
    points = [(n, w, compression_formula(alpha, f, n, w)) for n in ngrams for w in (1, 2, 4, 8, 16, 32)]
    found = fit(points)
    assert (found.alpha, found.f) == (pytest.approx(alpha, abs=2e-3), pytest.approx(f, rel=5e-3))
    assert found.rms < 1e-3
    noise = random.Random(0)
    found = fit([(n, w, s + noise.gauss(0, 0.01)) for n, w, s in points])
    assert found.alpha == pytest.approx(alpha, abs=0.1)
    assert 0.003 < found.rms < 0.02


def test_nothing_to_fit() -> None:
    with pytest.raises(BadParameter, match="fewer than three points"):
        fit([(3, 1, 1.5), (3, 2, 1.6), (3, 2, 1.7)])
    with pytest.raises(BadParameter, match="nothing to fit"):
        fit([(3, 1, 1.0), (3, 2, 1.0), (3, 4, 1.0)])
    target = TimedTarget()
    with pytest.raises(BadParameter, match="fewer than three points"):
        curves.compression(target, PROMPTS, ngrams=(3,), windows=(1, 2))
    assert target.sizes == []  # said before anything was measured


def test_compression_counts_what_decoding_counts() -> None:
    target = ToyTarget()
    found = curves.compression(target, PROMPTS, ngrams=(3, 4), windows=(1, 4), max_new_tokens=30)
    for row in found["rows"]:
        runs = [
            run(
                target,
                Lookahead(row["window"], row["ngram"], row["window"]),
                prompt,
                stop=StopParams(max_new_tokens=30),
            )
            for prompt in PROMPTS
        ]
        steps = sum(each.stats.steps for each in runs)
        assert (row["steps"], row["step_compression"]) == (steps, pytest.approx(90 / steps, abs=1e-4))
        assert row["different_texts"] == 0
    assert found["tokens"] == 90
    assert 0 < found["distinct_4"] <= 1
    assert found["fit"]["points"] == 4
    assert found["fits"] == {}  # two points of one N are too few
    json.dumps(found, allow_nan=False)


def test_compression_without_an_accepted_draft() -> None:
    """What was measured stays, without a fit."""
    rows = [{"ngram": 3, "window": w, "step_compression": 1.0} for w in (1, 2, 4)]
    found, note = fitted(rows)
    assert found is None
    assert note.startswith("there is nothing to fit")


# -------------------------------------------------------------------------------------------------------- jacobi


def test_jacobi_ends_at_the_text_of_plain_decoding() -> None:
    target = ToyTarget()
    for params in (GREEDY, SamplingParams(temperature=0.9, seed=5)):
        plain = run(target, params=params, stop=StopParams(max_new_tokens=32)).tokens
        blocks = list(blocks_of(target, PROMPT, params, 8, 32, (), random.Random(0)))
        assert [token for values in blocks for token in values[-1]] == plain
        for values in blocks:
            assert len(values) <= 8 + 1
            assert set(values[0]) <= set(PROMPT)
            for k, tokens in enumerate(values):
                assert tokens[:k] == values[-1][:k]  # one position a forward at the least


def test_jacobi_shares_reach_one() -> None:
    found = curves.jacobi(ToyTarget(), PROMPTS, block=6, temperatures=(0, 0.8), max_new_tokens=20)
    assert [curve["temperature"] for curve in found["curves"]] == [0, 0.8]
    for curve in found["curves"]:
        assert curve["blocks"] == 9
        right = np.array(curve["right"])
        assert right.shape == (7, 6)
        assert (right[-1] == 1).all()
        for k in range(1, 7):
            assert (right[k, :k] == 1).all()
        assert curve["mean"] == pytest.approx(right.mean(axis=1).tolist(), abs=1e-3)
        assert all(kept <= share for kept, share in zip(curve["settled"], curve["mean"], strict=True))
        assert curve["settled"] == sorted(curve["settled"])
        assert 1 <= curve["iterations"]["mean"] <= curve["iterations"]["greatest"] <= 6
        assert curve["tokens_per_iteration"] == pytest.approx(6 / curve["iterations"]["mean"], abs=1e-3)
    json.dumps(found, allow_nan=False)


def test_jacobi_by_hand() -> None:
    """A target that does not look at what was said is right everywhere after one forward."""
    target = ScriptTarget([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    found = curves.jacobi(target, [(11, 11)], block=4, temperatures=(0,), max_new_tokens=8)
    (curve,) = found["curves"]
    assert curve["right"] == [[0] * 4] + [[1] * 4] * 4
    assert (curve["blocks"], curve["tokens_per_iteration"]) == (2, 4)


def test_jacobi_leaves_out_the_block_in_which_the_text_ends() -> None:
    target = ScriptTarget([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    found = curves.jacobi(
        target, [(11, 11)], block=4, temperatures=(0,), max_new_tokens=8, eos_token_ids=(target.text[7],)
    )
    assert found["curves"][0]["blocks"] == 1
    with pytest.raises(BadParameter, match="no text at temperature 0 is as long as a block of 4"):
        curves.jacobi(target, [(11, 11)], block=4, max_new_tokens=8, eos_token_ids=(target.text[3],))
    with pytest.raises(BadParameter, match="block=1 is not possible"):
        curves.jacobi(target, PROMPTS, block=1)
    with pytest.raises(Refused, match="cannot read a block"):
        curves.jacobi(ToyTarget(capabilities=frozenset()), PROMPTS)


# ---------------------------------------------------------------------------------------------------------- pool


def test_pool_history() -> None:
    target, options = ToyTarget(), {"window": 3, "ngram": 3, "guesses": 4}
    found = curves.pool(target, [PROMPT], options, max_new_tokens=60)
    steps = found["steps"]
    # 1 2 3 1 2: three 3-grams, of three first tokens
    assert steps[0] == {"step": 0, "prompts": 1, "tokens": 0, "keys": 3, "ngrams": 3, "hit": 0, "accepted": 0}
    for name in ("tokens", "keys", "ngrams"):
        values = [row[name] for row in steps]
        assert values == sorted(values)
    assert all(row["accepted"] <= row["hit"] for row in steps)
    drafter = Lookahead(**options)
    decoded = run(target, drafter, stop=StopParams(max_new_tokens=60))
    figures = drafter.figures()
    assert sum(row["hit"] for row in steps) / (len(steps) - 1) == pytest.approx(figures["hit_rate"], abs=1e-4)
    assert found["at"][-1]["tokens"] in (32, 60)
    assert sum(row["accepted"] for row in steps) == sum(
        any(step.proposal.sources[node] == "guess" for node in step.verdict.path[1:]) for step in decoded.steps
    )
    assert found["at"][0]["hit"] is None
    overall = found["overall"]
    assert overall["steps"] == len(steps) - 1
    assert overall["hit"] == pytest.approx(figures["hit_rate"], abs=1e-4)
    shares = overall["accepted"] * overall["per_accepted"] + (1 - overall["accepted"]) * overall["per_other"]
    assert overall["acceptance_length"] == pytest.approx(shares, abs=1e-3)
    assert overall["acceptance_length"] == pytest.approx(steps[-1]["tokens"] / overall["steps"], abs=1e-3)
    json.dumps(found, allow_nan=False)


def test_pool_averages_over_the_texts_that_came_so_far() -> None:
    def row(tokens: int, keys: int, hit: int) -> dict[str, int]:
        return {"tokens": tokens, "keys": keys, "ngrams": 2 * keys, "hit": hit, "accepted": 0}

    histories = [[row(0, 1, 0), row(20, 3, 1)], [row(0, 3, 0), row(1, 5, 0), row(16, 7, 1), row(40, 9, 1)]]
    first, second, third, fourth = by_step(histories)
    assert (first["keys"], first["prompts"], second["hit"], third["prompts"]) == (2, 2, 0.5, 1)
    assert (fourth["ngrams"], fourth["tokens"]) == (18, 40)
    zero, sixteen, longest = by_tokens(histories, 32)
    assert (zero["tokens"], zero["keys"], zero["hit"]) == (0, 2, None)
    assert (sixteen["prompts"], sixteen["keys"], sixteen["hit"]) == (2, 5, pytest.approx(2 / 3, abs=1e-4))
    assert (longest["tokens"], longest["prompts"], longest["keys"]) == (32, 1, 9)


# --------------------------------------------------------------------------------------------------------- match


@pytest.mark.parametrize(
    ("tokens", "longest", "length"),
    [
        ([], 3, 0),
        ([1], 3, 0),
        ([1, 2], 3, 0),
        ([1, 1], 3, 1),
        ([1, 1, 1], 3, 2),  # an earlier end may overlap the last
        ([1, 2, 3, 9, 1, 2, 3], 8, 3),
        ([1, 2, 3, 9, 1, 2, 3], 2, 2),
        ([7, 2, 3, 1, 2, 3, 5, 2, 3], 8, 2),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], 8, 4),
        ([5, 3, 4, 3], 8, 1),
    ],
)
def test_match_length(tokens: list[int], longest: int, length: int) -> None:
    assert match_length(tokens, longest) == length


@given(st.lists(st.integers(0, 2), max_size=14), st.integers(1, 5))
def test_match_length_is_what_the_definition_says(tokens: list[int], longest: int) -> None:
    lengths = [
        n
        for n in range(1, longest + 1)
        if any(tokens[end - n : end] == tokens[len(tokens) - n :] for end in range(n, len(tokens)))
    ]
    assert match_length(tokens, longest) == max(lengths, default=0)


def test_match_by_hand() -> None:
    """Period 5, drafts of 2: nothing matches 5, then "1" does, then "1 2 3 4"."""
    target = ScriptTarget([1, 2, 3, 4, 5])
    found = curves.match(target, [(1, 2, 3, 4, 5)], num_tokens=2, max_new_tokens=7)
    assert [(row["match"], row["drafts"], row["accepted"]["mean"]) for row in found["rows"]] == [(1, 1, 2), (4, 1, 2)]
    assert (found["steps"], found["without_match"]) == (3, 1)
    assert all(row["first_right"] == row["all_right"] == 1 for row in found["rows"])


def test_match_agrees_with_the_drafter() -> None:
    """The length that is derived from the text is the one that the drafter's tables had."""
    target = ToyTarget(vocab_size=8)
    drafter = PromptLookup(max_ngram=4, num_tokens=3, max_matches=10_000)
    tokens = list(PROMPT)
    for step in run(target, drafter, stop=StopParams(max_new_tokens=60)).steps:
        length = match_length(tokens, 4)
        if len(step.tree) > 1:
            assert length >= 1
            ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == tokens[-length:]]
            follows = {tokens[e] for e in ends}
            assert int(step.tree.tokens[1]) in follows
        tokens += step.tokens
    found = curves.match(target, PROMPTS, max_ngram=4, num_tokens=3, max_new_tokens=60)
    assert 0 < sum(row["drafts"] for row in found["rows"]) <= found["steps"] - found["without_match"]
    for row in found["rows"]:
        value, known = row["accepted"], row["drafts"] >= LEAST_DRAFTS
        assert value["low"] <= value["mean"] <= value["high"] <= 3 if known else value["low"] is value["high"] is None
        assert row["all_right"] <= row["first_right"] <= row["accepted"]["mean"] + 1e-9
    assert any(row["drafts"] >= LEAST_DRAFTS for row in found["rows"])
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("figure", [curves.compression, curves.jacobi, curves.pool, curves.match])
def test_no_prompts(figure: Any) -> None:
    with pytest.raises(BadParameter, match="there are no prompts"):
        figure(ToyTarget(), [])


def test_a_target_without_trees_is_refused_by_name() -> None:
    target = ToyTarget(capabilities=frozenset({CHAIN}))
    for figure in (curves.compression, curves.pool):
        with pytest.raises(Refused, match="'lookahead' needs tree"):
            figure(target, PROMPTS)  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------------ expected


@pytest.mark.parametrize(
    ("alpha", "length", "tokens"),
    [(0.5, 0, 1), (0.5, 1, 1.5), (0.5, 3, 1.875), (0.8, 5, 3.68928), (0.9, 2, 2.71)],
)
def test_expected_tokens_by_hand(alpha: float, length: int, tokens: float) -> None:
    assert expected_tokens(alpha, length) == pytest.approx(tokens)
    assert expected_speedup(alpha, length, 0.1) == pytest.approx(tokens / (1 + 0.1 * length))


def test_expected_tokens_by_simulation() -> None:
    right = np.random.default_rng(0).random((100_000, 5)) < 0.7
    accepted = np.logical_and.accumulate(right, axis=1).sum(axis=1)
    assert 1 + accepted.mean() == pytest.approx(expected_tokens(0.7, 5), abs=0.02)


def test_expected() -> None:
    found = curves.expected([0.5, 0.9, 0.5], length=3, cost=0.1, longest=4)
    half, high = found["rows"]
    assert (half["tokens"], half["speedup"]) == (1.875, pytest.approx(1.875 / 1.3, abs=1e-4))
    # By hand: 1, 1.3636, 1.4583, 1.4423 for K = 0..3 at alpha 0.5.
    assert (half["best_length"], half["best_speedup"]) == (2, pytest.approx(1.75 / 1.2, abs=1e-4))
    assert high["best_length"] > 4  # sought beyond the curve
    assert half["curve"]["length"] == [0, 1, 2, 3, 4]
    assert half["curve"]["tokens"][:3] == [1, 1.5, 1.75]
    (free,) = curves.expected([0.5], cost=0)["rows"]
    assert (free["best_length"], free["best_speedup"]) == (None, None)
    (dear,) = curves.expected([0.1], cost=0.5)["rows"]
    assert (dear["best_length"], dear["best_speedup"]) == (0, 1)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_an_alpha_that_cannot_be(alpha: float) -> None:
    with pytest.raises(BadParameter, match="is not possible: an acceptance rate lies between 0 and 1"):
        curves.expected([0.5, alpha])


# ------------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def lab(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command of research with the tiny model as the bundled one."""
    monkeypatch.setattr(loading, "bundled", lambda: str(tiny_folder))

    def invoke(*args: str) -> Result:
        result = CliRunner(env={"COLUMNS": "160"}).invoke(research, args)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


FEW = ("--task", "code", "--task", "maths", "--limit", "1", "--max-new-tokens", "24")
RUNS = {
    "cost": (["--contexts", "16,40", "--sizes", "1,2,4", "--rounds", "3", "--task", "code"], "T(n)/T(1)"),
    "compression": ([*FEW, "--windows", "1,2,4", "--ngrams", "3,5"], "distinct 4-grams"),
    "jacobi": ([*FEW, "--block", "6"], "tokens per iteration"),
    "pool": ([*FEW, "-W", "3", "-N", "3", "-G", "4"], "hit rate"),
    "match": ([*FEW, "--max-ngram", "4"], "steps had no match"),
    "expected": (["-a", "0.5,0.8"], "1.969"),
    "calibration": ([*FEW, "-o", "nodes=6"], "conditional: "),
    "growth": (["--sizes", "200,400", "--rounds", "2", "--prefill", "0.001"], "as at 200"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_command_writes_its_files(lab: Any, tmp_path: Path, name: str) -> None:
    args, word = RUNS[name]
    result = lab(name, *args, "--out", str(tmp_path / "v1.2"))
    assert result.exit_code == 0
    assert word in result.stdout
    found = json.loads((tmp_path / "v1.2.json").read_text())
    assert (found["figure"], bool(found["conditions"]["versions"]["leapahead"])) == (name, True)
    assert (tmp_path / "v1.2.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "v1.2.svg").read_bytes()
    assert b"<svg" in svg
    if name not in ("cost", "expected", "growth"):
        assert found["conditions"]["data"] == "1 code, 1 maths prompts"
    plots.save(found, tmp_path / "again")  # the JSON is all that a figure needs
    assert (tmp_path / "again.svg").read_bytes() == svg


@pytest.mark.slow
def test_prompts_from_a_folder(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "humaneval.jsonl").write_text('{"prompt": "def f(x):"}\n{"prompt": "def g(x):"}\n')
    (tmp_path / "gsm8k_test.jsonl").write_text('{"question": "How many are there?"}\n')
    args = ("match", "--data", str(tmp_path), "--limit", "1", "--max-new-tokens", "8")
    assert lab(*args, "--out", str(tmp_path / "m.png")).exit_code == 0
    found = json.loads((tmp_path / "m.json").read_text())  # an ending of ours is not doubled
    assert found["conditions"]["data"] == "1 humaneval, 1 gsm8k prompts"


@pytest.mark.slow
def test_conversations_and_prompts_that_do_not_fit(lab: Any, tmp_path: Path) -> None:
    rows = [{"category": "writing", "turns": [turn, "Again."]} for turn in ("Write.", "x y " * 400)]
    rows.append({"category": "stem", "turns": ["Why?"]})
    (tmp_path / "mt_bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ("match", "--data", str(tmp_path), "--max-new-tokens", "8", "--out", str(tmp_path / "m"))
    result = lab(*args, "--task", "mt_bench/writing")
    assert result.exit_code == 0
    assert result.stderr.startswith("mt_bench/writing: 1 of 2 prompts left out: with 8 new tokens they do not fit the")
    assert json.loads((tmp_path / "m.json").read_text())["conditions"]["data"] == "1 mt_bench/writing prompts"
    assert lab(*args).exit_code == 0
    assert json.loads((tmp_path / "m.json").read_text())["conditions"]["data"] == "2 mt_bench prompts"


def test_conversations_are_encoded_by_the_template(tiny_folder: Path) -> None:
    loaded = loading.load(str(tiny_folder))
    chat: tasks.Prompt = [{"role": "user", "content": "a b"}]
    task = tasks.Task("chat", [chat, "a b"])
    assert tasks.has_template(loaded.tokenizer)
    through, plain = tasks.encoded(task, loaded)
    assert through == encode(chat, loaded.tokenizer, loaded.target.info) != plain
    assert tasks.encoded(task, loaded, loaded.target.info.context_length) == []
    tokenizer: Any = loaded.tokenizer
    tokenizer.chat_template = None
    assert tasks.encoded(task, loaded) == [plain, plain]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["match", "--data", "/no/such/folder"], "error: there is no folder '/no/such/folder' of prompts"),
        (["match", "--data", "{here}"], "error: {here} holds prompts in none of the files humaneval.jsonl"),
        (["expected", "-a", "1"], "error: --alpha=1 is not possible: an acceptance rate lies between 0 and 1"),
        (["expected", "-a", "half"], "error: --alpha half is not possible: give numbers"),
        (["expected", "-c", "-1"], "error: K=5 and c=-1 must be at least 0"),
        (["expected", "-k", "-1"], "error: K=-1 and c=0.05 must be at least 0"),
        (["expected", "--out", "/no/such/folder/x"], "error: --out /no/such/folder/x cannot be written: there is no"),
        (["cost", "--sizes", "1,,2"], "error: --sizes 1,,2 is not possible: give numbers"),
        (["cost", "--contexts", "500"], "error: a context of 500 tokens and a chain of 128 do not fit into the 512"),
        (["cost", "-m", "/no/such/model"], "error: there is no folder '/no/such/model'"),
        (["compression", "--windows", "1", "--ngrams", "3"], "error: alpha and f cannot be fitted to fewer than three"),
        (["compression", "--windows", "0,1,2"], "error: window=0 is not possible"),
        (["jacobi", "--block", "1"], "error: --block=1 is not possible"),
        (["jacobi", "-t", "-1"], "error: --temperature=-1.0 is not possible"),
        (["pool", "-t", "-1"], "error: --temperature=-1.0 is not possible"),
        (["growth", "--limit", "2"], "error: --task code chooses among the prompts of --data; give --data, too"),
        (["growth", "--prefill", "nan"], "error: --prefill=nan is not possible: it must be a number of seconds"),
        (["match", "--task", "cod"], "error: there is no task 'cod' (did you mean 'code'?)"),
        (["pool", "-o", "widow=3"], "error: drafter 'lookahead' has no option 'widow'"),
        (["match", "--min-ngram", "9"], "error: --min-ngram=9 must be at most --max-ngram=8"),
    ],
)
def test_bad_input_is_one_sentence(lab: Any, tmp_path: Path, args: list[str], sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    here = str(tmp_path / "empty")
    out = [] if "--out" in args else ["--out", str(tmp_path / "x")]
    code = [] if args[0] == "expected" else ["--task", "code"]  # prompts that fit
    result = lab(*(arg.replace("{here}", here) for arg in args), *code, *out)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(sentence.replace("{here}", here))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["crowded-loading", "--limit", "nan"], "--limit=nan is not possible: it must be a number of seconds from 0.1"),
        (["crowded-loading", "--limit", "-1"], "--limit=-1.0 is not possible: it must be a number of seconds from 0.1"),
        (["regret", "--case", "nothere"], "no case has 'nothere' in its name; names are such as 'right, "),
        (["exact-families", "{tests}", "--engine", "nothere"], "there is no engine 'nothere'; there are Transformers"),
    ],
)
def test_what_is_unknown_is_refused_before_a_file_is_written(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], sentence: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "x.json").write_text('{"rows": []}')
    out = ["--out", str(tmp_path / ("x.json" if args[0] == "exact-families" else "x"))]
    result = lab(*(arg.replace("{tests}", str(Path(__file__).parent)) for arg in args), *out)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {sentence}")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json", '{"rows": []}')]


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["1", "2"])
def test_steps_too_few_to_have_all_kinds(lab: Any, monkeypatch: pytest.MonkeyPatch, steps: str) -> None:
    for name in ("overhead", "whole_steps"):
        monkeypatch.setattr(toy_overhead, name, lambda *_, **__: [{}])
    assert lab("overhead", "--toy", "--steps", steps, "--context", "800").exit_code == 0


@pytest.mark.parametrize("line", ['{"prompt": ', '{"question": "x"}', "7"])
def test_a_damaged_prompt_file(lab: Any, tmp_path: Path, line: str) -> None:
    (tmp_path / "humaneval.jsonl").write_text(line + "\n")
    result = lab("match", "--data", str(tmp_path), "--out", str(tmp_path / "x"))
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith(f"error: {tmp_path / 'humaneval.jsonl'}, line 1")


def test_an_out_that_is_a_folder(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "x.svg").mkdir()
    result = lab("expected", "--out", str(tmp_path / "x"))
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "cannot be written" in result.stderr
    assert not (tmp_path / "x.json").exists()


def test_a_full_disk_loses_nothing(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "x.png"))

    monkeypatch.setattr(plots, "save", full)
    result = lab("expected", "--out", str(tmp_path / "x"))
    assert result.exit_code == 2
    assert result.stderr == f"error: {tmp_path / 'x.png'} cannot be written: No space left on device\n"
    assert "3.689" in result.stdout
    assert json.loads((tmp_path / "x.json").read_text())["figure"] == "expected"


@pytest.mark.slow
def test_figures_of_the_documents(tiny_folder: Path, tmp_path: Path) -> None:
    """A JSON file and a plot each; what is finished stays if the rest is not."""
    data, folder = tmp_path / "data", tmp_path / "figures"
    data.mkdir()
    (data / "humaneval.jsonl").write_text('{"prompt": "def f(x):"}\n')
    (data / "gsm8k_test.jsonl").write_text('{"question": "How many?"}\n')
    loaded = loading.load(str(tiny_folder))
    shown: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        shown.append(what)
        if what.startswith("temperature 1"):
            raise KeyboardInterrupt

    drawn.draw("expected", loaded, data, folder, progress)
    with pytest.raises(KeyboardInterrupt):
        drawn.draw("match", loaded, data, folder, progress)
    assert shown == ["greedy, prompt_lookup", "greedy, prompt_lookup", "temperature 1, prompt_lookup"]
    assert sorted(path.name for path in folder.iterdir()) == [
        *("expected.json", "expected.svg", "match.json", "match.svg")
    ]
    text = (folder / "match.json").read_text()
    assert (text.count("\n"), json.loads(text)["conditions"]["data"]) == (1, "1 humaneval, 1 gsm8k prompts")


def test_what_is_not_installed(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        result = lab("expected", "--out", str(tmp_path / "x"))
        assert (
            result.stderr == 'error: a plot needs matplotlib, which is not installed: pip install "leapahead[bench]"\n'
        )
        assert not (tmp_path / "x.json").exists()
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(LeapaheadError, match=r"needs scipy, .* pip install \"leapahead\[bench\]\""):
        curves.compression(ToyTarget(), PROMPTS)


def test_help(lab: Any) -> None:
    """Every command can be loaded, and documents its options and itself as the list of commands does."""
    listed = lab("--help").stdout
    for name in COMMANDS:
        command = research.get_command(click.Context(research), name)
        assert command is not None
        assert name in listed
        assert lab(name, "--help").exit_code == 0
        assert all(getattr(option, "help", "") for option in command.params if option.param_type_name == "option")


@pytest.mark.slow
def test_rows_of_prompts(lab: Any) -> None:
    given = lab("prompt-rows", "--task", "code", "--limit", "1", "--max-new-tokens", "17")
    assert given.exit_code == 0, given.output
    rows = [list(map(float, line.split())) for line in given.stdout.splitlines() if re.fullmatch(r"[\d. ]+", line)]
    rows = [row for row in rows if row]
    assert [row[:3] for row in rows] == [[4, 0, 1], [16, 0, 1], [4, 1, 1], [16, 1, 1]]
    assert all(min(row[3:5]) >= 1 and min(row[5:]) > 0 for row in rows)


@pytest.mark.slow
def test_a_figure_without_a_fit(tmp_path: Path) -> None:
    found = curves.compression(ToyTarget(), PROMPTS, ngrams=(3,), windows=(1, 2, 4), max_new_tokens=12)
    plots.save({**found, "fit": None, "fits": {}, "note": "nothing"}, tmp_path / "x")
    assert (tmp_path / "x.png").is_file()


def test_generations_are_closed() -> None:
    target = ToyTarget()
    closed: list[ToySession] = []
    opened: list[ToySession] = []

    class Watched(ToySession):
        def close(self) -> None:
            closed.append(self)
            super().close()

    def open_(*args: Any, **options: Any) -> ToySession:
        session = ToyTarget.open(target, *args, **options)
        session.__class__ = Watched
        opened.append(session)
        return session

    target.open = open_  # type: ignore[method-assign]
    curves.cost(target, [1], contexts=(3,), sizes=(2,), rounds=1)
    curves.jacobi(target, PROMPTS, block=4, temperatures=(0,), max_new_tokens=8)
    curves.match(target, PROMPTS, max_new_tokens=8)
    assert len(opened) == 7
    assert set(map(id, opened)) == set(map(id, closed))
