"""`python -m research repair-draft`: what a draft model of the text-repair model is trained from and on.

start/            a T5 with the repair model's encoder and the first layer of its decoder: a deep encoder and a shallow
                  decoder, as the Spec-Drafter of SpecDec has them (2203.16487)
prompts.jsonl     damaged lines of the files that the repair model was trained on
held-out.jsonl    those of files that it was not trained on
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch

from leapahead.cli.command import Command
from leapahead.cli.screen import write_file
from leapahead.core.errors import BadParameter
from leapahead.models.transformers import pretrained
from research.train.data import read_corpus, stdlib_folder
from research.train.repair import held_out, pairs

DECODER_LAYERS = 1
SEED = 7  # of the damage, other than that of the repair model's training


def start_of(model: Any) -> Any:
    """A copy of a T5 with all of its encoder and the first layers of its decoder."""
    found = copy.deepcopy(model)
    found.decoder.block = found.decoder.block[:DECODER_LAYERS]
    found.config.num_decoder_layers = found.decoder.config.num_layers = DECODER_LAYERS
    return found


@click.command(name="repair-draft", cls=Command)
@click.option(
    "--repair",
    type=click.Path(path_type=Path),
    default=Path("build/repair"),
    show_default=True,
    help="Folder of `research repair`, which gets what is written, too.",
)
@click.option("--count", type=click.IntRange(min=1), default=2000, show_default=True, help="Number of prompts.")
@click.option("--evaluated", type=click.IntRange(min=1), default=40, show_default=True, help="Held-out prompts.")
def main(repair: Path, count: int, evaluated: int) -> None:
    """Write the beginning of a draft model of the text-repair model, and prompts to train it on."""
    if not (repair / "model" / "config.json").is_file():
        raise BadParameter(f"there is no {repair / 'model'}; run `python -m research repair --out {repair}` first")
    model, tokenizer, _ = pretrained.load_files(str(repair / "model"), "auto", False)
    model.config.dtype = torch.float32
    pretrained.save(start_of(model), tokenizer, repair / "start")
    texts = read_corpus(stdlib_folder(), None).files
    _write(repair / "prompts.jsonl", (damaged for damaged, _ in islice(pairs(texts, random.Random(SEED)), count)))
    _write(repair / "held-out.jsonl", (damaged for damaged, _ in held_out(evaluated)))
    click.echo(f"{repair / 'start'}: {sum(each.numel() for each in start_of(model).parameters()):,} parameters")


def _write(path: Path, prompts: Iterable[str]) -> None:
    write_file(path, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
