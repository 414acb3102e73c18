"""`python -m research regret`: the regret of planning where the latency profile is wrong, or load or text changes.

The real engine and planner decode in the worlds of `research.simulation`. Regret is the time of a run less that of
plain decoding of as many tokens from the same moment under the same load. The gain of the right profile is that of a
planner that knows the true curve, in the same world. Gains are computed from the tokens that each step commits on
average (`World.expected`), and in the time of the idle machine, since it is a matter of luck how many it commits, and
whether a load falls in it. Interruptions themselves are not counted in the regret either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from multiprocessing import Pool
from pathlib import Path
from statistics import mean

import click
import numpy as np
from rich.progress import track

from leapahead import __version__
from leapahead.bench.conditions import Data
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter
from leapahead.core.stop import StopParams
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.planner.acceptance import AcceptanceTable
from research.command_parts import files_of, out_option, prefix_of, show, write
from research.simulation import CURVES, LOADS, STARTS, UNEVEN, Case, Guessing, Right, Target, World, start

STEPS = 120  # of a run, at least
WARM = 60  # steps after which the gain is compared with that of the right profile
ALLOWED = 10  # plain steps of regret that are promised, beside a share of the time
LEAST_GAIN = 0.03  # of the right profile, from which the share of it is computed


def cases() -> list[Case]:
    """Every start on every curve; load; changing acceptance; batches; quick targets; short texts."""
    starts = [Case(*each) for each in product(STARTS, CURVES, ("good", "useless"))]
    starts += [Case(start, "llama.cpp", "fair") for start in STARTS]
    loads = [Case("none", curve, kind, load) for load, curve, kind in product(LOADS, CURVES, ("good", "useless"))]
    changing = [Case("right", curve, kind) for kind in ("changing", "mixed") for curve in CURVES]
    batches = [
        Case(start, curve, kind, "", 4, padded)
        for start, padded, curve, kind in product(
            ("right", "none"), (False, True), ("cheap", "llama.cpp"), ("good", "useless")
        )
    ]
    batches += [
        Case("measured busy", curve, kind, load, 8)
        for load, curve, kind in product(("", "contention"), ("cheap", "llama.cpp"), ("good", "fair", "useless"))
    ]
    uneven = [
        Case(start, "four bits", kind, load)
        for kind, (start, load) in product(UNEVEN, (("right", ""), ("none", ""), ("none", "contention")))
    ]
    quick = [
        Case("right", curve, kind, quick=True)
        for curve, kinds in (
            ("llama.cpp", ("useless", "mixed", "changing")),
            ("buckets", ("useless", "mixed", "changing")),
            ("four bits", ("useless", "mixed", "changing", *UNEVEN)),
        )
        for kind in kinds
    ]
    short = [
        Case("right", curve, kind, quick=quick, length=length)
        for length, quick, curve, kind in product((5, 20), (False, True), ("cheap", "llama.cpp"), ("good", "useless"))
    ]
    return [*starts, *loads, *changing, *uneven, *batches, *quick, *short]


@dataclass(frozen=True)
class Outcome:
    """What one run gave, in plain steps, without the time of interruptions.

    Attributes:
        plain: time of plain decoding.
        regret: further time that this run took; negative where it gained.
        parts: for each part of the text, what was gained from step `WARM` of it on, and the plain time of that.
    """

    plain: float
    regret: float
    parts: tuple[tuple[float, float], ...]


def run(case: Case, seed: int, right: bool = False) -> Outcome:
    """Decodes one text, one of each sequence, or short ones one after another.

    Args:
        right: with a planner that knows the true curve, whatever the case says about the start.
    """
    world = World(case, seed)
    target = Target(world)
    latency = Right(world) if right else start(world, target, case.start)
    engine = Engine(target, max_batch=case.sequences, latency=latency, acceptance=AcceptanceTable())
    drafter = engine.drafter(Guessing(world))
    stop = StopParams(max_new_tokens=case.length or len(world.texts[0][0]) // 2)
    handles = [engine.submit(Request([index], drafter, stop=stop)) for index in range(case.texts)]
    length = sum(tokens for tokens, _ in world.phases)
    least = STEPS if len(world.phases) == 1 else 0
    worked, done, expected = [0.0], [0.0], [0.0]  # after each step: seconds; tokens per sequence, and expected ones
    while done[-1] < length or (len(done) <= least and not case.length):
        engine.step()
        assert case.length or not any(handle.done for handle in handles), "a text has ended"
        worked.append(world.worked)
        done.append(sum(len(handle.tokens) for handle in handles) / case.sequences)
        expected.append(expected[-1] + target.expected / case.sequences)
    unit = world.seconds(case.sequences)
    whole, paused = world.after(0.0, world.plain(done[-1]))
    plain = whole - paused
    parts, begin = [], 0
    borders = [sum(tokens for tokens, _ in world.phases[: index + 1]) for index in range(len(world.phases) - 1)]
    for border in (*borders, done[-1]):
        end = next(step for step, count in enumerate(done) if count >= border)
        first = min(begin + WARM, end)
        lasted = world.plain(expected[end] - expected[first])
        parts.append(((lasted - (worked[end] - worked[first])) / unit, lasted / unit))
        begin = end
    return Outcome(plain / unit, (world.now - world.paused - plain) / unit, tuple(parts))


@cache
def _right(case: Case, seed: int) -> Outcome:
    """With a planner that knows the true curve; the worlds of all starts are the same."""
    return run(case, seed, right=True)


def row(case: Case, seeds: int) -> Data:
    """A row of the table.

    Returns:
        what, curve, acceptance: of the case. plain_steps: mean time of plain decoding, in plain steps. regret: mean, as
        a share of that time, and regret_steps, in plain steps. mean_excess: the share by which the mean regret exceeds
        `ALLOWED` plain steps; p95_excess: the 95th percentile over the seeds of that share. gain: mean share of plain
        decoding's time saved from step `WARM` on, of the part of the text where the right profile's gain is least
        reached; right_gain: what the right profile saves there; share: their quotient, None where the latter is small.
    """
    found = [run(case, seed) for seed in range(seeds)]
    gains: list[tuple[float, float]] = []
    if case.acceptance != "useless":
        best = [_right(replace(case, start="right"), seed) for seed in range(seeds)]
        gains = [
            (_gain(found, part), most)
            for part in range(len(found[0].parts))
            if (most := _gain(best, part)) > LEAST_GAIN
        ]
    gain, right = min(gains, key=lambda pair: pair[0] / pair[1], default=(None, None))
    plain, regret = mean(each.plain for each in found), mean(each.regret for each in found)
    excess = [(each.regret - ALLOWED) / each.plain for each in found]
    return {
        "what": case.what,
        "curve": case.curve,
        "acceptance": case.acceptance,
        "seeds": seeds,
        "plain_steps": round(plain, 1),
        "regret": round(regret / plain, 4),
        "regret_steps": round(regret, 2),
        "mean_excess": round((regret - ALLOWED) / plain, 4),
        "p95_excess": round(float(np.quantile(excess, 0.95)), 4),
        "gain": None if gain is None else round(gain, 4),
        "right_gain": None if right is None else round(right, 4),
        "share": None if gain is None or right is None else round(gain / right, 4),
    }


def _gain(outcomes: Sequence[Outcome], part: int) -> float:
    """The share of plain decoding's time that was saved in a part of the text."""
    saved, lasted = (sum(each.parts[part][which] for each in outcomes) for which in (0, 1))
    return saved / lasted if lasted else 0.0


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def table(rows: Sequence[Data]) -> None:
    """Prints the rows."""
    show(
        ("case", "curve", "acceptance", "regret %", "in steps", "mean - 10, %", "95th - 10, %", "gain %", "right's %"),
        [
            (
                *(row[name] for name in ("what", "curve", "acceptance")),
                _percent(row["regret"]),
                f"{row['regret_steps']:.1f}",
                _percent(row["mean_excess"]),
                _percent(row["p95_excess"]),
                _percent(row["gain"]),
                _percent(row["right_gain"]),
            )
            for row in rows
        ],
    )


@click.command(cls=Command)
@click.option("--seeds", type=click.IntRange(min=1), default=200, show_default=True, help="Runs of each case.")
@click.option("--case", "words", multiple=True, metavar="TEXT", help="Only cases whose name has this; may be repeated.")
@click.option("--resume", is_flag=True, help="Keep the rows of the file that have as many seeds.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@out_option("regret")
def main(seeds: int, words: tuple[str, ...], resume: bool, jobs: int, out: Path) -> None:
    """Measure what planning loses and gains when the latency profile is wrong, or the load or the text changes.

    Simulated: no model is needed. Regret is the time beyond that of plain decoding. The data are written after every
    row, and the figure at the end.
    """
    prefix = prefix_of(out)
    names = {case.name: case for case in cases()}
    rows = {name: row for name, row in _known(files_of(prefix)[0]).items() if name in names} if resume else {}
    wanted = [name for name in names if all(word in name for word in words)]
    if not wanted:
        raise BadParameter(
            f"no case has {' and '.join(map(repr, words))} in its name; names are such as {next(iter(names))!r}"
        )
    wanted = [name for name in wanted if name not in rows or rows[name]["seeds"] < seeds]
    with Pool(jobs) as pool:
        found = pool.imap(partial(row, seeds=seeds), [names[name] for name in wanted])
        for name, each in zip(wanted, track(found, "regret", len(wanted)), strict=True):
            rows[name] = each
            files_of(prefix)[0].write_text(json.dumps(_data(rows, names)) + "\n", encoding="utf-8")
    data = _data(rows, names)
    table(data["rows"])
    write(data, prefix)


def _known(path: Path) -> dict[str, Data]:
    """The rows of a file by the names of their cases; none if there is no file.

    Raises:
        BadParameter: it is another kind of file.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError, TypeError):
        raise BadParameter(f"{path} does not hold the rows of this command; give another --out") from None
    return {f"{row['what']}, {row['curve']}, {row['acceptance']}": row for row in found}


def _data(rows: Mapping[str, Data], names: Iterable[str]) -> Data:
    """What is written: the rows in the order of the cases."""
    found = [rows[name] for name in names if name in rows]
    seeds = " or ".join(str(each) for each in sorted({row["seeds"] for row in found}))
    conditions = {"seeds": seeds, "versions": {"leapahead": __version__}}
    return {"figure": "regret", "conditions": conditions, "rows": found}
