"""`python -m research crowded-loading`: how long a model takes to load beside busy programs.

Each loading is a process of its own, as of a user's command, whose OpenMP threads may sleep (as they do for users,
`leapahead.core.openmp`) or always spin (GOMP_SPINCOUNT with GNU's default). The two take turns.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.progress import track

from leapahead.bench.conditions import conditions
from leapahead.cli.command import Command
from leapahead.core.parameters import within
from leapahead.models import loading
from research.busy import busy
from research.command_parts import show
from research.crowded import SPINS, WAITING

LOAD = """
import sys
from time import perf_counter
from leapahead import LLM
name = sys.argv[1]
if name.endswith(".gguf"):
    import llama_cpp
else:
    import transformers
began = perf_counter()
LLM(name)
print(perf_counter() - began)
"""


@click.command(cls=Command)
@click.option(
    "-m", "--model", "models", multiple=True, default=("bundled",), show_default=True, help="A model; may be repeated."
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Loadings of each kind.")
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Busy processes beside it.")
@click.option("--limit", type=float, default=60.0, show_default=True, help="Seconds after which a loading is ended.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def main(models: tuple[str, ...], rounds: int, processes: int, limit: float, out: Path | None) -> None:
    """Compare the loading of models beside busy programs with threads that sleep or spin."""
    within("limit", limit, 0.1, 86400, "a number of seconds from 0.1 to 86400")
    described = conditions(loading.load(models[0]).target, rounds=rounds, limit=limit)
    rows: list[dict[str, Any]] = []
    for count in (0, processes):
        with busy(count):
            sides = list(product(range(rounds), models, WAITING))
            random.Random(0).shuffle(sides)
            for _, model, waiting in track(sides, description=f"beside {count} busy processes"):
                seconds = _loading(model, waiting, limit)
                rows.append({"busy": count, "model": Path(model).name, "threads": waiting, "seconds": seconds})
    table = []
    for count, name, waiting in product((0, processes), (Path(each).name for each in models), WAITING):
        some = [row["seconds"] for row in rows if (row["busy"], row["model"], row["threads"]) == (count, name, waiting)]
        table.append((name, str(count), waiting, *(f"{each:.1f}" for each in (median(some), min(some), max(some)))))
    show(("model", "busy processes", "threads", "seconds, median", "lowest", "highest"), table)
    if out is not None:
        content = {"conditions": described, "processes": processes, "rows": rows}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _loading(model: str, waiting: str, limit: float) -> float:
    """Seconds that a new process takes to load a model, without its imports; `limit` if it takes longer."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "LEAPAHEAD_CACHE": folder,
            **({"GOMP_SPINCOUNT": SPINS} if waiting == "spins" else {}),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-c", LOAD, model], env=environment, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return limit
    if done.returncode:
        raise click.ClickException(f"{model} could not be loaded: {done.stderr.strip().splitlines()[-1]}")
    return round(float(done.stdout.split()[-1]), 2)
