"""`python -m research busy`: what `auto` makes of a latency profile that was measured beside other busy processes.

1. In a fresh cache directory and beside busy processes, a first process decodes some texts with `auto`, and ends.
2. In another one, the same is done on the idle machine.
3. On the idle machine, a process with each of the two directories decodes the texts plainly and with `auto`, all four
   in random order for each text. Both keep correcting their profiles, as they do for users.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.progress import track

from leapahead.api import LLM
from leapahead.bench.conditions import conditions
from leapahead.cli.command import Command
from leapahead.cli.options import MODEL, all_of, model_arguments
from leapahead.core.errors import LeapaheadError
from leapahead.models.base import KeepsPrefixes
from leapahead.planner.profile import LatencyProfiles
from research.command_parts import DATA, length_option, loaded_prompts, show

BEFORE = ("busy", "idle")  # how the machine was when the latency profile was measured
DRAFTERS = ("plain", "auto")


@click.command(cls=Command)
@all_of(MODEL, DATA)
@length_option(48)
@click.option("-t", "--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--processes", type=click.IntRange(min=1), default=3, show_default=True, help="Busy processes beside it.")
@click.option("--first", type=click.IntRange(min=1), default=2, show_default=True, help="Texts of the first process.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def main(
    max_new_tokens: int,
    temperature: float,
    processes: int,
    first: int,
    out: Path | None,
    **values: Any,
) -> None:
    """Compare auto after a first run on a busy machine with auto after one on an idle machine."""
    model = model_arguments(dict(values))
    loaded, texts, words = loaded_prompts(values, max_new_tokens)
    described = conditions(loaded.target, prompts=words, max_new_tokens=max_new_tokens, temperature=temperature)
    believed: dict[str, Any] = {}
    del loaded
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": 1, "ignore_eos": True}
    with ExitStack() as opened:
        folders = {name: opened.enter_context(tempfile.TemporaryDirectory()) for name in BEFORE}
        for name in BEFORE:
            with busy(processes if name == "busy" else 0), decoding(folders[name], model) as ask:
                for tokens in track(texts[:first], description=f"first texts, machine {name}"):
                    ask(tokens, drafter="auto", **options)
                believed[name] = ask(None)
        asks = {name: opened.enter_context(decoding(folders[name], model)) for name in BEFORE}
        rows = []
        for index, tokens in enumerate(track(texts, description="idle machine")):
            sides = list(product(BEFORE, DRAFTERS))
            random.Random(index).shuffle(sides)
            found = {(name, drafter): asks[name](tokens, drafter=drafter, **options) for name, drafter in sides}
            if len({tuple(each["tokens"]) for each in found.values()}) > 1:
                click.echo(f"text {index}: the texts differ; see `leapahead check` for ties", err=True)
            rows.append({f"{name} {drafter}": each["rate"] for (name, drafter), each in found.items()})
    ratios = {name: [row[f"{name} auto"] / row[f"{name} plain"] for row in rows] for name in BEFORE}
    show(
        ("profile measured", "auto / plain: first text", "median", "lowest", "highest"),
        [
            (name, *(f"{value:.3f}" for value in (some[0], median(some), min(some), max(some))))
            for name, some in ratios.items()
        ],
    )
    if out is not None:
        content = {"conditions": described, "processes": processes, "profiles": believed, "tokens_per_second": rows}
        out.write_text(json.dumps({**content, "ratios": ratios}, indent=1) + "\n", encoding="utf-8")


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes beside this one that do nothing but compute."""
    spinning = [get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.terminate()
            process.join()


def _spin() -> None:
    while True:
        pass


@contextmanager
def decoding(folder: str, model: dict[str, Any]) -> Iterator[Any]:
    """A process with its own LLM and cache directory; gives a function that decodes one text in it."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(there, folder, model), daemon=True)
    process.start()

    def ask(tokens: list[int] | None, **options: Any) -> Any:
        try:
            here.send((tokens, options))
            found = here.recv()
        except (EOFError, BrokenPipeError):
            raise LeapaheadError("the process that decodes has ended; its own message is above") from None
        if isinstance(found, str):
            raise LeapaheadError(found)
        return found

    try:
        yield ask
    finally:
        process.terminate()
        process.join()


def _serve(connection: Connection, folder: str, model: dict[str, Any]) -> None:
    """Answers each (prompt, options) by tokens and tokens per second, and None by the stored latency profile."""
    os.environ["LEAPAHEAD_CACHE"] = folder
    warnings.simplefilter("ignore")
    llm = LLM(drafter="auto", drafter_cache=False, **model)
    while True:
        tokens, options = connection.recv()
        try:
            if tokens is None:
                connection.send(LatencyProfiles(llm.target.info).profile(1).as_dict())
                continue
            if isinstance(llm.target, KeepsPrefixes):
                llm.target.forget()
            result = llm.generate(tokens, **options)
            connection.send({"tokens": list(result.tokens), "rate": result.stats.tokens_per_second})
        except LeapaheadError as error:
            connection.send(str(error))
