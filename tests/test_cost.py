"""The cost curve: what a measurement finds, what steps correct, what survives on the disk. The clock is our own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import exp
from pathlib import Path
from typing import Any

import pytest

from leapahead.core.errors import CacheFull, LeapaheadError
from leapahead.drafters.base import Forward
from leapahead.models.base import CHAIN
from leapahead.models.toy import ToyTarget
from leapahead.planner import profile
from leapahead.planner.latency import ASSUMED, SIZES, CostCurve, fitted, measure, rounds, samples
from leapahead.planner.profile import Machine, Place, machine_of

SEEDS = range(5)


class Clock:
    """Shows what the target has taken so far."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(ToyTarget):
    """Its forwards take what they are told to."""

    def __init__(self, seconds: Callable[[int], float], **options: Any) -> None:
        super().__init__(**options)
        self.seconds, self.clock, self.stepped, self.open_sessions = seconds, Clock(), list[int](), 0

    def open(self, tokens: Sequence[int], *rest: Any, **options: Any) -> Any:
        self.clock.now += 0.0 if len(tokens) == 1 else self.seconds(len(tokens) - 1)
        session = super().open(tokens, *rest, **options)
        self.open_sessions += 1
        close = session.close

        def closing() -> None:
            self.open_sessions -= 1
            close()

        session.close = closing  # type: ignore[method-assign]
        return session

    def step(self, sessions: Any, trees: Any) -> Any:
        rows = sum(map(len, trees))
        self.stepped.append(rows)
        self.clock.now += self.seconds(rows)
        return super().step(sessions, trees)


def line(slope: float, one: float = 0.02) -> Callable[[int], float]:
    """T(n) with each further node at `slope` of the first."""
    return lambda n: one * (1 + slope * (n - 1))


def sloping(slope: float) -> CostCurve:
    return CostCurve({n: line(slope)(n) for n in SIZES})


class World:
    """A true T(n) under noise: lognormal, and now and then ten times as long."""

    def __init__(self, true: Callable[[int], float], seed: int, noise: float = 0.1, outliers: float = 0.01) -> None:
        self.true, self.random, self.noise, self.outliers = true, random.Random(seed), noise, outliers

    def live(self, curve: CostCurve, steps: int, sizes: Sequence[int] = (1, 4, 8), pace: float = 1.0) -> None:
        for _ in range(steps):
            n = self.random.choice(sizes)
            accident = 10.0 if self.random.random() < self.outliers else 1.0
            curve.observe(n, pace * self.true(n) * exp(self.random.gauss(0, self.noise)) * accident)

    def error(self, curve: CostCurve, sizes: Sequence[int] = (4, 8)) -> float:
        """Greatest relative one of T(n)/T(1)."""
        relative = curve.relative()
        return max(abs(relative[n] / (self.true(n) / self.true(1)) - 1) for n in sizes)


# ---------------------------------------------------------------------------------------------------------- curve


def test_the_curve_goes_through_what_was_measured_and_on_behind_it() -> None:
    curve = CostCurve({1: 1.0, 2: 1.2, 4: 1.4, 8: 2.4})
    assert [round(curve(n), 6) for n in (1, 2, 3, 4, 6, 8, 16)] == [1.0, 1.2, 1.3, 1.4, 1.9, 2.4, 4.4]
    assert curve.relative()[4] == pytest.approx(1.4)
    assert CostCurve({int(n): s for n, s in curve.as_dict().items()})(6) == pytest.approx(1.9)
    for broken in ({}, {1: 0.0}, {1: float("nan")}, {1: float("inf")}, {0: 1.0}, {1: -1.0, 2: 1.0}):
        with pytest.raises(ValueError, match="positive seconds"):
            CostCurve(broken)


def test_a_curve_that_falls_at_its_end_does_not_fall_for_ever() -> None:
    curve = CostCurve({1: 1.0, 64: 3.0, 96: 2.5})
    assert curve(96) == curve(200) == pytest.approx(2.5)


def test_of_one_size_the_others_are_assumed() -> None:
    curve = CostCurve({1: 2.0})
    assert curve(1) == pytest.approx(2.0)
    assert curve(11) == pytest.approx(2.0 * (1 + 10 * ASSUMED))
    rows = CostCurve({4: 2.0})  # of four sequences
    assert rows(2) == rows(4) == pytest.approx(2.0)
    assert rows.relative()[4] == 1.0
    assert CostCurve({500: 1.0})(1000) > 1.0


# ------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("slope", [0.05, 0.13, 0.5])
@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_a_slope_that_was_wrong_by_two_is_right_after_sixty_steps(slope: float, wrong: float, seed: int) -> None:
    world, curve = World(line(slope), seed), sloping(wrong * slope)
    world.live(curve, 60)
    assert world.error(curve) < 0.1


def test_nodes_that_are_not_free_are_found_out_before_they_have_cost_much() -> None:
    """The case in which drafting is a loss: 8 nodes seem free, and take 1.9 plain steps."""
    world, curve = World(line(0.13), 0), sloping(0.005)
    world.live(curve, 30)
    assert curve.relative()[8] > 1.7
    assert curve.relative()[16] > 1.9  # which was never decoded: its neighbours were


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("slope", [0.02, 0.13, 0.3])
def test_a_curve_that_was_guessed_is_right_after_thirty_steps(slope: float, seed: int) -> None:
    world, curve = World(line(slope), seed, outliers=0.0), CostCurve.guessed()
    world.live(curve, 30, sizes=(1, 2, 4, 8, 12))
    assert world.error(curve, (2, 4, 8, 12)) < 0.15
    assert curve(1) == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pace", [0.5, 2.0, 4.0])
def test_a_machine_that_changes_its_speed_is_followed_within_ten_steps(pace: float, seed: int) -> None:
    world, curve = World(line(0.1), seed), sloping(0.1)
    world.live(curve, 50)
    world.live(curve, 10, pace=pace)
    assert curve(1) == pytest.approx(0.02 * pace, rel=0.2)
    assert world.error(curve) < 0.12  # and its shape stays
    world.live(curve, 10)
    assert curve(1) == pytest.approx(0.02, rel=0.2)


def test_a_context_that_grows_makes_all_sizes_dearer() -> None:
    world, curve = World(line(0.1), 0, noise=0.05), sloping(0.1)
    for step in range(400):
        world.live(curve, 1, pace=1 + step / 400)
    assert curve(1) == pytest.approx(0.04, rel=0.12)
    assert world.error(curve) < 0.1


def test_a_shape_that_was_wrong_is_learned_while_the_pace_changes() -> None:
    curve = CostCurve({1: 1.0, 8: 1.1})
    world = World(lambda n: 1.0 if n == 1 else 3.0, 0)
    for pace in (1.0, 2.0, 3.0):
        world.live(curve, 100, sizes=(1, 8), pace=pace)
    assert curve.relative()[8] == pytest.approx(3.0, rel=0.12)


def test_a_jump_of_the_clock_teaches_nothing_and_a_lasting_change_does() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    for seconds in (3600.0, -5.0, 0.0, float("inf"), float("nan"), -3600.0):
        curve.observe(1, seconds)
    curve.observe(0, 1.0)
    assert curve(1) == pytest.approx(1.0)
    assert curve.relative()[8] == pytest.approx(2.0)
    for _ in range(12):
        curve.observe(1, 10.0)
    assert curve(1) == pytest.approx(10.0, rel=0.01)
    assert curve.relative()[8] == pytest.approx(2.0, rel=0.05)


def test_what_a_size_needs_when_it_comes_first_is_no_measure_of_it() -> None:
    """As when a kernel is compiled, or a graph captured, for every new size."""
    curve = sloping(0.05)
    for n in range(2, 30):
        curve.observe(1, 0.02)
        curve.observe(n, 100 * line(0.05)(n))
    assert curve(1) == pytest.approx(0.02, rel=0.01)
    assert curve.relative()[16] == pytest.approx(1.75, rel=0.01)


def test_a_long_life_of_one_size_forgets_nothing_and_stays_finite() -> None:
    curve = sloping(0.2)
    World(line(0.2), 0).live(curve, 5000, sizes=(1,))
    assert curve.relative()[8] == pytest.approx(2.4, rel=0.1)
    World(line(0.4), 1).live(curve, 60)  # and it can still learn
    assert curve.relative()[8] == pytest.approx(3.8, rel=0.12)


# ------------------------------------------------------------------------------------------------------ measuring


def test_a_measurement_keeps_to_its_time_and_takes_the_important_sizes_first() -> None:
    quick = Timed(line(0.05, 0.002))
    curve = measure(quick, clock=quick.clock)
    assert quick.clock.now < 1.0
    assert curve.sizes[-1] == 96  # the first that costs more than five plain steps
    assert curve.relative()[64] == pytest.approx(1 + 63 * 0.05)
    assert quick.stepped[:4] == [1, 4, 8, 16]
    assert quick.open_sessions == 0
    slow = Timed(line(0.05, 0.2))
    curve = measure(slow, clock=slow.clock)
    assert slow.clock.now <= 1.0
    assert curve(8) == pytest.approx(0.27)
    assert curve.sizes == [1, 4, 8]
    slower = Timed(line(0.5, 1.0))
    curve = measure(slower, clock=slower.clock)
    assert slower.stepped == [1]
    assert curve.sizes == list(SIZES)
    assert curve(1) == pytest.approx(1.0)


@pytest.mark.parametrize("one", [0.001, 0.005, 0.02, 0.05, 0.1, 0.3, 0.45])
@pytest.mark.parametrize("slope", [0.0, 0.05, 0.5])
def test_a_measurement_takes_less_than_a_second_or_a_little_more(one: float, slope: float) -> None:
    target = Timed(line(slope, one))
    measure(target, clock=target.clock)
    assert target.clock.now < 1.0 + 1.6 * one  # of what a forward takes nobody knows before


def test_noise_only_adds_time_and_neighbours_in_the_wrong_order_get_their_mean() -> None:
    rng = random.Random(0)
    target = Timed(lambda n: line(0.05, 0.002)(n) * (1 + rng.choice([0, 0, 0, 0.02, 3.0])))
    curve = measure(target, seconds=3.0, clock=target.clock)
    assert all(curve(n) == pytest.approx(line(0.05, 0.002)(n), rel=0.05) for n in curve.sizes if n <= 32)
    values = [curve(n) for n in curve.sizes]
    assert values == sorted(values)
    found = fitted([{}, {1: 1.0, 2: 1.5, 3: 1.3, 4: 2.0}])
    assert found == pytest.approx({1: 1.0, 2: 1.4, 3: 1.4, 4: 2.0})


def test_a_dip_that_every_round_shows_is_kept() -> None:
    once = {1: 1.0, 2: 1.5, 3: 2.0, 4: 1.2, 5: 1.3}
    kept = fitted([once] * 5)
    assert kept == pytest.approx(once)
    smoothed = fitted([once] * 3)  # the warm-up and two: no proof yet
    assert list(smoothed.values()) == sorted(smoothed.values())
    now_and_then = [once, once, once, {**once, 4: 2.1}, {**once, 4: 2.1}, once]
    assert list(fitted(now_and_then).values()) == sorted(fitted(now_and_then).values())


def test_the_warm_up_counts_only_where_there_is_little_else() -> None:
    found = [{1: 9.0, 8: 9.0, 64: 9.0}, {1: 1.0, 8: 2.0}, {1: 1.1}, {1: 1.2}]
    assert samples(found) == {1: [1.0, 1.1, 1.2], 8: [2.0, 9.0], 64: [9.0]}


def test_targets_with_little_room_are_measured_as_far_as_they_go() -> None:
    chained = Timed(lambda n: 0.01, capabilities=frozenset())
    assert measure(chained, clock=chained.clock)(1) == pytest.approx(0.01)
    assert set(chained.stepped) == {1}
    short = Timed(lambda n: 0.01, context_length=40)
    assert measure(short, clock=short.clock)(1) == pytest.approx(0.01)
    narrow = Timed(lambda n: 0.01, max_nodes=6, capabilities=frozenset({CHAIN}))
    assert measure(narrow, clock=narrow.clock).sizes == [1, 2, 3, 4, 6]
    assert short.open_sessions == narrow.open_sessions == 0


def test_sequences_are_measured_together_by_rows() -> None:
    target = Timed(line(0.05, 0.002))
    found = rounds(target, seconds=2.0, sequences=3, clock=target.clock)
    assert {n % 3 for each in found for n in each} == {0}
    assert fitted(found)[12] == pytest.approx(line(0.05, 0.002)(12))
    assert target.open_sessions == 0


class Full(Timed):
    """Breaks down after some forwards."""

    def __init__(self, steps: int) -> None:
        super().__init__(lambda n: 0.01)
        self.left = steps

    def step(self, sessions: Any, trees: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise CacheFull("no room")
        return super().step(sessions, trees)


def test_a_target_without_room_is_guessed_and_the_steps_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path))
    with pytest.raises(CacheFull):
        measure(Full(0))
    target = Full(3)
    assert measure(target, clock=target.clock).sizes == [1, 4, 8]  # what was measured before counts
    assert target.open_sessions == 0
    here = Machine()
    curve = here.curve(Full(0), 1)
    assert not list(tmp_path.rglob("*.json"))  # a guess is not kept
    for _ in range(5):
        here.observed(Forward(0.05, 1, 1))
    assert curve(1) == pytest.approx(0.05, rel=0.01)


# ---------------------------------------------------------------------------------------------------------- cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path))
    return tmp_path


def test_a_curve_survives_on_the_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyTarget()
    first = Machine().curve(target, 1)
    (file,) = (cache / "cost").iterdir()
    again = Machine().curve(target, 1)
    assert again.as_dict() == pytest.approx(first.as_dict(), rel=1e-4)
    other = ToyTarget(seed=1)
    Machine().curve(other, 1)
    assert len(list((cache / "cost").iterdir())) == 2  # another model, another file
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(file))  # no folder: measured, and not kept
    assert Machine().curve(target, 1)(1) > 0


def stored(target: ToyTarget, **more: Any) -> dict[str, Any]:
    """The file of a target whose plain step takes 7 seconds, which no measurement would say."""
    assert machine_of(target).put(target, 1, CostCurve({1: 7.0, 2: 8.0}))
    content: dict[str, Any] = json.loads(Place.of(target).path.read_text())
    return {**content, **more}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: "{broken",
        lambda content: "",
        lambda content: "[]",
        lambda content: "7",
        lambda content: json.dumps({**content, "target": "another"}),
        lambda content: json.dumps({**content, "processor": "another"}),
        lambda content: json.dumps({**content, "format": 0}),
        lambda content: json.dumps({**content, "curves": {}}),
        lambda content: json.dumps({**content, "curves": None}),
        lambda content: json.dumps({**content, "curves": {"1": 5}}),
        lambda content: json.dumps(content).replace("7.0", "-7.0"),
        lambda content: json.dumps(content).replace("7.0", '"x"'),
        lambda content: json.dumps(content).replace("7.0", "NaN"),
        lambda content: json.dumps(content).replace('"measured": ', '"measured": -'),
        lambda content: json.dumps(content).replace('"measured": ', '"measured": 9'),
    ],
)
def test_a_file_that_is_broken_or_foreign_or_old_is_measured_again(
    cache: Path, spoil: Callable[[dict[str, Any]], str]
) -> None:
    target = ToyTarget()
    content = stored(target)
    assert Machine().curve(target, 1)(1) == pytest.approx(7.0)
    Place.of(target).path.write_text(spoil(content))
    assert Machine().curve(target, 1)(1) < 1.0
    assert Machine().curve(target, 1)(1) < 1.0  # and is whole again
    assert json.loads(Place.of(target).path.read_text())["format"] == profile.FORMAT


def test_binary_rubbish_is_measured_again(cache: Path) -> None:
    target = ToyTarget()
    stored(target)
    Place.of(target).path.write_bytes(b"\xff\x00\xfe" * 99)
    assert Machine().curve(target, 1)(1) < 1.0


def test_a_batch_begins_as_one_and_is_kept_as_steps_correct_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyTarget()
    now = [0.0]
    monkeypatch.setattr(profile, "monotonic", lambda: now[0])
    here = Machine()
    here.put(target, 1, sloping(0.1))
    curve = here.curve(target, 4)
    assert curve.sizes[0] == 4
    assert curve(8) == pytest.approx(line(0.1)(8))
    true = World(line(0.3), 0)
    for _ in range(60):
        rows = true.random.choice((4, 8, 16))
        forward = Forward(true.true(rows), 4, rows)
        for _ in range(4):
            here.observed(forward)  # each of its sequences tells of it
    assert curve.steps == 60
    now[0] += 59
    here.observed(Forward(true.true(4), 4, 4))
    assert "4" not in json.loads(Place.of(target).path.read_text())["curves"]
    now[0] += 2
    here.observed(Forward(true.true(4), 4, 4))
    later = Machine().curve(target, 4)
    assert later.relative()[8] == pytest.approx(true.true(8) / true.true(4), rel=0.05)
    assert Machine().curve(target, 1).relative()[8] == pytest.approx(1.7, rel=0.01)  # not decoded: as measured


def test_corrections_do_not_make_a_measurement_younger(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyTarget()
    today = 1e9
    monkeypatch.setattr(profile, "time", lambda: today)
    here = Machine()
    here.put(target, 1, CostCurve({1: 7.0, 2: 8.0}))
    today += profile.OLD / 2
    for _ in range(profile.ENOUGH):
        here.observed(Forward(7.0, 1, 1))
    assert here.keep()
    assert Machine().curve(target, 1)(1) == pytest.approx(7.0)
    today += profile.OLD / 2 + 1
    assert Machine().curve(target, 1)(1) < 1.0


WRITER = """
import sys
from leapahead.planner.latency import CostCurve
from leapahead.planner.profile import Place
place, own = Place("shared"), int(sys.argv[1])
for turn in range(80):
    assert place.write({own: CostCurve({own: 1.0, own + 7: 2.0 + turn})}, measured=True)
    curve = place.read(own)  # the last writer of all wins, so it may be missing
    assert curve is None or curve.sizes == [own, own + 7]
"""


def test_processes_that_share_a_file_never_break_it(cache: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(own)], env=environment) for own in (1, 2, 3)]
    place, seen = Place("shared"), 0
    while any(writer.poll() is None for writer in writers):
        if place.path.is_file():
            assert json.loads(place.path.read_text())["target"] == "shared"  # whole at every moment
            seen += 1
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert seen
    assert [file.suffix for file in place.path.parent.iterdir()] == [".json"]


def test_the_time_of_drafting_is_learned_by_node(cache: Path) -> None:
    here, rng = Machine(), random.Random(0)
    for _ in range(2000):
        nodes = rng.choice((0, 4, 8, 16, 32))
        here.drafted((3e-4 + 5e-5 * nodes) * rng.uniform(0.9, 1.1) * (20 if rng.random() < 0.005 else 1), nodes)
    assert here.drafting(0) == pytest.approx(3e-4, rel=0.25)
    assert here.drafting(32) == pytest.approx(19e-4, rel=0.2)
    for seconds in (-1.0, float("nan"), float("inf")):
        before = here.drafting(8)
        here.drafted(seconds, 8)
        assert here.drafting(8) == before
    for _ in range(500):
        here.drafted(0.0, 8)
    assert 0 <= here.drafting(8) < 1e-4
    for _ in range(300):
        here.drafted(2e-3, 0)
    assert here.drafting(0) == pytest.approx(2e-3, rel=0.1)


def test_what_the_target_raises_is_no_crash_of_the_planner(cache: Path) -> None:
    class Refusing(ToyTarget):
        def open(self, *_: Any, **__: Any) -> Any:
            raise LeapaheadError("not now")

    assert Machine().curve(Refusing(), 1)(1) > 0
    assert Machine().curve(Refusing(), 3).sizes[0] == 3
