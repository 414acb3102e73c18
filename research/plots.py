"""The figures of research: one function for each kind of data that `research.curves` returns.

The style, the caption and the writing of files are those of `leapahead.bench.plots`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leapahead.bench import plots as base
from leapahead.bench.conditions import Data
from leapahead.bench.formula import compression_formula
from leapahead.bench.plots import COLOURS, MARKERS, latency, plain_numbers, sampling, subplots
from research.curves.calibration import LEAST_NODES
from research.devices.plots import devices
from research.plots_curve import curve as chain_curve
from research.plots_regret import regret
from research.plots_tree import sequoia
from research.plots_triforce import triforce

if TYPE_CHECKING:
    from typing import Any

    from matplotlib.figure import Figure


def save(data: Data, prefix: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draws what one function of `research.curves` returned, and writes PREFIX.png and PREFIX.svg, or some of them.

    Raises:
        LeapaheadError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    return base.save(draw, data, prefix, kinds)


def draw(data: Data) -> Figure:
    """The figure of what one function of `research.curves` returned."""
    return FIGURES[data["figure"]](data)


def compression(data: Data) -> Figure:
    """S against log2(W = G), a curve for each N, the formula dashed: fitted to that N, or to all if it has too few."""
    rows, whole = data["rows"], data["fit"]
    note = f"{data['distinct_4']:.0%} of 4-grams distinct"
    if whole is not None:
        note += (
            f"; dashed: 2402.02057, equation 7; one fit to every N: α = {whole['alpha']:.2f}, f = {whole['f']:.2f} "
            f"(rms error {whole['rms']:.2f})"
        )
    figure, (axes,) = subplots(1, data, note)
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
    plain_numbers(axes, windows)
    axes.set_ylim(bottom=1)
    axes.legend(loc="best")
    return figure


def jacobi(data: Data) -> Figure:
    """Share of correct tokens against iterations: over all positions, with all before them correct, and by position."""
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    block, curves = data["block"], data["curves"]
    repeated = ", ".join(f"{sampling(curve['temperature'])} {curve['distinct_4']:.0%}" for curve in curves)
    note = f"blocks of {block} tokens that begin as random tokens of the prompt; 4-grams distinct: {repeated}"
    figure, panels = subplots(len(curves), data, note)
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
        axes.plot(
            k, curve["settled"], color="black", linewidth=1.6, linestyle="--", label="correct, and all before it too"
        )
        axes.set(
            title=f"Jacobi, {sampling(curve['temperature'])}: "
            f"{curve['tokens_per_iteration']:.2f} tokens per iteration\n"
            f"({curve['blocks']} blocks, all correct after {curve['iterations']['mean']:.1f} on average)",
            xlabel="iterations",
            xlim=(0, block),
            ylim=(0, 1.02),
        )
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("share of blocks whose token is correct")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    return figure


def pool(data: Data) -> Figure:
    """Size of the pool and hit rate against steps, as long as half of the texts continue."""
    w, texts = data["lookahead"], data["steps"][0]["prompts"]
    note = (
        f"lookahead with W = {w['window']}, N = {w['ngram']}, G = {w['guesses']}; "
        f"drawn as long as half of the {texts} texts continue; {data['overall']['distinct_4']:.0%} of 4-grams distinct"
    )
    figure, (sizes, rates) = subplots(2, data, note)
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
    """Accepted tokens per draft by match length, with intervals and counts."""
    draft, most = data["num_tokens"], data["max_ngram"]
    figure, (axes,) = subplots(
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
        title="Accepted tokens by length of the match",
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
    """Observed against predicted acceptance, with intervals; a calibrated drafter's points lie on the diagonal."""
    least = data["path"].get("least_nodes", LEAST_NODES)
    counts = ", ".join(f"{kind} {data[kind]['nodes']}" for kind in ("path", "conditional"))
    note = (
        f"{data['drafter']}; nodes: {counts}; whiskers: exact binomial 95 % intervals; pale points: bins with fewer "
        f"than {least} nodes, which do not count for the greatest deviation; "
        f"acceptance length {data['acceptance_length']:.2f}"
    )
    figure, panels = subplots(2, data, note)
    titles = {"path": "P(node is accepted)", "conditional": "P(node | its parent is accepted)"}
    for axes, (kind, title) in zip(panels, titles.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="#888888", linewidth=1, linestyle=":")
        for row in data[kind]["rows"]:
            at, value, interval = row["predicted"], row["observed"], row["interval"]
            spread = [[max(value - interval["low"], 0)], [max(interval["high"] - value, 0)]]
            alpha = 1.0 if row["nodes"] >= least else 0.35
            axes.errorbar(at, value, yerr=spread, color=COLOURS[0], marker="o", capsize=3, elinewidth=1.2, alpha=alpha)
            label = f"n={row['nodes']}"
            axes.annotate(label, (at, value), xytext=(6, -10), textcoords="offset points", fontsize=7)
        off = data[kind]["deviation"]
        worst = "" if off is None else f"\ngreatest deviation {off:.3f} (bins with ≥ {least} nodes)"
        axes.set(title=title + worst, xlabel="predicted", xlim=(0, 1.02), ylim=(0, 1.02))
    panels[0].set_ylabel("observed")
    return figure


def expected(data: Data) -> Figure:
    """Expected tokens and speed-up of one draft against its length."""
    note = (
        "tokens = (1 - α^(K+1)) / (1 - α), speed-up = tokens / (1 + c K): Leviathan et al., 2211.17192, equation 1 and "
        "theorem 3.8; c: cost of a drafted token in target steps; a target step is assumed to cost the same for "
        "K + 1 tokens as for one"
    )
    figure, (tokens, speed) = subplots(2, data, note)
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
    """Seconds and megabytes against tokens, on linear axes."""
    ratios = ", ".join(f"{row['index']} {row['ratio']:.2f}" for row in data["linear"])
    ends = data["linear"][0]
    note = f"text: {data['text']}; time of a token at {ends['to']:,} tokens over that at {ends['from']:,}: {ratios}"
    if (prefill := data["conditions"]["prefill_seconds_per_token"]) is not None:
        most = max(row["of_prefill"] for row in data["rows"])
        note += f"; at most {most:.2%} of a prefill of {1e3 * prefill:.3g} ms a token"
    drawn, (seconds, memory) = subplots(2, data, note)
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


def _smooth(rows: list[Data], name: str, around: int) -> list[float]:
    """Running mean over the neighbouring rows, weighted by their numbers of texts."""
    smooth = []
    for index in range(len(rows)):
        near = rows[max(index - around, 0) : index + around + 1]
        texts = sum(row["prompts"] for row in near)
        smooth.append(sum(row[name] * row["prompts"] for row in near) / texts)
    return smooth


FIGURES: dict[str, Callable[[Data], Figure]] = {
    "cost": latency,
    "curve": chain_curve,
    "compression": compression,
    "jacobi": jacobi,
    "pool": pool,
    "match": match,
    "expected": expected,
    "calibration": calibration,
    "growth": growth,
    "regret": regret,
    "sequoia": sequoia,
    "devices": devices,
    "triforce": triforce,
}
