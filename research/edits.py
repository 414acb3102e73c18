"""`python -m research edits`: prompts with simulated predictions, for models that cannot edit text.

The prediction of a prompt is the text that the model itself gives, greedily, with every tenth word replaced: a
simulated edit, of which about nine tenths stay as they were. `leapahead bench --data FOLDER` reads the file.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from leapahead import LLM
from leapahead.bench import tasks
from leapahead.cli.command import Command

CHANGED = 10  # every so manyth word of a prediction is another one


def simulated(text: str) -> str:
    """A text with every tenth word replaced."""
    words = text.split(" ")
    words[CHANGED - 1 :: CHANGED] = ["changed"] * len(words[CHANGED - 1 :: CHANGED])
    return " ".join(words)


@click.command(cls=Command)
@click.option("-m", "--model", default="bundled", show_default=True, help="Its texts become the predictions.")
@click.option("--data", required=True, type=click.Path(exists=True, path_type=Path), help="Folder of humaneval.jsonl.")
@click.option("--count", type=click.IntRange(min=1), default=16, show_default=True, help="Prompts.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of a prediction."
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The file, such as edits/edits.jsonl.")
def main(model: str, data: Path, count: int, max_new_tokens: int, out: Path) -> None:
    """Write functions of HumanEval with predictions of how a model completes them."""
    (task,) = tasks.read(data, ["humaneval"], count)
    llm = LLM(None if model == "bundled" else model)
    results = llm.generate(task.texts, max_new_tokens=max_new_tokens, temperature=0)
    rows = [
        {"prompt": prompt, "prediction": simulated(result.text)}
        for prompt, result in zip(task.texts, results, strict=True)
        if result.text.strip()
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    click.echo(f"{out}: {len(rows)} prompts with predictions")
