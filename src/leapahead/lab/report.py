"""The report of a bench, from its file alone: a Markdown table, and plots as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leapahead.errors import LeapaheadError
from leapahead.lab.cell import PLAIN
from leapahead.lab.record import OVERALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
Group = tuple[str, float, int]  # target, temperature, batch

COLUMNS = (
    *("task", "drafter", "speed-up", "95 %", "tokens/s", "accept. length", "nodes/step", "1st token", "distinct-4"),
    *("prompts", "tokens", "mismatches", "ties"),
)
# Okabe and Ito's colours, told apart by the colour-blind; then the shape tells.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


def require_matplotlib() -> None:
    """Refuses before anything is measured.

    Raises:
        LeapaheadError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise LeapaheadError('the plots need matplotlib, which is not installed: pip install "leapahead[lab]"')


def groups(results: Sequence[Row]) -> dict[Group, list[Row]]:
    """The rows of each table: the tasks in their order, the overall rows last."""
    found: dict[Group, list[Row]] = {}
    for row in sorted(results, key=lambda row: bool(row["task"] == OVERALL)):
        found.setdefault((row["target"], row["temperature"], row["batch"]), []).append(row)
    return found


def title(group: Group) -> str:
    target, temperature, batch = group
    return f"{target}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}, batch {batch}"


def cells(row: Row) -> list[str]:
    """A row's text under COLUMNS."""
    speed = row["speedup"]
    plain = row["drafter"] == PLAIN
    return [
        row["task"],
        row["drafter"],
        f"{speed['median']:.2f}",
        "" if plain else f"{speed['low']:.2f} to {speed['high']:.2f}",
        f"{row['tokens_per_second']:.1f}",
        _number(row["acceptance_length"], 2),
        _number(row["nodes_per_step"], 1),
        f"{1e3 * row['time_to_first_token']:.1f} ms",
        f"{row['distinct_4']:.2f}",
        *(str(row[key]) for key in ("prompts", "tokens", "mismatches", "ties")),
    ]


def markdown(found: dict[str, Any]) -> str:
    """The whole report as text."""
    told = found["conditions"]
    lines = ["# Bench", "", *_prose(told), ""]
    for group, rows in groups(found["results"]).items():
        lines += [f"## {title(group)}", "", _line(COLUMNS), _line(["---", "---", *["---:"] * (len(COLUMNS) - 2)])]
        lines += [_line(cells(row)) for row in rows]
        lines += ["", *_details(rows), ""]
    if found["results"]:
        lines += ["![speed-up by task and drafter](speedup.svg)", ""]
        lines += ["![acceptance length by task and drafter](acceptance.svg)", ""]
    return "\n".join(lines)


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    """`report.md`, `speedup` and `acceptance` as PNG and SVG; without results the first only.

    Args:
        found: what a bench's file holds.
        folder: where they go.

    Raises:
        LeapaheadError: matplotlib is not installed, or they cannot be written.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "leapahead"  # the same figures, the same file
    paths = [folder / "report.md"]
    try:
        paths[0].write_text(markdown(found), encoding="utf-8")
        if found["results"]:
            for name, figure in (("speedup", speedups(found)), ("acceptance", acceptance_lengths(found))):
                for kind, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
                    figure.savefig(folder / f"{name}.{kind}", format=kind, **options)
                    paths.append(folder / f"{name}.{kind}")
    except OSError as error:
        raise LeapaheadError(f"the report cannot be written to {folder}: {error.strerror}") from None
    return paths


# --------------------------------------------------------------------------------------------------------- plots


def speedups(found: dict[str, Any]) -> Figure:
    """The speed-up of each drafter on each task with its interval, and a line where plain decoding is."""

    def draw(axes: Axes, row: Row, y: float, style: dict[str, Any]) -> None:
        speed = row["speedup"]
        axes.plot([speed["low"], speed["high"]], [y, y], color=style["color"], linewidth=2, alpha=0.6)
        axes.plot([speed["median"]], [y], linestyle="", markersize=6, **style)

    return _panels(found, draw, "speed-up over plain decoding (tokens per second; 95 % interval)", "speedup", 0.0)


def acceptance_lengths(found: dict[str, Any]) -> Figure:
    """Committed tokens per step of each drafter on each task, and a line where plain decoding is."""

    def draw(axes: Axes, row: Row, y: float, style: dict[str, Any]) -> None:
        if row["acceptance_length"] is not None:
            axes.plot([1, row["acceptance_length"]], [y, y], color=style["color"], linewidth=2, alpha=0.6)
            axes.plot([row["acceptance_length"]], [y], linestyle="", markersize=6, **style)

    return _panels(found, draw, "acceptance length (tokens per step)", "acceptance_length", 0.9)


def _panels(found: dict[str, Any], draw: Any, label: str, key: str, left: float) -> Figure:
    """A panel for each target, temperature and batch; tasks from top to bottom, a line within each for a drafter."""
    from matplotlib.figure import Figure

    tables = groups(found["results"])
    drafters = list(dict.fromkeys(row["drafter"] for row in found["results"] if row["drafter"] != PLAIN))
    tasks = list(dict.fromkeys(row["task"] for rows in tables.values() for row in rows))
    tasks.sort(key=lambda task: task == OVERALL)
    columns = min(2, len(tables))
    down = -(-len(tables) // columns)
    height = max(1.2, 0.2 * len(tasks) * (len(drafters) + 1.2))
    legend = 0.25 * -(-len(drafters) // 3) + 0.3
    figure = Figure(figsize=(5.2 * columns + 1.2, (height + 1.0) * down + legend), layout="constrained")
    grid = figure.subplots(down, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(tables) :]:
        axes.set_visible(False)
    marks: dict[str, Any] = {}
    for axes, (group, rows) in zip(grid.flat, tables.items(), strict=False):
        axes.set_title(title(group), fontsize=10)
        axes.axvline(1, color="0.35", linewidth=1.2, linestyle="--", zorder=0)
        for row in rows:
            if row["drafter"] in drafters:
                index = drafters.index(row["drafter"])
                style = {
                    "color": COLOURS[index % len(COLOURS)],
                    "marker": MARKERS[index // len(COLOURS) % len(MARKERS)],
                }
                offset = (index - (len(drafters) - 1) / 2) / (len(drafters) + 1.2)
                draw(axes, row, tasks.index(row["task"]) + offset, style)
                marks.setdefault(row["drafter"], axes.lines[-1] if row[key] is not None else None)
        for edge in range(1, len(tasks)):
            axes.axhline(edge - 0.5, color="0.88", linewidth=0.8, zorder=0)
        axes.set_yticks(range(len(tasks)), tasks)
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        axes.set_xlim(left=left)
        axes.grid(axis="x", color="0.92", zorder=0)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel(label if columns == 1 else "")
    if columns > 1:
        figure.supxlabel(label, fontsize=10)
    shown = {name: mark for name, mark in marks.items() if mark is not None}
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


# ---------------------------------------------------------------------------------------------------------- text


def _prose(told: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in told["versions"].items() if number)
    lines = [
        f"- {told['date']}; {versions}; commit {told['commit'] or 'unknown'}",
        f"- {told['cpu']}; GPU: {told['gpu'] or 'none'}; {told['system']}",
        f"- Prompts: {told['data']}; "
        + ", ".join(f"{name} ({each['prompts']})" for name, each in told["tasks"].items()),
        f"- Up to {told['max_new_tokens']} new tokens a text, {told['rounds']} rounds, seed {told['seed']}",
    ]
    for name, each in told["targets"].items():
        parts = [f"{key} {each[key]}" for key in ("backend", "dtype", "device", "threads") if key in each]
        lines.append(f"- {name}: {', '.join((*parts, 'conversations as ' + each['chat']))}")
        lines += [f"  - {drafter} is left out: {why}" for drafter, why in each["refused"].items()]
    return [*lines, f"- {told['figures']}"]


def _details(rows: Sequence[Row]) -> list[str]:
    """Of each drafter: where the time went, what was accepted at which depth and of whom, memory, forwards."""
    last = [row for row in rows if row["task"] == OVERALL] or list(rows)
    lines = []
    for row in last:
        whole = sum(row["seconds"].values()) or 1.0
        split = ", ".join(f"{phase} {spent / whole:.1%}" for phase, spent in row["seconds"].items() if spent)
        where = "" if row["task"] == OVERALL else f", {row['task']}"
        line = f"- `{row['drafter']}`{where}: time: {split}; {row['forwards']} forwards in all"
        if row["peak_memory_mib"] is not None:
            line += f"; peak memory {row['peak_memory_mib']:.0f} MiB"
        if row["peak_gpu_memory_mib"] is not None:
            line += f", {row['peak_gpu_memory_mib']:.0f} MiB on the GPU"
        if row["accepted_at"]:
            depths = ", ".join(f"{depth}: {count / row['steps']:.0%}" for depth, count in row["accepted_at"].items())
            line += f"; steps that accepted to a depth: {depths}"
        if row["drafted_by"]:
            shares = ", ".join(
                f"{source} {row['accepted_by'].get(source, 0)} of {count}"
                for source, count in row["drafted_by"].items()
            )
            line += f"; nodes accepted by source: {shares}"
        lines.append(line)
    return lines


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
