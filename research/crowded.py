"""`python -m research crowded`: decoding beside busy programs, with OpenMP threads that may sleep or always spin.

Two processes decode each text, plainly and with `auto`: one as it is for users (`leapahead.core.openmp`), and one in
which GOMP_SPINCOUNT has GNU's default, so that threads which wait for others always spin. All four take turns, first on
the machine as it is and then beside busy processes.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click
from rich.progress import track

from leapahead.bench.conditions import conditions
from leapahead.cli.command import Command
from leapahead.cli.options import MODEL, all_of, model_arguments
from research.busy import DRAFTERS, busy, decoding
from research.command_parts import DATA, length_option, loaded_prompts, show

SPINS = "300000"  # GNU's default, about three milliseconds or more
WAITING = ("adapts", "spins")


@click.command(cls=Command)
@all_of(MODEL, DATA)
@length_option(48)
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Busy processes beside it.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def main(max_new_tokens: int, processes: int, out: Path | None, **values: Any) -> None:
    """Compare decoding beside busy programs with threads that sleep or spin."""
    model = model_arguments(dict(values))
    loaded, texts, words = loaded_prompts(values, max_new_tokens)
    described = conditions(loaded.target, prompts=words, max_new_tokens=max_new_tokens, temperature=0.0)
    del loaded
    options = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "seed": 1, "ignore_eos": True}
    rows = []
    with ExitStack() as opened:
        asks = {}
        for waiting in WAITING:
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            with patch.dict(os.environ, {"GOMP_SPINCOUNT": SPINS} if waiting == "spins" else {}):
                asks[waiting] = opened.enter_context(decoding(folder, model))
        for count in (0, processes):
            with busy(count):
                for index, tokens in enumerate(track(texts, description=f"beside {count} busy processes")):
                    sides = list(product(WAITING, DRAFTERS))
                    random.Random(index).shuffle(sides)
                    for waiting, drafter in sides:
                        rate = asks[waiting](tokens, drafter=drafter, **options)["rate"]
                        rows.append(
                            {"busy": count, "text": index, "threads": waiting, "drafter": drafter, "rate": rate}
                        )
    table = []
    for count, waiting, drafter in product((0, processes), WAITING, DRAFTERS):
        rates = [
            row["rate"] for row in rows if (row["busy"], row["threads"], row["drafter"]) == (count, waiting, drafter)
        ]
        table.append(
            (str(count), waiting, drafter, *(f"{each:.1f}" for each in (median(rates), min(rates), max(rates))))
        )
    show(("busy processes", "threads", "drafter", "tokens/s, median", "lowest", "highest"), table)
    if out is not None:
        content = {"conditions": described, "processes": processes, "rows": rows}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
