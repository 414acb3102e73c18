"""`leapahead drafters`: every drafter with its options, read from the signatures and docstrings of the classes."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import click
from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from leapahead import drafters as registry
from leapahead.cli.command import Command, option, say
from leapahead.cli.screen import Console
from leapahead.core.errors import BadParameter
from leapahead.drafters.registry import DrafterClass


@click.command(cls=Command, examples=("leapahead drafters", "leapahead drafters --json"))
@option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def drafters(as_json: bool) -> None:
    """List the drafters and their options.

    Other commands take an option of a drafter as -o KEY=VALUE (run-batch as --option KEY=VALUE); those of lookahead as
    -W, -N, -G and --preset too, and draft models as --draft.

    An option either fixes or limits, and says which. `nodes=N` drafts exactly N nodes in every step in which there are
    so many candidates and room for them, and nothing depends on the time that steps take; with `nodes=0` a drafter
    drafts as many as pay.
    """
    described = []
    for name in registry.names():
        try:
            described.append(describe(registry.load(name)))
        except BadParameter as error:  # another package's, which is broken
            say(f"warning: {error}")
    if as_json:
        click.echo(json.dumps(described, indent=2, default=str))  # another package's default may be a path
        return
    console = Console()
    for drafter in described:
        console.print(Text.assemble((drafter["name"], "bold"), "  ", drafter["summary"]))
        if drafter["options"]:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for column in ("option", "default", "meaning"):
                table.add_column(column, overflow="fold")
            for each in drafter["options"]:
                default = "" if each["default"] is None else str(each["default"])
                table.add_row(Text(each["name"]), Text(default), Text(each["meaning"]))
            console.print(Padding(table, (0, 0, 0, 2)))
        else:
            console.print()


def describe(drafter: DrafterClass) -> dict[str, Any]:
    """Name, summary, needs and options of a drafter class, from its signature and docstring."""
    doc = (drafter.__doc__ and inspect.getdoc(drafter)) or ""
    meanings = arguments(doc)
    return {
        "name": drafter.name,
        "summary": doc.partition("\n\n")[0].replace("\n", " "),
        "needs": sorted(drafter.needs),
        "options": [
            {
                "name": name,
                "type": _type(parameter.annotation),
                "default": None if parameter.default is parameter.empty else parameter.default,
                "meaning": meanings.get(name, ""),
            }
            for name, parameter in registry.options(drafter).items()
        ],
    }


def arguments(doc: str) -> dict[str, str]:
    """The `Args:` section of a docstring: name of the argument -> its meaning, on one line."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(section[1]).splitlines() if section else []:
        if head := re.match(r"(\w+)(?: \([^)]*\))?:\s*(.*)", line):
            name, found[head[1]] = head[1], head[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
