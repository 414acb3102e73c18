"""`leapahead memory`: what a saved memory holds, several made one, and the option by which other commands use one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from leapahead.api import LLM
from leapahead.core.errors import BadParameter
from leapahead.drafters import cache_sections
from leapahead.drafters.cache import DrafterCache

FILE = click.Path(dir_okay=False, path_type=Path)

MEMORY = (
    click.option(
        "--drafter-cache",
        "memory_file",
        type=FILE,
        metavar="FILE",
        help="Draft from what earlier texts left in FILE, and leave there what this one teaches. It holds pieces of "
        "prompts and texts.",
    ),
)


def memory_argument(values: dict[str, Any]) -> Path | bool:
    """Of `LLM`, taken out of a command's values."""
    file: Path | None = values.pop("memory_file", None)
    return True if file is None else file


def saved_at_the_end(llm: LLM) -> LLM:
    """Of the command that runs, after Ctrl-C and after an error too, if the memory has a file."""
    if llm.drafter_cache is not None and llm.drafter_cache.path is not None:
        click.get_current_context().call_on_close(llm.save_drafter_cache)
    return llm


@click.group()
def memory() -> None:
    """Show and merge what drafters keep from one text to the next.

    `leapahead generate --drafter-cache FILE` and `chat --drafter-cache FILE` make and use such files. They hold pieces of prompts and
    texts.
    """


@memory.command()
@click.argument("file", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """Show what FILE holds: the parts, how much each has, and whose tokens they are."""
    found = as_dict(file)
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{file}: {found['bytes'] / 1e6:.2f} MB, tokenizer {found['tokenizer']}, {found['vocab_size']} ids")
    width = max(map(len, ("part", *found["parts"])))
    click.echo(f"{'part':{width}}  {'MB':>6}  holds")
    for name, part in found["parts"].items():
        holds = ", ".join(f"{key} {value}" for key, value in part["figures"].items() if not isinstance(value, dict))
        if not part["known"]:
            holds = ", ".join(f"{key} {shape}" for key, shape in part["arrays"].items()) + "; not known here"
        click.echo(f"{name:{width}}  {part['bytes'] / 1e6:6.2f}  {holds}")


@memory.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("-o", "--output", required=True, type=FILE, metavar="OUT", help="The file to write.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def merge(files: tuple[Path, ...], output: Path, force: bool) -> None:
    """Merge FILES, the oldest first, into one.

    Where there is more than a memory keeps, the oldest goes. Files of different tokenizers are refused.
    """
    if output.exists() and not force:
        raise BadParameter(f"{output} exists; name another file, or give --force to replace it")
    merged = DrafterCache()
    for file in reversed(files):  # each comes before what is there already
        merged.take_over(file)
        merged.adopt(cache_sections.make)
    merged.save(output, replace=True)
    click.echo(f"{output}: {output.stat().st_size / 1e6:.2f} MB, from {len(files)} files")


def as_dict(file: Path) -> dict[str, Any]:
    """What a file holds, plain types."""
    found = cache_sections.load(file)
    parts = {}
    for name, (layout, arrays) in found.written().items():
        parts[name] = {
            "known": name in found.sections,
            "layout": layout,
            "bytes": sum(array.nbytes for array in arrays.values()),
            "arrays": {key: list(array.shape) for key, array in arrays.items()},
            "figures": found.sections[name].figures() if name in found.sections else {},
        }
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        "tokenizer": found.tokenizer,
        "vocab_size": found.vocab_size,
        "parts": parts,
    }
