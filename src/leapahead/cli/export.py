"""`leapahead export-gguf`: a Hugging Face folder as a file for llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from leapahead.cli import screen
from leapahead.integrations import gguf


@click.command(name="export-gguf")
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT.gguf", type=click.Path(path_type=Path))
@click.option(
    "--type", "kind", type=click.Choice(gguf.KINDS), default="bf16", show_default=True, help="Of the weights."
)
@click.option("--force", is_flag=True, help="Replace OUT.gguf if it exists.")
def export_gguf(model_dir: Path, out: Path, kind: str, force: bool) -> None:
    """Write a Llama from a Hugging Face folder as a GGUF file, tokenizer included.

    f32 and bf16 hold the weights as they are or rounded to bfloat16; q8_0 and q4_k_m are quantised by llama.cpp. What
    llama.cpp would compute or tokenize otherwise than Transformers is refused.
    """
    with screen.progress(f"reading {model_dir}") as bar:
        written = gguf.export_gguf(model_dir, out, kind, force=force, progress=bar)
    click.echo(
        f"{written.path}: {written.size / 1e6:.1f} MB, {kind}, {written.tensors} tensors ({_counts(written.types)})"
    )
    if written.fallbacks:
        click.echo(
            f"{sum(written.fallbacks.values())} tensors have rows that are no multiple of {gguf.PACKED[kind]} numbers, "
            f"which {kind} needs; llama.cpp kept them in other types ({_counts(written.fallbacks)})"
        )


def _counts(types: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items(), key=lambda item: -item[1]))
