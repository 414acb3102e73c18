"""`python -m research curve`: T(n) of GGUF files for every n, under builds of llama.cpp and options, in turn.

Each pair of a file and a variant has a process of its own (`research.curve_worker`), since a process can load one build
of llama.cpp only. The variants of a file take turns, round by round, so that a change of the machine's speed affects
all of them alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from leapahead.bench.conditions import Data, conditions
from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.integrations.gguf import KINDS, export_gguf
from research.command_parts import files_of, out_option, prefix_of, show, write

CONTEXT, MOST = 300, 16  # tokens of context; greatest number of rows
SHOWN = (2, 3, 4, 5, 6, 7, 8, 12, 16)
SWITCHES = {"flash_attn": "flash_attn", "repack": "use_extra_bufts"}


Tell = Callable[[int, int], None]  # rounds done, rounds in all


class Variant(NamedTuple):
    """How a file is run.

    Attributes:
        name: for tables.
        build: folder with another `llama_cpp`; None for the installed one.
        options: of `LlamaCppOptions`.
    """

    name: str
    build: Path | None
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Reads "NAME:build=FOLDER,threads=N,flash_attn=on|off,repack=on|off".

        Raises:
            BadParameter: something else.
        """
        name, _, given = text.partition(":")
        build, options = None, dict[str, Any]()
        for pair in filter(None, given.split(",")):
            key, _, value = pair.partition("=")
            if key == "build" and (Path(value) / "llama_cpp").is_dir():
                build = Path(value).resolve()
            elif key == "threads" and value.isdecimal():
                options["n_threads"] = int(value)
            elif key in SWITCHES and value in ("on", "off"):
                options[SWITCHES[key]] = value == "on"
            else:
                raise BadParameter(
                    f"--variant {text} is not possible because of {pair!r}: give build=FOLDER, where FOLDER has the "
                    "package llama_cpp, threads=N, flash_attn=on or off, repack=on or off"
                )
        return cls(name, build, options)


class Worker:
    """A process for one file and one variant.

    Args:
        file: GGUF.
        variant: how it is run.
        asked: `context`, `sizes` and `repeats` of every round.

    Attributes:
        about: build of llama.cpp, type of the file, threads.

    Raises:
        LeapaheadError: the file cannot be loaded, or the process ended.
    """

    def __init__(self, file: Path, variant: Variant, asked: dict[str, Any]) -> None:
        self._what = f"{file} under {variant.name}"
        paths = [*([str(variant.build)] if variant.build else []), *sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "research.curve_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.about = self._ask({"file": str(file), "options": variant.options, **asked})

    def round(self) -> dict[str, Any]:
        """One round's milliseconds by size, and tokens of the prompt per second."""
        return self._ask({})

    def close(self) -> None:
        """Ends the process."""
        with suppress(OSError):
            self._process.communicate()

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        text = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(text) if text else {"error": "its process ended"}
        if "error" in found:
            self.close()
            raise LeapaheadError(f"{self._what} could not be measured: {found['error']}")
        return found


@click.command(cls=Command)
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--types", metavar="TYPE,...", help=f"Types to which folders are exported: {', '.join(KINDS)}.")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    default=("installed",),
    show_default=True,
    metavar="NAME:KEY=VALUE,...",
    help="Keys: build (a folder with another llama_cpp), threads, flash_attn (on, off), repack (on, off).",
)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Measured rounds.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Forwards of a size a round.")
@out_option("curve")
def main(
    models: tuple[Path, ...], types: str | None, variants: tuple[str, ...], rounds: int, repeats: int, out: Path
) -> None:
    """Draw T(n) of GGUF files for every n from 1 to 16, under builds and options of llama.cpp.

    Each of MODELS is a GGUF file, or a folder that is exported to each of --types first.
    """
    prefix, parsed = prefix_of(out), [Variant.parse(text) for text in variants]
    asked = {"context": CONTEXT, "sizes": list(range(1, MOST + 1)), "repeats": repeats}
    found: Data = {
        "figure": "curve",
        "conditions": conditions(rounds=rounds, context=CONTEXT, repeats=repeats),
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="leapahead-curve-") as work, screen.progress("curve") as bar:
        files = exported(models, types, Path(work), bar)
        for number, file in enumerate(files):
            tell = partial(bar, f"{file.stem}, {number + 1} of {len(files)}")
            found["rows"] += measured(file, parsed, asked, rounds, tell)
            files_of(prefix)[0].write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    _show(found["rows"])
    write(found, prefix)


def exported(models: Sequence[Path], types: str | None, work: Path, bar: screen.Bar) -> list[Path]:
    """The GGUF files: those that were named, and those of the folders in each type."""
    files = []
    for model in models:
        if not model.is_dir():
            files.append(model)
            continue
        if types is None:
            raise BadParameter(f"{model} is a folder: say to which types it is exported with --types")
        for kind in types.split(","):
            files.append(export_gguf(model, work / f"{model.name}-{kind}.gguf", kind, progress=bar).path)
    return files


def measured(file: Path, variants: Sequence[Variant], asked: dict[str, Any], rounds: int, tell: Tell) -> list[Data]:
    """A row for each variant; they take turns."""
    with ExitStack() as opened:
        workers = []
        for variant in variants:
            workers.append(Worker(file, variant, asked))
            opened.callback(workers[-1].close)
        seen: list[list[dict[str, Any]]] = [[] for _ in workers]
        for turn in range(rounds + 1):
            tell(turn, rounds + 1)
            order = list(zip(workers, seen, strict=True))
            for worker, results in order if turn % 2 else order[::-1]:
                results.append(worker.round())
        return [
            {
                "file": file.stem,
                "variant": variant.name,
                "options": variant.options,
                **worker.about,
                **_row(results[1:]),
            }
            for variant, worker, results in zip(variants, workers, seen, strict=True)
        ]


def _row(results: Sequence[dict[str, Any]]) -> Data:
    """Medians and quartiles over the rounds; a round counts with the median of its forwards."""
    sizes = list(results[0]["milliseconds"])
    sizes = sorted(sizes, key=int)
    times = {n: np.array([np.median(each["milliseconds"][n]) for each in results]) for n in sizes}
    return {
        "prompt": _quartiles([each["prompt"] for each in results]),
        "milliseconds": {n: _quartiles(times[n]) for n in sizes},
        "relative": {n: _quartiles(times[n] / times[sizes[0]]) for n in sizes},
    }


def _quartiles(values: Any) -> dict[str, float]:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def _show(rows: Sequence[Data]) -> None:
    shown = [
        (
            row["file"],
            row["variant"],
            f"{row['prompt']['median']:.0f}",
            f"{row['milliseconds']['1']['median']:.1f}",
            *(f"{row['relative'][str(n)]['median']:.2f}" for n in SHOWN),
        )
        for row in rows
    ]
    show(("file", "variant", "prompt tokens/s", "T(1) ms", *(f"T({n})" for n in SHOWN)), shown)
