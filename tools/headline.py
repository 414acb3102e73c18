"""The table at the top of README: what `auto` gains, beside the fastest peers, from the benches under docs/bench."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from leapahead.bench.record import OVERALL, read

Row = dict[str, Any]
Table = Callable[[str, list[list[str]]], str]

# A line: bench, target, temperature and drafter; what it is.
LINES = (
    ("auto/135m", "135m-bf16", 0.0, "auto", "Transformers, bfloat16, 135M"),
    ("auto/1b", "1b-bf16", 0.0, "auto", "Transformers, bfloat16, 1B"),
    ("draft/1b", "1b-bf16", 0.0, "auto(draft", "the same, with a draft model of 135M"),
    ("auto/sampled", "135m-bf16", 1.0, "auto", "Transformers, bfloat16, 135M, temperature 1"),
    ("openvino/135m", "135m-bf16.gguf", 0.0, "auto", "llama.cpp, bf16, 135M"),
    ("openvino/135m", "135m-q8_0.gguf", 0.0, "auto", "llama.cpp, q8_0, 135M"),
    ("openvino/1b", "1b-q8_0.gguf", 0.0, "auto", "llama.cpp, q8_0, 1B"),
    ("openvino/1b", "1b-openvino-int8", 0.0, "auto", "OpenVINO, int8, 1B"),
)
PEERS = {
    "peer:transformers-prompt-lookup": "Transformers' prompt lookup",
    "peer:transformers-assisted": "Transformers' assisted generation",
    "peer:llama-lookup": "llama.cpp's lookup",
    "peer:openvino-prompt-lookup": "OpenVINO GenAI's prompt lookup",
    "peer:llama-speculative-simple": "llama.cpp's draft model",
    "peer:llama-speculative-simple(type=ngram-simple)": "llama.cpp's `ngram-simple`",
    "peer:vllm": "vLLM, plain",
    "peer:vllm-suffix": "vLLM with suffix decoding",
}


def headline(root: Path, table: Table) -> str:
    """Speed relative to our plain decoding in the same run, with 95 % intervals."""
    lines = []
    for bench, target, temperature, drafter, name in LINES:
        rows = _overall(root, bench, target, temperature)
        (own,) = [row for row in rows if row["drafter"].partition("=")[0] == drafter]  # without its value
        (plain,) = [row for row in rows if row["drafter"] == "plain"]
        speeds = [f"{plain['tokens_per_second']:.1f}", f"**{_speed(own)}**", _fastest_peer(rows)]
        lines.append([name, _tasks(root, bench, own), *speeds])
    columns = "plain decoding, tokens/s | `auto` | fastest peer, same run"
    return table(f"engine, precision, cost of the model | prompts | {columns}", lines)


def _overall(root: Path, bench: str, target: str, temperature: float) -> list[Row]:
    found = read(root / "docs/bench" / bench)["results"]
    wanted = (OVERALL, target, temperature)
    return [row for row in found if (row["task"], row["target"], row["temperature"]) == wanted]


def _fastest_peer(rows: list[Row]) -> str:
    peers = [row for row in rows if row["drafter"].startswith("peer:")]
    if not peers:
        return ""
    best = max(peers, key=lambda row: float(row["speedup"]["median"]))
    name = best["drafter"]
    return f"{PEERS.get(name) or PEERS[name.partition('(')[0]]}: {_speed(best)}"


def _speed(row: Row) -> str:
    speed = row["speedup"]
    return f"{speed['median']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})"


def _tasks(root: Path, bench: str, row: Row) -> str:
    tasks = read(root / "docs/bench" / bench)["conditions"]["tasks"]
    names = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "spec_bench": "Spec-Bench", "edits": "edits"}
    families = dict.fromkeys(names[task.partition("/")[0]] for task in tasks)
    return f"{', '.join(families)} ({row['prompts']})"
