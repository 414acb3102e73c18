"""Every measured number of README and docs, in one command: `make figures`, or `python -m leapahead.lab.figures`."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console

from leapahead import __version__
from leapahead.generate import LLM
from leapahead.lab import tasks
from leapahead.lab.acceptance import acceptance
from leapahead.lab.conditions import cpu
from leapahead.lab.exactness import exactness
from leapahead.lab.overhead import cost_curve, overhead, target_135m
from leapahead.lab.picture import picture

PARTS = ("check", "acceptance", "overhead", "example")


@click.command()
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="A JSON file, renewed.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this; the rest stays as it is.")
@click.option("--limit", type=int, default=40, show_default=True, help="Prompts of each task.")
@click.option("--check-limit", type=int, default=30, show_default=True, help="The same, of the check.")
def main(data: Path, out: Path, parts: tuple[str, ...], limit: int, check_limit: int) -> None:
    """Measure the bundled model and the cost of a step, and write the figures with their conditions."""
    console = Console(stderr=True)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"conditions": {}}
    prompts, checked = tasks.load(data, limit), tasks.load(data, check_limit)
    machine = (
        f"{cpu()}, {torch.get_num_threads()} of them used; leapahead {__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )
    llm = LLM(dtype="float32")

    def save(**values: Any) -> None:
        conditions = values.pop("conditions")
        found.update(values)
        found["conditions"].update(conditions)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for part in parts or PARTS:
        console.rule(part)
        if part == "check":
            rows = exactness(llm, checked, console)
            save(
                check=rows,
                conditions={
                    "check": f"bundled model, float32, {_counts(checked)} prompts, up to 128 new tokens, "
                    f"seed 0; {machine}."
                },
            )
        elif part == "acceptance":
            save(
                acceptance=acceptance(llm, prompts),
                conditions={
                    "acceptance": f"bundled model, float32, {_counts(prompts)} prompts, up to 128 new tokens, "
                    f"stopping at EOS, seed 1, prefill not counted, every text equal to plain decoding's; {machine}."
                },
            )
        elif part == "overhead":
            target = target_135m()
            words = list(range(1, 251))
            rows = overhead(target)
            curve = cost_curve(target, words, (1, 2, 4, 8, 16, 32, 64, 128))
            what = "random weights in the shapes of a 135M Llama, bfloat16, batch 1"
            save(
                overhead=rows,
                cost_curve=curve,
                conditions={
                    "overhead": f"{what}, medians of 60 steps; {machine}.",
                    "cost_curve": f"{what}, 250 tokens of context, medians of 15 rounds; {machine}.",
                },
            )
        else:
            picture(llm, out.parent / "run.svg")
            readme = (out.parent.parent / "README.md").read_text(encoding="utf-8")
            save(example=_printed(readme), conditions={})


def _counts(prompts: dict[str, list[str]]) -> str:
    return " and ".join(f"{len(texts)} {task}" for task, texts in prompts.items())


def _printed(readme: str) -> str:
    """What the README's first Python example prints."""
    code = readme.split("```python\n")[1].split("```")[0]
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
