"""`leapahead bench`: how much faster than plain decoding is each drafter, on this model, on this machine?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from leapahead import drafters as registry
from leapahead.bench import peers, record, report, tasks
from leapahead.bench import run as runner
from leapahead.bench.cell import PLAIN
from leapahead.bench.contender import Configuration
from leapahead.cli import screen
from leapahead.cli.options import SHORTHANDS, drafter_arguments
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.core.sampling import SamplingParams

# Of the report's columns, those that a terminal has room for, with their headings.
SHOWN = {
    "speed-up": "speed-up",
    "95 %": "95 %",
    "tokens/s": "tokens/s",
    "accept. length": "accept.\nlength",
    "nodes/step": "nodes/\nstep",
    "mismatches": "mis-\nmatches",
    "ties": "ties",
}
QUICK: dict[str, Any] = {"limit": 2, "rounds": 2, "max_new_tokens": 32, "temperatures": (0.0,)}


@click.command()
@click.option(
    "-m", "--model", "models", multiple=True, metavar="M", help="A target. May be repeated.  [default: the bundled one]"
)
@click.option("-d", "--drafter", "names", multiple=True, metavar="D", help="May be repeated.  [default: all]")
@click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="D:KEY=VALUE,...",
    help="A drafter with options, as lookahead:window=7,ngram=5,guesses=7. May be repeated.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Holds humaneval.jsonl, gsm8k_test.jsonl, mt_bench.jsonl or spec_bench.jsonl.  [default: prompts of our own]",
)
@click.option(
    "--peer",
    "peers_given",
    multiple=True,
    metavar="P:KEY=VALUE,...",
    help=f"What others offer, on the same model: {', '.join(peers.PEERS)}. May be repeated.",
)
@click.option(
    "--task",
    "names_of_tasks",
    multiple=True,
    metavar="T",
    help="One task, or a family of them; T=K takes K prompts of each. May be repeated.  [default: all]",
)
@click.option(
    "-t",
    "--temperature",
    "temperatures",
    type=float,
    multiple=True,
    default=(0.0, 1.0),
    show_default=True,
    help="0 is greedy. May be repeated.",
)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1,),
    show_default=True,
    metavar="N",
    help="Texts decoded together. May be repeated.",
)
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="Prompts of each task.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of each text.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Measured ones, after a warm-up."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of dice, order and bootstrap.")
@click.option("--dtype", default="auto", show_default=True, help="Of models that are no GGUF files.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or the best there is.")
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="Of torch and of llama.cpp.  [default: theirs]"
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("bench"),
    show_default=True,
    metavar="DIR",
    help="For results, table and plots.",
)
@click.option("--resume", is_flag=True, help="Go on with the results in --out.")
@click.option("--report-only", is_flag=True, help="Write table and plots of the results in --out again.")
@click.option(
    "--quick", is_flag=True, help="2 prompts a task, 2 rounds, 32 tokens, greedy, where nothing else is said."
)
@click.pass_context
def bench(
    context: click.Context,
    /,
    models: tuple[str, ...],
    names: tuple[str, ...],
    configs: tuple[str, ...],
    peers_given: tuple[str, ...],
    data: Path | None,
    names_of_tasks: tuple[str, ...],
    out: Path,
    resume: bool,
    report_only: bool,
    quick: bool,
    **values: Any,
) -> None:
    """Measure drafters against plain decoding, taking turns in one run, every text compared.

    Results are in DIR/bench.json after every finished cell (task, target, temperature, batch size); Ctrl-C keeps and
    reports them, and --resume goes on. The exit code is 1 on any mismatch of ours.
    """
    report.require_matplotlib()
    if report_only:
        _report(record.read(out), out)
        return
    if quick:
        unsaid = [name for name in QUICK if context.get_parameter_source(name) is ParameterSource.DEFAULT]
        values |= {name: QUICK[name] for name in unsaid}
    for temperature in values["temperatures"]:
        SamplingParams(temperature=temperature)  # refuses what cannot be
    chosen = tasks.read(data, names_of_tasks, values.pop("limit"))
    values |= {name: tuple(dict.fromkeys(values[name])) for name in ("temperatures", "batches")}
    plan = runner.Plan(
        tasks=chosen,
        models=models or (None,),
        configurations=configurations(names, configs),
        peers=peers.configured(peers_given),
        data="our own" if data is None else str(data),
        **values,
    )
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    kept = record.Record.open(out, plan.conditions(now), resume)
    screen.quiet_transformers()  # its bars and ours would write over each other
    interrupted, failure = False, None
    try:
        with _progress() as (progress, say):
            runner.run(plan, kept, progress=progress, say=say)
    except KeyboardInterrupt:
        interrupted = True
    except LeapaheadError as error:  # what was measured is shown before it is told
        failure = error
    found = kept.as_dict()
    _show(found)
    if failure is not None:
        raise failure
    if found["results"]:
        _write(found, out)
    if interrupted:
        screen.say(f"interrupted; {len(kept.rows)} rows are in {kept.path}, and --resume goes on")
        sys.exit(130)
    if any(row["mismatches"] for row in kept.rows if not _peer(row)):
        sys.exit(1)


def configurations(names: Sequence[str], configs: Sequence[str]) -> list[Configuration]:
    """Of the options -d and --config; every registered drafter if neither is given.

    Raises:
        BadParameter: unknown drafter or option, or a value that is not possible.
    """
    if not names and not configs:
        names = registry.ready()
    found = [Configuration(name) for name in names]
    for text in configs:
        name, _, given = text.partition(":")
        pairs = tuple(pair.strip() for pair in given.split(",") if pair.strip())
        if broken := [pair for pair in pairs if "=" not in pair]:
            raise BadParameter(f"--config {text} is not possible: {broken[0]!r} must be KEY=VALUE")
        values: dict[str, Any] = {**dict.fromkeys(SHORTHANDS), "options": pairs}
        found.append(Configuration(name.strip(), drafter_arguments(values, [name.strip()])))
    for each in found:
        registry.factory(each.drafter, **each.options)
    return [each for each in found if each.name != PLAIN]


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str, int, int], None], Callable[[str], None]]]:
    """A bar with the time left, on stderr if that is a terminal; and a way to say a line above it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("bench", total=None)

        def say(line: str) -> None:
            console.print(line, markup=False, soft_wrap=True)

        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total), say


def _report(found: dict[str, Any], out: Path) -> None:
    _show(found)
    _write(found, out)


def _write(found: dict[str, Any], out: Path) -> None:
    paths = report.write(found, out)
    screen.say(f"{out}: {', '.join([record.FILE, *(path.name for path in paths)])}")


def _show(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # nobody's window
    for group, rows in report.groups(found["results"]).items():
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=report.title(group), title_justify="left")
        table.add_column("drafter", overflow="fold", min_width=16)
        shown = [column for column in SHOWN if console.width >= 90 or column != "nodes/step"]
        for column in shown:
            table.add_column(SHOWN[column], justify="right", no_wrap=True)
        before = None
        for row in rows:
            if row["task"] != before:
                if before is not None:
                    table.add_section()
                table.add_row(row["task"], style="bold")
                before = row["task"]
            texts = dict(zip(report.COLUMNS, report.cells(row), strict=True))
            style = "red" if row["mismatches"] else "dim" if row["drafter"] == PLAIN else None
            table.add_row(f"  {row['drafter']}", *(texts[column] for column in shown), style=style)
        console.print(table)
    rows = [row for row in found["results"] if row["task"] != record.OVERALL]
    ties = sum(row["ties"] for row in rows if not _peer(row))
    if any(row["mismatches"] for row in rows if not _peer(row)):
        click.echo("MISMATCH: a text is not plain decoding's; `leapahead check` shows where. This is a bug.")
    elif rows:
        click.echo("Every text of ours equals plain decoding's" + (f", but for {ties} numeric ties." if ties else "."))
    else:
        click.echo("Nothing was measured.")
    for name in dict.fromkeys(row["drafter"] for row in rows if _peer(row) and row["mismatches"]):
        count = sum(row["mismatches"] for row in rows if row["drafter"] == name)
        click.echo(f"{name}: {count} texts differ from our plain decoding's by more than this target's rounding.")


def _peer(row: report.Row) -> bool:
    return str(row["drafter"]).startswith("peer:")
