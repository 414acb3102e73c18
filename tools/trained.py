"""The generated blocks of the bundled model that is tuned for Jacobi decoding, and of the one that repairs code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Table = Callable[..., str]


def repair_table(root: Path, table: Table) -> str:
    """Acceptance lengths of an encoder-decoder model, from docs/encoder-decoder.json."""
    data = json.loads((root / "docs/encoder-decoder.json").read_text(encoding="utf-8"))
    found = {(row["name"], row["temperature"]): row for row in data["rows"]}
    temperatures = sorted({temperature for _, temperature in found})
    rows = []
    for name in dict.fromkeys(row["name"] for row in data["rows"]):
        some = [found[name, temperature] for temperature in temperatures]
        lengths = [f"{row['acceptance_length']:.2f}" for row in some]
        rows.append([name, *lengths, *(f"{row['nodes_per_step']:.0f}" for row in some)])
    distinct = [f"{found['plain', temperature]['distinct_4']:.2f}" for temperature in temperatures]
    rows.append(["share of distinct 4-grams", *distinct, *[""] * len(temperatures)])
    measures = ("acceptance length", "nodes per step")
    each = [f"{measure}, T = {temperature:g}" for measure in measures for temperature in temperatures]
    return table(" | ".join(["drafter", *each]), rows) + f"\n\nConditions: {data['conditions']}"


def depths_table(root: Path, table: Table) -> str:
    """Acceptance by depth in chains, from docs/figures.json."""
    data = json.loads((root / "docs/figures.json").read_text(encoding="utf-8"))
    shown = [row for row in data["parallel"] if row["name"] != "plain"]
    deepest = max(len(row["by_depth"]) for row in shown)
    rows = [
        [
            row["task"],
            f"{row['temperature']:g}",
            row["name"],
            *(f"{rate:.2f}" for rate in row["by_depth"]),
            *[""] * (deepest - len(row["by_depth"])),
            f"{row['acceptance_length']:.2f}",
        ]
        for row in shown
    ]
    depths = [f"depth {depth}" for depth in range(1, deepest + 1)]
    heads = " | ".join(["prompts", "T", "drafter", *depths, "acceptance length"])
    return table(heads, rows) + f"\n\nConditions: {data['conditions']['parallel']}"


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


def tuning_table(root: Path, table: Table) -> str:
    """What the tuning of that model measured before and after, from docs/figures.json."""
    found = json.loads((root / "docs/figures.json").read_text(encoding="utf-8"))["cllm-run"]
    rows = [
        [
            before["name"],
            str(before["texts"]),
            f"{before['acceptance_length']:.2f}",
            f"{after['acceptance_length']:.2f}",
            f"{after['acceptance_length'] / before['acceptance_length']:.2f}",
            f"{before['prompt_loss']:.2f}",
            f"{after['prompt_loss']:.2f}",
            f"{before['answer_loss']:.2f}",
            f"{after['answer_loss']:.2f}",
        ]
        for before, after in zip(found["before"], found["after"], strict=True)
    ]
    heads = (
        "prompts | number | acceptance length, before | tuned | ratio | loss of the prompts, before | tuned | "
        "loss of the answers, before | tuned"
    )
    settings = found["settings"]
    conditions = (
        f"Conditions: {found['steps']:,} steps of {settings['batch']} texts out of {found['texts']:,}, in "
        f"{found['seconds'] / 60:.0f} minutes by the clock; blocks of {settings['block']}, up to {settings['states']} "
        f"states of each text, weights {settings['ar_weight']:g} of the text and {settings['keep_weight']:g} of the "
        f"divergence from the untuned model, learning rate {settings['lr']:g}; {found['conditions']['cpu']}."
    )
    return table(heads, rows) + f"\n\n{conditions}"
