"""`python -m research heads-prompts`: the prompts on whose texts the bundled model's heads are trained; those heads.

Half of them are code, the beginnings of functions of Python's standard library up to the end of the docstring, and half
questions of GSM8K's train split, some in the chat template. HumanEval and GSM8K's test split are only evaluated.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import click
from safetensors import safe_open

from leapahead.cli.command import Command
from leapahead.cli.screen import write_file
from leapahead.drafters.heads import checkpoint
from leapahead.training.loop import STATE
from leapahead.training.settings import Folder
from research.acceptance import Compared
from research.train.data import read_corpus, stdlib_folder

CHARACTERS = (60, 900)  # of a beginning of a function
CHAT = 4  # one in so many questions is in the chat template
IN_TEXT = 4  # one in so many functions is cut at a line below its docstring


@click.command(name="heads-prompts", cls=Command)
@click.option(
    "--gsm8k", type=click.Path(path_type=Path, exists=True), required=True, help="gsm8k_train.jsonl: train questions."
)
@click.option("--count", type=click.IntRange(min=2), default=2000, show_default=True, help="Number of prompts.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the choice.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File of JSON lines.")
def main(gsm8k: Path, count: int, seed: int, out: Path) -> None:
    """Write prompts for `leapahead train-head`: code of the standard library, and questions of GSM8K."""
    found = prompts(gsm8k, count, seed)
    write_file(out, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in found))
    click.echo(f"{out}: {len(found)} prompts")


def prompts(gsm8k: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts in a random order, half of them code, as far as there are so many."""
    corpus, draw = read_corpus(stdlib_folder(), gsm8k, seed), random.Random(seed)
    code = []
    for number, (head, body) in enumerate(draw.sample(corpus.documented, len(corpus.documented))):
        lines = body.splitlines(keepends=True)
        text = head + "".join(lines[: draw.randrange(1, len(lines))]) if number % IN_TEXT == 0 and lines[1:] else head
        if CHARACTERS[0] <= len(text) <= CHARACTERS[1]:
            code.append({"prompt": text})
    questions = []
    for number, (question, _) in enumerate(draw.sample(corpus.questions, len(corpus.questions))):
        is_chat = number % CHAT == 0
        questions.append({"messages": [{"role": "user", "content": question}]} if is_chat else {"question": question})
    half = count // 2
    found = [*code[: count - half], *questions[:half]]
    draw.shuffle(found)
    return found


def trained(folder: Path, nodes: int = 16) -> list[Compared]:
    """The heads that `make train-heads` has trained in a folder, each as a drafter with its size and time in the name.

    Raises:
        ClickException: there are none.
    """
    found: list[Compared] = []
    for run in map(Folder, sorted(each for each in folder.glob("*") if (each / "head" / "config.json").is_file())):
        config, tensors = checkpoint.read(run.trained)
        with safe_open(run.checkpoint, framework="pt") as file:
            seconds = json.loads(file.metadata()[STATE])["seconds"]
        parameters = sum(each.numel() for each in tensors.values())
        name = f"{config.kind}: {parameters / 1e6:.1f}M parameters, {seconds / 60:.0f} minutes"
        found.append((name, "head", {"head": str(run.trained), "nodes": nodes}))
    if not found:
        raise click.ClickException(f"there are no trained heads in {folder}; make them with `make train-heads`")
    return found
