"""The figure of `python -m research triforce`: times by length of the context, and simulated speed-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leapahead.bench.conditions import Data
from leapahead.bench.plots import COLOURS, MARKERS, plain_numbers, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = (0.7, 0.8, 0.9, 0.95)  # simulated rates


def triforce(data: Data) -> Figure:
    """Left: milliseconds of a forward of one token. Right: the best speed-up at simulated acceptance rates."""
    rows, budgets = data["rows"], list(data["rows"][0]["budgets"])
    shown = budgets[len(budgets) // 2]
    note = (
        f"times are measured (medians), keys and values are random, acceptance rates are simulated; {shown} retrieved "
        f"entries, chosen again every {data['conditions']['refresh']} tokens; the best number of drafted tokens each; "
        "solid: the target over its cache's part drafts alone; dashed: with a small model"
    )
    figure, (times, gains) = subplots(2, data, note)
    lengths = [row["context"] for row in rows]
    times.plot(
        lengths, [row["target_ms"]["1"] for row in rows], color="#000000", marker="o", label="target, all entries"
    )
    for number, budget in enumerate(budgets):
        values = [row["budgets"][budget]["middle_ms"]["1"] for row in rows]
        times.plot(lengths, values, color=COLOURS[number], marker=MARKERS[number], label=f"{budget} retrieved entries")
    times.set(title="Time of a forward of one token", xlabel="tokens of context", ylabel="milliseconds", ylim=(0, None))
    for number, rate in enumerate(SHOWN):
        for with_small, line in ((False, "-"), (True, "--")):
            here = [
                each["speedup"]
                for each in data["simulated"]
                if (each["rate"], each["small"], each["budget"]) == (rate, with_small, int(shown))
            ]
            label = None if with_small else f"{rate:.0%} accepted (simulated)"
            gains.plot(lengths, here, color=COLOURS[number], marker=MARKERS[number], linestyle=line, label=label)
    small = [each["speedup"] for each in data["alone"]]
    gains.plot(lengths, small, color="#888888", linestyle="-.", label="small model alone, 60% accepted (simulated)")
    gains.axhline(1.0, color="#888888", linewidth=1, linestyle=":")
    gains.set(title="Simulated speed-up", xlabel="tokens of context", ylabel="speed-up over plain decoding")
    gains.set_ylim(0, None)
    for axes in (times, gains):
        axes.set_xscale("log", base=2)
        plain_numbers(axes, lengths)
        axes.legend(loc="upper left", fontsize=8)
    return figure
