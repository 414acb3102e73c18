"""`leapahead tune`: what a forward costs on this machine, and so which drafts pay."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from leapahead import tune as tuning
from leapahead.bench import tasks
from leapahead.cli import screen
from leapahead.cli.options import MODEL, all_of, model_arguments
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.models import loading
from leapahead.planner.latency import CostCurve
from leapahead.bench.conditions import Data

KINDS = (".png", ".svg")
WORDS = {None: "never drafted", True: "yes", False: "no"}
WIDTH = 8  # of the longest bar


@click.command()
@all_of(MODEL)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Texts decoded together.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Prompts to try auto on, see `leapahead bench`.  [default: a small set of our own]",
)
@click.option("--limit", type=click.IntRange(min=1), default=2, show_default=True, help="K prompts of each task.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of each text.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="For the cost curve.")
@click.option("--text-seconds", type=click.FloatRange(min=0), default=10.0, show_default=True, help="0: no texts.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the curve: a .png or .svg file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tune(
    batch: int,
    data: Path | None,
    limit: int,
    max_new_tokens: int,
    seconds: float,
    text_seconds: float,
    plot: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure what a forward costs on this machine, and show which drafts pay.

    The curve is kept, and `auto` plans with it; without this command it measures one itself, within a second, and
    corrects it as it decodes.
    """
    if plot is not None:
        _check(plot)
    if data is not None and not data.is_dir():
        raise BadParameter(f"there is no folder {str(data)!r} of prompts")
    sets = tasks.read(data, (), limit) if text_seconds else []
    model = model_arguments(values)
    with screen.loading(model["model"]):
        loaded = loading.load(**model)
    target = loaded.target
    with screen.progress("tune") as bar:
        found = tuning.tune(target, batch, seconds, progress=bar)
        curve = CostCurve({row["nodes"]: row["cost"] for row in found["rows"]})
        prompts = [tokens for task in sets for tokens in tasks.encoded(task, loaded, max_new_tokens)]
        found["drafters"] = tuning.served(target)
        largest = max(row["nodes"] for row in found["rows"])
        found["lookahead"] = tuning.lookahead(curve, largest) if batch == 1 and largest > 1 else []
        found["auto"] = None
        if prompts:
            found["auto"] = tuning.practise(
                target, prompts, curve, batch, max_new_tokens, loaded.eos_token_ids, text_seconds, progress=bar
            )
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show(found)
    if plot is not None:
        _draw(found, plot)
        if not as_json:
            click.echo(f"written: {plot}")


def _check(plot: Path) -> None:
    """Whether the plot can be written, before anything is measured."""
    if plot.suffix not in KINDS:
        raise BadParameter(f"--plot {plot} is not possible: the file must end in {' or '.join(KINDS)}")
    if not plot.parent.is_dir():
        raise BadParameter(f"--plot {plot} cannot be written: there is no folder {plot.parent}")
    if plot.is_dir() or not os.access(plot if plot.exists() else plot.parent, os.W_OK):
        raise BadParameter(f"--plot {plot} cannot be written: no permission, or it is a folder")
    plots.require()


def _draw(found: Data, plot: Path) -> None:
    try:
        plots.save(tuning.figure(found), plot.with_suffix(""), kinds=(plot.suffix[1:],))
    except OSError as error:
        raise LeapaheadError(f"{plot} cannot be written: {error.strerror or error}") from None


# ---------------------------------------------------------------------------------------------------------- tables


def _show(found: Data) -> None:
    sequences = found["sequences"]
    batch = "" if sequences == 1 else f", {sequences} sequences a step"
    click.echo(f"{found['conditions']['target']}{batch}, {found['processor']}")
    _curve(found)
    _drafters(found["drafters"])
    if found["auto"] is not None:
        _auto(found["auto"])
    if found["lookahead"]:
        _lookahead(found["lookahead"])
    if found["stored"] is None:
        click.echo("The curve could not be written to the cache; every process will measure its own.")
    else:
        click.echo(f"The curve is kept in {found['stored']}.")


def _curve(found: Data) -> None:
    rows = found["rows"]
    most = max(row["cost"] for row in rows)
    table = _table(("n", "ms", "quartiles", "times", "T(n)/T(1)", "last node", "from p"), left=("",))
    for row in rows:
        spread = row["milliseconds"]
        table.add_row(
            str(row["nodes"]),
            f"{spread['median']:.4g}",
            f"{spread['low']:.4g}-{spread['high']:.4g}",
            str(row["times"]),
            f"{row['cost']:.2f}",
            _number(row["last_node"], ".3f"),
            "never" if row["needs"] is not None and row["needs"] >= 1 else _number(row["needs"], ".2f"),
            "█" * max(1, round(WIDTH * row["cost"] / most)),
        )
    Console(highlight=False).print(table)
    click.echo(
        "last node: what one more costs there, in tokens of plain decoding\n"
        "from p: a draft of this size pays if its nodes are accepted with that probability, on average\n"
    )
    if found["busy"]:
        click.echo("The machine was busy: the times differ widely, and with them what follows. Better measure again.")
    elif found["few"]:
        click.echo("Most sizes were measured once or twice only; --seconds gives them more time.")
    many, largest = found["free"], rows[-1]["nodes"] - found["sequences"]
    if not largest:
        click.echo("Only a plain step was measured: this model takes too long, or reads no drafts.")
    elif many:
        nodes = f"{many} drafted node{' is' if many == 1 else 's are'} free"
        click.echo(f"{'At least ' * (many == largest)}{nodes} (at most {tuning.FREE:g} times a plain step).")
    else:
        click.echo(f"No drafted node is free: already the first makes a step more than {tuning.FREE:g} times as long.")


def _drafters(rows: Sequence[Data]) -> None:
    able = [row["name"] for row in rows if row["refused"] is None]
    click.echo(f"This model can be served by {', '.join(able)}.")
    for row in rows:
        if row["refused"] is not None:
            click.echo(f"{row['name']}: refused: {row['refused']}")


def _auto(auto: Data) -> None:
    if not auto["steps"]:
        click.echo("auto: there was no time for a text.")
        return
    click.echo(
        f"\nauto on {auto['texts']} texts, greedy: {auto['nodes_per_step']:.1f} drafted nodes a step, "
        f"{auto['plain_steps'] / auto['steps']:.0%} of its {auto['steps']} steps without a draft, "
        f"acceptance length {auto['acceptance_length']:.2f}"
    )
    speeds = auto["tokens_per_second"]
    if speeds["plain"]:
        click.echo(
            f"{speeds['auto']:.1f} tokens/s, plain decoding of the same texts {speeds['plain']:.1f}: "
            f"{speeds['auto'] / speeds['plain']:.2f} times its speed"
        )
    table = _table(("first right", "drafted", "accepted", "price", "pays"), head=("source",))
    for row in auto["sources"]:
        table.add_row(
            str(row["name"]),
            _number(row["first"], ".1%"),
            str(row["drafted"]),
            str(row["accepted"]) if row["drafted"] else "-",
            _number(row["price"], ".1f"),
            "by later drafts" if row["probe"] else WORDS[row["pays"]],
        )
    Console(highlight=False).print(table)
    click.echo(
        "first right: a source's first candidate, drafted or not; price: the tokens that plain steps would have "
        "committed in the time that its nodes took"
    )


def _lookahead(rows: Sequence[Data]) -> None:
    click.echo(
        f"\nlookahead's window, by its authors' formula (2402.02057, equation 7, α = {tuning.ALPHA}, f = {tuning.F}); "
        "only the cost is measured:"
    )
    table = _table(("(W, N, G)", "n", "T(n)/T(1)", "expected S", "expected speed-up"))
    for row in rows:
        table.add_row(
            f"({row['window']}, {row['ngram']}, {row['guesses']})",
            str(row["nodes"]),
            _number(row["cost"], ".2f"),
            f"{row['compression']:.2f}",
            f"{row['speedup']:.2f}" if row["speedup"] is not None else f"< {row['at_most']:.2f}",
            style="bold" if row["best"] else None,
        )
    Console(highlight=False).print(table)
    best = next((row for row in rows if row["best"]), None)
    if best is None and all(row["at_most"] < tuning.WORTH for row in rows):
        click.echo("None of them pays on this machine: plain steps and retrieval drafts only.")
    elif best is None:
        click.echo("Whether one pays is not known: forwards that large were not measured (--seconds gives them time).")
    else:
        click.echo(f"Here lookahead should run with -W {best['window']} -N {best['ngram']} -G {best['guesses']}.")


def _table(columns: Sequence[str], head: Sequence[str] = (), left: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in head:
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for column in left:
        table.add_column(column, no_wrap=True)
    return table


def _number(value: float | None, form: str) -> str:
    """What was not measured is not shown."""
    return "-" if value is None else f"{value:{form}}"
