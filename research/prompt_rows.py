"""`python -m research prompt-rows`: what the likeliest tokens after those of a prompt bring to drafts, and their price.

The recycling source may learn, beside what a step computes, from the forward that reads the prompt. That forward then
has the output layer for up to `PROMPT_ROWS` rows, and chooses the likeliest tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import click

from leapahead.api import LLM
from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.cli.options import MODEL, all_of
from leapahead.core.stats import Stats
from leapahead.drafters.auto import Auto
from leapahead.models.base import Capture, KeepsPrefixes
from research.command_parts import DATA, length_option, loaded_prompts, show

NODES, TEMPERATURES = (4, 16), (0.0, 1.0)
COLUMNS = ("nodes", "temperature", "prompts", "length, read", "not read", "seconds of prompts, read", "not read")


class Unread(Auto):
    """`auto` that learns nothing from the forwards of prompts, also where the number of nodes is fixed."""

    name: ClassVar[str] = "prompts-unread"

    def capture_of(self, tokens: Sequence[int], owner: str) -> Capture:
        return replace(self.capture, top_k=0)


def measured(llm: LLM, prompts: Sequence[Any], temperature: float, nodes: int, max_new_tokens: int) -> list[float]:
    """A line of the table: of both, which take turns on each prompt."""
    kinds = (Auto, Unread)
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
    lengths = [round(total[kind].acceptance_length, 3) for kind in kinds]
    seconds = [round(total[kind].prefill_seconds, 3) for kind in kinds]
    return [nodes, temperature, len(prompts), *lengths, *seconds]


@click.command(cls=Command)
@all_of(MODEL, DATA)
@length_option(64)
def main(max_new_tokens: int, **values: Any) -> None:
    """Print acceptance lengths of auto with and without what the forwards of prompts would tell, and their time.

    Texts do not learn from each other: nothing is kept between them.
    """
    loaded, prompts, _ = loaded_prompts(values, max_new_tokens)
    rows = []
    with LLM(loaded.target, drafter_cache=False) as llm, screen.progress("prompt-rows") as bar:
        for index, (temperature, nodes) in enumerate(product(TEMPERATURES, NODES)):
            bar(f"{nodes} nodes, temperature {temperature:g}", index, len(TEMPERATURES) * len(NODES))
            rows.append(measured(llm, prompts, temperature, nodes, max_new_tokens))
    show(COLUMNS, rows)
