"""Generated tables of docs/research/several-devices.md, from docs/figures/devices.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Table = Callable[[str, Iterable[Sequence[str]]], str]


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    """Name of each block -> its text."""
    return {
        "devices-lookahead": lambda root: lookahead(_data(root), table),
        "devices-exits": lambda root: exits(_data(root), table),
        "devices-pipelined": lambda root: pipelined(_data(root), table),
        "devices-overlapped": lambda root: overlapped(_data(root), table),
        "devices-conditions": lambda root: conditions(_data(root), table),
    }


def _data(root: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((root / "docs/figures/devices.json").read_text(encoding="utf-8"))
    return data


def _by_message(rows: Sequence[dict[str, Any]], name: str) -> list[str]:
    """A figure of rows that differ in their messages alone, in the order of these."""
    return [f"{row[name]:.2f}" for row in sorted(rows, key=lambda row: float(row["message"]))]


def _messages(rows: Sequence[dict[str, Any]]) -> str:
    return " | ".join(f"message {message:g}" for message in sorted({row["message"] for row in rows}))


def lookahead(data: dict[str, Any], table: Table) -> str:
    """Speed-up by window, devices and time of a message."""
    rows = data["lookahead"]
    keys = dict.fromkeys((row["sizes"], row["devices"]) for row in rows)
    found = []
    for sizes, devices in keys:
        here = [row for row in rows if (row["sizes"], row["devices"]) == (sizes, devices)]
        first = here[0]
        length, nodes = f"{first['acceptance_length']:.2f}", f"{first['rows']:.1f}"
        found.append([sizes, str(devices), length, nodes, *_by_message(here, "speedup")])
    return table(f"W, N, G | devices | acceptance length | rows of the largest part | {_messages(rows)}", found)


def exits(data: dict[str, Any], table: Table) -> str:
    """How often the next token is among the k likeliest at an early exit."""
    names = list(data["exits"][0]["within"])
    rows = [
        [f"{row['layers']} of {row['of']}", *(f"{100 * row['within'][k]:.1f} %" for k in names)]
        for row in data["exits"]
    ]
    return table("layers before the exit | " + " | ".join(f"k = {k}" for k in names), rows)


def pipelined(data: dict[str, Any], table: Table) -> str:
    """Speed-up by candidates, devices and time of a message, each with its best exit."""
    rows = data["pipelined"]
    found = []
    for candidates, devices in dict.fromkeys((row["candidates"], row["devices"]) for row in rows):
        here = [row for row in rows if (row["candidates"], row["devices"]) == (candidates, devices)]
        first = here[0]
        best = (
            f"{100 * first['exit']:.0f} % of the layers",
            f"{100 * first['correct']:.1f} %",
            f"{first['formula']:.2f}",
        )
        found.append([str(candidates), str(devices), *best, *_by_message(here, "speedup")])
    return table(f"k | devices | exit | right there | by the formula | {_messages(rows)}", found)


def overlapped(data: dict[str, Any], table: Table) -> str:
    """Speed-up by the cost of the draft model and the time of a message."""
    rows = data["overlapped"]
    found = []
    for ratio in dict.fromkeys(row["ratio"] for row in rows):
        here = [row for row in rows if row["ratio"] == ratio]
        lengths = f"{here[0]['serial_gamma']}", f"{here[0]['gamma']}"
        found.append([f"{ratio:g}", lengths[0], f"{here[0]['serial']:.2f}", lengths[1], *_by_message(here, "speedup")])
    heads = "draft / target | draft length in turns | in turns, one device | draft length ahead"
    return table(f"{heads} | {_messages(rows)}", found)


def conditions(data: dict[str, Any], table: Table) -> str:
    """What was measured, and under which conditions."""
    known, curve = data["conditions"], data["curve"]
    sizes = [n for n in ("1", "2", "4", "8", "16", "32", "64", "128") if n in curve]
    times = table(
        "rows n | " + " | ".join(sizes),
        [["T(n), ms", *(f"{1e3 * curve[n]:.1f}" for n in sizes)]],
    )
    return (
        f"{times}\n\nOf a plain forward, a layer takes {1e3 * data['layer_seconds']:.2f} ms and the final norm with "
        f"the output layer {1e3 * data['head_seconds']:.2f} ms. The draft model is right in "
        f"{100 * data['draft']['agreement']:.1f} % of the tokens; a forward of it takes {data['draft']['ratio']:.2f} "
        "of one of the model whose texts these are. A message of 500 bytes between two threads of one process, by "
        f"Gloo, takes {1e6 * data['message_seconds']:.0f} µs.\n\nConditions: times of `{known['target']}`, "
        f"{known['dtype']}; texts of `{known['texts_of']}`, draft model `{known['draft']}`; {known['data']}, up to "
        f"{known['max_new_tokens']} new tokens, greedy; threads: {known['threads']}; {known['cpu']}; leapahead "
        f"{known['versions']['leapahead']}, torch {known['versions']['torch']}, transformers "
        f"{known['versions']['transformers']}."
    )
