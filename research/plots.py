"""The data of `lab.curves` as figures. Knows numbers and their names, and nothing of models.

One style for all: colours that the colour-blind tell apart, a marker of its own for every curve, axes that start where
the quantity does, and the conditions below in small print.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leapahead.core.errors import needing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from research.curves.run import Data

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
    "svg.hashsalt": "leapahead",  # equal data, equal file
    "svg.fonttype": "none",  # text stays text: half the size, and it can be searched
}
PRECISIONS = {2.0**-7: "bfloat16", 2.0**-10: "float16", 2.0**-23: "float32", 2.0**-52: "float64"}
DPI = 150


def require() -> None:
    """Whether figures can be drawn at all; asked before anything is measured.

    Raises:
        LeapaheadError: matplotlib is not installed.
    """
    with needing("a plot", "lab", "matplotlib"):
        import matplotlib  # noqa: F401


def save(data: Data, prefix: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draws the data and writes PREFIX.png and PREFIX.svg, or only some of them.

    Raises:
        LeapaheadError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    require()
    import matplotlib

    paths = [prefix.with_name(f"{prefix.name}.{kind}") for kind in kinds]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own style is
        matplotlib.rcParams.update(STYLE)
        figure = draw(data)
        for path in paths:
            figure.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def draw(data: Data) -> Figure:
    """The figure of what one function of `lab.curves` returned."""
    return FIGURES[data["figure"]](data)


# ------------------------------------------------------------------------------------------------------- figures


def cost(data: Data) -> Figure:
    """T(n)/T(1) against n, both in powers of two."""
    figure, (axes,) = _figure(1, data, "median and quartiles; a chain of n tokens, one choice read")
    rows = data["rows"]
    sizes = sorted({row["nodes"] for row in rows})
    for number, context in enumerate(dict.fromkeys(row["context"] for row in rows)):
        here = [row for row in rows if row["context"] == context]
        single = here[0]["milliseconds"]["median"]
        _with_spread(
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
    _plain_numbers(axes, sizes)
    _plain_numbers(axes, [2**k for k in range(int(top).bit_length())], y=True)
    axes.legend(loc="upper right")
    return figure


def compression(data: Data) -> Figure:
    """S against log2(W = G), a curve for each N, the formula dashed: fitted to that N, or to all if it has too few."""
    from research.curves.formula import compression_formula

    rows, whole = data["rows"], data["fit"]
    note = f"{data['distinct_4']:.0%} of 4-grams distinct"
    if whole is not None:
        note += (
            f"; dashed: 2402.02057, equation 7; one fit to every N: α = {whole['alpha']:.2f}, f = {whole['f']:.2f} "
            f"(rms error {whole['rms']:.2f})"
        )
    figure, (axes,) = _figure(1, data, note)
    windows = sorted({row["window"] for row in rows})
    fine = [2 ** (k / 8) for k in range(8 * (windows[-1].bit_length() - 1) + 1)]
    fine = [window for window in fine if window >= windows[0]]
    for number, ngram in enumerate(dict.fromkeys(row["ngram"] for row in rows)):
        here = sorted((row for row in rows if row["ngram"] == ngram), key=lambda row: int(row["window"]))
        colour, label, found = COLOURS[number % len(COLOURS)], f"N = {ngram}", data["fits"].get(str(ngram), whole)
        if found is not None:
            label += f" (α = {found['alpha']:.2f}, f = {found['f']:.2f}, rms error {found['rms']:.2f})"
            formula = [compression_formula(found["alpha"], found["f"], ngram, window) for window in fine]
            axes.plot(fine, formula, color=colour, linestyle="--", linewidth=1)
        axes.plot(
            [row["window"] for row in here],
            [row["step_compression"] for row in here],
            color=colour,
            marker=MARKERS[number % len(MARKERS)],
            label=label,
        )
    axes.set(
        title="Step compression of lookahead decoding",
        xlabel="window and guesses, W = G",
        ylabel="step compression S (tokens per step)",
    )
    axes.set_xscale("log", base=2)
    _plain_numbers(axes, windows)
    axes.set_ylim(bottom=1)
    axes.legend(loc="best")
    return figure


def jacobi(data: Data) -> Figure:
    """Share of right tokens against iterations: the block, what may be kept of it, and single positions."""
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    block, curves = data["block"], data["curves"]
    repeated = ", ".join(f"{how(curve['temperature'])} {curve['distinct_4']:.0%}" for curve in curves)
    note = f"blocks of {block} tokens that begin as random tokens of the prompt; 4-grams distinct: {repeated}"
    figure, panels = _figure(len(curves), data, note)
    positions = sorted({1, *(2**k for k in range(1, block.bit_length()) if 2**k < block), block})
    colours = matplotlib.colormaps["viridis"]
    for axes, curve in zip(panels, curves, strict=True):
        k = range(block + 1)
        for number, position in enumerate(positions):
            colour = colours(0.9 * number / max(len(positions) - 1, 1))
            share = [row[position - 1] for row in curve["right"]]
            full = next(index for index, value in enumerate(share) if value == 1)  # and it stays so
            axes.plot(
                k[: full + 1],
                share[: full + 1],
                color=colour,
                linewidth=1,
                marker=MARKERS[number % len(MARKERS)],
                markersize=3.5,
                label=f"position {position}",
            )
        axes.plot(k, curve["mean"], color="black", linewidth=2.4, label="all positions")
        axes.plot(k, curve["settled"], color="black", linewidth=1.6, linestyle="--", label="right, and all before too")
        axes.set(
            title=f"Jacobi, {how(curve['temperature'])}: {curve['tokens_per_iteration']:.2f} tokens per iteration\n"
            f"({curve['blocks']} blocks, all right after {curve['iterations']['mean']:.1f} on average)",
            xlabel="iterations",
            xlim=(0, block),
            ylim=(0, 1.02),
        )
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("share of blocks whose token is right")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    return figure


def pool(data: Data) -> Figure:
    """Keys and n-grams beside hits, both against steps, while enough texts go on."""
    w, texts = data["lookahead"], data["steps"][0]["prompts"]
    note = (
        f"lookahead with W = {w['window']}, N = {w['ngram']}, G = {w['guesses']}; "
        f"drawn as long as half of the {texts} texts go on; {data['overall']['distinct_4']:.0%} of 4-grams distinct"
    )
    figure, (sizes, rates) = _figure(2, data, note)
    rows = [row for row in data["steps"] if 2 * row["prompts"] >= texts]
    steps = [row["step"] for row in rows]
    for number, (name, label) in enumerate((("ngrams", "n-grams"), ("keys", "keys (first tokens)"))):
        sizes.plot(
            steps, [row[name] for row in rows], color=COLOURS[number], linestyle=("-", "--")[number], label=label
        )
    sizes.set(title="Size of the n-gram pool", xlabel="step (0: the prompt's)", ylabel="entries, mean over texts")
    sizes.set_ylim(bottom=0)
    sizes.set_xlim(left=0)
    sizes.legend(loc="upper left")
    around = max(1, len(rows) // 25)
    for number, (name, label) in enumerate((("hit", "pool has a guess"), ("accepted", "a guess is accepted"))):
        smooth = _smooth(rows[1:], name, around)
        rates.plot(steps[1:], smooth, color=COLOURS[number], linestyle=("-", "--")[number], label=label)
    rates.set(
        title=f"Hit rate (mean of {2 * around + 1} steps)",
        xlabel="step",
        ylabel="share of steps",
        ylim=(0, 1.02),
    )
    rates.set_xlim(left=0)
    rates.yaxis.set_major_formatter("{x:.0%}")
    rates.legend(loc="best")
    return figure


def match(data: Data) -> Figure:
    """Accepted tokens of a draft by match length, with intervals and counts."""
    draft, most = data["num_tokens"], data["max_ngram"]
    figure, (axes,) = _figure(
        1,
        data,
        f"prompt lookup, drafts of {draft} tokens; whiskers: 95 % bootstrap intervals of the mean (pale: too few "
        f"drafts, n, for one); {data['without_match']} of {data['steps']} steps had no match; "
        f"{data['distinct_4']:.0%} of 4-grams distinct",
    )
    rows = data["rows"]
    tops = []
    for row in rows:
        value = row["accepted"]
        known = value["low"] is not None  # else too few drafts for an interval
        top = value["high"] if known else value["mean"]
        tops.append(top)
        axes.bar(row["match"], value["mean"], width=0.6, color=COLOURS[5], alpha=1 if known else 0.4)
        if known:
            spread = [[max(value["mean"] - value["low"], 0)], [max(value["high"] - value["mean"], 0)]]
            axes.errorbar(
                row["match"], value["mean"], yerr=spread, fmt="none", ecolor="#333333", elinewidth=1.2, capsize=3
            )
        axes.annotate(
            f"n={row['drafts']}",
            (row["match"], top),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.set(
        title="What a match is worth",
        xlabel="length of the match (tokens)",
        ylabel=f"accepted tokens per draft (of {draft})",
    )
    axes.set_xticks(range(data["min_ngram"], most + 1))
    axes.set_xlim(data["min_ngram"] - 0.5, most + 0.5)
    axes.set_xticklabels([f"≥{n}" if n == most else str(n) for n in range(data["min_ngram"], most + 1)])
    axes.set_ylim(0, 1.12 * max(tops, default=1) + 0.1)
    axes.grid(visible=False, axis="x")
    return figure


def calibration(data: Data) -> Figure:
    """Observed against predicted acceptance, with intervals; the diagonal is a drafter that knows."""
    counts = ", ".join(f"{kind} {data[kind]['nodes']}" for kind in ("path", "conditional"))
    note = (
        f"{data['drafter']}; nodes: {counts}; whiskers: exact binomial 95 % intervals; "
        f"acceptance length {data['acceptance_length']:.2f}"
    )
    figure, panels = _figure(2, data, note)
    titles = {"path": "P(node is accepted)", "conditional": "P(node | its parent is accepted)"}
    for axes, (kind, title) in zip(panels, titles.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="#888888", linewidth=1, linestyle=":")
        for row in data[kind]["rows"]:
            at, value, interval = row["predicted"], row["observed"], row["interval"]
            spread = [[max(value - interval["low"], 0)], [max(interval["high"] - value, 0)]]
            axes.errorbar(at, value, yerr=spread, color=COLOURS[0], marker="o", capsize=3, elinewidth=1.2)
            label = f"n={row['nodes']}"
            axes.annotate(label, (at, value), xytext=(6, -10), textcoords="offset points", fontsize=7)
        off = data[kind]["deviation"]
        worst = "" if off is None else f"\ngreatest deviation {off:.3f}"
        axes.set(title=title + worst, xlabel="predicted", xlim=(0, 1.02), ylim=(0, 1.02))
    panels[0].set_ylabel("observed")
    return figure


def expected(data: Data) -> Figure:
    """Tokens and speed-up of one draft against its length."""
    note = (
        "tokens = (1 - α^(K+1)) / (1 - α), speed-up = tokens / (1 + c K): Leviathan et al., 2211.17192, equation 1 and "
        "theorem 3.8; c: cost of a drafted token, in steps of the target, which is taken to cost the same for K + 1 "
        "tokens as for one"
    )
    figure, (tokens, speed) = _figure(2, data, note)
    for number, row in enumerate(data["rows"]):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        curve, label = row["curve"], f"α = {row['alpha']:g}"
        tokens.plot(curve["length"], curve["tokens"], color=colour, marker=marker, markersize=3.5, label=label)
        speed.plot(curve["length"], curve["speedup"], color=colour, marker=marker, markersize=3.5, label=label)
        best = row["best_length"]
        if best is not None and best <= curve["length"][-1]:
            speed.plot(best, row["best_speedup"], color=colour, marker="o", markersize=12, fillstyle="none")
    speed.axhline(1, color="#888888", linewidth=1, linestyle=":")
    tokens.set(title="Expected tokens of a step", xlabel="drafted tokens, K", ylabel="tokens per step", ylim=(1, None))
    speed.set(
        title=f"Expected speed-up, c = {data['cost']:g} (ring: best K)",
        xlabel="drafted tokens, K",
        ylabel="speed-up over plain decoding",
    )
    speed.set_ylim(bottom=0)
    tokens.legend(loc="upper left")
    return figure


def growth(data: Data) -> Figure:
    """Seconds and megabytes against tokens, linear axes: what is linear is a straight line through zero."""
    ratios = ", ".join(f"{row['index']} {row['ratio']:.2f}" for row in data["linear"])
    ends = data["linear"][0]
    note = f"text: {data['text']}; time of a token at {ends['to']:,} tokens over that at {ends['from']:,}: {ratios}"
    if (prefill := data["conditions"]["prefill_seconds_per_token"]) is not None:
        most = max(row["of_prefill"] for row in data["rows"])
        note += f"; at most {most:.2%} of a prefill of {1e3 * prefill:.3g} ms a token"
    drawn, (seconds, memory) = _figure(2, data, note)
    for number, name in enumerate(dict.fromkeys(row["index"] for row in data["rows"])):
        rows = [row for row in data["rows"] if row["index"] == name]
        style: Any = {"color": COLOURS[number], "marker": MARKERS[number], "label": name}
        tokens = [row["tokens"] for row in rows]
        seconds.plot(tokens, [row["seconds"] for row in rows], **style)
        memory.plot(tokens, [row["bytes"] / 1e6 for row in rows], **style)
    seconds.set(title="Time to index a text", xlabel="tokens", ylabel="seconds")
    memory.set(title="Memory of the index", xlabel="tokens", ylabel="MB")
    for axes in (seconds, memory):
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    seconds.legend(loc="upper left")
    return drawn


def sequoia(data: Data) -> Figure:
    """The chosen tree, its likeliest path in bold; and expected tokens against size, of the best trees by depth."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    tree, rows = data["tree"], data["rows"]
    figure, (drawing, tokens) = _figure(2, data, _sequoia_note(data))
    parents, chances = tree["parents"], tree["chances"]
    depths, heights = _laid_out(parents, tree["ranks"])
    for node, parent in enumerate(parents[1:], 1):
        bold = heights[node] == 0  # the likeliest path is laid out first
        drawing.plot(
            [depths[parent], depths[parent] + 0.25, depths[node]],
            [heights[parent], heights[node], heights[node]],
            color="black" if bold else "#b0b0b0",
            linewidth=2.2 if bold else 0.9,
            zorder=2 if bold else 1,
        )
    small = min(1.0, 24 / (max(heights) + 1))  # so that neighbours do not touch
    dots = drawing.scatter(
        depths,
        heights,
        s=[small * (14 + 90 * chance) for chance in chances],
        c=chances,
        cmap="viridis_r",
        norm=PowerNorm(0.5, 0, 1),  # most are unlikely, and to be told apart
        edgecolors="black",
        linewidths=0.5,
        zorder=3,
    )
    bar = figure.colorbar(dots, ax=drawing, label="chance that the node is accepted", format="{x:.0%}", pad=0.02)
    bar.set_ticks([0, 0.02, 0.1, 0.25, 0.5, 0.75, 1])
    if tree["nodes"] == 1:
        title = "The tree that pays: none, plain decoding"
    else:
        title = (
            f"The tree that pays: {tree['nodes']} nodes, {tree['depth']} forwards of the draft,\n"
            f"{tree['expected']:.2f} tokens a step, {tree['speedup']:.2f} times plain decoding"
        )
    drawing.set(title=title, xlabel="depth", xlim=(-0.4, max(1, tree["depth"]) + 0.4))
    drawing.set_ylim(max(heights) + 0.8, -0.8)  # the likeliest on top
    drawing.xaxis.set_major_locator(MaxNLocator(integer=True))
    drawing.set_yticks([])
    drawing.spines["left"].set_visible(False)
    drawing.grid(visible=False)
    sizes = [row["nodes"] for row in rows]
    for number, depth in enumerate(rows[0]["best"]):
        tokens.plot(
            sizes,
            [row["best"][depth] for row in rows],
            color=COLOURS[number % (len(COLOURS) - 1)],
            marker=MARKERS[number % len(MARKERS)],
            markevery=[size - 1 for size in sizes if size & (size - 1) == 0],
            label=f"best, depth up to {depth}",
        )
    tokens.plot(
        sizes,
        [row["greedy"] for row in rows],
        color="black",
        linestyle=":",
        linewidth=2,
        label="likeliest nodes, any depth",
    )
    tokens.plot(
        tree["nodes"],
        tree["expected"],
        color="black",
        marker="o",
        markersize=12,
        fillstyle="none",
        linestyle="none",
        label="chosen",
    )
    tokens.set(title="Expected tokens of a step", xlabel="nodes of the tree, root counted", ylabel="tokens per step")
    tokens.set_xscale("log", base=2)
    _plain_numbers(tokens, [size for size in sizes if size & (size - 1) == 0])
    tokens.set_ylim(bottom=1)
    tokens.legend(loc="upper left", fontsize=8)
    return figure


FIGURES: dict[str, Callable[[Data], Figure]] = {
    "cost": cost,
    "compression": compression,
    "jacobi": jacobi,
    "pool": pool,
    "match": match,
    "expected": expected,
    "calibration": calibration,
    "growth": growth,
    "sequoia": sequoia,
}


# --------------------------------------------------------------------------------------------------------- parts


def _figure(panels: int, data: Data, note: str) -> tuple[Figure, list[Axes]]:
    """Panels side by side over the note and the caption."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    width = 6.4 if panels == 1 else 4.9 * panels
    figure = Figure(figsize=(width, 4.4), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))  # inches
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, panels, number) for number in range(1, panels + 1)]
    lines = [textwrap.fill(text, int(17.5 * width)) for text in (note, _caption(data["conditions"]))]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color="#444444")
    return figure, axes


def _caption(conditions: Data) -> str:
    """What was measured on; the machine only where a time was. The data hold the rest."""
    parts = []
    if "target" in conditions:
        precision = conditions["precision"]
        parts.append(f"{conditions['target']}, {PRECISIONS.get(precision, f'precision {precision:.2g}')}")
    if "prompts" in conditions:
        parts.append(f"{conditions.get('data', 'prompts')}, up to {conditions['max_new_tokens']} tokens")
    if "temperature" in conditions:
        parts.append(how(conditions["temperature"]))
    if "rounds" in conditions:
        parts.append(f"{conditions['rounds']} interleaved rounds; {conditions['cpu']}")
        if "torch_threads" in conditions:
            parts.append(f"{conditions['torch_threads']} threads")
    parts.append(f"leapahead {conditions['versions']['leapahead']}")
    return "; ".join(parts)


def how(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def _with_spread(axes: Axes, number: int, x: list[int], values: list[dict[str, float]], label: str) -> None:
    colour = COLOURS[number % len(COLOURS)]
    axes.plot(
        x, [value["median"] for value in values], color=colour, marker=MARKERS[number % len(MARKERS)], label=label
    )
    low, high = [value["low"] for value in values], [value["high"] for value in values]
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _plain_numbers(axes: Axes, values: list[int], y: bool = False) -> None:
    """Ticks at just these values, written as they are."""
    axis = axes.yaxis if y else axes.xaxis
    axis.set_ticks(values, labels=[str(value) for value in values])
    axis.set_ticks([], minor=True)


def _smooth(rows: list[Data], name: str, around: int) -> list[float]:
    """Mean over the neighbours, each weighted by its number of texts."""
    smooth = []
    for index in range(len(rows)):
        near = rows[max(index - around, 0) : index + around + 1]
        texts = sum(row["prompts"] for row in near)
        smooth.append(sum(row[name] * row["prompts"] for row in near) / texts)
    return smooth


def _sequoia_note(data: Data) -> str:
    """Acceptance by rank, what grown trees would cost, and on what machine."""
    ranks = ", ".join(f"{share:.1%}" for share in data["ranks"])
    tree, grown, conditions = data["tree"], data["greedy"], data["conditions"]
    among = f" ({conditions['looked']} ranked under the dice)" if "looked" in conditions else ""
    threads = f", {conditions['torch_threads']} threads" if "torch_threads" in conditions else ""
    return (
        f"draft: {data['draft']}; accepted by rank: {ranks} of {data['tokens']} tokens{among}; plain decoding "
        f"{1e3 * data['plain']:.3g} ms a token, this tree {1e3 * tree['seconds_per_token']:.3g}, the likeliest nodes "
        f"at any depth {1e3 * grown['seconds_per_token']:.3g} at best ({grown['nodes']} nodes, {grown['depth']} "
        f"forwards); {conditions['cpu']}{threads}"
    )


def _laid_out(parents: list[int], ranks: list[int]) -> tuple[list[int], list[float]]:
    """Depth and height of each node: leaves one below the other, a node as high as its likeliest child."""
    children: list[list[int]] = [[] for _ in parents]
    for node in sorted(range(1, len(parents)), key=lambda node: ranks[node]):
        children[parents[node]].append(node)
    depths, heights, leaves = [0] * len(parents), [0.0] * len(parents), 0
    waiting = [0]
    while waiting:  # depth first, the likeliest child first: then a path goes straight on until it branches
        node = waiting.pop()
        depths[node] = depths[parents[node]] + 1 if node else 0
        heights[node] = leaves
        leaves += not children[node]
        waiting += reversed(children[node])
    return depths, heights
