"""The commands that judge drafters: the calibration of their acceptance estimates, and the best draft tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.cli.options import DRAFTER_OPTIONS, MODEL, all_of, drafter_arguments
from leapahead.models import loading
from research import curves
from research.command_parts import (
    DATA,
    SAMPLING,
    length_option,
    loaded_prompts,
    other_model,
    out_option,
    prefix_of,
    sampling_of,
    show,
    write,
)
from research.curves.calibration import LEAST_NODES
from research.curves.sequoia import RANKED
from research.curves.sequoia import sequoia as draft_tree


@click.command(cls=Command)
@all_of(MODEL, DATA)
@click.option(
    "-d", "--drafter", default="auto", show_default=True, metavar="D", help="A drafter with acceptance estimates."
)
@all_of(DRAFTER_OPTIONS)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts decoded together.")
@all_of(SAMPLING)
@length_option(128)
@out_option("calibration")
def calibration(drafter: str, batch: int, max_new_tokens: int, out: Path, **values: Any) -> None:
    """Draw observed against predicted acceptance of drafted nodes.

    One panel for the probability that a node is accepted, one for nodes whose parent was accepted.
    """
    prefix = prefix_of(out)
    options, sampling = drafter_arguments(values, [drafter]), sampling_of(values)
    loaded, prompts, named = loaded_prompts(values, max_new_tokens)
    with screen.progress("calibration") as bar:
        found = curves.calibration(
            loaded.target,
            prompts,
            drafter,
            options,
            max_new_tokens,
            loaded.eos_token_ids,
            **sampling,
            batch=batch,
            progress=bar,
        )
    found["conditions"]["data"] = named
    for kind in ("path", "conditional"):
        click.echo(f"{kind}: {found[kind]['nodes']} nodes")
        show(
            ("predicted", "nodes", "mean", "observed", "95 %"),
            [
                (
                    f"{row['low']:.1f} to {row['high']:.1f}",
                    row["nodes"],
                    f"{row['predicted']:.3f}",
                    f"{row['observed']:.3f}",
                    f"{row['interval']['low']:.3f} to {row['interval']['high']:.3f}",
                )
                for row in found[kind]["rows"]
            ],
        )
        if (off := found[kind]["deviation"]) is not None:
            click.echo(f"greatest deviation of a bin with {LEAST_NODES} nodes or more: {off:.3f}")
    write(found, prefix)


@click.command(cls=Command)
@all_of(MODEL)
@click.option("--draft", metavar="M", help="Draft model with the same tokenizer.  [default: the bundled one]")
@all_of(DATA)
@click.option("--nodes", type=click.IntRange(min=1), default=64, show_default=True, help="Greatest number of nodes.")
@click.option("--depth", type=click.IntRange(min=0), default=10, show_default=True, help="Greatest depth.")
@click.option(
    "--ranked",
    type=int,
    default=RANKED,
    show_default=True,
    help="Sampling: draft tokens that are ranked with the noise.",
)
@all_of(SAMPLING)
@length_option(128)
@out_option("sequoia")
def sequoia(
    draft: str | None, nodes: int, depth: int, ranked: int, max_new_tokens: int, out: Path, **values: Any
) -> None:
    """Draw the best tree for a draft model, from how often its likeliest, second likeliest, ... token is accepted.

    The tree is the one with the least time per token on this machine, of all sizes and depths (Sequoia, 2402.12374,
    with exact matching as the acceptance rule).
    """
    prefix, sampling = prefix_of(out), sampling_of(values)
    other = other_model(draft, values)
    loaded, prompts, named = loaded_prompts(values, max_new_tokens)
    with screen.loading(draft):
        guessing = loading.load(**other)
    with screen.progress("sequoia") as bar:
        found = draft_tree(
            loaded.target,
            guessing.target,
            prompts,
            nodes,
            depth,
            max_new_tokens,
            loaded.eos_token_ids,
            **sampling,
            ranked=ranked,
            tokenizers=(loaded.tokenizer, guessing.tokenizer),
            progress=bar,
        )
    found["conditions"]["data"] = named
    shares = [*enumerate(found["ranks"]), ("none", max(1 - sum(found["ranks"]), 0.0))]
    show(("rank", "accepted"), [(rank, f"{share:.1%}") for rank, share in shares])
    depths = list(found["rows"][0]["best"])
    show(
        ("nodes", *(f"depth {depth}" for depth in depths), "any depth"),
        [
            (row["nodes"], *(f"{row['best'][depth]:.3f}" for depth in depths), f"{row['greedy']:.3f}")
            for row in found["rows"]
            if row["nodes"] & (row["nodes"] - 1) == 0
        ],
    )
    for name, tree in (("the tree that pays", found["tree"]), ("the likeliest nodes at any depth", found["greedy"])):
        click.echo(
            f"{name}: {tree['nodes']} nodes, {tree['depth']} draft forwards, {tree['expected']:.2f} tokens per "
            f"step, {1e3 * tree['seconds_per_token']:.2f} ms per token, {tree['speedup']:.2f} times plain decoding"
        )
    if found["tree"]["depth"] == depth or found["tree"]["nodes"] == nodes:
        click.echo("the tree reaches the limit of --nodes or --depth; larger limits may give a faster one")
    write(found, prefix)
