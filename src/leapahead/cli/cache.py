"""`leapahead cache`: saved drafter caches, and models converted for OpenVINO; and the option that names a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from leapahead.api import LLM
from leapahead.cli.command import Group, option
from leapahead.cli.options import DRAFTER_GROUP
from leapahead.cli.typed import HomePath
from leapahead.core.errors import BadParameter, counted
from leapahead.core.storage import replaceable
from leapahead.drafters import cache_sections
from leapahead.drafters.cache import DrafterCache
from leapahead.models.openvino import store

FILE = HomePath(dir_okay=False, path_type=Path)

DRAFTER_CACHE = (
    option(
        "--drafter-cache",
        "cache_file",
        type=FILE,
        metavar="FILE",
        group=DRAFTER_GROUP,
        help="Draft from earlier texts saved in FILE, and add this text to it. The file is created if it does not "
        "exist. It contains pieces of prompts and texts.",
    ),
)


def drafter_cache_argument(values: dict[str, Any]) -> Path | bool:
    """The argument `drafter_cache` of `LLM`, taken out of a command's values."""
    file: Path | None = values.pop("cache_file", None)
    return True if file is None else file


def save_at_exit(llm: LLM) -> LLM:
    """Saves the drafter cache when the running command ends, also after an error or an interrupt, if it has a file."""
    if llm.drafter_cache is not None and llm.drafter_cache.path is not None:
        click.get_current_context().call_on_close(llm.save_drafter_cache)
    return llm


@click.group(cls=Group)
def cache() -> None:
    """Show and merge files of drafter caches; list and remove converted models.

    A drafter cache holds what drafters learned from earlier texts. It changes the speed of decoding, never the text.
    `leapahead generate --drafter-cache FILE` and `leapahead chat --drafter-cache FILE` create and use such files. They
    contain pieces of prompts and texts.
    """


@cache.command(examples=("leapahead cache show drafts.npz", "leapahead cache show drafts.npz --json"))
@click.argument("file", type=FILE)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """Show the tokenizer and the sections of FILE, with their sizes and contents."""
    found = as_dict(file)
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(
        f"{file}: {found['bytes'] / 1e3:.1f} kB, tokenizer {found['tokenizer']}, vocabulary of {found['vocab_size']}"
    )
    width = max(map(len, ("section", *found["sections"])))
    click.echo(f"{'section':{width}}  {'kB':>8}  contents")
    for name, section in found["sections"].items():
        contents = ", ".join(
            f"{key} {value}" for key, value in section["figures"].items() if not isinstance(value, dict)
        )
        if not section["installed"]:
            contents = ", ".join(f"{key} {shape}" for key, shape in section["arrays"].items())
            contents += " (arrays of a package that is not installed)"
        click.echo(f"{name:{width}}  {section['bytes'] / 1e3:8.1f}  {contents}")


@cache.command(examples=("leapahead cache merge monday.npz tuesday.npz -o week.npz",))
@click.argument("files", nargs=-1, required=True, type=FILE)
@option("-o", "--output", required=True, type=FILE, metavar="OUT", help="The file to write.")
@option("--force", is_flag=True, help="Replace OUT if it exists.")
def merge(files: tuple[Path, ...], output: Path, force: bool) -> None:
    """Merge FILES, given from the oldest to the newest, into one file.

    Sections have a limited size; what exceeds it is dropped, the oldest first. All files must have the same tokenizer.
    """
    replaceable(output)
    if output.exists() and not force:
        raise BadParameter(f"{output} exists; name another file, or replace it with --force")
    merged = DrafterCache()
    for file in reversed(files):  # each is merged as if it had come before the files that are merged already
        merged.merge(file)
        merged.activate()
    merged.save(output, replace=True)
    click.echo(f"{output}: {output.stat().st_size / 1e3:.1f} kB, from {counted(len(files), 'file')}")


@cache.command(examples=("leapahead cache models", "leapahead cache models --clear"))
@option("--clear", is_flag=True, help="Remove them all. They are converted again when they are needed.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def models(clear: bool, as_json: bool) -> None:
    """List the models that were converted for OpenVINO, which are kept in the cache folder."""
    found = store.all_kept()
    freed = store.remove_kept() if clear else 0
    if as_json:
        rows = [
            {"source": each.source, "weights": each.weights, "bytes": each.size, "folder": str(each.folder)}
            for each in found
        ]
        click.echo(json.dumps({"models": rows, "removed": clear}))
        return
    if clear:
        click.echo(f"{counted(len(found), 'converted model')} removed, {freed / 1e6:.1f} MB")
        return
    for each in found:
        click.echo(f"{each.size / 1e6:10.1f} MB  {each.weights:5}  {each.source}  ({each.folder})")
    if not found:
        click.echo("There are no converted models.")


def as_dict(file: Path) -> dict[str, Any]:
    """The contents of a file in plain types, as `cache show --json` prints them."""
    found = cache_sections.load(file)
    sections = {}
    for name, (layout, arrays) in found.snapshot().items():
        sections[name] = {
            "installed": name in found.sections,
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
        "sections": sections,
    }
