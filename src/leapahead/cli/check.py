"""`leapahead check`: compares every drafter's text with that of plain decoding, on the user's model and machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.exceptions import Exit
from rich import box
from rich.table import Table

from leapahead import drafters as registry
from leapahead.bench import prompts, tasks
from leapahead.check import Report, refuse
from leapahead.check import check as run_check
from leapahead.cli import screen
from leapahead.cli.acceptance import REFUSED
from leapahead.cli.command import DIFFERENT, INTERRUPTED, Command, drafter_names, option
from leapahead.cli.options import (
    DRAFTER_GROUP,
    DRAFTER_OPTIONS,
    EXISTING_FILE,
    FILE_OF_PROMPTS,
    MODEL,
    TEMPERATURE,
    TEXT_GROUP,
    all_of,
    batch_option,
    drafter_arguments,
    model_arguments,
)
from leapahead.core.errors import counted
from leapahead.core.sampling import SamplingParams
from leapahead.inputs import check_values

SHOWN = 3  # mismatches that are printed of each drafter
BUG = "This is a bug; please report it."
UNSTEADY = (
    "The tokens are closer than the rounding error there, but that is larger than it should be for this type, as where "
    "texts are longer than the model was trained for. Try shorter prompts, or a wider type; if texts differ there too, "
    "this is a bug; please report it."
)


@click.command(
    cls=Command,
    examples=(
        "leapahead check",
        "leapahead check -m Qwen/Qwen3-0.6B -d lookahead -d auto --limit 5",
        "leapahead check -m model.gguf --prompts prompts.txt -t 0.8 --batch 4 --json",
    ),
)
@all_of(MODEL)
@option(
    "-d",
    "--drafter",
    "names",
    multiple=True,
    metavar="DRAFTER",
    shell_complete=drafter_names,
    group=DRAFTER_GROUP,
    show_default="all that need no file and no other model",
    help="A drafter to check. May be repeated.",
)
@all_of(DRAFTER_OPTIONS, REFUSED, [TEMPERATURE])
@option("--seed", type=int, default=0, group=TEXT_GROUP, help="Seed of the sampled texts.")
@option(
    "-n", "--max-new-tokens", type=int, default=128, group=TEXT_GROUP, help="Greatest length of each text in tokens."
)
@option(
    "--prompts",
    "--data",
    "file",
    type=EXISTING_FILE,
    metavar="FILE",
    show_default="a small built-in set",
    help=f"Prompts of your own: {FILE_OF_PROMPTS}.",
)
@option("--limit", type=click.IntRange(min=1), metavar="K", show_default="all", help="Only the first K prompts.")
@batch_option("Number of prompts decoded together.", default=1)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    names: tuple[str, ...],
    file: Path | None,
    limit: int | None,
    temperature: float,
    seed: int,
    batch: int,
    max_new_tokens: int,
    as_json: bool,
    **values: Any,
) -> None:
    """Compare every drafter's text with that of plain decoding, token for token.

    The exit code is 1 on any mismatch. A difference counts as a numeric tie, and not as a mismatch, only where the
    logits of the two tokens are closer than the rounding error measured at that position. With --exact there are no
    ties. Ctrl-C shows the drafters that are finished.
    """
    given: list[tasks.Prompt] = list(prompts.BUNDLED) if file is None else tasks.read_file(file).prompts
    options = drafter_arguments(values, names or registry.ready())
    sampling = SamplingParams(temperature=temperature, seed=seed)
    check_values({"max_new_tokens": max_new_tokens})
    refuse(list(names) or None, options, sampling)
    loaded = screen.load(model_arguments(values), batch, names or registry.ready())
    if loaded.target.info.reference:
        screen.say(loaded.target.info.reference)
    reports: list[Report] = []  # the latest is the last
    interrupted = False
    try:
        with screen.progress("plain") as bar:
            run_check(
                loaded.target,
                loaded.tokenizer,
                [tasks.readable(prompt, loaded.tokenizer) for prompt in given[:limit]],
                list(names) or None,
                options=options,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                eos_token_ids=loaded.eos_token_ids,
                batch=batch,
                progress=bar,
                finished=reports.append,
            )
    except KeyboardInterrupt:
        interrupted = True
        if not reports:
            raise
    report = reports[-1]
    if as_json:
        click.echo(json.dumps({**report.as_dict(), "interrupted": interrupted}))
    else:
        how = f"temperature {temperature:g}, seed {seed}" if temperature > 0 else "greedy"
        _show(report, how, min(batch, report.prompts))
    if interrupted:
        screen.say(f"interrupted; finished: {counted(len(report.drafters), 'drafter')}")
        raise Exit(INTERRUPTED)
    if not report.ok:
        raise Exit(DIFFERENT)


def _show(report: Report, sampling: str, batch: int) -> None:
    click.echo(
        f"{report.target}, {sampling}, batch {batch}\n"
        f"{counted(report.prompts, 'prompt')}, {counted(report.tokens, 'token')} of plain decoding; "
        f"{report.distinct_4_grams:.0%} of their 4-grams are distinct"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for column in ("prompts", "tokens", "mismatches", "ties", "largest gap", "acceptance length"):
        table.add_column(column, justify="right")
    for row in report.drafters:
        if row.refused is None:
            counts = (report.prompts, row.tokens, len(row.mismatches), len(row.ties))
            gap = f"{row.largest_tie:.3g}" if row.ties else "-"
            style = "red" if row.mismatches else None
            table.add_row(row.name, *map(str, counts), gap, f"{row.stats.acceptance_length:.2f}", style=style)
    screen.Console().print(table)
    for row in report.drafters:
        if row.refused is not None:
            click.echo(f"{row.name}: refused: {row.refused}")
        for d in row.mismatches[:SHOWN]:
            click.echo(
                f"{row.name}: prompt {d.prompt}, new token {d.position}: {d.got} instead of {d.expected}, "
                f"gap {d.gap:.3g}, rounding error {d.noise:.3g}"
            )
    if not report.ok:
        mismatches = [d for row in report.drafters for d in row.mismatches]
        unsteady = all(abs(d.gap) <= d.noise < float("inf") for d in mismatches)
        click.echo(f"MISMATCH: a drafter's text differs from that of plain decoding. {UNSTEADY if unsteady else BUG}")
    elif any(row.refused is None for row in report.drafters):
        ties = any(row.ties for row in report.drafters)
        click.echo(f"Every text equals that of plain decoding, token for token{', except for numeric ties' * ties}.")
