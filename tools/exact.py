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
    """A line for each case, or why it was refused."""
    rows = json.loads((root / "docs/bench/exact-families.json").read_text(encoding="utf-8"))["rows"]
    lines, known = [], {}
    for row in rows:
        name = [row["engine"], row["weights"], f"`{row['family']}`"]
        if "refused" in row:
            line = [*name, f"refused: {row['refused']}", "", "", "", ""]
            lines += [] if line in lines else [line]
            continue
        known = row["conditions"]
        text = f"temperature {row['temperature']:g}" if row["temperature"] else "greedy"
        control = f"{row['control']['differing']} of {row['control']['tokens']:,}"
        lines.append([*name, text, f"{row['tokens']:,}", str(row["differing"]), control, f"{row['distinct_4']:.2f}"])
    texts, new = (", ".join(sorted({str(row[name]) for row in rows})) for name in ("texts", "new"))
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    return table(HEADS, lines) + (
        f"\n\nConditions: {texts} prompts of 5 to 111 tokens (a quarter of them without exact mode), {new} new tokens "
        f"each, batches of 4; {known['cpu']}; {versions}; commit {known['commit'][:10]}."
    )
