"""`python -m research prompt-rows`: what the likeliest tokens after those of a prompt bring to drafts, and their price.

The recycling source may learn, beside what a step computes, from the forward that reads the prompt. That forward then
has the output layer for up to `PROMPT_ROWS` rows, and chooses the likeliest tokens of each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import click

from leapahead.api import LLM
from leapahead.bench.conditions import conditions
from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.cli.options import MODEL, all_of
from leapahead.core.stats import Stats
from leapahead.drafters.auto import Auto
from leapahead.models.base import Capture, KeepsPrefixes
from research.command_parts import DATA, length_option, loaded_prompts, show

NODES, TEMPERATURES = (4, 16), (0.0, 1.0)
COLUMNS = ("nodes", "temperature", "prompts", "length, read", "not read", "seconds of prompts, read", "not read")


class Read(Auto):
    """`auto` that learns from the forwards of prompts."""

    name: ClassVar[str] = "prompts-read"

    def capture_of(self, tokens: Sequence[int], owner: str) -> Capture:
        return self.capture


class Unread(Auto):
    """`auto` that does not."""

    name: ClassVar[str] = "prompts-unread"

    def capture_of(self, tokens: Sequence[int], owner: str) -> Capture:
        return replace(self.capture, top_k=0)


def measured(llm: LLM, prompts: Sequence[Any], temperature: float, nodes: int, max_new_tokens: int) -> dict[str, Any]:
    """Acceptance lengths, and seconds in which the prompts are read, of both in turns on each prompt."""
    kinds = (Read, Unread)
    total = {kind: Stats() for kind in kinds}
    for index, prompt in enumerate(prompts):
        for kind in kinds if index % 2 else kinds[::-1]:
            if isinstance(llm.target, KeepsPrefixes):
                llm.target.forget()  # a prompt that is kept is not read again
            result = llm.generate(
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=index,
                drafter=kind,
                drafter_options={"nodes": nodes},
            )
            total[kind] += result.stats
    return {
        "nodes": nodes,
        "temperature": temperature,
        "prompts": len(prompts),
        **{f"length_{kind.name}": round(total[kind].acceptance_length, 3) for kind in kinds},
        **{f"seconds_{kind.name}": round(total[kind].prefill_seconds, 3) for kind in kinds},
    }


@click.command(cls=Command)
@all_of(MODEL, DATA)
@length_option(64)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures as JSON.")
def main(max_new_tokens: int, out: Path | None, **values: Any) -> None:
    """Print acceptance lengths of auto with and without what the forwards of prompts would tell, and their time.

    Texts do not learn from each other: nothing is kept between them.
    """
    loaded, prompts, given = loaded_prompts(values, max_new_tokens)
    rows = []
    with LLM(loaded.target, drafter_cache=False) as llm, screen.progress("prompt-rows") as bar:
        for index, (temperature, nodes) in enumerate(product(TEMPERATURES, NODES)):
            bar(f"{nodes} nodes, temperature {temperature:g}", index, len(TEMPERATURES) * len(NODES))
            rows.append(measured(llm, prompts, temperature, nodes, max_new_tokens))
    found = {"figure": "prompt-rows", "rows": rows, "conditions": conditions(loaded.target, prompts=given)}
    show(COLUMNS, [list(row.values()) for row in rows])
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
