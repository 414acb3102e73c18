"""The report of `python -m research gpu`: Markdown tables of all cells that are there, and their figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from leapahead.bench import plots as base
from leapahead.bench.conditions import Data
from leapahead.core.errors import BadParameter, LeapaheadError
from research.gpu import plots

SUFFIXES = ("svg", "png")
Cells = dict[str, dict[str, Data]]  # cost -> cell -> what was found
NAMES = {
    "captured": "leapahead, captured forwards",
    "compiled": "leapahead, captured forwards, compiled",
    "eager": "leapahead, operation by operation",
    "exact": "leapahead, exact mode",
    "exact-eager": "leapahead, exact mode, operation by operation",
    "transformers": "Transformers, static cache",
    "vllm": "vLLM",
}


def read(file: Path) -> Data:
    """A cell.

    Raises:
        BadParameter: the file is none.
    """
    try:
        found: Data = json.loads(file.read_text(encoding="utf-8"))
        _ = found["cell"], found["cost"], found["conditions"]["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadParameter(f"{file} is no cell of this command; remove it, or name another --out") from None
    return found


def write(folder: Path) -> list[Path]:
    """Writes report.md and the figures of a folder of cells.

    Raises:
        LeapaheadError: a file cannot be written.
    """
    cells: Cells = {}
    for file in sorted(folder.glob("*/*.json")):
        cells.setdefault(file.parent.name, {})[file.stem] = read(file)
    path = folder / "report.md"
    try:
        path.write_text("\n\n".join(text(cells)) + "\n", encoding="utf-8")
        for name in plots.FIGURES:  # an earlier run's, of what this one has not measured
            for suffix in SUFFIXES:
                (folder / f"{name}.{suffix}").unlink(missing_ok=True)
        figures = [
            each
            for name, draw in plots.FIGURES.items()
            if (data := plots.data(name, cells)) is not None
            for each in base.save(draw, data, folder / name, SUFFIXES)
        ]
    except OSError as error:
        raise LeapaheadError(f"{error.filename or path} cannot be written: {error.strerror or error}") from None
    return [path, *figures]


def text(cells: Cells) -> Iterator[str]:
    """The parts of the report; empty where nothing was measured."""
    for title, table in TABLES.items():
        if rows := table(cells):
            yield f"### {title}\n\n{rows}"
    if left := list(_left_out(cells)):
        yield "### Left out\n\n" + "\n".join(f"- {line}" for line in left)
    if conditions := list(_conditions(cells)):
        yield "Conditions: " + "; ".join(conditions) + "."


def bandwidth(found: dict[str, Data]) -> float | None:
    """Bytes per second of copies, of one cost's cells."""
    return found.get("bandwidth", {}).get("bytes_per_second")


def plain_rates(found: dict[str, Data]) -> dict[str, float]:
    """Tokens per second of plain decoding by who decodes."""
    rows = found.get("plain", {}).get("rows", ())
    rates = {row["engine"]: row.get("tokens_per_second") for row in rows}
    rates |= {name: found.get(name, {}).get("tokens_per_second") for name in ("transformers", "vllm")}
    if compiled := found.get("compiled", {}).get("rows"):
        rates["compiled"] = compiled[0]["tokens_per_second"]
    return {name: rate for name, rate in rates.items() if rate is not None}


def memory_table(cells: Cells) -> str:
    """Bandwidth of the device's memory, measured beside each cost."""
    rows = []
    for cost, found in cells.items():
        speeds = [found.get("bandwidth", {}).get(name) for name in ("bytes_per_second", "read_bytes_per_second")]
        if speeds[0]:
            rows.append([cost, *(f"{each / 1e12:.3f}" if each else "" for each in speeds)])
    return _table("cost | copies, TB/s | reads, TB/s", rows)


def plain_table(cells: Cells) -> str:
    """Plain decoding beside the limit of bandwidth."""
    rows = []
    for cost, found in cells.items():
        weights, copied = found.get("plain", {}).get("weights"), bandwidth(found)
        read = found.get("bandwidth", {}).get("read_bytes_per_second")
        for name, rate in plain_rates(found).items():
            shares = [f"{rate * weights / limit:.2f}" if limit and weights else "" for limit in (copied, read)]
            size = f"{weights / 1e9:.2f}" if weights else ""
            rows.append([cost, NAMES[name], f"{rate:.1f}", f"{1e3 / rate:.2f}", *shares, size])
    heads = "cost | decoded by | tokens/s | ms a token | of the limit of copies | of that of reads | weights, GB"
    return _table(heads, rows)


def curve_table(cells: Cells) -> str:
    """T(n)/T(1)."""
    every = [(cost, row) for cost, found in cells.items() for row in found.get("curve", {}).get("rows", ())]
    every = [(cost, row) for cost, row in every if "milliseconds" in row]
    sizes = [n for n in every[0][1]["milliseconds"] if n != "1"] if every else []
    rows = [
        [
            cost,
            NAMES[row["engine"]],
            f"{row['milliseconds']['1']:.2f}",
            *(f"{row['milliseconds'][n] / row['milliseconds']['1']:.2f}" for n in sizes),
        ]
        for cost, row in every
    ]
    return _table(" | ".join(["cost", "forwards", "T(1), ms", *(f"T({n})" for n in sizes)]), rows)


def speculation_table(cells: Cells) -> str:
    """Drafters against plain decoding of the same engine."""
    rows = [
        [
            cost,
            cell["task"],
            f"{cell['temperature']:g}",
            str(cell["batch"]),
            f"`{row['drafter']}`",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speed_up']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['distinct_4']:.2f}",
            f"{row['differing_texts']} of {cell['texts']}",
        ]
        for cost, found in cells.items()
        for cell in plots.drafted(found)
        for row in cell["rows"]
    ]
    heads = (
        "cost | prompts | temperature | batch | drafter | tokens/s | against plain | acceptance length | "
        "distinct 4-grams | texts that differ"
    )
    return _table(heads, rows)


def compiled_table(cells: Cells) -> str:
    """Plain decoding and `auto` on compiled forwards."""
    rows = [
        [
            cost,
            f"`{row['drafter']}`",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speed_up']:.2f}",
            f"{row['acceptance_length']:.2f}",
            str(sum(line.startswith("compiled") for line in found["compiled"]["told"])),
        ]
        for cost, found in cells.items()
        for row in found.get("compiled", {}).get("rows", ())
    ]
    return _table("cost | drafter | tokens/s | against plain | acceptance length | compiled forwards", rows)


def outside_table(cells: Cells) -> str:
    """What a step of 64 nodes takes outside its forward."""
    rows = [
        [
            cost,
            NAMES[found["outside"]["engine"]],
            f"{row['temperature']:g}",
            f"{row['nodes']:g}",
            *(f"{row[name]:.3f}" for name in ("outside_ms", "choose_ms", "forward_ms", "single_forward_ms")),
        ]
        for cost, found in cells.items()
        for row in found.get("outside", {}).get("rows", ())
    ]
    heads = "cost | forwards | temperature | nodes | outside, ms | choose, ms | forward, ms | forward of one token, ms"
    return _table(heads, rows)


def exact_table(cells: Cells) -> str:
    """Texts of exact mode that differ from those of its plain decoding."""
    rows = []
    for cost, found in cells.items():
        every = found.get("exact", {}).get("rows", ())
        for drafter in dict.fromkeys(row["drafter"] for row in every):
            texts, tokens, differing = (
                sum(row[name] for row in every if row["drafter"] == drafter)
                for name in ("texts", "tokens", "differing_texts")
            )
            rows.append([cost, f"`{drafter}`", f"{tokens:,}", f"{differing} of {texts}"])
    return _table("cost | drafter | tokens | texts that differ", rows)


def price_table(cells: Cells) -> str:
    """How fast exact mode is beside usual plain decoding."""
    rows = []
    for cost, found in cells.items():
        usual = plain_rates(found)
        rate = usual.get("captured", usual.get("eager"))
        for row in found.get("exact", {}).get("speeds", ()):
            own = row["tokens_per_second"]
            share = f"{own / rate:.2f}" if rate else ""
            rows.append([cost, NAMES[row["engine"]], f"`{row['drafter']}`", f"{own:.1f}", share])
    return _table("cost | forwards | drafter | tokens/s | against usual plain decoding", rows)


def attention_table(cells: Cells) -> str:
    """Microseconds of one layer's attention."""
    rows = []
    for cost, found in cells.items():
        every = found.get("attention", {}).get("rows", ())
        shapes = list(dict.fromkeys((row["cells"], row["rows"]) for row in every))
        times = {(row["variant"], row["cells"], row["rows"]): row.get("microseconds") for row in every}
        for name in dict.fromkeys(row["variant"] for row in every):
            for length in dict.fromkeys(length for length, _ in shapes):
                counts = [count for other, count in shapes if other == length]
                rows.append([cost, name, f"{length:,}", *(_number(times.get((name, length, n))) for n in counts)])
    if not rows:
        return ""
    columns = max(len(row) for row in rows)
    names = [
        f"{n} row{'s' if n > 1 else ''}" for n in dict.fromkeys(n for found in cells.values() for n in _counts(found))
    ]
    rows = [row + [""] * (columns - len(row)) for row in rows]
    return _table(" | ".join(["cost", "attention", "cells", *names[: columns - 3]]), rows)


def graphs_table(cells: Cells) -> str:
    """Memory and time of captured forwards."""
    rows = [
        [
            cost,
            str(row["graphs"]),
            f"{row['bytes'] / 2**20:.0f}",
            f"{row['capture_seconds']:.2f}",
            f"{row['longest']:.3f}",
        ]
        for cost, found in cells.items()
        if "graphs" in (row := found.get("graphs", {}))
    ]
    return _table("cost | graphs | memory, MiB | capturing all, s | the longest, s", rows)


TABLES: dict[str, Callable[[Cells], str]] = {
    "The device's memory": memory_table,
    "Plain decoding": plain_table,
    "Steps of n nodes": curve_table,
    "Drafting": speculation_table,
    "Compiled forwards": compiled_table,
    "Outside the forward": outside_table,
    "Captured forwards": graphs_table,
    "Exact mode": exact_table,
    "The price of exact mode": price_table,
    "One layer's attention, microseconds": attention_table,
}


def _counts(found: dict[str, Data]) -> list[int]:
    return [row["rows"] for row in found.get("attention", {}).get("rows", ())]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _left_out(cells: Cells) -> Iterator[str]:
    """What was not measured, and why."""
    for cost, found in cells.items():
        for name, cell in found.items():
            reasons = [cell["refused"]] if "refused" in cell else []
            for row in cell.get("rows", ()):
                if "refused" in row:
                    what = row.get("engine") or f"{row['variant']}, {row['rows']} rows, {row['cells']} cells"
                    reasons.append(f"{what}: {row['refused']}")
            yield from (f"{cost}, {name}: {reason}" for reason in dict.fromkeys(reasons))


def _conditions(cells: Cells) -> Iterator[str]:
    """What all cells have in common, and what they have not."""
    every: list[Data] = [cell["conditions"] for found in cells.values() for cell in found.values()]
    for name in ("gpu", "device", "cpu", "dtype", "commit"):
        values = list(dict.fromkeys(str(each[name]) for each in every if each.get(name)))
        if values:
            yield f"{name} {' and '.join(values)}"
    versions: dict[str, Any] = every[-1]["versions"] if every else {}
    if versions:
        yield ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _table(heads: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; nothing without rows."""
    if not rows:
        return ""
    names = [name.strip() for name in heads.split("|")]
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
