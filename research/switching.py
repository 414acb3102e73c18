"""`python -m research switching`: what a forward costs after one of the same size, and after one of another size."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click

from leapahead.bench.conditions import conditions
from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models import loading
from leapahead.models.base import Session, Target, read_prompt
from research.command_parts import show

SIZES = (1, 4, 8, 16, 32)  # nodes of a step
CONTEXT, REPEATS, UNCOUNTED = 300, 12, 2  # tokens; forwards of one size in a row, of which the first are not counted


def measured(target: Target, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a step by its nodes, in a row; and of one and eight nodes that take turns."""
    tokens = [(1 + 7 * index) % target.info.vocab_size for index in range(CONTEXT + max(SIZES))]
    same: dict[int, list[float]] = {size: [] for size in SIZES}
    turns: dict[int, list[float]] = {1: [], 8: []}
    with target.lock, closing(target.open(tokens[:CONTEXT], SamplingParams())) as session:
        read_prompt(target, session)
        for _ in range(rounds):
            for size in SIZES:
                same[size] += [_step(target, session, tokens, size) for _ in range(REPEATS)][UNCOUNTED:]
            for _ in range(REPEATS):
                for size, times in turns.items():
                    times.append(_step(target, session, tokens, size))
    in_row, in_turns = ({n: median(times) for n, times in each.items()} for each in (same, turns))
    return {"milliseconds": in_row, "in_turns": in_turns}


def _step(target: Target, session: Session, tokens: list[int], size: int) -> float:
    tree = TokenTree.chain(tokens[CONTEXT - 1], tokens[CONTEXT : CONTEXT + size - 1])
    began = perf_counter()
    _ = target.step([session], [tree])[0][0]
    return 1e3 * (perf_counter() - began)


@click.command(cls=Command)
@click.argument("models", nargs=-1, required=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Each measures every size.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(models: tuple[str, ...], rounds: int, out: Path | None) -> None:
    """Print the milliseconds of steps of several sizes, after steps of the same size and of another.

    Chains over 300 tokens; MODELS are what `leapahead generate -m` takes.
    """
    found: dict[str, Any] = {"figure": "switching", "rows": []}
    for name in models:
        with screen.loading(name):
            target = loading.load(name).target
        found["rows"].append({"model": Path(name).name, **measured(target, rounds)})
        found["conditions"] = conditions(target, context=CONTEXT, rounds=rounds)
    show(list(COLUMNS), [cells(row) for row in found["rows"]])
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


COLUMNS = ("model", "one token, ms", *(f"{n} nodes" for n in SIZES[1:]), "in turns: one, ms", "eight, ms")


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table: sizes in units of one token."""
    same, turns = ({int(n): ms for n, ms in row[name].items()} for name in ("milliseconds", "in_turns"))
    return [
        row["model"],
        f"{same[1]:.1f}",
        *(f"{same[n] / same[1]:.2f}" for n in SIZES[1:]),
        *(f"{turns[n]:.1f}" for n in (1, 8)),
    ]
