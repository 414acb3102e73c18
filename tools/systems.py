"""The page of the systems of the literature, from docs/bench/systems/systems.json, see `python -m research systems`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Table = Callable[[str, Sequence[Sequence[str]]], str]
TEMPERATURES = ("0", "1")
COMPARED = ("tokens", "mismatches", "ties")
# The first row of each group of the table of figures -> the group.
GROUPS = {"jacobi": "Without a draft model", "leviathan": "Draft models", "blockwise": "Trained heads and probes"}


def _record(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "docs/bench/systems/systems.json").read_text(encoding="utf-8"))
    return found


def _name(row: Row) -> str:
    paper = f" ([{row['paper']}](https://arxiv.org/abs/{row['paper']}))" if row["paper"] else ""
    return f"{row['name']}{paper}"


def _pair(each: dict[str, Row], cell: Callable[[Row], str]) -> str:
    return " / ".join(cell(each[temperature]) if temperature in each else "-" for temperature in TEMPERATURES)


def _speed(figures: Row) -> str:
    speed = figures["speedup"]
    spread = "" if speed["low"] is None else f" ({speed['low']:.2f} to {speed['high']:.2f})"
    return f"{speed['median']:.2f}{spread}"


def _count(figures: Row, key: str) -> str:
    return f"{figures[key]:,}"


def _why(row: Row) -> str:
    """Why a row has no figures."""
    return row["elsewhere"] or (f"needs `{row['before']}`" if row["before"] else "not measured")


def figures(root: Path, table: Table) -> str:
    """Acceptance length and speed-up of every row beside the published ones."""
    found = _record(root)
    groups: dict[str, list[list[str]]] = {}
    lines: list[list[str]] = []
    for key, row in found["rows"].items():
        lines = groups.setdefault(GROUPS[key], []) if key in GROUPS else lines
        each, published = row.get("measured", {}), row["published"]
        here = [
            _pair(each, lambda figures: f"{figures['acceptance_length']:.2f}"),
            _pair(each, _speed),
            _pair(each, lambda figures: f"{figures['distinct_4']:.2f}"),
        ]
        if not each:
            here = [_why(row), "", ""]
        theirs = [published[key] for key in ("length", "speedup", "setting", "source")]
        lines.append([_name(row), row["rule"], *here, *theirs])
    heads = (
        "system|rule|acceptance length, greedy / T = 1|speed-up, greedy / T = 1|distinct 4-grams|"
        "published: acceptance length|speed-up|on|source"
    )
    tables = [f"### {name}\n\n{table(heads, lines)}" for name, lines in groups.items()]
    return "\n\n".join([*tables, "### Conditions of the figures", _conditions(found, "measured")])


def commands(root: Path, table: Table) -> str:
    """The command of every row, what it needs, and what differs."""
    lines = []
    for row in _record(root)["rows"].values():
        made = f"`{row['before']}`" if row["before"] else ""
        needs = "; ".join(filter(None, (row["needs"], made))) or "nothing"
        lines.append([row["name"], f"`{row['command']}`", needs, row["differs"]])
    return table("system|command|needs|what differs from the published system", lines)


def checked(root: Path, table: Table) -> str:
    """The numbers of tokens that were compared with plain decoding's."""
    found = _record(root)
    lines = []
    for row in found["rows"].values():
        if each := row.get("checked", {}):
            counts = (_pair(each, partial(_count, key=key)) for key in COMPARED)
            lines.append([row["name"], *counts, _pair(each, lambda figures: str(figures["commit"][:10]))])
    if not lines:
        return "Not compared yet."
    heads = "system|tokens compared, greedy / T = 1|mismatches|ties|commit"
    return table(heads, lines) + "\n\n" + _conditions(found, "checked")


def _conditions(found: dict[str, Any], kind: str) -> str:
    told = found["conditions"].get(kind)
    if told is None:
        return "Conditions: none, since nothing was measured."
    tasks = ", ".join(
        f"{each['prompts']} {name}" if kind == "measured" else name for name, each in told["tasks"].items()
    )
    versions = ", ".join(f"{name} {number}" for name, number in told["versions"].items() if number)
    how = (
        f"{told['rounds']} round{'s' * (told['rounds'] != 1)} after a text that warms up, in turns with plain decoding"
        if kind == "measured"
        else f"seed 0, batches of {told['batch']}"
    )
    return (
        f"Conditions: the bundled model in float32, {tasks} prompts, up to {told['max_new_tokens']} new tokens, {how}; "
        f"{told['threads']} thread{'s' * (told['threads'] != 1)} on {told['cpu']}; {versions}. The encoder-decoder "
        f"model has as many damaged pieces of held-out code instead. {_origins(found, kind)}"
    )


def _origins(found: dict[str, Any], kind: str) -> str:
    """The commit with the most figures, and of each other commit or machine the rows whose figures it made.

    Where the table has the commits, only other machines are told.
    """
    told, rows = found["conditions"][kind], defaultdict[str, list[str]](list)
    for row in found["rows"].values():
        for figures in row.get(kind, {}).values():
            made = [f"commit {figures['commit'][:10]}"] if kind == "measured" else []
            made += [f"on {figures['cpu']}"] if "cpu" in figures else []
            versions = figures.get("versions", {}).items()
            changed = [f"{name} {each}" for name, each in versions if each and each != told["versions"].get(name)]
            made += [f"with {', '.join(changed)}"] if changed else []
            rows[" ".join(made)].append(row["name"])
    first, *others = sorted(rows, key=lambda origin: -len(rows[origin]))
    told_first = f"The figures are of {first}" if first else "The table has the commits"
    if not others:
        return f"{told_first}."
    listed = [f"- {origin}: {'; '.join(dict.fromkeys(rows[origin]))}" for origin in others]
    return "\n".join((f"{told_first}. Other conditions have the rows:", "", *listed))


def uncovered(root: Path, table: Table) -> str:
    """What is not covered, and why."""
    return table("system|source|why", _record(root)["not_covered"])


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    """Name of the block -> its text."""
    made = {"figures": figures, "commands": commands, "check": checked, "not-covered": uncovered}
    return {f"systems-{name}": partial(block, table=table) for name, block in made.items()}
