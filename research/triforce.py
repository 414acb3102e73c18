"""`python -m research triforce`: what TriForce costs over long contexts, and from which length on it could pay."""

from __future__ import annotations

from pathlib import Path

import click
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.models.transformers.model import TransformersTarget
from research.command_parts import numbers, out_option, prefix_of, show, write
from research.overhead import SMOLLM2_135M
from research.retrieval_costs import RATES, measured

SMALL = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 3}
SMALL |= {"num_key_value_heads": 3}  # a tenth of the target's parameters, most of them in its embedding


def random_target(name: str, **shapes: int) -> TransformersTarget:
    """A model with random weights in bfloat16, of these shapes or else those of SmolLM2-135M."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SMOLLM2_135M, **shapes})
    return TransformersTarget(LlamaForCausalLM(config).to(torch.bfloat16).eval(), name=name, exclusive=True)


@click.command(cls=Command)
@click.option("--lengths", default="2048,4096,8192,16384,32768", show_default=True, metavar="N,...", help="Contexts.")
@click.option("--budgets", default="512,1024,2048", show_default=True, metavar="N,...", help="Retrieved entries.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Each measures every size.")
@out_option("triforce")
def main(lengths: str, budgets: str, rounds: int, out: Path) -> None:
    """Measure TriForce's forwards over long contexts, and compute its speed-up at simulated acceptance rates.

    The target has random weights, the shapes of SmolLM2-135M and random keys and values. Times are measured; acceptance
    is assumed, since it depends on the model and the text.
    """
    prefix = prefix_of(out)
    contexts, sizes = numbers("lengths", lengths, int), numbers("budgets", budgets, int)
    target = random_target("random llama, 135M shapes", max_position_embeddings=2 * max(contexts))
    small = random_target("random llama, 10M shapes", **SMALL)
    with screen.progress("triforce") as bar:
        found = measured(target, small, contexts, sizes, rounds=rounds, progress=bar)
    show(
        ("context", "budget", "target, ms", "over the budget, ms", "selection, ms", "the first, ms"),
        [
            (
                row["context"],
                budget,
                f"{row['target_ms']['1']:.1f}",
                f"{costs['middle_ms']['1']:.1f}",
                f"{costs['select_ms']:.1f}",
                f"{costs['first_select_ms']:.1f}",
            )
            for row in found["rows"]
            for budget, costs in row["budgets"].items()
        ],
    )
    click.echo(f"a forward of the small model: {found['small_ms']:.2f} ms")
    click.echo("speed-up at simulated acceptance rates, the best depth each:")
    show(
        ("context", "budget", "small model", *(f"{rate:g}" for rate in RATES)),
        [
            (context, budget, "with" if small_too else "without", *(f"{each['speedup']:.2f}" for each in some))
            for context in contexts
            for budget in sizes
            for small_too in (False, True)
            if (some := [row for row in found["simulated"] if _key(row) == (context, budget, small_too)])
        ],
    )
    write(found, prefix)


def _key(row: dict[str, object]) -> tuple[object, object, object]:
    return row["context"], row["budget"], row["small"]
