"""Generated table of the time of whole steps in docs/research/acceptance.md, from docs/bench/steps.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

USED = ("leapahead", "python", "numpy")
Table = Callable[[str, Iterable[Sequence[str]]], str]


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    """Name of each block -> its text."""
    return {"steps": lambda root: steps(root, table)}


def steps(root: Path, table: Table) -> str:
    """Microseconds a sequence before and after, by batch and temperature."""
    data = json.loads((root / "docs/bench/steps.json").read_text(encoding="utf-8"))
    told, rows = data["conditions"], data["rows"]
    lines = [
        [
            str(row["batch"]),
            f"{row['temperature']:g}",
            f"{row['before']:.0f} µs",
            f"{row['after']:.0f} µs",
            f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
        ]
        for row in rows
    ]
    same = "are those of the older code" if all(row["same"] for row in rows) else "differ from those of the older code"
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items() if name in USED)
    turns = (
        f"medians; the ratio is that of {told['turns']} turns of 6 steps in each of {told['pairs']} pairs of processes"
    )
    compared = f"before: commit {told['other']}, after: {told['commit'][:10]}"
    conditions = f"{told['context']:,} tokens of text; {turns}; drafts, estimates and texts {same}; {compared}"
    found = table("sequences | temperature | before | after | ratio, quartiles", lines)
    return f"{found}\n\nConditions: {conditions}; {told['cpu']}; {versions}."
