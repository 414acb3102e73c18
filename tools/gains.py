"""Generated table of docs/research/openvino.md: what drafts gain in the measured times of forwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benches import BITS

Row = dict[str, Any]
Table = Callable[[str, Iterable[Sequence[str]]], str]
COSTS = ("135m", "1b")
SIZES = (1, 4, 8, 16)
HEADS = "cost | target | T(1), ms | T(1) | T(4) | T(8) | T(16) | `auto`, greedy | `auto`, temperature 1"


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    """Name of each block -> its text."""
    return {"openvino-limits": lambda root: limits(root, table)}


def limits(root: Path, table: Table) -> str:
    """A row for each target of docs/bench/openvino/limits-*.json, in units of the fastest plain step of its width."""
    lines, notes = [], []
    for cost in COSTS:
        found = json.loads((root / f"docs/bench/openvino/limits-{cost}.json").read_text(encoding="utf-8"))
        kinds = {row["model"]: row["model"].removesuffix(".gguf").rpartition("-")[2] for row in found["rows"]}
        rows = sorted(found["rows"], key=lambda row: -int(BITS[kinds[row["model"]]].partition(" ")[0]))
        for row in rows:
            same = [each for each in rows if BITS[kinds[each["model"]]] == BITS[kinds[row["model"]]]]
            fastest = min(each["seconds"]["1"] for each in same)
            engine = "OpenVINO" if "openvino" in row["model"] else "llama.cpp"
            times = [f"{row['seconds'][str(n)] / fastest:.2f}" for n in SIZES]
            gains = [f"{_gain(row['gains'], fastest, temperature):.2f}" for temperature in (0.0, 1.0)]
            name = f"{engine}, {kinds[row['model']]}"
            lines.append([cost.upper(), name, f"{1e3 * row['seconds']['1']:.1f}", *times, *gains])
        notes.append(_note(cost, found))
    return table(HEADS, lines) + "\n\n" + "\n\n".join(notes)


def _gain(gains: Sequence[Row], fastest: float, temperature: float) -> float:
    some = [each for each in gains if each["temperature"] == temperature]
    seconds: float = sum(each["seconds"] for each in some)
    return fastest * sum(each["tokens"] for each in some) / seconds


def _note(cost: str, found: Row) -> str:
    known = found["rows"][0]["conditions"]
    versions = {name: each for row in found["rows"] for name, each in row["conditions"]["versions"].items() if each}
    return (
        f"Conditions: {cost.upper()}; chains over {known['context']} tokens, {known['rounds']} rounds in which the "
        f"targets take turns, medians; texts of the bundled model, {found['prompts']}, up to "
        f"{found['max_new_tokens']} new tokens each; {known['threads']} threads on {known['cpu']}; "
        f"{', '.join(f'{name} {each}' for name, each in versions.items())}; commit {known['commit'][:10]}."
    )
