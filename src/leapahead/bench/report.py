"""The report of a bench, made from its file: Markdown tables, and plots as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leapahead.bench import plots
from leapahead.bench.cell import PLAIN
from leapahead.bench.record import OVERALL
from leapahead.core.errors import LeapaheadError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Draw = Callable[[dict[str, Any]], "Figure"]
Group = tuple[str, float, int]  # target, temperature, batch

COLUMNS = (
    *("task", "drafter", "speed-up", "95 %", "tokens/s", "accept. length", "nodes/step", "1st token", "distinct-4"),
    *("prompts", "tokens", "mismatches", "ties"),
)
FORMS = ("form", "measured", "drafter", "ratio", "95 %")
FORMS_NOTE = (
    "These models, or forms of one model, were loaded together and took turns. The ratio is that of a drafter's tokens "
    "per second with one of them to those with the other, in the same rounds. Peak memory is that of the process, with "
    "all of them."
)
OURS, PEER = plots.COLOURS[:2]
NO_INTERVAL = (
    "Rows without an interval were measured on a single prompt (or once on a single batch), which does not show how "
    "much the speed-up varies."
)

LOSSY = (
    "Rows with a lossy rule accept tokens that the target would not have chosen; in place of mismatches they have the "
    "number of texts that differ from plain decoding's."
)


def groups(results: Sequence[Row]) -> dict[Group, list[Row]]:
    """The rows of each table: the tasks in order, then the overall rows."""
    found: dict[Group, list[Row]] = {}
    for row in sorted(results, key=lambda row: bool(row["task"] == OVERALL)):
        found.setdefault((row["target"], row["temperature"], row["batch"]), []).append(row)
    return found


def title(group: Group) -> str:
    """The heading of a table."""
    target, temperature, batch = group
    return f"{target}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}, batch {batch}"


def cells(row: Row) -> list[str]:
    """The texts of a row, by COLUMNS."""
    speed = row["speedup"]
    plain = row["drafter"] == PLAIN
    return [
        row["task"],
        row["drafter"],
        f"{speed['median']:.2f}",
        "" if plain or speed["low"] is None else f"{speed['low']:.2f} to {speed['high']:.2f}",
        f"{row['tokens_per_second']:.1f}",
        _number(row["acceptance_length"], 2),
        _number(row["nodes_per_step"], 1),
        f"{1e3 * row['time_to_first_token']:.1f} ms",
        f"{row['distinct_4']:.2f}",
        *(str(row[key]) for key in ("prompts", "tokens")),
        f"lossy: {row['lossy']}" if "lossy" in row else str(row["mismatches"]),
        str(row["ties"]),
    ]


def forms(results: Sequence[Row]) -> dict[str, list[list[str]]]:
    """Tables by FORMS of the speeds of a model's forms, relative to the first form, under the name of that one."""
    found: dict[str, list[list[str]]] = {}
    for row in sorted(results, key=lambda row: bool(row["task"] == OVERALL)):
        if "beside" in row:
            speed = row["beside"]
            sampling = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}"
            found.setdefault(speed["target"], []).append(
                [
                    row["target"],
                    f"{row['task']}, {sampling}, batch {row['batch']}",
                    row["drafter"],
                    f"{speed['median']:.2f}",
                    "" if speed["low"] is None else f"{speed['low']:.2f} to {speed['high']:.2f}",
                ]
            )
    return found


def forms_title(first: str) -> str:
    """The heading of such a table."""
    return f"Speed in relation to {first}"


def notes(rows: Sequence[Row]) -> list[str]:
    """Remarks below a table."""
    found = [NO_INTERVAL] if any(row["drafter"] != PLAIN and row["speedup"]["low"] is None for row in rows) else []
    return found + [LOSSY] * any("lossy" in row for row in rows)


def markdown(found: dict[str, Any]) -> str:
    """The whole report."""
    conditions = found["conditions"]
    lines = ["# Bench", "", *_conditions(conditions), ""]
    for group, rows in groups(found["results"]).items():
        lines += [f"## {title(group)}", "", _line(COLUMNS), _line(["---", "---", *["---:"] * (len(COLUMNS) - 2)])]
        lines += [_line(cells(row)) for row in rows]
        lines += ["", *(line for note in notes(rows) for line in (note, "")), *_details(rows), ""]
    for first, table in forms(found["results"]).items():
        lines += [f"## {forms_title(first)}", "", _line(FORMS), _line(["---", "---", "---", "---:", "---:"])]
        lines += [*map(_line, table), "", FORMS_NOTE, ""]
    for name, (_, caption) in figures(found["results"]).items():
        lines += [f"![{caption}]({name}.svg)", ""]
    return "\n".join(lines)


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    """Writes `report.md`, and `speedup`, `acceptance` and, of several batch sizes, `batches` as PNG and SVG.

    Without results of drafters only the first is written.

    Args:
        found: the content of a bench's file.
        folder: where the files are written.

    Raises:
        LeapaheadError: matplotlib is not installed, or a file cannot be written.
    """
    plots.require()
    paths = [folder / "report.md"]
    try:
        paths[0].write_text(markdown(found), encoding="utf-8")
        for name, (draw, _) in figures(found["results"]).items():
            paths += plots.save(draw, found, folder / name)
    except OSError as error:
        raise LeapaheadError(f"the report cannot be written to {folder}: {error.strerror}") from None
    return paths


# --------------------------------------------------------------------------------------------------------- plots


def figures(results: Sequence[Row]) -> dict[str, tuple[Draw, str]]:
    """What is drawn, and its caption, by the name of its files; nothing of plain decoding alone."""
    if all(row["drafter"] == PLAIN for row in results):
        return {}
    found: dict[str, tuple[Draw, str]] = {
        "speedup": (speedups, "speed-up by task and drafter"),
        "acceptance": (acceptance_lengths, "acceptance length by task and drafter"),
    }
    if len({row["batch"] for row in results}) > 1:
        found["batches"] = (batches, "speed-up by batch size")
    return found


def speedups(found: dict[str, Any]) -> Figure:
    """The speed-up of each drafter over all tasks with its interval; a faint dot for each task."""

    return _panels(found, _span, "times the speed of plain decoding (bar: 95 % interval; dots: tasks)", 0.0)


def acceptance_lengths(found: dict[str, Any]) -> Figure:
    """Acceptance length of each drafter over all tasks; a faint dot for each task."""

    def span(row: Row) -> tuple[float, float, float] | None:
        length = row["acceptance_length"]
        return None if length is None else (length, 1.0, length)

    return _panels(found, span, "acceptance length, tokens per step (dots: tasks)", 0.9)


def _span(row: Row) -> tuple[float, float, float]:
    """The speed-up and its interval, which is a point where there is none."""
    speed = row["speedup"]
    return speed["median"], speed["low"] or speed["median"], speed["high"] or speed["median"]


def batches(found: dict[str, Any]) -> Figure:
    """Speed-up over all tasks by batch size: a panel for each target, a curve for each drafter and temperature."""
    whole = [row for row in found["results"] if row["drafter"] != PLAIN]
    whole = [row for row in whole if row["task"] == OVERALL] or whole
    targets = list(dict.fromkeys(row["target"] for row in whole))
    note = "speed-up over plain decoding of as many texts; 95 % intervals"
    figure, panels = plots.subplots(len(targets), found, note)
    for axes, target in zip(panels, targets, strict=True):
        curves: dict[str, list[Row]] = {}
        for row in sorted(whole, key=lambda row: int(row["batch"])):
            if row["target"] == target:
                curves.setdefault(f"{row['drafter']}, {plots.sampling(row['temperature'])}", []).append(row)
        for number, (label, rows) in enumerate(curves.items()):
            values = [dict(zip(("median", "low", "high"), _span(row), strict=True)) for row in rows]
            plots.with_spread(axes, number, [row["batch"] for row in rows], values, label)
        axes.axhline(1, color="0.35", linewidth=1.2, linestyle="--", zorder=0)
        axes.set(title=target, xlabel="texts decoded together", ylabel="times plain decoding's speed")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        plots.plain_numbers(axes, sorted({row["batch"] for row in whole}))
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)  # beside the curves, which go everywhere
    return figure


def _panels(
    found: dict[str, Any], span: Callable[[Row], tuple[float, float, float] | None], label: str, left: float
) -> Figure:
    """A panel for each target, temperature and batch size, a line for each contender."""
    from matplotlib.figure import Figure

    tables = groups([row for row in found["results"] if row["drafter"] != PLAIN])
    lines = {group: list(dict.fromkeys(row["drafter"] for row in rows)) for group, rows in tables.items()}
    columns = min(2, len(tables))
    grid_rows = [list(tables)[start : start + columns] for start in range(0, len(tables), columns)]
    heights = [0.26 * max(len(lines[group]) for group in groups_) + 0.9 for groups_ in grid_rows]
    figure = Figure(figsize=(6.4 * columns, sum(heights) + 0.4), layout="constrained")
    grid = figure.subplots(len(grid_rows), columns, squeeze=False, sharex=True, height_ratios=heights)
    for axes in grid.flat[len(tables) :]:
        axes.set_visible(False)
    for axes, (group, rows) in zip(grid.flat, tables.items(), strict=False):
        names = lines[group]
        axes.set_title(title(group), fontsize=10)
        axes.axvline(1, color="0.35", linewidth=1.2, linestyle="--", zorder=0)
        whole = {row["drafter"] for row in rows if row["task"] == OVERALL}
        for row in rows:
            if row["drafter"] in names and (at := span(row)) is not None:
                y = names.index(row["drafter"])
                colour = PEER if row["drafter"].startswith("peer:") else OURS
                if row["task"] == OVERALL or row["drafter"] not in whole:
                    axes.plot(at[1:], [y, y], color=colour, linewidth=2.5, alpha=0.55, zorder=2)
                    axes.plot([at[0]], [y], color=colour, marker="o", markersize=7, linestyle="", zorder=3)
                else:
                    axes.plot([at[0]], [y], color=colour, marker="o", markersize=4, alpha=0.3, linestyle="", zorder=1)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="both", color="0.92", zorder=0)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelbottom=True)  # also above another panel
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    grid[0, 0].set_xlim(left=left)  # of all panels, once all have their data: it ends the choice of the right limit
    figure.supxlabel(label, fontsize=10)
    return figure


# ---------------------------------------------------------------------------------------------------------- text


def _conditions(conditions: dict[str, Any]) -> list[str]:
    """The conditions as a list."""
    versions = ", ".join(f"{name} {number}" for name, number in conditions["versions"].items() if number)
    lines = [
        f"- {conditions['date']}; {versions}; commit {conditions['commit'] or 'unknown'}",
        f"- {conditions['cpu']}; GPU: {conditions['gpu'] or 'none'}; {conditions['system']}",
        f"- Prompts: {conditions['data']}; "
        + ", ".join(f"{name} ({each['prompts']})" for name, each in conditions["tasks"].items()),
        f"- Up to {conditions['max_new_tokens']} new tokens per text, "
        f"{conditions['rounds']} round{'s' * (conditions['rounds'] != 1)}, "
        f"seed {conditions['seed']}",
    ]
    lines += [f"- Peer {name}: {version}" for name, version in conditions.get("peers", {}).items()]
    for name, each in conditions["targets"].items():
        parts = [f"{key} {each[key]}" for key in ("backend", "dtype", "device", "threads") if key in each]
        parts += [f"{name}={value}" for name, value in each.get("options", {}).items()]
        lines.append(f"- {name}: {', '.join((*parts, 'conversations as ' + each['chat']))}")
        lines += [f"  - {each['reference']}"] if "reference" in each else []
        lines += [f"  - {drafter} was left out: {why}" for drafter, why in each["refused"].items()]
    lines += [f"- {name}: {each['chosen']}" for name, each in conditions.get("kv_cache", {}).items()]
    return [*lines, f"- {conditions['figures']}"]


def _details(rows: Sequence[Row]) -> list[str]:
    """For each drafter: time by phase, forwards, memory, acceptance by depth and by source."""
    last = [row for row in rows if row["task"] == OVERALL] or list(rows)
    lines = []
    for row in last:
        whole = sum(row["seconds"].values()) or 1.0
        split = ", ".join(f"{phase} {spent / whole:.1%}" for phase, spent in row["seconds"].items() if spent)
        where = "" if row["task"] == OVERALL else f", {row['task']}"
        line = f"- `{row['drafter']}`{where}: time: {split}; {row['forwards']} target forwards in all"
        if row["peak_memory_mib"] is not None:
            line += f"; peak memory {row['peak_memory_mib']:.0f} MiB"
        if row["peak_gpu_memory_mib"] is not None:
            line += f", {row['peak_gpu_memory_mib']:.0f} MiB on the GPU"
        if row["accepted_at"]:
            depths = ", ".join(f"{depth}: {count / row['steps']:.0%}" for depth, count in row["accepted_at"].items())
            line += f"; steps that accepted to a depth: {depths}"
        if row.get("replayed"):
            line += f"; {row['replayed'] / row['steps']:.2f} replayed tokens a step"
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
