"""The figure of `python -m research devices`: a panel for each method, its speed-up over plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leapahead.bench.conditions import Data
from leapahead.bench.plots import COLOURS, MARKERS, plain_numbers, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = ("-", "--", ":")


def devices(data: Data) -> Figure:
    """Lookahead parallelism and pipelined decoding against devices, overlapped drafting against the draft's cost."""
    note = (
        "simulated from times and texts measured on one device; message: time from one device to another, as a part of "
        f"a plain forward ({1e3 * data['plain_seconds']:.3g} ms, {data['conditions']['cpu']}); texts of "
        f"{data['conditions']['texts_of']}"
    )
    figure, panels = subplots(3, data, note)
    _lookahead(panels[0], data)
    _pipelined(panels[1], data)
    _overlapped(panels[2], data)
    for axes in panels:
        axes.axhline(1.0, color="#888888", linewidth=1)
        axes.set(ylabel="simulated speed-up over plain decoding")
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.legend(loc="best", fontsize=7)
    return figure


def _lookahead(axes: Axes, data: Data) -> None:
    rows = data["lookahead"]
    counts = sorted({row["devices"] for row in rows})
    messages = sorted({row["message"] for row in rows})
    for number, sizes in enumerate(dict.fromkeys(row["sizes"] for row in rows)):
        for line, message in zip(LINES, (messages[0], messages[-1]), strict=False):
            here = [row for row in rows if row["sizes"] == sizes and row["message"] == message]
            axes.plot(
                [row["devices"] for row in here],
                [row["speedup"] for row in here],
                color=COLOURS[number],
                marker=MARKERS[number],
                linestyle=line,
                label=f"W, N, G = {sizes}" if line == "-" else None,
            )
    axes.plot([], [], color="#444444", linestyle="--", label=f"message {messages[-1]:g}")
    axes.set(title="Lookahead parallelism", xlabel="devices, each with the whole model")
    axes.set_xscale("log", base=2)
    plain_numbers(axes, counts)


def _pipelined(axes: Axes, data: Data) -> None:
    rows = data["pipelined"]
    messages = sorted({row["message"] for row in rows})
    for number, candidates in enumerate(sorted({row["candidates"] for row in rows})):
        for line, message in zip(LINES, (messages[0], messages[-1]), strict=False):
            here = [row for row in rows if row["candidates"] == candidates and row["message"] == message]
            axes.plot(
                [row["devices"] for row in here],
                [row["speedup"] for row in here],
                color=COLOURS[number],
                marker=MARKERS[number],
                linestyle=line,
                label=f"k = {candidates}" if line == "-" else None,
            )
    axes.plot([], [], color="#444444", linestyle="--", label=f"message {messages[-1]:g}")
    axes.set(title="Predictive pipelined decoding,\nbest exit layer", xlabel="devices")
    plain_numbers(axes, sorted({row["devices"] for row in rows}))


def _overlapped(axes: Axes, data: Data) -> None:
    rows = data["overlapped"]
    messages = sorted({row["message"] for row in rows})
    for number, message in enumerate(messages):
        here = [row for row in rows if row["message"] == message]
        axes.plot(
            [row["ratio"] for row in here],
            [row["speedup"] for row in here],
            color=COLOURS[number],
            marker=MARKERS[number],
            label=f"two devices, message {message:g}",
        )
    here = [row for row in rows if row["message"] == messages[0]]
    axes.plot(
        [row["ratio"] for row in here],
        [row["serial"] for row in here],
        color="#444444",
        linestyle="--",
        marker="x",
        label="one device, in turns",
    )
    axes.set(
        title="Draft-target overlap, best draft length",
        xlabel="time of a draft forward / of a target forward",
        xscale="log",
    )
    ratios = [row["ratio"] for row in here]
    axes.set_xticks(ratios, labels=[f"{ratio:g}" for ratio in ratios])
    axes.set_xticks([], minor=True)
