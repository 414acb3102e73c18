"""The figures of `python -m research gpu`, in the common style of all figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from leapahead.bench.conditions import Data
from leapahead.bench.plots import COLOURS, MARKERS, plain_numbers, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETTING = ("task", "temperature", "batch")
LABELS = {"captured": "captured forwards", "eager": "operation by operation"}


def data(name: str, cells: dict[str, dict[str, Data]]) -> Data | None:
    """What a figure draws, from the cells of all costs; None where nothing of it was measured."""
    rows = ROWS[name](cells)
    every = [cell["conditions"] for found in cells.values() for cell in found.values()]
    return {"figure": name, "rows": rows, "conditions": every[-1]} if rows else None


def _curves(cells: dict[str, dict[str, Data]]) -> list[Data]:
    every = [(cost, row) for cost, found in cells.items() for row in found.get("curve", {}).get("rows", ())]
    return [{"cost": cost, **row} for cost, row in every if "milliseconds" in row]


def drafted(found: dict[str, Data]) -> list[Data]:
    """The cells of one cost in which drafters decode, by prompts, temperature and batch."""
    return sorted(
        (cell for cell in found.values() if "task" in cell), key=lambda cell: [cell[name] for name in SETTING]
    )


def _gains(cells: dict[str, dict[str, Data]]) -> list[Data]:
    return [
        {"cost": cost, **{name: cell[name] for name in SETTING}, **row}
        for cost, found in cells.items()
        for cell in drafted(found)
        for row in cell["rows"]
        if row["drafter"] != "plain"
    ]


def curves(found: Data) -> Figure:
    """T(n)/T(1) against n, a panel for each cost, a curve for each way to run a forward."""
    costs = list(dict.fromkeys(row["cost"] for row in found["rows"]))
    figure, panels = subplots(len(costs), found, _note(found, "median; a chain of n tokens, choices read"))
    for axes, cost in zip(panels, costs, strict=True):
        for number, row in enumerate(row for row in found["rows"] if row["cost"] == cost):
            times = {int(n): value for n, value in row["milliseconds"].items()}
            label = f"{LABELS[row['engine']]}, T(1) = {times[1]:.3g} ms"
            relative = [value / times[1] for value in times.values()]
            axes.plot(list(times), relative, color=COLOURS[number], marker=MARKERS[number], label=label)
        axes.set(title=f"Steps at the cost of {cost}", xlabel="tokens in one step, n", ylabel="T(n) / T(1)")
        axes.set_xscale("log", base=2)
        plain_numbers(axes, list(times))
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left")
    return figure


def gains(found: Data) -> Figure:
    """Tokens per second against those of plain decoding by batch, a panel for each cost, a curve for each drafter."""
    costs = list(dict.fromkeys(row["cost"] for row in found["rows"]))
    figure, panels = subplots(len(costs), found, _note(found, "dotted: plain decoding on the same engine"))
    for axes, cost in zip(panels, costs, strict=True):
        here = [row for row in found["rows"] if row["cost"] == cost]
        kinds = dict.fromkeys((row["drafter"], row["task"], row["temperature"]) for row in here)
        drafters = list(dict.fromkeys(row["drafter"] for row in here))
        tasks = list(dict.fromkeys(row["task"] for row in here))
        for drafter, task, temperature in kinds:
            some = [
                row for row in here if (row["drafter"], row["task"], row["temperature"]) == (drafter, task, temperature)
            ]
            axes.plot(
                [row["batch"] for row in some],
                [row["speed_up"] for row in some],
                color=COLOURS[drafters.index(drafter)],
                marker=MARKERS[tasks.index(task)],
                linestyle="-" if temperature == 0 else "--",
                label=f"{drafter}, {task}, T = {temperature:g}",
            )
        axes.axhline(1, color="#888888", linewidth=1, linestyle=":")
        axes.set(
            title=f"Gain at the cost of {cost}", xlabel="sequences decoded together", ylabel="speed / plain decoding"
        )
        axes.set_xscale("log", base=2)
        plain_numbers(axes, sorted({row["batch"] for row in here}))
        axes.set_ylim(bottom=0)
        axes.legend(loc="best", fontsize=7)
    return figure


def _note(found: Data, what: str) -> str:
    conditions = found["conditions"]
    return f"{what}; {conditions.get('gpu') or conditions['cpu']}, {conditions['dtype']}"


ROWS: dict[str, Callable[[dict[str, dict[str, Data]]], list[Data]]] = {"curve": _curves, "gain": _gains}
FIGURES: dict[str, Callable[[Data], Figure]] = {"curve": curves, "gain": gains}
