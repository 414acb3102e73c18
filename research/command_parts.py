"""What the commands of research share: options, loading of models and prompts, tables, and writing of files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.table import Table

from leapahead.bench import tasks
from leapahead.bench.conditions import Data
from leapahead.bench.plots import require
from leapahead.cli import screen
from leapahead.cli.options import Option, model_arguments
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.models import loading
from leapahead.models.loading import LLAMA_CPP_OPTIONS
from research import plots

Number = TypeVar("Number", int, float)
KINDS = (".json", ".png", ".svg")
SAMPLING: tuple[Option, ...] = (
    click.option("-t", "--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampling."),
)


def data_options(default: str) -> tuple[Option, ...]:
    """The options --data, --task and --limit; `default` tells what is used without --data."""
    files = ", ".join((*tasks.FILES, *tasks.CONVERSATIONS))
    return (
        click.option(
            "--data",
            type=click.Path(path_type=Path),
            metavar="FOLDER",
            help=f"Folder of prompts: {files}.  [default: {default}]",
        ),
        click.option("--task", "names", multiple=True, metavar="T", help="Task; may be repeated.  [default: all]"),
        click.option("--limit", type=click.IntRange(min=1), metavar="K", help="Use only K prompts of each task."),
    )


DATA = data_options("the bundled prompts")


def out_option(name: str) -> Option:
    """The option --out with its default."""
    return click.option(
        "--out",
        type=click.Path(path_type=Path),
        default=name,
        show_default=True,
        metavar="PREFIX",
        help="Writes PREFIX.json, PREFIX.png and PREFIX.svg.",
    )


def length_option(default: int) -> Option:
    """The option --max-new-tokens with its default."""
    return click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help="Greatest number of new tokens of each text.",
    )


def loaded_prompts(values: dict[str, Any], room: int = 0) -> tuple[loading.Loaded, list[list[int]], str]:
    """The model, the encoded prompts that fit into its context with `room` new tokens, and how many of each task.

    The prompts are read before the model, so that a mistake in them is reported at once.
    """
    data, names, limit = (values.pop(name) for name in ("data", "names", "limit"))
    if data is not None and not data.is_dir():
        raise BadParameter(f"there is no folder {str(data)!r} of prompts")
    sets = tasks.read(data, names, limit)
    model = model_arguments(values)
    with screen.loading(model["model"]):
        loaded = loading.load(**model)
    fitting = {task.name: tasks.encoded(task, loaded, room) for task in sets}
    for task in sets:
        if room and (left := len(task.prompts) - len(fitting[task.name])):
            screen.say(
                f"{task.name}: {left} of {len(task.prompts)} prompts left out: with {room} new tokens they do not fit "
                f"the context of {loaded.target.info.context_length}"
            )
    return loaded, [tokens for each in fitting.values() for tokens in each], tasks.in_words(fitting)


def other_model(name: str | None, values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `loading.load` for a second model: those of the first, without options that its backend lacks."""
    found = model_arguments(dict(values))
    if not str(name).lower().endswith(".gguf"):
        found = {key: value for key, value in found.items() if key not in LLAMA_CPP_OPTIONS}
    return {**found, "model": name}


def sampling_of(values: dict[str, Any]) -> dict[str, Any]:
    """Temperature and seed, taken out of a command's values; invalid ones are refused before a model is loaded."""
    found = {name: values.pop(name) for name in ("temperature", "seed")}
    SamplingParams(**found)
    return found


def numbers(name: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """The numbers of a comma-separated list."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise BadParameter(f"--{name} {text} is not possible: give numbers separated by commas") from None


def prefix_of(out: Path) -> Path:
    """The prefix of the files to write, without an extension, checked before anything is measured."""
    prefix = out.with_suffix("") if out.suffix in KINDS else out
    if not prefix.name:
        raise BadParameter(f"--out {out} is not possible: it must end in a file name")
    if not prefix.parent.is_dir():
        raise BadParameter(f"--out {out} cannot be written: there is no folder {prefix.parent}")
    for file in files_of(prefix):
        if file.is_dir() or not os.access(file if file.exists() else prefix.parent, os.W_OK):
            raise BadParameter(f"--out {out} cannot be written: no permission, or {file} is a folder")
    require()
    return prefix


def files_of(prefix: Path) -> list[Path]:
    """The files that are written."""
    return [prefix.with_name(prefix.name + kind) for kind in KINDS]


def write(found: Data, prefix: Path) -> None:
    """Writes the data and then the figure: if the disk is full, the measured data are the more valuable part."""
    files = files_of(prefix)
    try:
        files[0].write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        plots.save(found, prefix)
    except OSError as error:
        raise LeapaheadError(f"{error.filename or prefix} cannot be written: {error.strerror or error}") from None
    click.echo(f"written: {', '.join(map(str, files))}")


def show(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(highlight=False).print(table)


def spread(value: dict[str, float], form: str) -> tuple[str, str]:
    """The median and the quartiles as text."""
    return f"{value['median']:{form}}", f"{value['low']:{form}} to {value['high']:{form}}"
