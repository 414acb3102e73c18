"""`python -m research systems`: every system of the literature, each by its own command, against plain decoding."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product, zip_longest
from pathlib import Path
from time import monotonic
from typing import Any

import click
from click.exceptions import Exit

from leapahead.bench import tasks
from leapahead.bench.conditions import conditions
from leapahead.check import References
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
class Bench:
    """What rows are decoded with, and how.

    Attributes:
        data: folder of HumanEval and GSM8K; None for the bundled prompts.
        limit: greatest number of prompts of each task.
        folders: of trained weights, by the names that the commands have for them.
        plan: of the measurement; its length of texts is that of the comparison, too.
        tokens: compared of each row; 0 where rows are measured instead.
        batch: texts that are compared together.
    """

    data: Path | None
    limit: int
    folders: Mapping[str, Path]
    plan: Plan
    tokens: int
    batch: int
    _models: dict[str, Loaded] = field(default_factory=dict)  # by what they were loaded with
    _encoded: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)  # and by what is prompted with
    _references: dict[tuple[str, float], References] = field(default_factory=dict)  # and by temperature

    def __post_init__(self) -> None:
        self.sets = tasks.read(self.data, () if self.data is None else tasks.TEXTS, self.limit)

    @property
    def kind(self) -> str:
        return CHECKED if self.tokens else MEASURED

    def conditions(self) -> dict[str, Any]:
        how = {"tokens": self.tokens, "batch": self.batch} if self.tokens else {"rounds": self.plan.rounds}
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **conditions(self._loaded({}).target, max_new_tokens=self.plan.max_new_tokens, **how),
            "tasks": {task.name: {"prompts": len(task.prompts), "digest": task.digest} for task in self.sets},
        }

    def lacks(self, system: System) -> str:
        """What is missing, "" if nothing is. What takes seconds to make is made."""
        missing = system.missing(self.folders)
        if not missing:
            return ""
        if not system.made_here:
            return f"there is no {missing[0]}; it is made by `{system.before}`"
        before = system.before if self.data is None else system.before.replace("../shared/data", str(self.data))
        for path in missing:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", *shlex.split(before)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else f"`{before}` failed: {done.stderr.strip()}"

    def figures(self, system: System, temperature: float) -> dict[str, Any]:
        """Figures of a row, by its command."""
        row = parsed(system.with_folders(self.folders))
        loaded = self._loaded(row.model)
        prompts = self._prompts(system, str(row.model), loaded)
        if not prompts:
            raise LeapaheadError(f"no prompt fits the context of {loaded.target.info.name}")
        try:
            if not self.tokens:
                return measured(loaded, row.configuration, prompts, self.plan, temperature)
            return compared(
                loaded,
                row.configuration,
                prompts,
                self.tokens,
                temperature,
                max_new_tokens=self.plan.max_new_tokens,
                batch=self.batch,
                references=self._references.setdefault((str(row.model), temperature), {}),
            )
        finally:
            if row.model.get("devices"):  # their processes would run beside those of the next row
                loading.close(self._models.pop(str(row.model)).target)

    def _loaded(self, model: dict[str, Any]) -> Loaded:
        """A model in float32, loaded once."""
        key = str(model)
        if key not in self._models:
            with screen.loading(model.get("model")):
                self._models[key] = loading.load(**{**model, "dtype": "float32"})
        return self._models[key]

    def _prompts(self, system: System, model: str, loaded: Loaded) -> list[list[int]]:
        """Token ids of the prompts that fit with a text, the tasks in turns."""
        key = (model, system.prompts)
        if key not in self._encoded:
            if system.prompts == REPAIR:
                from research.train.repair import held_out

                texts = [damaged for damaged, _ in held_out(self.limit * len(self.sets))]
                self._encoded[key] = [encode(text, loaded.tokenizer, loaded.target.info) for text in texts]
            else:
                each = (tasks.encoded(task, loaded, self.plan.max_new_tokens) for task in self.sets)
                self._encoded[key] = [tokens for turn in zip_longest(*each) for tokens in turn if tokens is not None]
        return self._encoded[key]


@click.command(cls=Command)
@click.option("--data", type=FOLDER, metavar="FOLDER", help="Folder of prompt sets.  [default: the bundled prompts]")
@click.option("--out", type=FOLDER, default=Path("docs/bench/systems"), show_default=True, help="Folder of the record.")
@click.option(
    "--row", "keys", multiple=True, metavar="KEY", help="Only this row, anew; may be repeated.  [default: all]"
)
@click.option("--limit", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts of each task.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=96, show_default=True, help="Tokens of a text.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="Measured rounds.")
@click.option("--check", "is_check", is_flag=True, help="Compare texts, and measure nothing.")
@click.option("--tokens", type=click.IntRange(min=1), default=5000, show_default=True, help="Tokens compared of a row.")
@click.option("--batch", type=click.IntRange(min=1), default=16, show_default=True, help="Texts compared together.")
@click.option(
    "--heads", type=FOLDER, default=Path("build/heads"), show_default=True, help="That of `make train-heads`."
)
@click.option(
    "--distilled", type=FOLDER, default=Path("build/distilled"), show_default=True, help="That of `make train-draft`."
)
@click.option(
    "--repair", type=FOLDER, default=Path("build/repair"), show_default=True, help="That of `research repair`."
)
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
    plan = Plan(max_new_tokens, rounds)
    bench = Bench(data, MANY if is_check else limit, folders, plan, tokens if is_check else 0, batch)
    record = Record(out, ROWS, resume)
    try:
        with screen.progress("systems") as bar:
            failed = _measure(bench, record, chosen, bool(keys), minutes, bar)
    except KeyboardInterrupt:
        screen.say(f"interrupted; what is finished is in {record.path}, and --resume continues")
        raise Exit(INTERRUPTED) from None
    click.echo(f"written: {record.path}")
    for line in record.mismatches():
        click.echo(f"MISMATCH: a text of an exact rule differs from plain decoding's: {line} texts")
    if failed or record.mismatches():
        raise Exit(DIFFERENT)


def _measure(
    bench: Bench, record: Record, systems: Sequence[System], anew: bool, minutes: float | None, bar: screen.Bar
) -> bool:
    """Fills the record, row by row; returns whether a row failed."""
    began, failed, lacking = monotonic(), False, dict[str, str]()
    todo = list(_todo(systems, record, bench.kind, anew))
    for number, (system, temperature) in enumerate(todo):
        if minutes is not None and monotonic() - began >= 60 * minutes:
            bar.say(f"{len(todo) - number} of {len(todo)} measurements are left for --resume")
            break
        if number == 0:
            record.agree(bench.kind, bench.conditions())
        what = f"{system.key}, temperature {temperature:g}"
        bar(what, number, len(todo))
        if system.key not in lacking:
            lacking[system.key] = bench.lacks(system)
            if reason := lacking[system.key]:
                bar.say(f"{system.key} is left out: {reason}")
        if lacking[system.key]:
            continue
        try:
            figures = bench.figures(system, temperature)
        except LeapaheadError as error:
            failed = True
            bar.say(f"{what} failed: {error}")
            continue
        record.add(system, bench.kind, temperature, figures)
        bar.say(f"{what}: {_line(figures)}")
    return failed


def _chosen(keys: Sequence[str]) -> list[System]:
    known = {system.key: system for system in ROWS}
    for key in keys:
        if key not in known:
            raise BadParameter(f"--row {key} is not possible: there are {', '.join(known)}")
    return [known[key] for key in keys] or list(ROWS)


def _todo(systems: Sequence[System], record: Record, kind: str, anew: bool) -> Iterator[tuple[System, float]]:
    """What is to be done: relaxed texts are not compared, and those that are exact in distribution greedily only.

    Args:
        anew: also what the record has.
    """
    # All greedy texts first, so that a run in pieces decodes few texts plainly.
    for temperature, system in product(TEMPERATURES, systems):
        comparable = system.rule == EXACT or (system.rule == DISTRIBUTION and temperature == 0)
        done = not anew and record.has(system, kind, temperature)
        if system.elsewhere or done or (kind == CHECKED and not comparable):
            continue
        yield system, temperature


def _line(figures: dict[str, Any]) -> str:
    if "speedup" not in figures:
        return f"{figures['tokens']} tokens, {figures['mismatches']} mismatches, {figures['ties']} ties"
    speed = figures["speedup"]
    return f"acceptance length {figures['acceptance_length']:.2f}, speed-up {speed['median']:.2f}"
