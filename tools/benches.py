"""The benches under docs/bench as tables: blocks of README and docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from leapahead.bench.cell import PLAIN
from leapahead.bench.figures import speedup
from leapahead.bench.plan import LEAST_PASSES
from leapahead.bench.record import OVERALL, read

Row = dict[str, Any]
Table = Callable[[str, list[list[str]]], str]
ENGINES = {"transformers": "Transformers", "llama.cpp": "llama.cpp", "openvino": "OpenVINO"}
OPENVINO_TYPES = {"u8": "int8", "i8": "int8", "u4": "int4", "i4": "int4"}
BITS = {"bf16": "16 bits", "int8": "8 bits", "q8_0": "8 bits", "int4": "4 bits", "q4_0": "4 bits"}
GENAI = "peer:openvino-genai"


def overall(root: Path, name: str, temperature: float, table: Table) -> str:
    """Speed-ups over all prompts, a column for each target: `median (95 % interval), tokens a step`."""
    found = read(root / "docs/bench" / name)
    rows = [row for row in found["results"] if row["task"] == OVERALL and row["temperature"] == temperature]
    targets = list(dict.fromkeys(row["target"] for row in rows))
    cells = {(row["drafter"], row["target"]): row for row in rows}
    lines = []
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        if drafter != PLAIN:
            lines.append([f"`{drafter}`", *(_cell(cells.get((drafter, target))) for target in targets)])
    plain = [cells[PLAIN, target] for target in targets]
    lines.append(["plain decoding, tokens a second", *(f"{row['tokens_per_second']:.1f}" for row in plain)])
    lines.append(["distinct 4-grams of its texts", *(f"{row['distinct_4']:.2f}" for row in plain)])
    lines.append(["prompts", *(str(row["prompts"]) for row in plain)])
    heads = " | ".join(["", *(_target(found["conditions"], target) for target in targets)])
    return table(heads, lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    speed, length = row["speedup"], row["acceptance_length"]
    tokens = "" if length is None else f", {length:.2f}"
    return f"**{speed['median']:.2f}**{_interval(speed)}{tokens}"


def _interval(speed: Row) -> str:
    """ " (low to high)", or nothing where a single prompt was measured."""
    return "" if speed["low"] is None else f" ({speed['low']:.2f} to {speed['high']:.2f})"


def _target(conditions: Row, name: str) -> str:
    told = conditions["targets"][name]
    return f"{ENGINES[told['backend']]}, {_type(told)}"


def _type(told: Row) -> str:
    """Of the weights. llama.cpp says "llama ?B Q8_0", OpenVINO "u8, computed in bf16, cache in bf16"."""
    kind = str(told["dtype"]).partition(",")[0].split()[-1].lower()
    return OPENVINO_TYPES.get(kind, kind)


def conditions(
    root: Path,
    name: str,
    cost: str,
    batch: str = ", batch 1",
    tasks: Collection[str] | None = None,
    counted: bool = True,
) -> str:
    """One line, from the bench's own.

    Args:
        root: the checkout.
        name: of the bench, a folder in docs/bench.
        cost: of the stand-in; "" for the bundled model itself.
        batch: what is said of the batch.
        tasks: those that are shown; by default all.
        counted: whether the table says how many prompts each target has had.
    """
    told = read(root / "docs/bench" / name)["conditions"]
    prompts: dict[str, int] = {}
    for task, each in told["tasks"].items():
        if tasks is not None and task not in tasks:
            continue
        family = task.partition("/")[0]
        prompts[family] = prompts.get(family, 0) + each["prompts"]
    given = ", ".join(f"{count} {family}" for family, count in prompts.items())
    counts = list(dict.fromkeys(str(each["threads"]) for each in told["targets"].values()))
    threads = f"{' and '.join(counts)} thread{'s' * (counts != ['1'])}"
    versions = ", ".join(f"{package} {number}" for package, number in told["versions"].items() if number)
    versions = "; ".join(filter(None, (versions, ", ".join(dict.fromkeys(told["peers"].values())))))
    model = "the bundled model" + (f" at the cost of {cost} parameters" if cost else "")
    count = " (the table says how many prompts each target has had)" if counted else ""
    return (
        f"Conditions: {model}{batch}; {given} prompts, "
        f"up to {told['max_new_tokens']} new tokens each{count}; "
        f"{told['rounds']} round after a warm-up, in which all take turns "
        f"on each prompt; {threads} on {told['cpu']}; {versions}; {_commits(told)}."
    )


def _commits(told: dict[str, Any]) -> str:
    """The commits of a bench that may have been resumed."""
    # Records of earlier versions have dates alone.
    resumed = [each["commit"] for each in told.get("resumed", []) if isinstance(each, dict)]
    commits = dict.fromkeys(str(commit)[:10] for commit in (told["commit"], *resumed))
    return f"commit{'s' * (len(commits) > 1)} {' and '.join(commits)}"


def agreement(root: Path, name: str, again: str, table: Table) -> str:
    """Two runs of one bench: every speed-up with its interval, and whether the intervals meet."""
    one, other = read(root / "docs/bench" / name), read(root / "docs/bench" / again)
    key = ("task", "target", "drafter", "temperature", "batch")
    first = {tuple(row[each] for each in key): row for row in one["results"]}
    lines = []
    for row in other["results"]:
        mine = first.get(tuple(row[each] for each in key))
        if mine is not None and row["drafter"] != PLAIN and row["task"] != OVERALL:
            speeds: Sequence[Row] = (mine["speedup"], row["speedup"])
            if any(each["low"] is None for each in speeds):
                continue  # single prompts have no interval
            meet = max(each["low"] for each in speeds) <= min(each["high"] for each in speeds)
            texts = [f"{each['median']:.2f}{_interval(each)}" for each in speeds]
            lines.append([row["task"], row["target"], f"`{row['drafter']}`", *texts, "yes" if meet else "no"])
    return table("task | target | drafter | first run | second run | intervals meet", lines)


def gain(root: Path, names: Sequence[str], table: Table, model: str = "draft") -> str:
    """Of `auto` with a draft model, or a head, over `auto` without, in the same run and on the same prompts."""
    lines = []
    for name in names:
        found = read(root / "docs/bench" / name)
        rows = [row for row in found["results"] if row["task"] != OVERALL]
        (with_it,) = {row["drafter"] for row in rows if row["drafter"].startswith(f"auto({model}=")}
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            mine, others = (
                _samples([row for row in rows if (row["drafter"], row["temperature"]) == (drafter, temperature)])
                for drafter in (with_it, "auto")
            )
            each = speedup(mine, others)
            plain = [row for row in rows if (row["drafter"], row["temperature"]) == (PLAIN, temperature)]
            target = _target(found["conditions"], rows[0]["target"])
            cost = Path(rows[0]["target"]).name.partition("-")[0].upper()
            times = f"{each['median']:.2f}{_interval(each)}"
            lines.append([f"{cost}, {target}", f"{temperature:g}", str(sum(row["prompts"] for row in plain)), times])
    return table(f"target | temperature | prompts | `auto` with the {model} / without", lines)


def batches(root: Path, table: Table) -> str:
    """Speed-ups of `auto` by batch size, a row for each target and temperature: `median (95 % interval)`."""
    found = read(root / "docs/bench/batch")
    rows = {(row["target"], row["temperature"], row["batch"], row["drafter"]): row for row in found["results"]}
    sizes = sorted({batch for _, _, batch, _ in rows})
    lines = []
    for target, temperature in dict.fromkeys(key[:2] for key in rows):
        where = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        cells = [rows[target, temperature, batch, "auto"]["speedup"] for batch in sizes]
        plain = [f"{rows[target, temperature, batch, PLAIN]['tokens_per_second']:.0f}" for batch in sizes]
        name = f"{_target(found['conditions'], target)}, {where}"
        lines.append([name, *(f"**{each['median']:.2f}**{_interval(each)}" for each in cells)])
        lines.append(["plain decoding, tokens a second", *plain])
    passes = (
        f"Of batches there are as many rounds as give {LEAST_PASSES} passes of each drafter, and a text of a batch has "
        "between half and all of these new tokens."
    )
    told = conditions(root, "batch", "135M", batch="")
    return table(" | ".join(["batch", *map(str, sizes)]), lines) + f"\n\n{told} {passes}"


def hybrids(root: Path, table: Table) -> str:
    """`auto` on models with recurrent layers, a row for each target, temperature and task."""
    found, lines = read(root / "docs/bench/hybrid"), []
    rows = {(row["target"], row["temperature"], row["task"], row["drafter"]): row for row in found["results"]}
    for target, temperature, task in dict.fromkeys(key[:3] for key in rows):
        if task == OVERALL:
            continue
        auto, plain = (rows[target, temperature, task, drafter] for drafter in ("auto", PLAIN))
        where = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        each, replayed = auto["speedup"], auto["replayed"] / auto["steps"]
        speeds = [f"{row['tokens_per_second']:.1f}" for row in (plain, auto)]
        times = f"**{each['median']:.2f}**{_interval(each)}"
        name = f"{_target(found['conditions'], target)}, {where}"
        lines.append([name, task, times, *speeds, f"{auto['acceptance_length']:.2f}", f"{replayed:.2f}"])
    columns = "target | task | `auto` / plain | plain, tokens/s | `auto`, tokens/s | accept. length | replayed / step"
    return table(columns, lines) + "\n\n" + conditions(root, "hybrid", "135M")


def precisions(root: Path, table: Table) -> str:
    """`auto` on its fastest engine against plain decoding on its fastest, of OpenVINO and llama.cpp, by width."""
    lines = []
    for name, auto, plain in _fastest(root):
        whole = auto[OVERALL], plain[OVERALL]
        speeds = [f"{row['tokens_per_second']:.1f}" for row in whole]
        lines.append([name, auto["where"], speeds[0], plain["where"], speeds[1], f"**{_ratio(*whole):.2f}**"])
    columns = "cost, weights | `auto` on | tokens/s | fastest plain decoding | tokens/s | ratio"
    return table(columns, lines)


def precisions_by_task(root: Path, table: Table) -> str:
    """The ratios of `precisions`, for every task alone."""
    found = list(_fastest(root))
    tasks = list(dict.fromkeys(task for _, auto, _ in found for task in auto if task not in (OVERALL, "where")))
    lines = [
        [name, *(f"{_ratio(auto[task], plain[task]):.2f}" if task in auto else "" for task in tasks)]
        for name, auto, plain in found
    ]
    return table(" | ".join(["cost, weights", *tasks]), lines)


def _ratio(one: Row, other: Row) -> float:
    ratio: float = one["tokens_per_second"] / other["tokens_per_second"]
    return ratio


def _fastest(root: Path) -> Iterator[tuple[str, Row, Row]]:
    """Of each cost, temperature and width: its name, and the rows by task of `auto` and of plain decoding.

    Each is of the target where it is fastest over all tasks; "where" names it.
    """
    for cost in ("135m", "1b"):
        found = read(root / "docs/bench/openvino" / cost)
        kinds = {name: _type(told) for name, told in found["conditions"]["targets"].items()}
        for temperature in sorted({row["temperature"] for row in found["results"]}):
            for bits in dict.fromkeys(BITS[kind] for kind in kinds.values()):
                some = [
                    row
                    for row in found["results"]
                    if row["temperature"] == temperature and BITS[kinds[row["target"]]] == bits
                ]
                name = f"{cost.upper()}, {bits}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}"
                best = [_best(found, some, names) for names in (("auto",), (PLAIN, GENAI))]
                yield name, best[0], best[1]


def _best(found: Row, rows: list[Row], drafters: Sequence[str]) -> Row:
    """The rows by task of the fastest of these drafters."""
    whole = [row for row in rows if row["task"] == OVERALL and row["drafter"] in drafters]
    best = max(whole, key=lambda row: row["tokens_per_second"])
    same = [row for row in rows if all(row[key] == best[key] for key in ("target", "drafter"))]
    where = _target(found["conditions"], best["target"]) + ", GenAI" * (best["drafter"] == GENAI)
    return {"where": where} | {row["task"]: row for row in same}


def engines(root: Path, table: Table, benches: Mapping[str, str]) -> str:
    """All contenders of every target, relative to our plain decoding on that target.

    Args:
        root: the checkout.
        benches: folders in docs/bench, and the costs of the stand-ins, with which the names of the targets begin.
    """
    lines = []
    for bench in benches:
        found = read(root / "docs/bench" / bench)
        for row in found["results"]:
            if row["task"] != OVERALL:
                continue
            cost = Path(row["target"]).name.partition("-")[0]
            name = f"{cost.upper()}, {_target(found['conditions'], row['target'])}"
            where = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}"
            length = "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
            speed, rate = row["speedup"], f"{row['tokens_per_second']:.1f}"
            times = f"{speed['median']:.2f}{_interval(speed)}"
            lines.append([name, where, f"`{row['drafter']}`", times, rate, length, f"{row['distinct_4']:.2f}"])
    columns = "cost, target | text | drafter | speed-up | tokens/s | accept. length | distinct 4-grams"
    notes = "\n\n".join(conditions(root, bench, cost, counted=False) for bench, cost in benches.items())
    return table(columns, lines) + "\n\n" + notes


def positions(root: Path, table: Table) -> str:
    """How often the drafted token at each position of a chain is accepted, of steps, in ours and in vLLM."""
    kinds = sorted(path.parent.name for path in (root / "docs/bench/heads-vllm").glob("*/bench.json"))
    lines = []
    for kind in kinds:
        for row in read(root / "docs/bench/heads-vllm" / kind)["results"]:
            if row["drafter"] == PLAIN or row["task"] == OVERALL:
                continue
            who = "vLLM" if row["drafter"].startswith("peer:") else "leapahead"
            shares = [f"{100 * row['accepted_at'].get(str(depth), 0) / row['steps']:.1f}" for depth in range(1, 5)]
            lines.append([kind, row["task"], who, *shares, str(row["steps"]), str(row["mismatches"])])
    columns = "head | prompts | program | position 1, % | 2, % | 3, % | 4, % | steps | texts that differ"
    notes = {kind: conditions(root, f"heads-vllm/{kind}", "", counted=False) for kind in kinds}
    return table(columns, lines) + "\n\n" + together(notes)


def together(notes: Mapping[str, str]) -> str:
    """The conditions of several benches as one line; where they differ, each with the names of its benches."""
    parts = [[part.split(", ") for part in note.removesuffix(".").split("; ")] for note in notes.values()]
    same = (zip(*each, strict=True) for each in zip(*parts, strict=True))
    return "; ".join(", ".join(_each(notes, items) for items in each) for each in same) + "."


def _each(names: Iterable[str], items: Sequence[str]) -> str:
    """One item of the conditions: once if it is the same everywhere, else with the names to which it applies."""
    found: dict[str, list[str]] = {}
    for name, item in zip(names, items, strict=True):
        found.setdefault(item, []).append(name)
    if len(found) == 1:
        return items[0]
    return " and ".join(f"{item} ({', '.join(of)})" for item, of in found.items())


def _samples(rows: Sequence[Row]) -> dict[str, Any]:
    """Of several tasks, as of one: [rounds, prompts]."""
    parts = [row["samples"] for row in rows]
    return {
        what: [list(chain(*turns)) for turns in zip(*(part[what] for part in parts), strict=True)]
        for what in ("tokens", "seconds")
    }


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    def whole(name: str, cost: str) -> Callable[[Path], str]:
        return lambda root: overall(root, name, 0.0, table) + "\n\n" + conditions(root, name, cost)

    return {
        "auto-135m": whole("auto/135m", "135M"),
        "auto-1b": whole("auto/1b", "1B"),
        "auto-135m-sampled": lambda root: "\n\n".join(
            f"Temperature {temperature:g}:\n\n" + overall(root, "auto/sampled", temperature, table)
            for temperature in (1.0, 1.5)
        ),
        "draft-135m": whole("draft/135m", "135M"),
        "draft-135m-sampled": lambda root: overall(root, "draft/135m", 1.0, table),
        "draft-135m-gguf": whole("draft/135m-gguf", "135M"),
        "draft-135m-gguf-sampled": lambda root: overall(root, "draft/135m-gguf", 1.0, table),
        "draft-1b": whole("draft/1b", "1B"),
        "draft-1b-sampled": lambda root: overall(root, "draft/1b", 1.0, table),
        "cascade-135m": whole("draft/cascade-135m", "135M"),
        "cascade-1b": whole("draft/cascade-1b", "1B"),
        "heads-135m": whole("heads", "135M"),
        "heads-135m-sampled": lambda root: overall(root, "heads", 1.0, table),
        "heads-vllm": lambda root: positions(root, table),
        "head-gain": lambda root: gain(root, ("heads", "heads-greedy"), table, "head"),
        "draft-gain": lambda root: gain(root, ("draft/135m", "draft/1b", "draft/135m-gguf"), table),
        "bench-135m": whole("135m", "135M"),
        "bench-135m-sampled": lambda root: overall(root, "135m", 1.0, table),
        "bench-1b": whole("1b", "1B"),
        "auto-batches": lambda root: batches(root, table),
        "auto-hybrids": lambda root: hybrids(root, table),
        "openvino-precisions": lambda root: precisions(root, table),
        "openvino-tasks": lambda root: precisions_by_task(root, table),
        "openvino-vllm": lambda root: "\n\n".join(
            f"{cost.upper()}:\n\n" + whole(f"openvino/vllm-{cost}", cost.upper())(root) for cost in ("135m", "1b")
        ),
        "openvino-targets": lambda root: engines(root, table, {"openvino/135m": "135M", "openvino/1b": "1B"}),
        "avx2": lambda root: engines(root, table, {"avx2": "1B and 135M"}),
        "bench-again": lambda root: agreement(root, "135m", "again", table),
    }
