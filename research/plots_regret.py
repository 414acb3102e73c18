"""The figure of `python -m research regret`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leapahead.bench.conditions import Data
from leapahead.bench.plots import COLOURS, MARKERS, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALLOWED, LEAST_SHARE = 3.0, 90.0  # percent: of regret beyond ten plain steps, and of the right profile's gain

LITTLE = ("useless", "fair", "mostly wrong")  # acceptance with which drafts gain little or nothing


def regret(data: Data) -> Figure:
    """Mean regret beyond ten plain steps, by case; and what was gained against the gain of the right profile."""
    rows = data["rows"]
    note = f"simulated; {data['conditions']['seeds']} seeds of each case; negative regret is time gained"
    figure, (losses, gains) = subplots(2, data, note)
    curves = list(dict.fromkeys(row["curve"] for row in rows))
    cases = list(dict.fromkeys(row["what"] for row in rows))
    for number, curve in enumerate(curves):
        style: dict[str, Any] = {"color": COLOURS[number], "marker": MARKERS[number], "linestyle": ""}
        some = [row for row in rows if row["curve"] == curve and row["acceptance"] in LITTLE]
        losses.plot(
            [100 * row["mean_excess"] for row in some], [cases.index(row["what"]) for row in some], label=curve, **style
        )
        some = [row for row in rows if row["curve"] == curve and row["gain"] is not None]
        gains.plot([100 * row["right_gain"] for row in some], [100 * row["gain"] for row in some], **style)
    losses.axvline(ALLOWED, color="black", linewidth=1, linestyle="--")
    losses.set_yticks(range(len(cases)), cases, fontsize=7)
    losses.invert_yaxis()
    losses.set(title="Where drafts are of little or no use", xlabel="mean regret - 10 plain steps, % of plain time")
    gains.plot([0, 100], [0, 100], color="black", linewidth=1)
    gains.plot([0, 100], [0, LEAST_SHARE], color="black", linewidth=1, linestyle="--")
    gains.set(
        title="Where they are good, from step 60 on",
        xlabel="time saved with the right profile, %",
        ylabel="time saved, %",
    )
    gains.legend(*losses.get_legend_handles_labels(), loc="lower right", fontsize=8)  # where no case is
    return figure
