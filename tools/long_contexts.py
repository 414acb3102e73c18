"""The generated blocks of the page on long contexts, from docs/figures/triforce.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Table = Callable[..., str]


def _data(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "docs/figures/triforce.json").read_text(encoding="utf-8"))
    return found


def costs_table(root: Path, table: Table) -> str:
    """Measured: forwards over all entries and over a part of them, and choosing that part."""
    data = _data(root)
    rows = [
        [
            str(row["context"]),
            budget,
            f"{row['target_ms']['1']:.1f}",
            f"{row['target_ms']['7']:.1f}",
            f"{costs['middle_ms']['1']:.1f}",
            f"{costs['middle_ms']['3']:.1f}",
            f"{costs['select_ms']:.1f}",
            f"{costs['first_select_ms']:.0f}",
        ]
        for row in data["rows"]
        for budget, costs in row["budgets"].items()
    ]
    heads = (
        "context | budget | target, 1 row | target, 7 rows | over the part, 1 row | over the part, 3 rows | choosing | "
        "choosing the first time"
    )
    known = data["conditions"]
    return table(heads, rows) + (
        f"\n\nMilliseconds, medians of {known['rounds']} interleaved rounds (the first choice: one). A forward of the "
        f"small model, {known['small']}, over a window of {known['window']} tokens takes {data['small_ms']:.1f} ms. "
        f"Conditions: {known['target']}, {known['dtype']}, keys and values are random; chunks of {known['chunk']} "
        f"entries; {known['threads']} threads; {known['cpu']}; commit {known['commit']}."
    )


def gains_table(root: Path, table: Table) -> str:
    """Simulated: the speed-up at acceptance rates, and the rate from which on there is one."""
    data = _data(root)
    rates = list(dict.fromkeys(row["rate"] for row in data["simulated"]))
    alone = {row["context"]: f"{row['speedup']:.2f}" for row in data["alone"]}
    rows = []
    for need in data["needed"]:
        key = (need["context"], need["budget"], need["small"])
        some = [row for row in data["simulated"] if (row["context"], row["budget"], row["small"]) == key]
        gains = [f"{row['speedup']:.2f}" for row in some]
        least = "none" if need["rate"] is None else f"{need['rate']:.2f}"
        without = alone[key[0]] if key[2] else "1.00"
        rows.append([str(key[0]), str(key[1]), "with" if key[2] else "without", without, *gains, least])
    rows.sort(key=lambda row: (row[2] == "with", int(row[0]), int(row[1])))
    heads = "context | budget | small model | no middle level | " + " | ".join(f"{rate:g} accepted" for rate in rates)
    return table(heads + " | least rate that pays", rows)


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    """By name."""
    return {
        "triforce-costs": partial(costs_table, table=table),
        "triforce-gains": partial(gains_table, table=table),
    }
