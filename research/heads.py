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
from torch import Tensor

from leapahead.api import LLM
from leapahead.cli.command import Command
from leapahead.cli.screen import write_file
from leapahead.drafters.heads import checkpoint
from leapahead.drafters.heads.config import EAGLE3
from leapahead.models.loading import BUNDLED, bundled
from leapahead.training.cllm_run import TUNED_FOLDER
from leapahead.training.loop import OPTIMIZER, STATE
from leapahead.training.probe_run import HEAD_FOLDER, PROBES_FOLDER
from leapahead.training.settings import Folder
from research.acceptance import Compared, acceptance
from research.train.data import read_corpus, stdlib_folder

CHARACTERS = (60, 900)  # of a beginning of a function
CHAT = 4  # one in so many questions is in the chat template
IN_TEXT = 4  # one in so many functions is cut at a line below its docstring
BUNDLED_HEAD, BUNDLED_MINUTES = "tiny-eagle3", 15  # of its model card


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


def trained(folder: Path, nodes: int = 16) -> dict[str, list[Compared]]:
    """The heads that `make train-heads` has trained in a folder, each as a drafter with its size and time in the name.

    The bundled EAGLE-3, which it has trained too, stands for that kind where the folder has none.

    Returns:
        By the model that they draft for: the bundled one, or the folder of one that was tuned with them (SPACE).

    Raises:
        ClickException: there are none.
    """
    found: dict[str, list[Compared]] = {}
    kinds = set[str]()
    for result, model, head in ((HEAD_FOLDER, "", ""), (TUNED_FOLDER, TUNED_FOLDER, PROBES_FOLDER)):
        for path in sorted(each for each in folder.glob("*") if (each / result / head / "config.json").is_file()):
            run, target = Folder(path, result), str(path / model) if model else BUNDLED
            config, tensors = checkpoint.read(run.trained / head)
            kinds.add(config.kind)
            with safe_open(run.checkpoint, framework="pt") as file:
                seconds = json.loads(file.metadata()[STATE])["seconds"]
                if model:  # which was trained too
                    tensors = {each: file.get_tensor(each) for each in file.keys() if OPTIMIZER not in each}  # noqa: SIM118
            name = f"{config.kind}{' and its own target' * bool(model)}: {_size(tensors)}, {seconds / 60:.0f} minutes"
            compared = (name, "head", {"head": str(run.trained / head), "nodes": nodes})
            found.setdefault(target, []).append(compared)
    if not found:
        raise click.ClickException(f"there are no trained heads in {folder}; make them with `make train-heads`")
    if EAGLE3 not in kinds:
        _, tensors = checkpoint.read(Path(bundled(BUNDLED_HEAD)))
        name = f"{EAGLE3}, bundled: {_size(tensors)}, {BUNDLED_MINUTES} minutes"
        found.setdefault(BUNDLED, []).append((name, "head", {"head": BUNDLED, "nodes": nodes}))
    return found


def _size(tensors: dict[str, Tensor]) -> str:
    """The number of parameters in words."""
    count = sum(each.numel() for each in tensors.values())
    return f"{count / 1e6:.1f}M parameters" if count > 1e5 else f"{count:,} parameters"


def kinds(folder: Path, prompts: dict[str, list[str]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What these heads save; see `acceptance`.

    Args:
        folder: of the heads.
        prompts: by task.
        before: rows of an earlier measurement, of which those of kinds that the folder does not hold are kept.
    """
    rows = []
    is_known = any(row["name"].startswith(EAGLE3) for row in before)
    for model, configurations in trained(folder).items():
        if is_known:  # the bundled head is the EAGLE-3 of a row that is kept
            configurations = [each for each in configurations if each[2]["head"] != BUNDLED]
        if not configurations:
            continue
        llm = LLM(None if model == BUNDLED else model, dtype="float32", drafter_cache=False)
        rows += acceptance(llm, prompts, configurations=configurations)
        llm.close()
    measured = {row["name"].split(":")[0] for row in rows}
    rows += [row for row in before if row["name"].split(":")[0] not in measured]
    return sorted(rows, key=lambda row: row["name"])
