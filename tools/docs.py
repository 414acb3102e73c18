"""Writes the generated blocks of README and docs: help texts, the list of files, the tables of measured figures.

A block lies between `<!-- generated: NAME -->` and `<!-- end -->`. `python tools/docs.py` renews all blocks; with
`--check` it changes nothing and exits with 1 if one is out of date.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import benches
import cascades
import claims
import click
import exact
import gains
import headline
import inside_vllm
import long_contexts
import reference
import server_benches
import several_devices
import steps
import systems
import trained

BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages(root: Path) -> list[Path]:
    """README and every page of docs that has a generated block."""
    files = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [file for file in files if BLOCK.search(file.read_text(encoding="utf-8"))]


def table(heads: str, rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; `heads` are separated by bars."""
    names = heads.split("|")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cell.strip() for cell in line)} |" for line in lines)


def _figures(root: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((root / "docs/figures.json").read_text(encoding="utf-8"))
    return data


def _conditions(data: dict[str, Any], what: str) -> str:
    return f"\n\nConditions: {data['conditions'][what]}"


def acceptance_table(root: Path) -> str:
    """Acceptance lengths, from docs/figures.json."""
    data = _figures(root)
    rows = [
        [
            row["task"],
            f"{row['temperature']:g}",
            row["name"],
            f"{row['acceptance_length']:.2f}",
            f"{row['nodes_per_step']:.0f}",
            f"{row['distinct_4']:.2f}",
        ]
        for row in data["acceptance"]
        if row["name"] != "plain" and not row["ignore_eos"]
    ]
    heads = "prompts | temperature | drafter | acceptance length | nodes per step | distinct 4-grams"
    return table(heads, rows) + _conditions(data, "acceptance")


def lengths_table(root: Path, part: str) -> str:
    """Acceptance lengths by task and temperature, from a part of docs/figures.json; and prompts, where rows differ."""
    data = _figures(root)
    columns = list(dict.fromkeys((row["task"], row["temperature"]) for row in data[part]))
    cells = {(row["name"], row["task"], row["temperature"]): row for row in data[part]}
    prompts = {row["name"]: str(row["prompts"]) for row in data[part]}
    differ = len(set(prompts.values())) > 1
    rows = [
        [
            name,
            *([count] if differ else []),
            *(f"{cells[name, task, temperature]['acceptance_length']:.2f}" for task, temperature in columns),
        ]
        for name, count in prompts.items()
    ]
    heads = ["", *(["prompts of each task"] if differ else []), *(f"{task}, T = {t:g}" for task, t in columns)]
    return table(" | ".join(heads), rows) + _conditions(data, part)


def relaxed_table(root: Path) -> str:
    """Relaxed rules beside exact matching, from docs/figures.json; costs are against plain decoding's texts."""
    data = _figures(root)
    plain = {
        (row["task"], row["temperature"]): row["log_likelihood"] for row in data["relaxed"] if row["drafter"] == "plain"
    }
    rows = [
        [
            row["task"],
            f"{row['temperature']:g}",
            f"`{row['drafter']}`",
            f"`{row['rule']}`",
            f"{row['acceptance_length']:.2f}",
            f"{row['different']} of {row['prompts']}",
            f"{row['log_likelihood'] - plain[row['task'], row['temperature']]:+.2f}",
        ]
        for row in data["relaxed"]
        if row["drafter"] != "plain"
    ]
    heads = "prompts | temperature | drafter | rule | acceptance length | texts that differ | nats a token"
    return table(heads, rows) + _conditions(data, "relaxed")


def check_table(root: Path) -> str:
    """Equality with plain decoding, from docs/figures.json: a row for each drafter, over all settings."""
    data = _figures(root)
    rows = []
    for drafter in dict.fromkeys(row["drafter"] for row in data["check"]):
        own = [row for row in data["check"] if row["drafter"] == drafter]
        sums = [sum(row[what] for row in own) for what in ("tokens", "mismatches", "ties")]
        alone = {row["temperature"]: row["acceptance_length"] for row in own if row["batch"] == 1}
        rows.append([drafter, *(f"{value:,}" for value in sums), *(f"{alone[each]:.2f}" for each in (0.0, 1.0))])
    heads = "drafter | tokens compared | mismatches | ties | acceptance length, T = 0 | T = 1"
    return table(heads, rows) + _conditions(data, "check")


def overhead_table(root: Path) -> str:
    """What a step costs outside the forward, from docs/figures.json."""
    data = _figures(root)
    rows = [
        [
            f"{row['context']:,}",
            f"{row['temperature']:g}",
            f"{row['committed']:.1f}",
            f"{row['outside_ms']:.2f} ms ({100 * row['of_this_forward']:.1f} %)",
            f"{row['choose_ms']:.2f} ms ({100 * row['choose_of_this_forward']:.1f} %)",
            f"{row['forward_ms']:.0f} ms",
            f"{row['single_forward_ms']:.0f} ms",
        ]
        for row in data["overhead"]
    ]
    heads = (
        "context | temperature | tokens per step | draft, verify, commit, observe | choose | forward of 64 nodes | "
        "of one token"
    )
    return table(heads, rows) + _conditions(data, "overhead")


def cost_table(root: Path) -> str:
    """T(n)/T(1), from docs/figures.json."""
    data = _figures(root)
    curve = {int(n): ms for n, ms in data["cost_curve"].items()}
    heads = "nodes in the step | " + " | ".join(map(str, sorted(curve)))
    rows = [["cost, one token = 1", *(f"{curve[n] / curve[1]:.2f}" for n in sorted(curve))]]
    return table(heads, rows) + _conditions(data, "cost_curve")


def regret_table(root: Path) -> str:
    """Regret and gain of planning, from docs/figures/regret.json: a row for each start, load or batch, by curve."""
    data = json.loads((root / "docs/figures/regret.json").read_text(encoding="utf-8"))

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f}"

    heads = (
        "case | curve | acceptance | regret, % | in plain steps | mean - 10 steps, % | 95th percentile - 10 steps, %"
    )
    rows = [
        [
            *(row[name] for name in ("what", "curve", "acceptance")),
            percent(row["regret"]),
            f"{row['regret_steps']:.1f}",
            percent(row["mean_excess"]),
            percent(row["p95_excess"]),
            percent(row["gain"]),
            percent(row["right_gain"]),
            "" if row["share"] is None else f"{100 * row['share']:.0f}",
        ]
        for row in data["rows"]
    ]
    return table(heads + " | time saved from step 60 on, % | with the right profile, % | share of it, %", rows)


def regret_worst_table(root: Path) -> str:
    """The worst row of each start, load or batch, from docs/figures/regret.json."""
    data = json.loads((root / "docs/figures/regret.json").read_text(encoding="utf-8"))
    together: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        together.setdefault(row["what"], []).append(row)

    def where(row: dict[str, Any]) -> str:
        return f"({row['curve']}, {row['acceptance']})"

    rows = []
    for what, some in together.items():
        cells = []
        for name in ("mean_excess", "p95_excess"):
            worst = max(some, key=lambda row: row[name])
            cells.append(f"{100 * worst[name]:.1f} {where(worst)}")
        gained = [row for row in some if row["share"] is not None]
        least = min(gained, key=lambda row: row["share"])
        share = f"{100 * least['share']:.0f} of {100 * least['right_gain']:.1f} {where(least)}"
        rows.append([what, str(len(some)), str(some[0]["seeds"]), *cells, share])
    heads = "case | rows | runs of each | mean regret - 10 steps, % | 95th percentile - 10 steps, % | least share, %"
    return table(heads, rows)


def _gguf(root: Path, part: str) -> tuple[dict[str, Any], str]:
    """File -> its figures of one part, and the conditions, from docs/llama-cpp.json."""
    data = json.loads((root / "docs/llama-cpp.json").read_text(encoding="utf-8"))
    found = {name: row[part] for name, row in data["files"].items() if part in row}
    return found, f"\n\nConditions: {data['conditions'][part]}"


def gguf_check_table(root: Path) -> str:
    """Equality on GGUF files."""
    found, conditions = _gguf(root, "check")
    rows = []
    for name, each in found.items():
        for drafter in dict.fromkeys(row["drafter"] for row in each):
            own = [row for row in each if row["drafter"] == drafter]
            gap = max(row["largest_tie_gap"] for row in own)
            sums = [sum(row[key] for row in own) for key in ("tokens", "mismatches", "ties")]
            cells = [name, drafter, str(own[0]["prompts"]), *(f"{value:,}" for value in sums)]
            rows.append([*cells, f"{gap:.3f}" if gap else ""])
    return table("file | drafter | prompts | tokens compared | mismatches | ties | largest gap", rows) + conditions


def gguf_plain_table(root: Path) -> str:
    """Plain decoding beside llama-bench."""
    found, conditions = _gguf(root, "plain")
    rows = [
        [
            name,
            f"{row['ours']:.1f}",
            f"{row['llama_bench']:.1f}",
            f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
            f"{row['outside_ms']:.2f} ms ({row['outside_ms'] * row['ours'] / 10:.1f} %)",
        ]
        for name, row in found.items()
    ]
    heads = "file | leapahead, tokens/s | llama-bench, tokens/s | ratio, median (range) | a token outside llama.cpp"
    return table(heads, rows) + conditions


def gguf_curve_table(root: Path) -> str:
    """T(n)/T(1) beside llama-batched-bench."""
    found, conditions = _gguf(root, "curve")
    names = {"chain": "chain", "tree": "tree", "batched_bench": "llama-batched-bench"}
    sizes = [int(n) for n in next(iter(found.values()))["chain"]]
    rows = [
        [file, names[kind], *(f"{each[kind][str(n)] / each[kind]['1']:.2f}" for n in sizes), f"{each[kind]['1']:.1f}"]
        for file, each in found.items()
        for kind in names
    ]
    rows += [
        [file, "ours outside llama.cpp, ms", *(f"{each['outside'][str(n)]:.2f}" for n in sizes), ""]
        for file, each in found.items()
        if "outside" in each
    ]
    return table("file | step | " + " | ".join(f"n = {n}" for n in sizes) + " | T(1), ms", rows) + conditions


CURVE_SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 16)


def gguf_every_n_table(root: Path) -> str:
    """T(n)/T(1) of every type under two builds, from docs/figures/curve.json."""
    data = json.loads((root / "docs/figures/curve.json").read_text(encoding="utf-8"))
    rows = [
        [
            row["file"],
            row["variant"],
            f"{row['prompt']['median']:.0f}",
            f"{row['milliseconds']['1']['median']:.1f}",
            *(f"{row['relative'][str(n)]['median']:.2f}" for n in CURVE_SIZES),
        ]
        for row in data["rows"]
    ]
    heads = "file | build | prompt, tokens/s | T(1), ms | " + " | ".join(f"T({n})" for n in CURVE_SIZES)
    known, first = data["conditions"], data["rows"][0]
    conditions = (
        f"\n\nConditions: chains over {known['context']} tokens of context, {known['rounds']} rounds in which the "
        f"builds take turns, {known['repeats']} forwards of each size a round, medians; threads: {first['threads']}; "
        f"{known['cpu']}; leapahead {known['versions']['leapahead']}, "
        f"llama-cpp-python {known['versions']['llama-cpp-python']}."
    )
    return table(heads, rows) + conditions


SWITCHING_SIZES = (4, 8, 16, 32)


def switching_table(root: Path) -> str:
    """Times of steps after steps of the same size and of another, from docs/bench/openvino/switching.json."""
    data = json.loads((root / "docs/bench/openvino/switching.json").read_text(encoding="utf-8"))
    rows = []
    for row in data["rows"]:
        same, turns = row["milliseconds"], row["in_turns"]
        larger = (f"{same[str(n)] / same['1']:.2f}" for n in SWITCHING_SIZES)
        rows.append([row["model"], f"{same['1']:.1f}", *larger, *(f"{turns[str(n)]:.1f}" for n in (1, 8))])
    sizes = " | ".join(f"{n} nodes" for n in SWITCHING_SIZES)
    heads = f"model | one token, ms | {sizes} | in turns: one, ms | eight, ms"
    known = data["conditions"]
    return table(heads, rows) + (
        f"\n\nConditions: chains over {known['context']} tokens, {known['rounds']} rounds, medians; threads: "
        f"{known['threads']}; {known['cpu']}; openvino {known['versions']['openvino']}."
    )


def _where(known: Sequence[dict[str, Any]]) -> str:
    """Threads, processor, versions and commits of measurements on one machine."""
    first = known[0]
    versions = ", ".join(f"{name} {each}" for name, each in first["versions"].items() if each)
    commits = sorted({each["commit"][:10] for each in known})
    return (
        f"{first['threads']} threads on {first['cpu']}; {versions}; "
        f"commit{'s' * (len(commits) > 1)} {' and '.join(commits)}"
    )


def crowded_table(root: Path) -> str:
    """Decoding beside busy programs: tokens a second for each model of docs/bench/crowded."""
    rows, known = [], []
    for file in sorted((root / "docs/bench/crowded").glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        for busy in (0, data["processes"]):
            cells = []
            for threads, drafter in (("spins", "plain"), ("adapts", "plain"), ("spins", "auto"), ("adapts", "auto")):
                rates = [
                    row["rate"]
                    for row in data["rows"]
                    if (row["busy"], row["threads"], row["drafter"]) == (busy, threads, drafter)
                ]
                cells.append(f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})")
            rows.append([Path(data["conditions"]["target"]).name, str(busy), *cells])
        known.append(data["conditions"])
    heads = "model | busy programs | plain, spins | plain, adapts | `auto`, spins | `auto`, adapts"
    lengths = sorted({each["max_new_tokens"] for each in known})
    return table(heads, rows) + (
        f"\n\nConditions: {known[0]['prompts']}, up to {' or '.join(map(str, lengths))} tokens each, greedy; "
        f"{_where(known)}."
    )


def loading_table(root: Path) -> str:
    """Loading beside busy programs: seconds, from docs/bench/crowded-loading.json."""
    data = json.loads((root / "docs/bench/crowded-loading.json").read_text(encoding="utf-8"))
    limit, rows = data["conditions"]["limit"], []
    for model in dict.fromkeys(row["model"] for row in data["rows"]):
        for busy in (0, data["processes"]):
            cells = []
            for threads in ("spins", "adapts"):
                some = [
                    row["seconds"]
                    for row in data["rows"]
                    if (row["model"], row["busy"], row["threads"]) == (model, busy, threads)
                ]
                least, middle, most = (
                    f"more than {each:g}" if each >= limit else f"{each:.1f}"
                    for each in (min(some), statistics.median(some), max(some))
                )
                cells.append(f"{middle} ({least} to {most})")
            rows.append([model, str(busy), *cells])
    given = data["conditions"]
    return table("model | busy programs | spins | adapts", rows) + (
        f"\n\nConditions: {given['rounds']} processes of each kind, without their imports; {_where([given])}."
    )


NOT_MEASURED = "Nothing has been measured on a GPU yet."


def gpu_report(root: Path) -> str:
    """The report of `make bench-gpu`, with its figures; without one, that there is none."""
    folder = root / "docs/bench/gpu"
    if not (folder / "report.md").is_file():
        return NOT_MEASURED
    figures = [f"![{file.stem}](../bench/gpu/{file.name})" for file in sorted(folder.glob("*.svg"))]
    text = (folder / "report.md").read_text(encoding="utf-8").strip()
    return "\n\n".join([text, *figures])


def gpu_summary(root: Path) -> str:
    """Speed-ups of `auto` on a GPU, by cost, temperature and batch: one task / the other."""
    cells: dict[tuple[str, float], dict[int, dict[str, float]]] = {}
    tasks: set[str] = set()
    for file in sorted((root / "docs/bench/gpu").glob("*/*-t*-b*.json")):
        cell = json.loads(file.read_text(encoding="utf-8"))
        (row,) = (row for row in cell["rows"] if row["drafter"] == "auto")
        at = cells.setdefault((cell["cost"], cell["temperature"]), {}).setdefault(cell["batch"], {})
        at[cell["task"]] = row["speed_up"]
        tasks.add(cell["task"])
    order = sorted(tasks, reverse=True)
    sizes = sorted({size for each in cells.values() for size in each})
    rows = []
    for (cost, temperature), each in sorted(cells.items()):
        found = [" / ".join(f"{each[size][t]:.2f}" if t in each[size] else "-" for t in order) for size in sizes]
        rows.append([cost.upper(), "greedy" if temperature == 0 else f"temperature {temperature:g}", *found])
    return table(f"{' / '.join(order)} | text | " + " | ".join(f"batch of {size}" for size in sizes), rows)


def gpu_simulated(root: Path) -> str:
    """What `python -m research gpu-simulated` has written."""
    data = json.loads((root / "docs/bench/gpu-simulated.json").read_text(encoding="utf-8"))
    rows = [
        [
            row["cost"],
            row["task"],
            f"{row['temperature']:g}",
            str(row["batch"]),
            *(f"{each:.2f}" for each in row["speed_ups"]),
            ", ".join(map(str, row["captures"])),
            f"{row['acceptance_length']:.2f}",
        ]
        for row in data["rows"]
    ]
    heads = "cost | prompts | temperature | batch | first pass | second | third | captures | acceptance length"
    return table(heads, rows) + f"\n\nTimes of {data['measured']['gpu']}, {data['measured']['dtype']}."


MODES = ("trees", "chains", "chains with replay", "plain", "refused")


def families_table(root: Path) -> str:
    """What each family of models gets, from docs/families.json; families that get the same for one reason together."""
    data = json.loads((root / "docs/families.json").read_text(encoding="utf-8"))
    together: dict[tuple[str, int, str], list[str]] = {}
    for row in data["rows"]:
        key = (row["engine"], MODES.index(row["mode"]), row["why"])
        together.setdefault(key, []).append(f"`{row['family']}`")
    order = sorted(together, key=lambda key: (not key[0].startswith("Transformers"), *key))
    rows = [[engine, MODES[mode], ", ".join(together[engine, mode, why]), why] for engine, mode, why in order]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    return table("engine | drafts | families | why not more", rows) + f"\n\nVersions: {versions}."


BLOCKS: dict[str, Callable[[Path], str]] = {
    "headline": lambda root: headline.headline(root, table),
    **reference.blocks(table),
    "acceptance": acceptance_table,
    **{part: partial(lengths_table, part=part) for part in ("rules", "heads", "distilled")},
    "parallel": lambda root: trained.depths_table(root, table),
    "cllm": lambda root: trained.tuned_table(root, table),
    "cllm-run": lambda root: trained.tuning_table(root, table),
    "cascades": lambda root: cascades.cascades_table(root, table),
    "repair": lambda root: trained.repair_table(root, table),
    "relaxed": relaxed_table,
    "head-kinds": partial(lengths_table, part="head-kinds"),
    "check": check_table,
    "overhead": overhead_table,
    "cost-curve": cost_table,
    "regret": regret_table,
    "regret-worst": regret_worst_table,
    "families": families_table,
    **exact.blocks(table),
    "gguf-check": gguf_check_table,
    "gguf-plain": gguf_plain_table,
    "gguf-curve": gguf_curve_table,
    "gguf-every-n": gguf_every_n_table,
    "gpu": gpu_report,
    "gpu-simulated": gpu_simulated,
    "gpu-summary": gpu_summary,
    "switching": switching_table,
    "crowded": crowded_table,
    "crowded-loading": loading_table,
    **claims.blocks(table),
    **benches.blocks(table),
    **inside_vllm.blocks(table),
    **server_benches.blocks(table),
    **gains.blocks(table),
    **several_devices.blocks(table),
    **steps.blocks(table),
    **long_contexts.blocks(table),
    **systems.blocks(table),
}


def renewed(text: str, root: Path) -> str:
    """`text` with every generated block as it should be."""
    return BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m['name']](root)}\n{m[3]}", text)


@click.command()
@click.option("--root", type=click.Path(path_type=Path, exists=True), default=Path(), help="The checkout.")
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if a block is out of date.")
def main(root: Path, check: bool) -> None:
    """Renew the generated blocks of README and docs."""
    stale = []
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        new = renewed(text, root)
        if new != text:
            stale.append(str(path.relative_to(root)))
            if not check:
                path.write_text(new, encoding="utf-8")
    click.echo(f"{'out of date' if check else 'renewed'}: {', '.join(stale) or 'nothing'}")
    if check and stale:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
