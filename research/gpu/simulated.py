"""`python -m research gpu-simulated`: drafting on captured forwards, in the times that were measured on a GPU.

The texts, the drafts and the shapes of forwards are real; time is simulated, and no GPU is needed. A step takes T(rows)
of a measured curve, a step with drafts the time outside the forward too, which was measured for one sequence and is
counted once in a batch; a capture takes the longest measured one. Beyond the measured rows T is the line through the
last two. What a step takes outside its forward on the CPU does not count otherwise, nor does reading prompts.

Every pass decodes the same prompts. The latency profile of one sequence is measured before the first one, as when a
model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from pathlib import Path

import click
import numpy as np
import torch

from leapahead.bench.conditions import Data, conditions
from leapahead.bench.contender import Ours, Setting
from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.models.transformers.static.executor import StaticExecutor
from leapahead.models.transformers.static.graphs import Calls, Forward, Recording
from leapahead.models.transformers.static.shapes import Shape
from leapahead.planner.profile import LatencyProfiles
from research.command_parts import show
from research.gpu import report
from research.gpu.lab import CAPTURED, KINDS, TINY, Lab, Settings
from research.simulation import Stored

PASSES = 3
HEADS = ["cost", "prompts", "temperature", "batch", "against plain, by pass", "captures, by pass", "acceptance length"]


class Times:
    """What was measured at one cost, and a clock that it moves.

    Args:
        folder: of the cells of `research gpu` at this cost.

    Raises:
        BadParameter: it has not got the cells.
    """

    def __init__(self, folder: Path) -> None:
        cells = {name: report.read(folder / f"{name}.json") for name in ("curve", "graphs", "outside")}
        (curve,) = (row["milliseconds"] for row in cells["curve"]["rows"] if row["engine"] == CAPTURED)
        self._rows: list[int] = [int(n) for n in curve]
        self._seconds: list[float] = [ms / 1e3 for ms in curve.values()]
        self.capture: float = cells["graphs"]["longest"]
        self.outside: float = min(row["outside_ms"] for row in cells["outside"]["rows"]) / 1e3
        self.conditions: Data = cells["curve"]["conditions"]
        self.now = 0.0
        self.captures = 0

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now

    def step(self, rows: int) -> float:
        """T(rows) in seconds."""
        (before, last), (one, other) = self._rows[-2:], self._seconds[-2:]
        if rows > last:
            return other + (rows - last) * (other - one) / (last - before)
        found: float = np.interp(rows, self._rows, self._seconds).item()
        return found


class Simulated(Calls):
    """Records nothing, and takes the time of a capture."""

    pooled = True

    def __init__(self, times: Times) -> None:
        self._times = times

    def record(self, forward: Forward) -> Recording:
        self._times.now += self._times.capture
        self._times.captures += 1
        return super().record(forward)


def simulate(
    times: Times, lab: Lab, batches: Sequence[int], temperatures: Sequence[float], passes: int = PASSES
) -> Iterator[Data]:
    """A row for each batch, task and temperature: how many times as fast as plain decoding `auto` was in each pass."""
    loaded = lab.loaded(CAPTURED)
    executor = loaded.target.executor  # type: ignore[attr-defined]
    assert isinstance(executor, StaticExecutor)
    _count_time(executor, times)
    for task in lab.tasks:
        lab.prompts(task, least=max(batches))  # or it is refused before anything is simulated
    for batch, task, temperature in product(batches, lab.tasks, temperatures):
        executor.forget()
        setting = Setting(temperature, batch, lab.settings.max_new_tokens, seed=1)
        prompts = lab.prompts(task, max(batch, lab.settings.prompts))
        found = {}
        for drafter in ("plain", "auto"):
            latency = LatencyProfiles(loaded.target.info, Stored(None), times)
            if drafter == "auto":
                latency.prepare(loaded.target)
            ours = Ours(drafter, loaded.target, loaded.tokenizer, drafter, {}, latency)
            found[drafter] = [_pass(ours, prompts, setting, times) for _ in range(passes)]
            ours.close()
        yield {
            "task": task,
            "temperature": temperature,
            "batch": batch,
            "speed_ups": [
                theirs["seconds"] / mine["seconds"] for mine, theirs in zip(found["auto"], found["plain"], strict=True)
            ],
            "captures": [each["captures"] for each in found["auto"]],
            "acceptance_length": found["auto"][-1]["acceptance_length"],
        }


def _count_time(executor: StaticExecutor, times: Times) -> None:
    """Has each captured forward move the clock."""
    whole = executor.graphs.run

    def run(key: Hashable, forward: Forward) -> None:
        whole(key, forward)
        assert isinstance(key, Shape)
        times.now += times.step(key.all_rows) + (times.outside if key.rows > 1 else 0.0)

    executor.graphs.run = run  # type: ignore[method-assign]


def _pass(ours: Ours, prompts: Sequence[list[int]], setting: Setting, times: Times) -> Data:
    began, before = times.now, times.captures
    ours.begin_round()
    texts = ours.run([list(each) for each in prompts], setting).texts
    every = [text.stats for text in texts if text.stats is not None]
    return {
        "seconds": times.now - began,
        "captures": times.captures - before,
        "acceptance_length": sum(each.committed for each in every) / sum(each.steps for each in every),
    }


def _some(values: Sequence[float]) -> str:
    return ", ".join(f"{each:g}" if isinstance(each, int) else f"{each:.2f}" for each in values)


def table(rows: Sequence[Data]) -> list[list[str]]:
    """The rows of the table with `HEADS`."""
    return [
        [
            row["cost"],
            row["task"],
            f"{row['temperature']:g}",
            str(row["batch"]),
            _some(row["speed_ups"]),
            _some(row["captures"]),
            f"{row['acceptance_length']:.2f}",
        ]
        for row in rows
    ]


@click.command(cls=Command, examples=("python -m research gpu-simulated --out docs/bench/gpu-simulated.json",))
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    default=Path("docs/bench/gpu"),
    show_default=True,
    metavar="DIR",
    help="What research gpu has written.",
)
@click.option("--cost", "costs", multiple=True, metavar="COST", help="A cost; may be repeated.  [default: all]")
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1, 64),
    multiple=True,
    help="A batch size; may be repeated.  [default: 1, 4, 16]",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of humaneval.jsonl and gsm8k_test.jsonl.  [default: the bundled prompts]",
)
@click.option("--prompts", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts of each task.")
@click.option("--max-new-tokens", type=click.IntRange(min=4), default=64, show_default=True, help="Tokens of a text.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Writes the rows as JSON.")
def main(
    measured: Path,
    costs: tuple[str, ...],
    batches: tuple[int, ...],
    data: Path | None,
    prompts: int,
    max_new_tokens: int,
    out: Path | None,
) -> None:
    """Simulate drafting on captured forwards in the times that were measured on a GPU.

    Texts, drafts and the shapes of forwards are real, of the bundled model; steps and captures take the times that
    research gpu has measured. Shown is how many times as fast as plain decoding `auto` is in each of three passes over
    the same prompts, and how many forwards it has captured in each.
    """
    if data is not None and not data.is_dir():
        raise BadParameter(f"there is no folder {str(data)!r} of prompts")
    there = sorted(each.name for each in measured.glob("*") if (each / "curve.json").is_file())
    if not there or (wrong := [cost for cost in costs if cost not in there]):
        raise BadParameter(f"{measured} has no curve of {wrong[0] if there else 'any cost'}; name another --measured")
    rows: list[Data] = []
    given: Data = {}
    for cost in costs or there:
        times = Times(measured / cost)
        settings = Settings(torch.device("cpu"), data=data, prompts=prompts, max_new_tokens=max_new_tokens)
        lab = Lab(TINY, settings, kinds={**KINDS, CAPTURED: {"static": Simulated(times)}})
        with screen.progress(f"simulating {cost}") as bar:
            count = len(batches or (1, 4, 16)) * len(lab.tasks) * 2
            for done, row in enumerate(simulate(times, lab, batches or (1, 4, 16), (0.0, 1.0))):
                bar(cost, done + 1, count)
                rows.append({"cost": cost, **row})
        given = {name: times.conditions.get(name) for name in ("gpu", "dtype")}
    show(HEADS, table(rows))
    if out is not None:
        found = {"rows": rows, "measured": given, "conditions": conditions(prompts=prompts)}
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise LeapaheadError(f"{out} cannot be written: {error.strerror or error}") from None
        click.echo(f"written: {out}")
