"""`leapahead lab`: what is needed to measure, and not to decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from leapahead.cli import screen
from leapahead.core.errors import needing


@click.group()
def lab() -> None:
    """Tools for measurements."""


@lab.command()
@click.option("--from", "source", metavar="MODEL_DIR", help="Folder of a Llama.  [default: the bundled model]")
@click.option("--cost", required=True, metavar="135m|360m|1b|3b|7b", help="Whose shapes it gets.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A new or empty folder.")
@click.option("--dtype", default="bfloat16", show_default=True, help="float32 or bfloat16.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random numbers that are never seen.")
def standin(source: str | None, cost: str, out: Path, dtype: str, seed: int) -> None:
    """Write a stand-in: a small model's text at a large model's cost.

    The logits are those of the small model, up to rounding; the shapes are those of SmolLM2-135M or -360M, Llama 3.2 1B
    or 3B, or Llama 2 7B. The vocabulary stays, and layers make up for it.
    """
    make = _maker()
    with screen.progress("reading") as progress:
        made = make(source, cost, out, dtype=dtype, seed=seed, progress=progress)
    real = made.real
    click.echo(
        f"{out}: {made.shapes.layers} layers, {made.head_layers} of them for the head that the vocabulary lacks; "
        f"{made.shapes.per_token / 1e6:.1f} million parameters read per token "
        f"({made.shapes.per_token / real.per_token - 1:+.1%} to the real model's {real.per_token / 1e6:.1f}); "
        f"{made.weights / 1e9:.2f} GB"
    )


def _maker() -> Any:
    """`lab.standin`, imported when it is asked for: it needs a backend that the command line does not."""
    with needing("a stand-in", "transformers", "torch", "transformers", "safetensors"):
        from research.standin import standin
    return standin
