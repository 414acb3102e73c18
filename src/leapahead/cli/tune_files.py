"""The comparison of several GGUF files of one model by `leapahead tune`: which type is fastest with drafting.

Each file is loaded, measured and released before the next one, so that only one has to fit into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from leapahead import tune as tuning
from leapahead.bench import tasks
from leapahead.bench.conditions import Data
from leapahead.bench.tasks import Task
from leapahead.cli import screen
from leapahead.cli.options import model_arguments
from leapahead.core.errors import BadParameter
from leapahead.core.text import fingerprint
from leapahead.models import loading

SHOWN = (2, 3, 4, 6, 8, 16)  # values of n in the table


def check(files: Sequence[Path]) -> None:
    """Refuses files that cannot be compared, before anything is measured.

    Raises:
        BadParameter: fewer than two, one that is no GGUF file, or files with different vocabularies.
    """
    if len(files) < 2:
        raise BadParameter(f"{files[0]} alone cannot be compared: give at least two files, or this one with --model")
    for file in files:
        if file.suffix.lower() != ".gguf":
            raise BadParameter(f"{file} cannot be compared: give GGUF files of one model, which differ in their types")
    first, *others = [fingerprint(loading.gguf_tokenizer(str(file))) for file in files]
    for file, other in zip(files[1:], others, strict=True):
        if other != first:
            raise BadParameter(
                f"{file} has another vocabulary than {files[0]}: give files of one model, which differ in their types"
            )


def compare(
    files: Sequence[Path],
    values: dict[str, Any],
    sets: Sequence[Task],
    batch: int,
    max_new_tokens: int,
    seconds: float,
    text_seconds: float,
) -> Data:
    """Measures each file, and decodes the same prompts with each.

    Args:
        files: of one model, see `check`.
        values: the command's options of models.
        sets: the prompts.
        batch: sequences stepped together.
        max_new_tokens: greatest length of a text.
        seconds, text_seconds: of each file.

    Returns:
        files: for each what `tune` and `practise` measured, and its `file` and `bytes`. fastest: with drafting, and
        fastest_plain; None where no text was decoded.
    """
    found: list[Data] = []
    with screen.progress("tune") as bar:
        for file in files:
            bar(f"loading {file.name}", 0, 1)
            loaded = loading.load(**model_arguments({**values, "model": str(file)}), sequences=batch)
            measured, profiles = tuning.tune(loaded.target, batch, seconds, progress=bar)
            prompts = [tokens for task in sets for tokens in tasks.encoded(task, loaded, max_new_tokens)]
            ends = loaded.eos_token_ids
            measured["auto"] = tuning.practise(
                loaded.target, profiles, prompts, batch, max_new_tokens, ends, text_seconds, progress=bar
            )
            found.append({"file": str(file), "bytes": file.stat().st_size, **measured})
    return {"files": found, "fastest": _fastest(found, "auto"), "fastest_plain": _fastest(found, "plain")}


def _fastest(found: Sequence[Data], what: str) -> str | None:
    speeds = {row["file"]: row["auto"]["expected"][what] for row in found if row["auto"]["expected"][what] is not None}
    return max(speeds, key=lambda file: float(speeds[file])) if speeds else None


def show(found: Data) -> None:
    """Prints the table and which file is fastest."""
    rows = found["files"]
    sequences = rows[0]["sequences"]
    click.echo(rows[0]["processor"] + ("" if sequences == 1 else f", {sequences} sequences a step"))
    columns = ["MB", "T(1) ms", *(f"T({n})" for n in SHOWN), "tokens/step", "plain tokens/s", "with auto", "gain"]
    table = screen.new_table(columns, head=("file",))
    for row in rows:
        cost = {each["nodes"] // sequences: each["cost"] for each in row["rows"]}
        expected = row["auto"]["expected"]
        gain = expected["auto"] / expected["plain"] if expected["auto"] and expected["plain"] else None
        table.add_row(
            Path(row["file"]).name,
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['rows'][0]['milliseconds']['median']:.4g}",
            *(screen.number(cost.get(n), ".2f") for n in SHOWN),
            screen.number(row["auto"]["acceptance_length"], ".2f"),
            screen.number(expected["plain"], ".1f"),
            screen.number(expected["auto"], ".1f"),
            screen.number(gain, ".2f"),
            style="bold" if row["file"] == found["fastest"] else None,
        )
    screen.Console().print(table)
    click.echo(
        "T(n) relative to T(1); tokens/step, plain and with auto: of the same prompts, decoded by each file, with the "
        "forwards at the times of its profile"
    )
    if any(row["busy"] or row["few"] for row in rows):
        click.echo(
            "The machine was busy or the time too short, and the comparison is not reliable; measure again when it is "
            "idle, or give more --seconds."
        )
    if found["fastest"] is None or found["fastest_plain"] is None:
        click.echo("The time was too short for a text; give more with --text-seconds.")
    else:
        click.echo(f"Fastest with drafting: {found['fastest']}. Fastest plainly: {found['fastest_plain']}.")
