"""`leapahead convert-head`: turns the pickled weights of a trained head into safetensors."""

from __future__ import annotations

from pathlib import Path

import click

from leapahead.cli.command import Command
from leapahead.cli.typed import HomePath
from leapahead.core.errors import needing


@click.command(
    name="convert-head",
    cls=Command,
    examples=(
        "leapahead convert-head EAGLE3-LLaMA3.1-Instruct-8B eagle3-llama3.1-8b",
        "leapahead convert-head medusa-vicuna-7b-v1.3 heads/medusa-vicuna",
    ),
)
@click.argument("source", type=HomePath(path_type=Path))
@click.argument("destination", type=HomePath(path_type=Path))
def convert_head(source: Path, destination: Path) -> None:
    """Write the head in the folder SOURCE with its weights in safetensors, for --head.

    EAGLE's, Medusa's and Hydra's published weights are pickles, which can run code when they are loaded; leapahead
    loads none. Nothing in them is executed here. DESTINATION is a new folder.
    """
    with needing("a trained head", "transformers", "torch", "transformers", "safetensors"):
        from leapahead.drafters.heads import checkpoint

        found = checkpoint.convert(source, destination)  # imports torch itself
    depths = f", {found.depths} depths" if found.depths else ""
    click.echo(f"{destination}: {found.kind}{depths}, {found.draft_vocab_size} tokens")
