"""`python -m research systems`: every system of the literature, each by its own command, against plain decoding."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import product, zip_longest
from pathlib import Path
from time import monotonic
from typing import Any

import click
from click.exceptions import Exit

from leapahead.bench import tasks
from leapahead.bench.conditions import conditions
from leapahead.cli import screen
from leapahead.cli.command import DIFFERENT, INTERRUPTED, Command
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.inputs import encode
from leapahead.models import loading
from leapahead.models.loading import Loaded
from research.systems.measure import Plan, compared, measured
from research.systems.record import CHECKED, MEASURED, Record
from research.systems.rows import ROWS
from research.systems.system import DISTRIBUTION, EXACT, REPAIR, System, parsed

TEMPERATURES = (0.0, 1.0)
MANY = 10_000  # more prompts than any file has
FOLDER = click.Path(file_okay=False, path_type=Path)


@dataclass
class Prompts:
    """The prompts of the rows, encoded by the model of each.

    Attributes:
        data: folder of HumanEval and GSM8K; None for the bundled prompts.
        limit: greatest number of prompts of each task.
        models: loaded so far.
    """

    data: Path | None
    limit: int
    models: dict[str | None, Loaded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sets = tasks.read(self.data, () if self.data is None else tasks.TEXTS, self.limit)

    def loaded(self, model: str | None) -> Loaded:
        """A model in float32, loaded once."""
        if model not in self.models:
            with screen.loading(model):
                self.models[model] = loading.load(model, dtype="float32")
        return self.models[model]

    def of(self, system: System, loaded: Loaded, room: int) -> list[list[int]]:
        """Token ids that fit with `room` new tokens, the tasks in turns."""
        if system.prompts == REPAIR:
            from research.train.repair import held_out

            return [encode(text, loaded.tokenizer, loaded.target.info) for text, _ in held_out(2 * self.limit)]
        each = (tasks.encoded(task, loaded, room) for task in self.sets)
        return [tokens for turn in zip_longest(*each) for tokens in turn if tokens is not None]

    def described(self) -> dict[str, Any]:
        return {task.name: {"prompts": len(task.prompts), "digest": task.digest} for task in self.sets}


@click.command(cls=Command)
@click.option("--data", type=FOLDER, metavar="FOLDER", help="Folder of prompt sets.  [default: the bundled prompts]")
@click.option("--out", type=FOLDER, default=Path("docs/bench/systems"), show_default=True, help="Folder of the record.")
@click.option("--row", "keys", multiple=True, metavar="KEY", help="Only this row; may be repeated.  [default: all]")
@click.option("--limit", type=click.IntRange(min=1), default=3, show_default=True, help="Prompts of each task.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=96, show_default=True, help="Of each text.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Measured rounds.")
@click.option("--check", "is_check", is_flag=True, help="Compare texts, and measure nothing.")
@click.option("--tokens", type=click.IntRange(min=1), default=5000, show_default=True, help="Compared of each row.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Texts compared together.")
@click.option("--heads", type=FOLDER, default=Path("build/heads"), show_default=True, help="Of `make train-heads`.")
@click.option("--distilled", type=FOLDER, default=Path("build/distilled"), show_default=True, help="Of its recipes.")
@click.option("--repair", type=FOLDER, default=Path("build/repair"), show_default=True, help="Of `research repair`.")
@click.option("--minutes", type=float, metavar="M", help="Begin no row after so many minutes.  [default: no limit]")
@click.option("--resume", is_flag=True, help="Go on with the record in --out.")
def main(
    data: Path | None,
    out: Path,
    keys: tuple[str, ...],
    limit: int,
    max_new_tokens: int,
    rounds: int,
    is_check: bool,
    tokens: int,
    batch: int,
    heads: Path,
    distilled: Path,
    repair: Path,
    minutes: float | None,
    resume: bool,
) -> None:
    """Measure every system of the literature by its command, against plain decoding in the same run.

    Each row is decoded greedily and at temperature 1 in float32, in turns with plain decoding, and every text of an
    exact rule is compared with plain decoding's. With --check, texts are compared until so many --tokens are. A row
    whose trained weights are missing is left out. The exit code is 1 if a text of an exact rule differs.
    """
    chosen = _chosen(keys)
    folders = {"build/heads": heads, "build/distilled": distilled, "build/repair": repair}
    prompts = Prompts(data, MANY if is_check else limit)
    record = Record(out, ROWS, resume)
    kind, plan = CHECKED if is_check else MEASURED, Plan(max_new_tokens, rounds)
    bundled = prompts.loaded(None)
    how = {"tokens": tokens, "batch": batch} if is_check else {"rounds": rounds}
    record.agree(
        kind,
        {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **conditions(bundled.target, max_new_tokens=max_new_tokens, tasks=prompts.described(), **how),
        },
    )
    began, failed = monotonic(), list[str]()
    todo = list(_todo(chosen, record, kind))
    try:
        with screen.progress("systems") as bar:
            for number, (system, temperature) in enumerate(todo):
                if minutes is not None and monotonic() - began > 60 * minutes:
                    bar.say(f"{len(todo) - number} of {len(todo)} measurements are left for --resume")
                    break
                what = f"{system.key}, temperature {temperature:g}"
                bar(what, number, len(todo))
                if reason := _made(system, folders, data):
                    bar.say(f"{system.key} is left out: {reason}")
                    continue
                try:
                    figures = _figures(system, temperature, prompts, folders, plan, tokens if is_check else 0, batch)
                except LeapaheadError as error:
                    failed.append(f"{system.key}: {error}")
                    bar.say(f"{what} failed: {error}")
                    continue
                record.add(system, kind, temperature, figures)
                bar.say(f"{what}: {_line(figures)}")
    except KeyboardInterrupt:
        screen.say(f"interrupted; what is finished is in {record.path}, and --resume continues")
        raise Exit(INTERRUPTED) from None
    click.echo(f"written: {record.path}")
    for line in record.mismatches():
        click.echo(f"MISMATCH: a text of an exact rule differs from plain decoding's: {line} texts")
    if failed or record.mismatches():
        raise Exit(DIFFERENT)


def _chosen(keys: Sequence[str]) -> list[System]:
    known = {system.key: system for system in ROWS}
    for key in keys:
        if key not in known:
            raise BadParameter(f"--row {key} is not possible: there are {', '.join(known)}")
    return [known[key] for key in keys] or list(ROWS)


def _todo(systems: Sequence[System], record: Record, kind: str) -> Iterator[tuple[System, float]]:
    """What is to be done: relaxed texts are not compared, and those that are exact in distribution greedily only."""
    for system, temperature in product(systems, TEMPERATURES):
        comparable = system.rule == EXACT or (system.rule == DISTRIBUTION and temperature == 0)
        if system.elsewhere or record.has(system, kind, temperature) or (kind == CHECKED and not comparable):
            continue
        yield system, temperature


def _made(system: System, folders: Mapping[str, Path], data: Path | None) -> str | None:
    """Makes what a row needs, where that takes seconds; says what is missing, if anything is."""
    missing = system.missing(folders)
    if not missing:
        return None
    if not system.made_here:
        return f"there is no {missing[0]}; it is made by `{system.before}`"
    words = shlex.split(system.before if data is None else system.before.replace("../shared/data", str(data)))
    for path in missing:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"`{shlex.join(words)}` failed: {done.stderr.strip()}"


def _figures(
    system: System,
    temperature: float,
    prompts: Prompts,
    folders: Mapping[str, Path],
    plan: Plan,
    tokens: int,
    batch: int,
) -> dict[str, Any]:
    """Figures of a row; of the comparison of so many tokens, or of the measurement where that is 0."""
    row = parsed(system.with_folders(folders))
    loaded = prompts.loaded(row.model)
    given = prompts.of(system, loaded, plan.max_new_tokens)
    if not given:
        raise LeapaheadError(f"no prompt fits the context of {loaded.target.info.name}")
    if not tokens:
        return measured(loaded, row.configuration, given, plan, temperature)
    how: dict[str, Any] = {"max_new_tokens": plan.max_new_tokens, "batch": batch}
    return compared(loaded, row.configuration, given, tokens, temperature, **how)


def _line(figures: dict[str, Any]) -> str:
    if "speedup" not in figures:
        return f"{figures['tokens']} tokens, {figures['mismatches']} mismatches, {figures['ties']} ties"
    speed = figures["speedup"]
    return f"acceptance length {figures['acceptance_length']:.2f}, speed-up {speed['median']:.2f}"
