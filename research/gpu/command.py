"""`python -m research gpu`: runs the cells, writes each as soon as it is done, then the report and its figures."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch

from leapahead.bench.conditions import Data, conditions
from leapahead.bench.plots import require
from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter, LeapaheadError, first_line
from leapahead.models.transformers.devices import checked_device
from research.gpu import report
from research.gpu.cells import Cell, cells
from research.gpu.lab import TINY, Lab, Settings
from research.gpu.timing import Clock
from research.standin import COSTS, DTYPES

LLAMAS = [name for name, shapes in COSTS.items() if not shapes.recurrent]


@click.command(cls=Command)
@click.option(
    "--cost",
    "costs",
    multiple=True,
    metavar="COST",
    help=f"{', '.join(LLAMAS)}, or {TINY}: the bundled model itself; may be repeated.  [default: 7b, 1b]",
)
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, cpu, ..., or auto.")
@click.option("--dtype", default="bfloat16", show_default=True, help="float32 or bfloat16.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    default=8.5,
    show_default=True,
    help="Cells that would take longer are left out.",
)
@click.option(
    "--cell",
    "names",
    multiple=True,
    metavar="NAME",
    help="Only this cell, which may take all of the time; may be repeated.",
)
@click.option("--resume", is_flag=True, help="Keep the cells that were measured.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/gpu"),
    show_default=True,
    metavar="DIR",
    help="Folder for the cells, the report and its figures.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of humaneval.jsonl and gsm8k_test.jsonl.  [default: the bundled prompts]",
)
@click.option("--prompts", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts of each task.")
@click.option("--max-new-tokens", type=click.IntRange(min=4), default=64, show_default=True, help="Tokens of a text.")
@click.option(
    "--exact-tokens",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="Tokens to compare in exact mode.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=15, show_default=True, help="Repetitions of a timed operation."
)
@click.option("--vllm-python", metavar="FILE", help="The Python of an environment with vLLM.")
def main(
    costs: tuple[str, ...], minutes: float, names: tuple[str, ...], resume: bool, out: Path, **values: Any
) -> None:
    """Measure decoding on a GPU: bandwidth, captured and other forwards, speculation, exact mode, attention, peers.

    The models are stand-ins with the text of the bundled model at the cost of published ones, built in the device's
    memory. Each cell is written when it is done. What did not fit into the time is measured by the same command with
    --resume; without it, and without --cell, what an earlier run has found is removed first. What cannot be measured
    here is left out with its reason.
    """
    require()
    settings = _settings(**values)
    labs = [Lab(cost, settings) for cost in _checked(costs)]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadParameter(f"--out {out} cannot be written: {error.strerror or error}") from None
    _begin(out, labs, names, resume)
    clock = Clock(60 * minutes)
    late = 0
    for lab in labs:
        chosen = _chosen(lab, names)
        for cell in chosen:
            seconds = clock.left if names else cell.seconds
            late += _measured(lab, cell, out / lab.cost / f"{cell.name}.json", clock, seconds, resume)
        lab.release()
    written = report.write(out)
    click.echo(f"written: {', '.join(map(str, written))}")
    if late:
        click.echo(f"{late} cells did not fit into {minutes:g} minutes; --resume measures them")


def _settings(device: str, dtype: str, data: Path | None, **more: Any) -> Settings:
    if dtype not in DTYPES:
        raise BadParameter(f"--dtype {dtype} is not possible; there are {', '.join(DTYPES)}")
    if data is not None and not data.is_dir():
        raise BadParameter(f"there is no folder {str(data)!r} of prompts")
    found = checked_device(device)
    if not isinstance(found, torch.device) or found.type not in ("cuda", "cpu"):
        raise BadParameter(f"--device {device} is not possible here: this measures one CUDA device, or the CPU")
    return Settings(found, dtype, data, **more)


def _checked(costs: tuple[str, ...]) -> list[str]:
    known = [*LLAMAS, TINY]
    if wrong := [cost for cost in costs if cost not in known]:
        raise BadParameter(f"--cost {wrong[0]} is not possible; there are {', '.join(known)}")
    return list(dict.fromkeys(costs or ("7b", "1b")))


def _chosen(lab: Lab, names: tuple[str, ...]) -> list[Cell]:
    every = list(cells(lab))
    if wrong := [name for name in names if name not in {cell.name for cell in every}]:
        raise BadParameter(f"there is no cell {wrong[0]!r}; there are {', '.join(cell.name for cell in every)}")
    return [cell for cell in every if not names or cell.name in names]


def _measured(lab: Lab, cell: Cell, file: Path, clock: Clock, seconds: float, resume: bool) -> bool:
    """Measures a cell and writes its file; true where too little time is left."""
    if resume and file.is_file() and "refused" not in report.read(file):  # for want of time, maybe
        return False
    if clock.left <= min(seconds, cell.seconds) / 2:
        return True
    began = perf_counter()
    with screen.progress(f"{lab.cost}: {cell.what}") as lab.progress:
        found = _run(lab, cell, clock.part(seconds))
    found |= {"cell": cell.name, "cost": lab.cost, "seconds": round(perf_counter() - began, 2)}
    found["conditions"] = conditions(device=str(lab.device), dtype=lab.settings.dtype)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise LeapaheadError(f"{file} cannot be written: {error.strerror or error}") from None
    click.echo(f"{lab.cost} {cell.name}: {found.get('refused', 'done')} ({found['seconds']:.1f} s)")
    return False


def _run(lab: Lab, cell: Cell, clock: Clock) -> Data:
    """What the cell found, or why there is nothing. An error of one cell does not end the others."""
    try:
        return cell.measure(lab, clock)
    except LeapaheadError as error:
        return {"refused": first_line(error)}
    except Exception as error:  # of torch, of its compiler, of Transformers: what they raise is not known beforehand
        return {"refused": f"{type(error).__name__}: {first_line(error)}", "failed": True}


def _begin(out: Path, labs: list[Lab], names: tuple[str, ...], resume: bool) -> None:
    """Removes the cells of an earlier run that this one measures anew, unless it resumes it or has cells by name.

    Raises:
        BadParameter: other cells are another device's, or another commit's if they are resumed: they are not put
            beside those of this run.
    """
    now = conditions(device=str(labs[0].device), dtype=labs[0].settings.dtype)
    costs = set() if names or resume else {lab.cost for lab in labs}
    every = {file: report.read(file)["conditions"] for file in sorted(out.glob("*/*.json"))}
    old = [file for file in every if file.parent.name in costs]
    for (file, found), what in product(every.items(), ("gpu", "device", "dtype", *(["commit"] if resume else []))):
        # The first cells that are written may change the checkout.
        before, present = (str(each.get(what)).removesuffix("-dirty") for each in (found, now))
        if file not in old and before != present:
            raise BadParameter(
                f"{file} was measured with {what} {before}, and this run has {present}; name another --out"
            )
    for file in old:
        file.unlink()
