"""The common style of all figures, writing them to files, and the figure of the latency profile.

Colours that the colour-blind can tell apart, a marker of its own for every curve, axes that start where the quantity
starts, and the conditions of the measurement in small print below. matplotlib is imported only when a figure is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leapahead.bench.conditions import Data
from leapahead.core.errors import needing
from leapahead.core.storage import replaceable, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: Any = {  # matplotlib types the keys by name
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.facecolor": "white",
    "svg.hashsalt": "leapahead",  # equal data give equal files
    "svg.fonttype": "none",  # text is stored as text: half the size, and searchable
}
PRECISIONS = {2.0**-7: "bfloat16", 2.0**-10: "float16", 2.0**-23: "float32", 2.0**-52: "float64"}
DPI = 150


def require(extra: str = "bench") -> None:
    """Refuses, before anything is measured, if figures cannot be drawn.

    Args:
        extra: of this package, for the message.

    Raises:
        LeapaheadError: matplotlib is not installed.
    """
    with needing("a plot", extra, "matplotlib"):
        import matplotlib  # noqa: F401


def save(draw: Callable[[Data], Figure], data: Data, prefix: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draws the data in the common style and writes PREFIX.KIND for every kind.

    Args:
        draw: makes the figure of the data.
        data: what it draws.
        prefix: path of the files without their extensions.
        kinds: file formats.

    Raises:
        LeapaheadError: matplotlib is not installed, or a path is no file's.
        OSError: a file cannot be written.
    """
    require()
    import matplotlib

    paths = [prefix.with_name(f"{prefix.name}.{kind}") for kind in kinds]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # independent of the user's own style
        matplotlib.rcParams.update(STYLE)
        figure = draw(data)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            with replacing(replaceable(path)) as part:
                figure.savefig(part, dpi=DPI, format=path.suffix[1:], metadata=metadata)
    return paths


def latency(data: Data) -> Figure:
    """T(n)/T(1) against the number n of rows of a forward, both axes in powers of two, a curve for each context."""
    figure, (axes,) = subplots(1, data, "median and quartiles; a chain of n tokens, one choice read")
    rows = data["rows"]
    sizes = sorted({row["nodes"] for row in rows})
    for number, context in enumerate(dict.fromkeys(row["context"] for row in rows)):
        here = [row for row in rows if row["context"] == context]
        single = here[0]["milliseconds"]["median"]
        with_spread(
            axes,
            number,
            [row["nodes"] for row in here],
            [row["relative"] for row in here],
            f"{context} tokens of context, T(1) = {single:.3g} ms",
        )
    axes.set(title="Cost of a forward over n tokens", xlabel="tokens in one forward, n", ylabel="T(n) / T(1)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    most = max(2.0, *(row["relative"]["high"] for row in rows))
    top = 2.5 * most  # room for the legend
    axes.set_ylim(0.8, top)
    axes.plot([1, most], [1, most], color="#888888", linewidth=1, linestyle=":")
    axes.annotate("n × T(1)", (most, most), xytext=(-6, 0), textcoords="offset points", ha="right", color="#666666")
    plain_numbers(axes, sizes)
    plain_numbers(axes, [2**k for k in range(int(top).bit_length())], y=True)
    axes.legend(loc="upper right")
    return figure


# ------------------------------------------------------------------------------------------------- parts of figures


def subplots(count: int, data: Data, note: str) -> tuple[Figure, list[Axes]]:
    """Panels side by side above the note and the caption."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    width = 6.4 if count == 1 else 4.9 * count
    figure = Figure(figsize=(width, 4.4), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))  # inches
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, count, number) for number in range(1, count + 1)]
    lines = [textwrap.fill(text, int(17.5 * width)) for text in (note, caption(data["conditions"]))]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color="#444444")
    return figure, axes


def caption(conditions: Data) -> str:
    """The conditions in one line; the machine is named only where times were measured."""
    parts = []
    if "target" in conditions:
        precision = conditions["precision"]
        dtype = conditions.get("dtype") or PRECISIONS.get(precision, f"precision {precision:.2g}")
        parts.append(f"{conditions['target']}, {dtype}")
    if "prompts" in conditions:
        parts.append(f"{conditions.get('data', 'prompts')}, up to {conditions['max_new_tokens']} tokens")
    if "temperature" in conditions:
        parts.append(sampling(conditions["temperature"]))
    if "rounds" in conditions:
        rounds = conditions["rounds"]
        parts.append(f"{'1 round' if rounds == 1 else f'{rounds} interleaved rounds'}; {conditions['cpu']}")
        if (threads := threads_of(conditions)) is not None:
            parts.append(f"{threads} thread{'' if threads == 1 else 's'}")
    parts.append(f"leapahead {conditions['versions']['leapahead']}")
    return "; ".join(parts)


def threads_of(conditions: Data) -> int | None:
    """The target's threads; files written by earlier versions name torch's."""
    found: int | None = conditions.get("threads", conditions.get("torch_threads"))
    return found


def sampling(temperature: float) -> str:
    """The temperature in words."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def with_spread(axes: Axes, number: int, x: list[int], values: list[dict[str, float]], label: str) -> None:
    """A curve of medians inside the band of its quartiles."""
    colour = COLOURS[number % len(COLOURS)]
    axes.plot(
        x, [value["median"] for value in values], color=colour, marker=MARKERS[number % len(MARKERS)], label=label
    )
    low, high = [value["low"] for value in values], [value["high"] for value in values]
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def plain_numbers(axes: Axes, values: list[int], y: bool = False) -> None:
    """Ticks at exactly these values, labelled with plain numbers."""
    axis = axes.yaxis if y else axes.xaxis
    axis.set_ticks(values, labels=[str(value) for value in values])
    axis.set_ticks([], minor=True)
