"""The generated block of the bundled model that is tuned for Jacobi decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Table = Callable[..., str]


def tuned_table(root: Path, table: Table) -> str:
    """Jacobi decoding before and after the tuning, from docs/figures.json."""
    data = json.loads((root / "docs/figures.json").read_text(encoding="utf-8"))
    rows = [
        [
            row["task"],
            row["name"],
            f"{row['acceptance_length']:.2f}",
            f"{row['prompt_loss']:.2f}",
            f"{row['tokens'] / row['prompts']:.0f}",
            f"{row['distinct_4']:.2f}",
        ]
        for row in sorted(data["cllm"], key=lambda row: str(row["task"]))
        if not row["name"].startswith("plain")
    ]
    heads = (
        "prompts | decoding | acceptance length | loss of the prompts, nats a token | tokens a text | distinct 4-grams"
    )
    return table(heads, rows) + f"\n\nConditions: {data['conditions']['cllm']}"
