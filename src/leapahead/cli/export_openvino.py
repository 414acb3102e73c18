"""`leapahead export-openvino`: writes a model folder of Transformers, or a GGUF file, as a folder for OpenVINO."""

from __future__ import annotations

from pathlib import Path

import click

from leapahead.cli import screen
from leapahead.cli.command import Command, file_names, option
from leapahead.cli.typed import HomePath
from leapahead.core.errors import BadParameter
from leapahead.models import loading
from leapahead.models.llama_cpp.file import is_gguf
from leapahead.models.openvino import export, gguf


@click.command(
    name="export-openvino",
    cls=Command,
    examples=(
        "leapahead export-openvino models/my-llama my-llama-openvino",
        "leapahead export-openvino models/my-llama my-llama-int8 --weights int8 --force",
        "leapahead export-openvino my-llama-q8_0.gguf my-llama-openvino",
    ),
)
@click.argument("model", shell_complete=file_names)
@click.argument("out_dir", type=HomePath(path_type=Path))
@option("--weights", type=click.Choice(export.WEIGHTS), show_default="bf16", help="Type of the weights.")
@option("--force", is_flag=True, help="Replace OUT_DIR if it is such a folder.")
@option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
def export_openvino(model: str, out_dir: Path, weights: str | None, force: bool, trust_remote_code: bool) -> None:
    """Write MODEL as a folder for OpenVINO, with its tokenizer.

    MODEL is a folder of a Transformers model, its name on the Hugging Face hub, a GGUF file, or "bundled". The types
    f32 and bf16 keep the weights in that precision; int8 and int4 are quantised by NNCF. The weights of a GGUF file
    keep their own types. A model whose logits would differ from those of Transformers is refused.
    """
    if model == loading.BUNDLED:
        model = loading.bundled()
    if is_gguf(model):
        if weights is not None:
            raise BadParameter(f"--weights {weights} is not possible with a GGUF file, whose weights keep their types")
        with screen.progress(f"reading {model}") as bar:
            written = gguf.export_gguf(model, out_dir, force=force, progress=bar)
    else:
        screen.quiet_transformers()
        with screen.progress(f"loading {model}") as bar:
            written = export.export(
                model, out_dir, weights or "bf16", force=force, progress=bar, trust_remote_code=trust_remote_code
            )
    click.echo(f"{written.path}: {written.size / 1e6:.1f} MB, {written.weights}")
    if written.no_tokenizer:
        screen.say(f"The folder has no tokenizer for programs without Transformers, because {written.no_tokenizer}.")
