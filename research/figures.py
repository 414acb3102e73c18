"""`python -m research figures`: every measured number and plot of README and docs.

The numbers are written to one JSON file; the plots and their data to the folder `figures` beside it.
"""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from leapahead import __version__
from leapahead.api import LLM
from leapahead.bench import tasks
from leapahead.cli.command import Command
from leapahead.drafters.pool import NgramPool
from leapahead.models.loading import Loaded
from leapahead.planner.profile import processor
from research import drawn, heads
from research.acceptance import HEADS, RULES, TEMPERATURES, acceptance
from research.cascades import CASCADES
from research.distilled import distilled, parallel, tuned, tuning
from research.exactness import exactness
from research.kept import Kept
from research.overhead import cost_curve, overhead, target_135m
from research.picture import picture
from research.relaxed import relaxed

PARTS = (
    *("check", "acceptance", "rules", "heads", "head-kinds", "relaxed", "cascades", "overhead", "memory", "example"),
    *drawn.PARTS,
)
UNFINISHED = Path("build/figures")  # rows of parts that take hours
TRAINED = ("distilled", "parallel", "cllm", "cllm-run")  # need models of `make train-draft` and other recipes


@click.command(cls=Command)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder of prompt sets.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="JSON file; other parts in it are kept.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice([*PARTS, *TRAINED]),
    help="Measure only this part; may be repeated.",
)
@click.option("--limit", type=int, default=40, show_default=True, help="Prompts of each task.")
@click.option("--check-limit", type=int, default=30, show_default=True, help="Prompts of each task for the check.")
@click.option(
    "--heads",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/heads"),
    show_default=True,
    help="Folder of the part head-kinds, see `make train-heads`.",
)
def main(data: Path, out: Path, parts: tuple[str, ...], limit: int, check_limit: int, folder: Path) -> None:
    """Measure the bundled model and the cost of a step, and write the figures with their conditions.

    An interruption keeps the parts that are finished, and the rows of check and acceptance, in build/.
    """
    console = Console(stderr=True)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"conditions": {}}
    transformers.logging.set_verbosity_error()  # prompts that are too long are left out and counted
    parts = parts or tuple(part for part in PARTS if part != "head-kinds" or folder.is_dir())
    llm = LLM(dtype="float32", drafter_cache=False)
    loaded = Loaded(llm.target, llm.tokenizer, llm.eos_token_ids)
    try:
        for part in parts:
            console.rule(part)
            if part in drawn.PARTS:
                _draw(part, loaded, data, out.parent / "figures", console)
            elif part == "head-kinds":
                prompts = _texts(data, limit)
                found[part] = heads.kinds(folder, prompts, found.get(part, []))
                found["conditions"][part] = (
                    f"bundled model and heads of `make train-heads`, float32, {tasks.in_words(prompts)}, up to 128 new "
                    "tokens, stopping at EOS, seed 1, at most 16 nodes, and beside them at most 32 rows of probes; "
                    f"{machine_in_words()}."
                )
                out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            else:
                values, conditions = _measured(part, llm, data, out, limit, check_limit, console)
                found.update(values)
                found["conditions"].update(conditions)
                out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                (UNFINISHED / f"{part}.json").unlink(missing_ok=True)
    except KeyboardInterrupt:
        console.print("interrupted; the finished parts are written, and the same command goes on")
        sys.exit(130)


def _draw(part: str, loaded: Loaded, data: Path, folder: Path, console: Console) -> None:
    with Progress(console=console) as bar:
        row = bar.add_task(part, total=None)
        drawn.draw(
            part,
            loaded,
            data,
            folder,
            lambda what, done, total: bar.update(row, description=what, completed=done, total=total),
        )


def _measured(
    part: str, llm: LLM, data: Path, out: Path, limit: int, check_limit: int, console: Console
) -> tuple[dict[str, Any], dict[str, str]]:
    """The figures of a part and their conditions."""
    machine = machine_in_words()
    if part == "check":
        prompts = _texts(data, check_limit)
        conditions = {
            "check": f"bundled model, float32, {tasks.in_words(prompts)}, up to 128 new tokens, seed 0, "
            f"temperatures 0 and 1, each in batches of 1 and 4; {machine}."
        }
        kept = Kept(UNFINISHED / "check.json", conditions[part])
        return {part: exactness(llm, prompts, console, kept)}, conditions
    if part == "acceptance":
        prompts = _texts(data, limit)
        conditions = {
            "acceptance": f"bundled model, float32, {tasks.in_words(prompts)}, up to 128 new tokens, "
            "stopping at EOS, seed 1, one after another, with a drafter cache for each row of the table, prefill not "
            f"counted, every text equal to plain decoding's; {machine}."
        }
        kept = Kept(UNFINISHED / "acceptance.json", conditions[part])
        return {part: acceptance(llm, prompts, kept=kept)}, conditions
    if part == "rules":
        prompts = _texts(data, limit)
        conditions = {
            "rules": f"bundled model and its draft, float32, {tasks.in_words(prompts)}, up to 128 new tokens, "
            f"stopping at EOS, seed 1, chains of 4 and trees of at most 16 nodes and 4 levels; {machine}."
        }
        return {"rules": acceptance(llm, prompts, TEMPERATURES, configurations=RULES)}, conditions
    if part == "heads":
        prompts = _texts(data, limit)
        conditions = {
            "heads": f"bundled model and its head, float32, {tasks.in_words(prompts)}, up to 128 new tokens, stopping "
            f"at EOS, seed 1, at most 16 nodes, with a drafter cache for each row of the table; {machine}."
        }
        return {"heads": acceptance(llm, prompts, configurations=HEADS)}, conditions
    if part == "cascades":
        prompts = _texts(data, limit)
        conditions = {
            "cascades": f"bundled model and its draft, float32, {tasks.in_words(prompts)}, up to 128 new tokens, "
            "stopping at EOS, seed 1, one after another, with a drafter cache for each row of the table, every text "
            f"equal to plain decoding's; {machine}."
        }
        return {"cascades": acceptance(llm, prompts, configurations=CASCADES)}, conditions
    if part in TRAINED:
        return _trained(part, llm, _texts(data, limit), machine)
    if part == "relaxed":
        prompts = _texts(data, limit)
        conditions = {
            "relaxed": f"bundled model, float32, {tasks.in_words(prompts)}, up to 128 new tokens, stopping at EOS, "
            "seed 1, trees of 16 nodes of auto with a drafter cache for each row of the table, chains of up to 4 of "
            f"the bundled draft model; {machine}."
        }
        return {"relaxed": relaxed(llm, prompts)}, conditions
    if part == "overhead":
        target = target_135m()
        what = "random weights in the shapes of a 135M Llama, bfloat16, batch 1"
        conditions = {
            "overhead": f"{what}, medians of 60 steps; {machine}.",
            "cost_curve": f"{what}, 250 tokens of context, medians of 15 rounds; {machine}.",
        }
        curve = cost_curve(target, list(range(1, 251)), (1, 2, 4, 8, 16, 32, 64, 128))
        return {"overhead": overhead(target), "cost_curve": curve}, conditions
    if part == "memory":
        return {"memory": _memory()}, {"memory": f"Python {platform.python_version()}."}
    picture(llm, out.parent / "run.svg")
    readme = (out.parent.parent / "README.md").read_text(encoding="utf-8")
    return {"example": _printed(readme)}, {}


def machine_in_words() -> str:
    return (
        f"{processor()}, {torch.get_num_threads()} of them used; leapahead {__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )


def _trained(part: str, llm: LLM, prompts: dict[str, list[str]], machine: str) -> tuple[dict[str, Any], dict[str, str]]:
    """As `_measured`, of the parts that need trained models."""
    common = f"float32, {tasks.in_words(prompts)}, up to 128 new tokens, stopping at EOS"
    if part == "cllm-run":
        return {part: tuning()}, {}
    if part == "distilled":
        conditions = f"bundled model, {common}, seed 1; {machine}."
        return {part: distilled(llm, prompts)}, {part: conditions}
    if part == "parallel":
        conditions = f"bundled model, {common}, seed 1, chains of at most 5 tokens; {machine}."
        return {part: parallel(llm, prompts)}, {part: conditions}
    conditions = f"bundled model and the same tuned for Jacobi decoding, {common}, greedy; {machine}."
    return {part: tuned(llm, prompts)}, {part: conditions}


def _texts(data: Path, limit: int) -> dict[str, list[str]]:
    """Prompts of plain text by task."""
    return {task.name: task.texts for task in tasks.read(data, tasks.TEXTS, limit)}


def _memory(ngrams: int = 10_000, ngram: int = 5, keys: int = 1000) -> dict[str, int]:
    """Bytes that Python allocates for a pool of random n-grams; ids above 256, which are objects of their own."""
    rng = random.Random(0)
    tracemalloc.start()
    pool = NgramPool(ngram, ngrams // keys, ngrams)
    for number in range(ngrams):
        pool.add(1000 + number % keys, tuple(rng.randrange(1000, 32_000) for _ in range(ngram - 1)))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"ngrams": len(pool), "ngram": ngram, "keys": keys, "bytes": used}


def _printed(readme: str) -> str:
    """The output of the README's first Python example."""
    code = readme.split("```python\n")[1].split("```")[0]
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
