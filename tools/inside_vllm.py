"""The blocks of docs/guide/vllm.md: the proposer's options and metrics, and the bench beside vLLM's own methods."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import benches

from leapahead.bench.figures import speedup
from leapahead.bench.plan import LEAST_PASSES
from leapahead.bench.record import OVERALL, read
from leapahead.integrations.vllm.figures import LABELS, METRICS
from leapahead.integrations.vllm.options import Options

Table = Callable[[str, list[list[str]]], str]
BENCHES = ("vllm-plugin", "vllm-plugin-avx512")  # of two processors
PLAIN, OURS = "peer:vllm", "peer:vllm-leapahead"
OTHERS = ("peer:vllm-ngram", "peer:vllm-suffix")


def options(table: Table) -> str:
    """From the docstring of `Options`."""
    text = (inspect.getdoc(Options) or "").partition("Attributes:\n")[2]
    found = dict(re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.MULTILINE))
    rows = []
    for field in fields(Options):
        default = {"": "none", "True": "true"}.get(str(field.default), str(field.default))
        default = "all but ngram" if field.name == "sources" else default
        rows.append([f"`{field.name}`", default, " ".join(found[field.name].split())])
    return table("option | default | meaning", rows)


def metrics(table: Table) -> str:
    """From `METRICS`."""
    rows = [[f"`leapahead:{name}_total`", ", ".join(LABELS.get(name, [])), text] for name, text in METRICS.items()]
    return table("metric | labels | meaning", rows)


def bench(root: Path, table: Table, name: str) -> str:
    """Tokens a second against vLLM without drafts, by task and number of requests: `ratio (95 % interval)`."""
    if not (root / "docs/bench" / name / "bench.json").is_file():
        return "Not measured yet."
    rows = [row for row in read(root / "docs/bench" / name)["results"] if row["task"] != OVERALL]
    cells = {(row["task"], row["batch"], row["drafter"]): row for row in rows}
    lines = []
    for task, batch in dict.fromkeys((row["task"], row["batch"]) for row in sorted(rows, key=lambda row: row["batch"])):
        plain = cells.get((task, batch, PLAIN))
        if plain is None:
            continue
        others = [_ratio(cells.get((task, batch, peer)), plain) for peer in (*OTHERS, OURS)]
        lines.append([task, str(batch), f"{plain['tokens_per_second']:.1f}", *others])
    heads = "task | requests | vLLM, tokens a second | its n-grams | its suffixes | leapahead inside vLLM"
    told = benches.conditions(root, name, "135M", batch="", tasks={row["task"] for row in rows}, counted=False)
    rounds = {len(row["samples"]["tokens"]) for row in rows if row["batch"] > 1}
    passes = f" At several requests there are {LEAST_PASSES} rounds." if rounds == {LEAST_PASSES} else ""
    return f"{table(heads, lines)}\n\n{told}{passes}"


def _ratio(row: dict[str, Any] | None, plain: dict[str, Any]) -> str:
    if row is None:
        return ""
    found = speedup(row["samples"], plain["samples"], prompts=row["prompts"])
    interval = "" if found["low"] is None else f" ({found['low']:.2f} to {found['high']:.2f})"
    return f"{found['median']:.2f}{interval}"


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    return {
        "vllm-options": lambda root: options(table),
        "vllm-metrics": lambda root: metrics(table),
        **{name: partial(bench, table=table, name=name) for name in BENCHES},
    }
