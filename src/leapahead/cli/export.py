"""`leapahead export-gguf`: writes a model folder of Transformers as a GGUF file for llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from leapahead.cli import screen
from leapahead.cli.command import Command, option
from leapahead.cli.typed import HomePath
from leapahead.integrations import gguf


@click.command(
    name="export-gguf",
    cls=Command,
    examples=(
        "leapahead export-gguf models/my-llama my-llama.gguf",
        "leapahead export-gguf models/my-llama my-llama-q8_0.gguf --type q8_0 --force",
    ),
)
@click.argument("model_dir", type=HomePath(path_type=Path))
@click.argument("out", metavar="OUT.gguf", type=HomePath(path_type=Path))
@option("--type", "kind", type=click.Choice(gguf.KINDS), default="bf16", help="Type of the weights.")
@option("--force", is_flag=True, help="Replace OUT.gguf if it exists.")
def export_gguf(model_dir: Path, out: Path, kind: str, force: bool) -> None:
    """Write the Llama model in MODEL_DIR as a GGUF file, with its tokenizer.

    The types f32 and bf16 keep the weights in that precision; llama.cpp quantises to the others. `leapahead tune` shows
    which type is fastest with drafting. A model that llama.cpp would compute or tokenize differently from Transformers
    is refused.
    """
    with screen.progress(f"reading {model_dir}") as bar:
        written = gguf.export_gguf(model_dir, out, kind, force=force, progress=bar)
    click.echo(
        f"{written.path}: {written.size / 1e6:.1f} MB, {kind}, {written.tensors} tensors ({_counts(written.types)})"
    )
    if written.fallbacks:
        click.echo(
            f"{sum(written.fallbacks.values())} tensors keep other types, because the length of their rows is not a "
            f"multiple of {gguf.MIXTURES[kind].block}, the largest block of {kind} ({_counts(written.fallbacks)})"
        )


def _counts(types: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items(), key=lambda item: -item[1]))
