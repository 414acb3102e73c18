"""`leapahead check`: is every drafter's text plain decoding's, on this model, on this machine?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from leapahead import drafters as registry
from leapahead.bench import prompts
from leapahead.check import Report
from leapahead.check import check as run_check
from leapahead.cli import screen
from leapahead.cli.options import DRAFTER_OPTIONS, MODEL, all_of, drafter_arguments, model_arguments
from leapahead.core.sampling import SamplingParams
from leapahead.models import loading


@click.command()
@all_of(MODEL)
@click.option("-d", "--drafter", "names", multiple=True, metavar="D", help="May be repeated.  [default: all]")
@all_of(DRAFTER_OPTIONS)
@click.option(
    "--prompts",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=".txt (one prompt a line) or .jsonl (field prompt, question or turns).  [default: a small set of our own]",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="K", help="Only the first K prompts.")
@click.option("-t", "--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the dice, with a temperature.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts decoded together.")
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Length limit of each text.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    """Prove the promise on a model: every drafter's text against plain decoding's, token for token.

    The exit code is 1 on any mismatch. A difference is a numeric tie, and no mismatch, only where the two tokens'
    scores lie closer than the measured rounding of that very position.
    """
    texts = prompts.read(file) if file is not None else list(prompts.BUNDLED)
    options = drafter_arguments(values, names or registry.ready())
    sampling = SamplingParams(temperature=temperature, seed=seed)
    model = model_arguments(values)
    with screen.loading(model["model"]):
        loaded = loading.load(**model)
    with screen.progress("plain") as bar:
        report = run_check(
            loaded.target,
            loaded.tokenizer,
            texts[:limit],
            list(names) or None,
            options=options,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos_token_ids=loaded.eos_token_ids,
            batch=batch,
            progress=bar,
        )
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        _show(report, f"temperature {temperature:g}, seed {seed}" if temperature > 0 else "greedy", batch)
    if not report.ok:
        sys.exit(1)


def _show(report: Report, sampling: str, batch: int) -> None:
    console = Console(highlight=False)
    click.echo(
        f"{report.target}, {sampling}, batch {batch}\n"
        f"{report.prompts} prompts, {report.tokens} tokens of plain decoding, "
        f"of whose 4-grams {report.distinct_4_grams:.0%} are distinct"
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
    console.print(table)
    for row in report.drafters:
        if row.refused is not None:
            click.echo(f"{row.name}: refused: {row.refused}")
        for d in row.mismatches[:3]:
            click.echo(
                f"{row.name}: prompt {d.prompt}, new token {d.position}: {d.got} instead of {d.expected}, "
                f"gap {d.gap:.3g}, noise {d.noise:.3g}"
            )
    if report.ok:
        ties = any(row.ties for row in report.drafters)
        click.echo("Every text equals plain decoding's, token for token" + (", but for numeric ties." if ties else "."))
    else:
        click.echo("MISMATCH: a drafter's text is not plain decoding's. This is a bug; please report it.")
