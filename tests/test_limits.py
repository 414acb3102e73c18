"""`research limits`: gains in the measured times of forwards. Times are given or simulated, texts are real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from leapahead.bench import tasks
from leapahead.bench.conditions import silent
from leapahead.models import loading
from leapahead.models.toy import ToyTarget
from research.limits import SIZES, TEMPERATURES, Clock, gains, main, ratio, times

FLAT = dict.fromkeys(SIZES, 0.01)
STEEP = {n: 0.01 * n for n in SIZES}


@pytest.fixture(scope="module")
def bundled() -> loading.Loaded:
    return loading.load()


@pytest.fixture(scope="module")
def sets() -> list[tasks.Task]:
    return (
        tasks.read(None, ["code"], 2) if "code" in {task.name for task in tasks.read(None)} else tasks.read(None, (), 1)
    )


def test_where_rows_are_free_each_step_gains_what_it_accepts(bundled: loading.Loaded, sets: list[tasks.Task]) -> None:
    row = {"gains": list(gains(bundled, sets, FLAT, 1, 24))}
    for each in row["gains"]:
        assert each["seconds"] == pytest.approx(0.01 * each["steps"])
    greedy = [each for each in row["gains"] if each["temperature"] == 0.0]
    accepted = sum(each["tokens"] for each in greedy) / sum(each["steps"] for each in greedy)
    assert accepted > 1.5
    assert ratio(row, 0.01, 0.0) == pytest.approx(accepted)
    assert ratio(row, 0.02, 0.0) == pytest.approx(2 * accepted)  # beside a slower plain step


def test_where_each_row_costs_a_whole_step_nothing_is_lost(bundled: loading.Loaded, sets: list[tasks.Task]) -> None:
    row = {"gains": list(gains(bundled, sets, STEEP, 1, 24))}
    assert min(ratio(row, 0.01, temperature) for temperature in TEMPERATURES) > 0.999


def test_drafted_steps_are_padded(bundled: loading.Loaded, sets: list[tasks.Task]) -> None:
    """Only multiples of 64 rows are possible, and they are dear: nothing is drafted."""
    padded = list(gains(bundled, sets, {1: 0.01, 64: 1.0}, 64, 12))
    assert all(each["steps"] == each["tokens"] for each in padded)
    assert all(each["seconds"] == pytest.approx(0.01 * each["steps"]) for each in padded)


def test_the_clock_leaves_the_target_as_it_was() -> None:
    target = ToyTarget()
    whole = target.step
    clock = Clock(target, FLAT, 4)
    assert target.step != whole
    clock.close()
    assert target.step == whole


def test_every_size_that_a_target_computes_is_measured() -> None:
    found = times({"all": ToyTarget(64), "small": ToyTarget(64, max_nodes=6)}, 1, silent)
    assert list(found["all"]) == list(SIZES)
    assert list(found["small"]) == [1, 2, 3, 4, 5, 6]
    assert all(seconds > 0 for each in found.values() for seconds in each.values())


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    given = ["bundled", "--limit", "1", "--rounds", "1", "--max-new-tokens", "8", "--out", str(file)]
    result = CliRunner().invoke(main, given, catch_exceptions=False)
    assert result.exit_code == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert {each["temperature"] for each in row["gains"]} == set(TEMPERATURES)
    assert f"{ratio(row, row['seconds']['1'], 0.0):.2f}" in result.output


def test_a_missing_folder_of_prompts_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bundled", "--data", str(tmp_path / "none")])
    assert result.exit_code != 0
    assert "there is no folder" in result.output
