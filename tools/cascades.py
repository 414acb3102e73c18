"""The generated block of draft models that are decoded speculatively themselves, from docs/figures.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Table = Callable[..., str]


def cascades_table(root: Path, table: Table) -> str:
    """Acceptance lengths and draft forwards per step; of two draft models, those of each."""
    data = json.loads((root / "docs/figures.json").read_text(encoding="utf-8"))
    found = [row for row in data["cascades"] if row["name"] != "plain"]
    columns = list(dict.fromkeys((row["task"], row["temperature"]) for row in found))
    cells = {(row["name"], row["task"], row["temperature"]): row for row in found}
    rows = []
    for name in dict.fromkeys(row["name"] for row in found):
        cols = [cells[name, task, temperature] for task, temperature in columns]
        forwards = [" + ".join(f"{each:.1f}" for each in row["draft_forwards"].values()) for row in cols]
        lengths = [f"{row['acceptance_length']:.2f}" for row in cols]
        rows.append([name, *(f"**{length}**, {each}" for length, each in zip(lengths, forwards, strict=True))])
    heads = " | ".join(["", *(f"{task}, T = {temperature:g}" for task, temperature in columns)])
    return table(heads, rows) + f"\n\nConditions: {data['conditions']['cascades']}"
