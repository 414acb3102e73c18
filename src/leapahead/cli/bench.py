"""`leapahead bench`: measures how much faster than plain decoding each drafter is, on this model and machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.exceptions import Exit
from rich import box
from rich.table import Table

from leapahead import drafters as registry
from leapahead.bench import peers, plots, record, report, tasks
from leapahead.bench import run as runner
from leapahead.bench.cell import PLAIN
from leapahead.bench.contender import Configuration
from leapahead.bench.plan import Model, Plan
from leapahead.cli import screen
from leapahead.cli.acceptance import SPELLED
from leapahead.cli.bench_models import model_of
from leapahead.cli.command import DIFFERENT, INTERRUPTED, Command, drafter_names, option
from leapahead.cli.engine_options import ENGINE, MODEL_GROUP
from leapahead.cli.options import (
    FILE_OF_PROMPTS,
    LOADING,
    SHORTHANDS,
    all_of,
    batch_option,
    data_option,
    drafter_arguments,
    loading_arguments,
)
from leapahead.cli.typed import Folder
from leapahead.core.errors import BadParameter, LeapaheadError, counted
from leapahead.core.parameters import listed
from leapahead.core.relaxed import rule
from leapahead.core.sampling import SamplingParams

MEASURED = "What is measured"
# The columns of the report that fit on a terminal, with their headings.
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


@click.command(
    cls=Command,
    examples=(
        "leapahead bench --quick -d auto -d lookahead",
        "leapahead bench -m model.gguf --prompts mine.jsonl --config lookahead:window=7,ngram=5,guesses=7 --out new",
        "leapahead bench --data prompts --task gsm8k=20 --peer transformers-prompt-lookup",
        "leapahead bench -m 'model.gguf(flash-attn=on)' -m 'model.gguf(flash-attn=off)' -d auto --out attention",
    ),
)
@option(
    "-m",
    "--model",
    "models",
    multiple=True,
    metavar="MODEL",
    group=MODEL_GROUP,
    show_default="the bundled model",
    help="As of `generate`; MODEL(OPTION=VALUE,...) gives options to this model alone, a value with commas in quotes: "
    'MODEL(devices="cuda:0,cuda:1"). May be repeated.',
)
@all_of(LOADING)
@option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    argument="n_threads",
    group=MODEL_GROUP,
    show_default="chosen by each of them",
    help="CPU threads of torch, llama.cpp and OpenVINO, and of the peers.",
)
@all_of(ENGINE)
@option(
    "-d",
    "--drafter",
    "names",
    multiple=True,
    metavar="DRAFTER",
    shell_complete=drafter_names,
    group=MEASURED,
    show_default="all that need no file and no other model",
    help="A drafter with its default options. May be repeated.",
)
@option(
    "--config",
    "configs",
    multiple=True,
    metavar="DRAFTER:KEY=VALUE,...",
    group=MEASURED,
    help="A drafter with options, such as lookahead:window=7,ngram=5,guesses=7, a value with commas in quotes: "
    'auto:sources="ngram,suffix". May be repeated.',
)
@option(
    "--acceptance",
    "rules",
    argument="acceptance",
    multiple=True,
    metavar="RULE",
    group=MEASURED,
    show_default="exact",
    help=f"How drafts are accepted: {SPELLED}. Texts of a lossy rule differ, which is counted. May be repeated.",
)
@option(
    "--peer",
    "peers_given",
    multiple=True,
    metavar="PEER:KEY=VALUE,...",
    group=MEASURED,
    help=f"Another program on the same model: {', '.join(peers.PEERS)}. May be repeated.",
)
@data_option(
    f"Prompts of your own: {FILE_OF_PROMPTS}; beside prompt or question there may be prediction, the text that is "
    "expected. Or a folder with humaneval.jsonl, gsm8k_test.jsonl, mt_bench.jsonl, spec_bench.jsonl or edits.jsonl.",
    group=MEASURED,
)
@option(
    "--task",
    "names_of_tasks",
    multiple=True,
    metavar="TASK",
    group=MEASURED,
    show_default="all",
    help="A task, or a family of tasks; TASK=K takes K prompts of each. May be repeated.",
)
@option("--limit", type=click.IntRange(min=1), default=10, metavar="K", group=MEASURED, help="Prompts of each task.")
@option(
    "-t",
    "--temperature",
    "temperatures",
    argument="temperature",
    type=float,
    multiple=True,
    default=(0.0, 1.0),
    group=MEASURED,
    help="0 is greedy decoding. May be repeated.",
)
@batch_option(
    "Number of texts decoded together. May be repeated.", "batches", multiple=True, default=(1,), group=MEASURED
)
@option(
    "-n",
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=64,
    metavar="N",
    group=MEASURED,
    help="Greatest length of each text in tokens.",
)
@option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    metavar="N",
    group=MEASURED,
    help="Measured rounds, after one that warms up.",
)
@option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    group=MEASURED,
    help="Seed of the sampled texts, of the order of measurements and of the bootstrap.",
)
@option(
    "--quick",
    is_flag=True,
    group=MEASURED,
    help="2 prompts of each task, 2 rounds, 32 tokens, greedy, where these options are not given.",
)
@option(
    "--together",
    is_flag=True,
    group=MEASURED,
    help="Load all models at once and let them take turns, so that their speeds compare. They must have one tokenizer.",
)
@option(
    "--out",
    type=Folder(),
    default=Path("bench"),
    metavar="DIR",
    help="Folder of the results, the table and the plots.",
)
@option("--resume", is_flag=True, help="Continue the measurement whose results are in --out.")
@option("--report-only", is_flag=True, help="Only write the table and the plots of the results in --out again.")
@click.pass_context
def bench(
    context: click.Context,
    /,
    models: tuple[str, ...],
    names: tuple[str, ...],
    configs: tuple[str, ...],
    rules: tuple[str, ...],
    peers_given: tuple[str, ...],
    data: Path | None,
    names_of_tasks: tuple[str, ...],
    out: Path,
    resume: bool,
    report_only: bool,
    quick: bool,
    **values: Any,
) -> None:
    """Measure drafters against plain decoding, alternating in one run, and compare every text.

    Options of models and engines count for every model and drafter of leapahead, and are refused for a model that has
    no such option; --dtype is for those of Transformers. Forms of one model, such as -m "model_ov(copies=1)" -m
    "model_ov(copies=4)", are loaded together, take turns, and are compared with each other, too. Peers are not given
    these options, and run beside the first form; openvino-genai computes in the same types as the model beside it.

    Results are written to DIR/bench.json after every finished cell (task, target, temperature, batch size). Ctrl-C
    keeps and reports them, and --resume continues. The exit code is 1 if a text differs from that of plain decoding.
    """
    plots.require()
    if report_only:
        _refuse_others(context)
        _report(record.read(out), out)
        return
    if quick:
        unsaid = [name for name in QUICK if context.get_parameter_source(name) is ParameterSource.DEFAULT]
        values |= {name: QUICK[name] for name in unsaid}
    for temperature in values["temperatures"]:
        SamplingParams(temperature=temperature)  # refuses what cannot be
    chosen = tasks.read(data, names_of_tasks, values.pop("limit"))
    values |= {name: tuple(dict.fromkeys(values[name])) for name in ("temperatures", "batches")}
    _check_batch(chosen, max(values["batches"]))
    values |= _common(values)
    plan = Plan(
        tasks=chosen,
        models=tuple(map(model_of, models)) or (Model(),),
        configurations=configurations(names, configs, rules),
        peers=peers.configured(peers_given),
        data="our own" if data is None else str(data),
        **values,
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    kept = record.Record.open(out, plan.conditions(now), resume)
    ended_by = _measure(plan, kept)
    if not kept.rows:
        kept.discard()
        raise ended_by or BadParameter(
            "nothing was measured, since the prompts do not fit the context with "
            f"max_new_tokens={plan.max_new_tokens}; give fewer, or shorter prompts"
        )
    found = kept.as_dict()
    if isinstance(ended_by, LeapaheadError):
        _show(found)
        raise ended_by
    _report(found, out)
    if ended_by is not None:
        screen.say(f"interrupted; {kept.path} has {counted(len(kept.rows), 'row')}, and --resume continues")
        raise Exit(INTERRUPTED)
    if any(row["mismatches"] for row in kept.rows if not _peer(row)):
        raise Exit(DIFFERENT)


def _refuse_others(context: click.Context) -> None:
    """Refuses what was given beside --report-only and --out, since it would be ignored."""
    for each in context.command.params:
        name, given = str(each.name), max(each.opts, key=len)
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and name not in ("out", "report_only"):
            raise BadParameter(f"{given} is not possible with --report-only, which measures nothing; leave it out")


def _check_batch(chosen: Sequence[tasks.Task], batch: int) -> None:
    """Refuses a batch for which no task has enough prompts, before a model is loaded."""
    most = max(len(task.prompts) for task in chosen)
    if batch > most:
        raise BadParameter(
            f"--batch={batch} is not possible, since the greatest number of prompts of a task is {most}; give more "
            "with --data or --limit, or decode fewer together"
        )


def _common(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan with the options of all models, which are removed from the command's values."""
    found = loading_arguments(values)
    fields = {name: found.pop(name) for name in ("dtype", "device", "exact")}
    usual = {"engine": "auto", "trust_remote_code": False}
    return {**fields, "options": {name: value for name, value in found.items() if value != usual.get(name)}}


def _measure(plan: Plan, kept: record.Record) -> LeapaheadError | KeyboardInterrupt | None:
    """Measures what the plan has and the record has not. Returns what ended it early, so that its rows are shown."""
    try:
        screen.quiet_transformers()  # imports it, which takes seconds
        with screen.progress("bench") as bar:
            runner.run(plan, kept, progress=bar, say=bar.say)
    except (LeapaheadError, KeyboardInterrupt) as error:
        return error
    return None


def configurations(names: Sequence[str], configs: Sequence[str], rules: Sequence[str] = ()) -> list[Configuration]:
    """The configurations of -d and --config; if neither is given, all drafters that need nothing but a target.

    Each is measured with each of the acceptance rules.

    Raises:
        BadParameter: an unknown drafter or option, or a value that is not possible.
    """
    if not names and not configs:
        names = registry.ready()
    found = [Configuration(name) for name in names]
    for text in configs:
        name, _, given = text.partition(":")
        pairs = tuple(listed(given))
        if broken := [pair for pair in pairs if "=" not in pair]:
            raise BadParameter(
                f"--config {text} is not possible: {broken[0]!r} must be KEY=VALUE, and a value with commas in quotes: "
                'auto:sources="ngram,suffix"'
            )
        name = name.strip()
        values: dict[str, Any] = {**dict.fromkeys(SHORTHANDS), "options": pairs}
        found.append(Configuration(name, drafter_arguments(values, [name], f"--config {name}:")))
    for each in found:
        registry.make(each.drafter, **each.options)
    accepted = [rule(text) for text in rules] or [None]
    return [replace(each, acceptance=one) for each in found if each.drafter != PLAIN for one in accepted]


def _report(found: dict[str, Any], out: Path) -> None:
    if not found["results"]:
        raise BadParameter(f"{out / record.FILE} holds no results yet, since no cell was finished")
    try:
        _show(found)
    finally:  # also where standard output cannot be written
        _write(found, out)


def _write(found: dict[str, Any], out: Path) -> None:
    paths = report.write(found, out)
    screen.say(f"{out}: {', '.join([record.FILE, *(path.name for path in paths)])}")


def _show(found: dict[str, Any]) -> None:
    console = screen.Console()
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
    for first, rows_of in report.forms(found["results"]).items():
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=report.forms_title(first), title_justify="left")
        for column in report.FORMS:
            table.add_column(column, overflow="fold", justify="right" if column in report.FORMS[-2:] else "left")
        for texts_of in rows_of:
            table.add_row(*texts_of)
        console.print(table)
    for note in report.notes(found["results"]):
        click.echo(note)
    for each in found["conditions"]["targets"].values():
        if "reference" in each:
            click.echo(each["reference"])
    rows = [row for row in found["results"] if row["task"] != record.OVERALL]
    ties = sum(row["ties"] for row in rows if not _peer(row))
    if any(row["mismatches"] for row in rows if not _peer(row)):
        click.echo(
            "MISMATCH: a text differs from that of plain decoding. This is a bug; `leapahead check` shows where."
        )
    else:
        exact = "Every text" if all("lossy" not in row for row in rows) else "Every text of an exact rule"
        click.echo(f"{exact} equals that of plain decoding" + (f", except for {ties} numeric ties." if ties else "."))
    for name in dict.fromkeys(row["drafter"] for row in rows if _peer(row) and row["mismatches"]):
        count = sum(row["mismatches"] for row in rows if row["drafter"] == name)
        differ = f"{counted(count, 'text')} differ{'s' * (count == 1)}"
        click.echo(f"{name}: {differ} from plain decoding by more than the rounding error of this target.")


def _peer(row: report.Row) -> bool:
    return str(row["drafter"]).startswith("peer:")
