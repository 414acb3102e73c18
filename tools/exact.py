"""The table of texts in exact mode by family, from docs/bench/exact-families.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Table = Callable[[str, list[list[str]]], str]
HEADS = (
    "engine | weights | family | text | tokens compared | differing | differing without exact mode | "
    "distinct 4-grams | on"
)


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    return {"exact-families": lambda root: families(root, table)}


def families(root: Path, table: Table) -> str:
    """A line for each case, or why it was refused, and the machines that computed them."""
    rows = json.loads((root / "docs/bench/exact-families.json").read_text(encoding="utf-8"))["rows"]
    lines: list[list[str]] = []
    machines: list[str] = []
    conditions: list[dict[str, Any]] = []
    for row in rows:
        name = [row["engine"], row["weights"], f"`{row['family']}`"]
        if "refused" in row:
            line = [*name, f"refused: {row['refused']}", "", "", "", "", ""]
            lines += [] if line in lines else [line]
            continue
        conditions.append(row["conditions"])
        machine = row["conditions"]["cpu"]
        machines += [] if machine in machines else [machine]
        text = f"temperature {row['temperature']:g}" if row["temperature"] else "greedy"
        counts = [f"{row['tokens']:,}", str(row["differing"]), _sum([row["control"]]), f"{row['distinct_4']:.2f}"]
        lines.append([*name, text, *counts, str(machines.index(machine) + 1)])
    texts, new = (", ".join(sorted({str(row[name]) for row in rows})) for name in ("texts", "new"))
    named = "; ".join(f"on {number}: {machine}" for number, machine in enumerate(machines, 1))
    names = dict.fromkeys(name for each in conditions for name in each["versions"])
    versions = ", ".join(
        f"{name} {' and '.join(sorted({each['versions'][name] for each in conditions if name in each['versions']}))}"
        for name in names
    )
    commits = ", ".join(dict.fromkeys(each["commit"][:10] for each in conditions))
    compared = [row for row in rows if "refused" not in row]
    control = [row["control"] for row in compared]
    return (
        f"{_sum(compared)} tokens differ in exact mode, and {_sum(control)} without it.\n\n{table(HEADS, lines)}\n\n"
        f"Conditions: {texts} prompts of 5 to 111 tokens (a quarter of them without exact mode), {new} new tokens "
        f"each, batches of 4; {named}; {versions}; commits {commits}."
    )


def _sum(rows: Sequence[dict[str, Any]]) -> str:
    differing, tokens = (sum(row[name] for row in rows) for name in ("differing", "tokens"))
    return f"{differing:,} of {tokens:,}"
