"""`python -m research families`: what each family of models gets on each engine, and why not more.

The tests have a tiny random model of every family (`tests/architectures.py`, `tests/seq2seq.py`,
`tests/gguf_architectures.py`). Each is loaded, those of Transformers under OpenVINO too, and the capabilities that its
target finds are written, for the table in docs/guide/models.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from leapahead.cli.command import Command
from leapahead.core.errors import Refused
from leapahead.models.base import CHAIN, REASONS, TREE, Target
from leapahead.models.transformers.encoder_decoder import new_target
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.pretrained import quiet

PACKAGES = ("transformers", "llama-cpp-python", "openvino")
OUT = Path("docs/families.json")
OWN_POSITIONS = "it computes positions or its attention mask itself, from the number of cached tokens"
ONE_PATH = "its recurrent layers read the tokens of one path"
LOGITS = "a forward of several tokens over a state gives other logits than forwards of one"
WHY = {"trees": "", "chains": OWN_POSITIONS, "chains with replay": ONE_PATH, "plain": REASONS[CHAIN].strip(" ()")}
NOT_PAGED = "OpenVINO's paged attention cannot compute it, so it is decoded by its own states"
NARROW = "trees where the sliding window is longer than in these models, as long as the text is shorter than it"
IN_MODULES = "it keeps its state inside the model, where it cannot be exchanged"


@click.command(cls=Command)
@click.argument("tests", default="tests", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    default=OUT,
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file that is written.",
)
def main(tests: Path, out: Path) -> None:
    """Write what each family of models gets: trees, chains, chains with replay, or plain decoding.

    TESTS is the folder of the tests, which have the models.
    """
    sys.path.insert(0, str(tests))
    with quiet():
        rows = [*transformers_rows(), *encoder_decoder_rows(), *gguf_rows(), *openvino_rows()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    versions = json.dumps({name: version(name) for name in PACKAGES})
    out.write_text(f'{{"versions": {versions},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    click.echo(f"{out}: {len(rows)} families")


def transformers_rows() -> Iterator[dict[str, str]]:
    """Of the families of Transformers."""
    for each in import_module("architectures").ARCHITECTURES:
        target = TransformersTarget(each.build())
        mode = mode_of(target)
        why = _why(target, mode)
        if mode == "plain" and (alone := mode_of(TransformersTarget(each.build(), exclusive=True))) != mode:
            why += f"; {alone} where leapahead loads the model itself"
        yield {"engine": "Transformers", "family": each.name, "mode": mode, "why": why}


def encoder_decoder_rows() -> Iterator[dict[str, str]]:
    """Of the encoder-decoder models of Transformers."""
    models = import_module("seq2seq")
    for name in models.MODELS:
        mode = mode_of(new_target(models.build(name)))
        yield {"engine": "Transformers, encoder-decoder", "family": name, "mode": mode, "why": WHY[mode]}


def _why(target: Any, mode: str) -> str:
    """What the target was refused, in plain words."""
    if mode != "plain":
        return WHY[mode]
    if target.executor.shared:
        return IN_MODULES
    reason = next(iter(target.refusals.values()))
    return LOGITS if reason.startswith("logits differ") else reason


def gguf_rows() -> Iterator[dict[str, str]]:
    """Of llama.cpp's architectures."""
    from leapahead.models.llama_cpp import model
    from leapahead.models.llama_cpp.options import LlamaCppOptions

    for each in import_module("gguf_architectures").ARCHITECTURES:
        target, _ = model.load(each.path(), LlamaCppOptions(n_ctx=256, n_threads=1))
        mode = mode_of(target)
        yield {"engine": "llama.cpp", "family": each.name, "mode": mode, "why": WHY[mode]}


def openvino_rows() -> Iterator[dict[str, str]]:
    """Of the families of Transformers, exported for OpenVINO."""
    from leapahead.models.openvino import export, folder
    from leapahead.models.openvino.options import OpenVinoOptions

    for each in import_module("architectures").ARCHITECTURES:
        row = {"engine": "OpenVINO", "family": each.name}
        with tempfile.TemporaryDirectory() as place:
            each.build().save_pretrained(f"{place}/model")
            try:
                path = export.export(f"{place}/model", f"{place}/exported", "f32").path
                target = folder.load(path, OpenVinoOptions(n_threads=1))
            except Refused as error:
                reason = str(error).partition(": ")[2].partition("; ")[0].partition(" (")[0]
                yield {**row, "mode": "refused", "why": reason}
                continue
        mode = mode_of(target)
        yield {**row, "mode": mode, "why": "" if mode == "trees" else NARROW if target.model.trees else NOT_PAGED}


def mode_of(target: Target) -> str:
    """What may be drafted for a target."""
    info = target.info
    if TREE in info.capabilities:
        return "trees"
    if CHAIN not in info.capabilities:
        return "plain"
    return "chains with replay" if info.replays else "chains"
