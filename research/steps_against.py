"""`python -m research steps-against FOLDER`: the time of whole steps on the toy target, of two checkouts in turns.

FOLDER is another checkout, with its own compiled module beside its Python files. The steps are those of
`research.toy_overhead.whole_steps`. Each checkout has a process, and the two take turns of few steps each, so that both
see the same machine; several pairs of processes do so one after the other. First their drafts, the estimates of these
and their texts are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click

from leapahead.bench.conditions import conditions
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter, LeapaheadError
from research.command_parts import show

HERE = Path(__file__).resolve().parents[1]
STEPS, COLD = 8, 2  # of a turn; the first ones, for which memory comes back to the processor's cache, are not counted


class Worker:
    """A process of one checkout, see `research.steps_worker`.

    Raises:
        LeapaheadError: it has ended.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._read()

    def ask(self, line: str) -> Any:
        """The answer to a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise LeapaheadError("a checkout cannot run these steps; its error is above")


@contextmanager
def worker(folder: Path, *arguments: object) -> Iterator[Worker]:
    """A worker by the code of a checkout; BadParameter where the folder is none."""
    if not (folder / "src" / "leapahead").is_dir():
        raise BadParameter(f"{folder} is no checkout of leapahead, which has a folder src/leapahead; give another one")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder / "src"), str(folder)))}
    command = [sys.executable, str(HERE / "research" / "steps_worker.py"), *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=folder, text=True) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def compared(
    folders: Sequence[Path], batch: int, temperature: float, context: int, turns: int, pairs: int = 1
) -> dict[str, Any]:
    """One row: median microseconds a sequence of each checkout, and the ratio of the second to the first by turn.

    Args:
        folders: the two checkouts.
        batch, temperature, context: see `research.drafting.started`.
        turns: of each pair.
        pairs: of processes, one after the other: where its memory happens to lie makes one faster than another.
    """
    times: list[list[float]] = [[] for _ in folders]
    ratios, same = [], True
    for pair in range(pairs):
        with ExitStack() as stack:
            workers = [stack.enter_context(worker(each, batch, temperature, context)) for each in folders]
            if pair == 0:
                same = len({each.ask("texts 100") for each in workers}) == 1
            for turn in range(turns):
                found: dict[int, list[float]] = {}
                for index in (0, 1) if (pair + turn) % 2 == 0 else (1, 0):
                    found[index] = workers[index].ask(str(STEPS))[COLD:]
                    times[index] += found[index]
                ratios.append(median(found[1]) / median(found[0]))
    low, middle, high = quantiles(ratios, n=4)
    before, after = (round(median(each), 1) for each in times)
    row = {"batch": batch, "temperature": temperature, "before": before, "after": after}
    spread = {"ratio": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
    return {**row, **spread, "same": same}


@click.command(cls=Command)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--context", type=click.IntRange(min=800), default=8192, show_default=True, help="Tokens of the prompts.")
@click.option("--turns", type=click.IntRange(min=2), default=20, show_default=True, help="Turns of each pair.")
@click.option("--pairs", type=click.IntRange(min=1), default=3, show_default=True, help="Pairs of processes for a row.")
@click.option("--commit", default="", metavar="COMMIT", help="That of the other checkout, for the record.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Writes the rows and their conditions.")
def main(folder: Path, context: int, turns: int, pairs: int, commit: str, out: Path | None) -> None:
    """Compare the time of whole steps on the toy target with that of another checkout.

    Microseconds a sequence, without forward and choosing, of 16 nodes from the usual sources of auto.
    """
    folders = (folder.resolve(), HERE)
    rows = [
        compared(folders, batch, temperature, context, turns, pairs)
        for temperature in (0.0, 1.0)
        for batch in (1, 4, 16)
    ]
    show(list(rows[0]), [list(row.values()) for row in rows])
    if out is not None:
        told = conditions(context=context, turns=turns, pairs=pairs, other=commit)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"conditions": told, "rows": rows}, indent=1) + "\n", encoding="utf-8")
