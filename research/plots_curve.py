"""The figure of `python -m research curve`: T(n)/T(1) for every n, a panel for each variant, a curve for each file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leapahead.bench.conditions import Data
from leapahead.bench.plots import plain_numbers, subplots, with_spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curve(data: Data) -> Figure:
    """T(n)/T(1) against the number n of rows of a forward, medians and quartiles of the rounds."""
    rows, conditions = data["rows"], data["conditions"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    note = f"median and quartiles; chains of n tokens over {conditions['context']} tokens of context; dotted: n × T(1)"
    figure, panels = subplots(len(variants), data, note)
    most = max(value["high"] for row in rows for value in row["relative"].values())
    for axes, variant in zip(panels, variants, strict=True):
        here = [row for row in rows if row["variant"] == variant]
        sizes = [int(n) for n in here[0]["relative"]]
        for number, row in enumerate(here):
            single = row["milliseconds"]["1"]["median"]
            with_spread(axes, number, sizes, list(row["relative"].values()), f"{row['file']}, T(1) = {single:.3g} ms")
        axes.plot(sizes, sizes, color="#888888", linewidth=1, linestyle=":")
        axes.set(title=variant, xlabel="tokens in one forward, n", ylabel="T(n) / T(1)", ylim=(0, 1.05 * most))
        plain_numbers(axes, [n for n in sizes if n % 2 == 0 or n == 1])
        axes.legend(loc="upper left", fontsize=7)
    return figure
