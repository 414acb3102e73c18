"""The comparison of several forms of one model by `leapahead tune`: which type and which engine is fastest here.

Forms are GGUF files of different types, or one model with different options, such as its engine. Each is loaded,
measured and released before the next one, so that only one has to fit into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from leapahead import tune as tuning
from leapahead.bench import tasks
from leapahead.bench.conditions import Data
from leapahead.bench.plan import Model
from leapahead.bench.tasks import Task
from leapahead.cli import screen
from leapahead.cli.bench_models import model_of
from leapahead.core.errors import BadParameter
from leapahead.core.text import fingerprint
from leapahead.models import loading
from leapahead.models.llama_cpp.file import is_gguf

SHOWN = (2, 4, 8, 16)  # values of n in the table; without the first one where the terminal is narrow
WIDE = 90  # characters of a terminal that is not
UNCERTAIN = (
    f"With fewer than {tuning.FEW_TOKENS} tokens of auto the gain is uncertain, since its first steps try drafts of "
    "several sizes; give more time with --text-seconds."
)
SPEEDS = ("tokens\n/step", "plain\ntokens/s", "auto\ntokens/s", "gain")


def forms(given: Sequence[str], common: dict[str, Any]) -> dict[str, Model]:
    """The forms that are to be compared, by what was given; refused, where they cannot be, before any is measured.

    Args:
        given: `MODEL` or `MODEL(OPTION=VALUE,...)` each.
        common: arguments of `loading.load` for all of them.

    Raises:
        BadParameter: fewer than two, one that is given twice, a place where there is no model, an option that a model
            does not have, or models that differ in more than the types of a GGUF file.
    """
    found = {text: model_of(text) for text in given}
    if len(found) < 2:
        raise BadParameter(
            f"{given[0]} alone cannot be compared: give further files of the model, or the same one with other options "
            "in parentheses, as in the examples of --help; or this one with --model"
        )
    paths = list(dict.fromkeys(model.path for model in found.values()))
    for path in paths:
        if len(paths) > 1 and not is_gguf(path):
            raise BadParameter(
                f"{path or loading.BUNDLED} cannot be compared: give GGUF files of one model, which differ in their "
                "types, or one model with different options"
            )
        if path is not None:
            loading.check_place(path)
    seen: list[tuple[str | None, dict[str, Any]]] = []
    for text, model in found.items():
        loading.check(model.path, **{**common, **model.options})
        if (form := (model.path, dict(model.options))) in seen:
            raise BadParameter(f"{text} was given twice; give each form once")
        seen.append(form)
    if len(paths) > 1:
        first, *others = [fingerprint(loading.gguf_tokenizer(str(path))) for path in paths]
        for path, other in zip(paths[1:], others, strict=True):
            if other != first:
                raise BadParameter(
                    f"{path} has another vocabulary than {paths[0]}: give files of one model, which differ in their "
                    "types"
                )
    return found


def compare(
    models: dict[str, Model],
    common: dict[str, Any],
    sets: Sequence[Task],
    batch: int,
    max_new_tokens: int,
    seconds: float,
    text_seconds: float,
) -> Data:
    """Measures each form, and decodes the same prompts with each.

    Args:
        models, common: see `forms`.
        sets: the prompts.
        batch: sequences stepped together.
        max_new_tokens: greatest length of a text.
        seconds, text_seconds: of each form.

    Returns:
        models: for each what `tune` and `practise` measured, and `model`, as it was given, and `bytes` of a file.
        fastest: with drafting, and fastest_plain; None where no text was decoded.
    """
    found: list[Data] = []
    with screen.progress("tune") as bar:
        for text, model in models.items():
            bar(f"loading {Path(text).name}", 0, 1)
            arguments = {**common, **model.options, "sequences": batch}
            measured = _measured(model, arguments, sets, max_new_tokens, seconds, text_seconds, bar)
            is_file = model.path is not None and Path(model.path).is_file()
            size = Path(str(model.path)).stat().st_size if is_file else None
            found.append({"model": text, "bytes": size, **measured})
    return {"models": found, "fastest": _fastest(found, "auto"), "fastest_plain": _fastest(found, "plain")}


def _measured(
    model: Model,
    arguments: dict[str, Any],
    sets: Sequence[Task],
    max_new_tokens: int,
    seconds: float,
    text_seconds: float,
    bar: screen.Bar,
) -> Data:
    """What `tune` and `practise` measure of a form, which is loaded with the arguments and released in the end."""
    loaded, batch = loading.load(model.path, **arguments), arguments["sequences"]
    try:
        prompts = tasks.fitting(sets, loaded, max_new_tokens)
        measured, profiles = tuning.tune(loaded.target, batch, seconds, progress=bar)
        ends = loaded.eos_token_ids
        measured["auto"] = tuning.practise(
            loaded.target, profiles, prompts, batch, max_new_tokens, ends, text_seconds, progress=bar
        )
    finally:
        loading.close(loaded.target)
    return measured


def _fastest(found: Sequence[Data], what: str) -> str | None:
    speeds = {row["model"]: row["auto"]["expected"][what] for row in found if row["auto"]["expected"][what] is not None}
    return max(speeds, key=lambda model: float(speeds[model])) if speeds else None


def show(found: Data) -> None:
    """Prints the table and which file is fastest."""
    rows = found["models"]
    sequences = rows[0]["sequences"]
    click.echo(rows[0]["processor"] + ("" if sequences == 1 else f", {sequences} sequences a step"))
    console = screen.Console()
    shown = SHOWN if console.width >= WIDE else SHOWN[1:]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for column in ("MB", "T(1)\nms", *(f"T({n})" for n in shown), *SPEEDS):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cost = {each["nodes"] // sequences: each["cost"] for each in row["rows"]}
        expected = row["auto"]["expected"]
        gain = expected["auto"] / expected["plain"] if expected["auto"] and expected["plain"] else None
        table.add_row(
            _name(row["model"]),
            "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:.0f}",
            f"{row['rows'][0]['milliseconds']['median']:.4g}",
            *(screen.number(cost.get(n), ".2f") for n in shown),
            screen.number(row["auto"]["acceptance_length"], ".2f"),
            screen.number(expected["plain"], ".1f"),
            screen.number(expected["auto"], ".1f"),
            screen.number(gain, ".2f"),
            style="bold" if row["model"] == found["fastest"] else None,
        )
    console.print(table)
    click.echo(
        "T(n) relative to T(1); tokens/step and tokens/s, plainly and with auto: of the same prompts, decoded by each, "
        "with the forwards at the times of its profile"
    )
    if any(row["busy"] or row["few"] for row in rows):
        click.echo(
            "The machine was busy or the time too short, and the comparison is not reliable; measure again when it is "
            "idle, or give more --seconds."
        )
    if found["fastest"] is None or found["fastest_plain"] is None:
        click.echo("The time was too short for a text; give more with --text-seconds.")
    else:
        if few := [_name(row["model"]) for row in rows if row["auto"]["tokens"] < tuning.FEW_TOKENS]:
            click.echo(f"Few tokens were decoded with {', '.join(few)}. {UNCERTAIN}")
        click.echo(f"Fastest with drafting: {found['fastest']}. Fastest plainly: {found['fastest_plain']}.")


def _name(text: str) -> str:
    """A form without the folder that it lies in."""
    path, parenthesis, options = text.partition("(")
    return Path(path).name + parenthesis + options
