"""The figure of a draft tree of Sequoia: its shape, and the expected tokens of the best trees by size and depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leapahead.bench.conditions import Data
from leapahead.bench.plots import COLOURS, MARKERS, plain_numbers, subplots, threads_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def sequoia(data: Data) -> Figure:
    """The chosen tree with its likeliest path in bold; and expected tokens against size, of the best trees by depth."""
    figure, (drawing, tokens) = subplots(2, data, _note(data))
    _tree(figure, drawing, data["tree"])
    _expected_tokens(tokens, data)
    return figure


def _tree(figure: Figure, drawing: Axes, tree: Data) -> None:
    """The tree from left to right; the size and colour of a node show how likely it is accepted."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

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
        norm=PowerNorm(0.5, 0, 1),  # most nodes are unlikely; the scale separates them
        edgecolors="black",
        linewidths=0.5,
        zorder=3,
    )
    bar = figure.colorbar(dots, ax=drawing, label="probability that the node is accepted", format="{x:.0%}", pad=0.02)
    bar.set_ticks([0, 0.02, 0.1, 0.25, 0.5, 0.75, 1])
    if tree["nodes"] == 1:
        title = "The tree that pays: none, plain decoding"
    else:
        title = (
            f"The tree that pays: {tree['nodes']} nodes, {tree['depth']} draft forwards,\n"
            f"{tree['expected']:.2f} tokens per step, {tree['speedup']:.2f} times plain decoding"
        )
    drawing.set(title=title, xlabel="depth", xlim=(-0.4, max(1, tree["depth"]) + 0.4))
    drawing.set_ylim(max(heights) + 0.8, -0.8)  # the likeliest on top
    drawing.xaxis.set_major_locator(MaxNLocator(integer=True))
    drawing.set_yticks([])
    drawing.spines["left"].set_visible(False)
    drawing.grid(visible=False)


def _expected_tokens(tokens: Axes, data: Data) -> None:
    """Expected tokens of a step against the size of the tree."""
    tree, rows = data["tree"], data["rows"]
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
    greedy = [row["greedy"] for row in rows]
    tokens.plot(sizes, greedy, color="black", linestyle=":", linewidth=2, label="likeliest nodes, any depth")
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
    plain_numbers(tokens, [size for size in sizes if size & (size - 1) == 0])
    tokens.set_ylim(bottom=1)
    tokens.legend(loc="upper left", fontsize=8)


def _note(data: Data) -> str:
    """Acceptance by rank, the cost of the alternatives, and the machine."""
    ranks = ", ".join(f"{share:.1%}" for share in data["ranks"])
    tree, grown, conditions = data["tree"], data["greedy"], data["conditions"]
    ranked = conditions.get("ranked", conditions.get("looked"))  # the name in files of earlier versions
    among = f" ({ranked} ranked with the Gumbel noise)" if ranked is not None else ""
    threads = f", {count} threads" if (count := threads_of(conditions)) is not None else ""
    return (
        f"draft: {data['draft']}; accepted by rank: {ranks} of {data['tokens']} tokens{among}; plain decoding "
        f"{1e3 * data['plain']:.3g} ms per token, this tree {1e3 * tree['seconds_per_token']:.3g}, the likeliest nodes "
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
