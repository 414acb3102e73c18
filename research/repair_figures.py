"""`python -m research repair-acceptance`: acceptance lengths on the encoder-decoder model that repairs code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import torch
import transformers

from leapahead.api import LLM
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter
from research.acceptance import Compared, acceptance
from research.figures import machine_in_words
from research.train.repair import held_out

TASK = "code repair"
CONFIGURATIONS: list[Compared] = [
    ("plain", "plain", {}),
    ("jacobi, pj", "jacobi", {"variant": "pj"}),
    ("jacobi, pgj (8)", "jacobi", {"variant": "pgj"}),
    ("jacobi, hgj (8)", "jacobi", {"variant": "hgj"}),
    ("jacobi, sliding (8)", "jacobi", {}),
    ("lookahead (7, 5, 7)", "lookahead", {"window": 7, "ngram": 5, "guesses": 7}),
    ("prompt_lookup (10)", "prompt_lookup", {}),
    ("suffix (16)", "suffix", {"nodes": 16}),
    ("recycling (16)", "recycling", {"nodes": 16}),
    ("auto (16)", "auto", {"nodes": 16}),
]


@click.command(cls=Command)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    default=Path("build/repair/model"),
    show_default=True,
    help="Folder that `research repair` has written.",
)
@click.option("--limit", type=click.IntRange(min=1), default=40, show_default=True, help="Held-out examples.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("docs/encoder-decoder.json"),
    show_default=True,
    help="File of the figures.",
)
def main(model: Path, limit: int, out: Path) -> None:
    """Measure acceptance lengths on damaged lines of held-out files, with the model of `python -m research repair`."""
    if not (model / "config.json").is_file():
        raise BadParameter(f"there is no {model}; run `python -m research repair` first")
    llm = LLM(str(model), dtype="float32", drafter="plain", drafter_cache=False)
    examples = held_out(limit)
    rows = acceptance(llm, {TASK: [damaged for damaged, _ in examples]}, configurations=CONFIGURATIONS)
    texts = llm.generate([damaged for damaged, _ in examples], max_new_tokens=128)
    repaired = sum(text.text == sound for text, (_, sound) in zip(texts, examples, strict=True))
    state = json.loads((model.parent / "work" / "repair.json").read_text(encoding="utf-8"))
    size = sum(each.numel() for each in llm.target.model.parameters())  # type: ignore[attr-defined]
    found: dict[str, Any] = {
        "conditions": f"T5 of {size / 1e6:.1f} million parameters, trained by `python -m research repair` for "
        f"{state['step']} steps in {state['seconds'] / 60:.1f} minutes of one core, which restores {repaired} of these "
        f"{len(examples)} texts exactly when decoding greedily; float32, {len(examples)} damaged pieces of held-out "
        "files, up to 128 new tokens, stopping at EOS, seed 1, one after another, with a drafter cache for each row of "
        f"the table; {machine_in_words()}.",
        "repaired": repaired,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": rows,
    }
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    click.echo(f"{out}: {len(rows)} rows, {repaired} of {len(examples)} texts restored")
