"""The simulated schedules of methods for several devices, against closed formulas and against what devices compute."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers import GREEDY, PROMPT, FixedLatency
from parallel import divided
from transformers import LlamaConfig, LlamaForCausalLM

from leapahead import Engine, Request, StopParams
from leapahead.core.errors import Refused
from leapahead.models.toy import ToyTarget
from leapahead.models.transformers.model import TransformersTarget
from research.cli import main
from research.devices.measured import layer_times, recorded
from research.devices.schedules import (
    Layers,
    Step,
    fitted_line,
    lookahead,
    overlapped,
    overlapped_formula,
    pipelined,
    pipelined_formula,
    rows_of,
    serial,
    serial_formula,
)

FREE = Layers(12, lambda rows: 1.0, 0.0)  # layers, each of which takes a second for any number of rows


def times(rows: int) -> float:
    return 1.0 + 0.03 * (rows - 1)


def bits(alpha: float, count: int = 40_000, seed: int = 0) -> list[bool]:
    rng = random.Random(seed)
    return [rng.random() < alpha for _ in range(count)]


@pytest.mark.parametrize("exit_after", [6, 9, 11])
def test_pipelined_decoding_takes_the_time_of_the_papers_formula(exit_after: int) -> None:
    ranks = [0 if right else 3 for right in bits(0.6, 500)]
    run = pipelined(ranks, FREE, exit_after, candidates=2, devices=3, message=0.0)
    correct = sum(rank < 2 for rank in ranks[:-1]) / (len(ranks) - 1)
    assert run.seconds == pytest.approx(pipelined_formula(12, exit_after, len(ranks), correct))
    assert run.tokens == 500


def test_what_the_formula_leaves_out_makes_pipelined_decoding_slower() -> None:
    ranks = [0] * 100
    ideal = pipelined(ranks, FREE, 6, candidates=4, devices=5, message=0.0).seconds
    assert pipelined(ranks, FREE, 6, candidates=4, devices=5, message=0.5).seconds > ideal
    assert pipelined(ranks, Layers(12, times, 0.0), 6, candidates=4, devices=2, message=0.0).seconds > ideal
    assert pipelined(ranks, Layers(12, lambda rows: 1.0, 2.0), 6, candidates=4, devices=5, message=0.0).seconds > ideal
    late = pipelined(ranks, FREE, 6, candidates=4, devices=5, message=100.0)  # nothing can be known ahead
    assert late.seconds == pytest.approx(12 * 100)


def test_devices_of_pipelined_decoding_are_busy_for_every_candidate() -> None:
    run = pipelined([5] * 3, FREE, 8, candidates=2, devices=3, message=0.0)
    assert run.seconds == 36
    assert run.busy == 36 + 3 * 2 * 4  # four layers of two candidates beside each token, all of them lost


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("gamma", [1, 4, 9])
def test_drafting_in_turns_and_ahead_take_the_time_of_the_formulas(alpha: float, gamma: int) -> None:
    right = bits(alpha)
    run = serial(right, gamma, 0.1, times)
    assert run.seconds / run.tokens == pytest.approx(serial_formula(alpha, gamma, 0.1, times), rel=0.02)
    for draft, message in ((0.1, 0.0), (0.4, 0.05)):
        ahead = overlapped(right, gamma, draft, times, message)
        expected = overlapped_formula(alpha, gamma, draft, times, message)
        assert ahead.seconds / ahead.tokens == pytest.approx(expected, rel=0.02)


def test_an_overlapped_draft_that_is_always_right_hides_the_shorter_of_both() -> None:
    right = [True] * 1000
    run = overlapped(right, gamma=5, draft=0.2, times=lambda rows: 1.0, message=0.0)
    assert run.tokens / run.seconds == pytest.approx(5, rel=0.01)  # five tokens a forward, which takes a second
    assert run.busy / (2 * run.seconds) == pytest.approx(1.0)
    never = overlapped([False] * 100, gamma=5, draft=0.2, times=lambda rows: 1.0, message=0.0)
    assert never.seconds == 100


def test_the_rows_of_a_schedule_are_those_that_devices_compute() -> None:
    sizes, length = (5, 4, 5), 40
    (steps,) = recorded(ToyTarget(), [list(PROMPT)], sizes, length, ())
    for count in (2, 3):
        computed: list[list[int]] = [[] for _ in range(count)]

        class Counting(ToyTarget):
            def __init__(self, seen: list[int]) -> None:
                super().__init__()
                self.seen = seen

            def step(self, sessions: Any, trees: Any, *args: Any, **more: Any) -> Any:
                self.seen.extend(map(len, trees))
                return super().step(sessions, trees, *args, **more)

        target = divided([Counting(seen) for seen in computed])
        engine = Engine(target, latency=FixedLatency(target, {1: 1.0}))
        drafter = engine.drafter("lookahead", window=5, ngram=4, guesses=5)
        request = Request(list(PROMPT), drafter, GREEDY, StopParams(max_new_tokens=length))
        engine.run([engine.submit(request)])
        target.close()
        assert rows_of(steps, count) == [list(rows) for rows in zip(*computed, strict=True)]


def test_divided_branches_take_the_time_of_the_largest_part_and_two_messages() -> None:
    steps = [Step((-1, 0, 1, 0, 3), (0, 1, 2)), Step((-1,), (0,))]
    run = lookahead(steps, 2, lambda rows: float(rows), message=0.25)
    # first 3 rows on each device; then the root alone, and on the other device the two tokens that it lacks
    assert (run.seconds, run.tokens, run.steps, run.busy) == (3.25 + 0.25 + 3.5, 4, 2, 6 + 1 + 3)
    assert lookahead(steps, 1, lambda rows: float(rows), message=0.25).seconds == 6


def test_a_line_is_fitted_to_times() -> None:
    assert fitted_line([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)]) == pytest.approx((1.0, 2.0))


@pytest.mark.slow
def test_a_layer_of_few_cannot_be_timed() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    with pytest.raises(Refused, match="small has 2 layers, and three are needed to time one; give another model"):
        layer_times(TransformersTarget(LlamaForCausalLM(config).eval(), name="small"))


def test_bad_values_of_the_command(tmp_path: Path) -> None:
    for options, message in {
        ("--max-new-tokens", "500"): "at most 250 tokens",
        ("--out", str(tmp_path / "nowhere" / "devices")): "there is no folder",
    }.items():
        result = CliRunner().invoke(main, ["devices", *options])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert message in result.stderr


@pytest.mark.slow
def test_the_command_measures_simulates_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "devices"
    options = ["--limit", "1", "--max-new-tokens", "24", "--seconds", "1", "--dtype", "float32", "--out", str(out)]
    result = CliRunner().invoke(main, ["devices", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(out.with_suffix(".json").read_text())
    assert {row["devices"] for row in found["lookahead"]} == {1, 2, 4, 8}
    assert all(0 < row["within"]["1"] <= row["within"]["8"] <= 1 for row in found["exits"])
    assert all(row["speedup"] > 0 for part in ("lookahead", "pipelined", "overlapped") for row in found[part])
    assert out.with_suffix(".svg").stat().st_size > 10_000
