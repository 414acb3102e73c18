"""`leapahead drafters`: what can guess, and with which options, read from the classes themselves."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from leapahead import drafters as registry
from leapahead.drafters.base import Drafter


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list on standard output.")
def drafters(as_json: bool) -> None:
    """List the drafters and their options.

    Options are given as -o KEY=VALUE, or, for lookahead, as -W, -N, -G and --preset.
    """
    described = [describe(registry.load(name)) for name in registry.names()]
    if as_json:
        click.echo(json.dumps(described, indent=2))
        return
    console = Console(highlight=False)
    for drafter in described:
        console.print(Text.assemble((drafter["name"], "bold"), "  ", drafter["summary"]))
        if drafter["options"]:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for column in ("option", "default", "meaning"):
                table.add_column(column, overflow="fold")
            for option in drafter["options"]:
                default = "" if option["default"] is None else str(option["default"])
                table.add_row(Text(option["name"]), Text(default), Text(option["meaning"]))
            console.print(Padding(table, (0, 0, 0, 2)))
        else:
            console.print()


def describe(drafter: type[Drafter]) -> dict[str, Any]:
    """Name, summary, needs and options of a drafter; meanings are those of its docstring's `Args:`."""
    doc = inspect.getdoc(drafter) or ""
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
    """The `Args:` section of a docstring: name -> meaning on one line."""
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
