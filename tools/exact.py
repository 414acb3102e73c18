"""The table of texts in exact mode by family, from docs/bench/exact-families.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Table = Callable[[str, list[list[str]]], str]
HEADS = (
    "engine | weights | family | text | tokens compared | differing | differing without exact mode | distinct 4-grams"
)


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    return {"exact-families": lambda root: families(root, table)}


def families(root: Path, table: Table) -> str:
    """Two lines for each case, or why it was refused."""
    rows = json.loads((root / "docs/bench/exact-families.json").read_text(encoding="utf-8"))["rows"]
    lines, known = [], {}
    for row in rows:
        name = [row["engine"], row["weights"], f"`{row['family']}`"]
        if "refused" in row:
            lines.append([*name, f"refused: {row['refused']}", "", "", "", ""])
            continue
        known = row["conditions"]
        for run in row["runs"]:
            text = "greedy" if run["temperature"] == 0 else f"temperature {run['temperature']:g}"
            control = f"{run['control']['differing']} of {run['control']['tokens']:,}"
            figures = [f"{run['tokens']:,}", str(run["differing"]), control, f"{run['distinct_4']:.2f}"]
            lines.append([*name, text, *figures])
    texts, new = (", ".join(sorted({str(row[name]) for row in rows})) for name in ("texts", "new"))
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    return table(HEADS, lines) + (
        f"\n\nConditions: {texts} prompts of 5 to 111 tokens, {new} new tokens each, batches of 4; {known['cpu']}; "
        f"{versions}; commit {known['commit'][:10]}."
    )
