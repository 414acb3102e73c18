"""What the commands that train have in common: options, the command line for the model card, interrupts, the result."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.exceptions import Exit

from leapahead.api import LLM
from leapahead.bench import plots, tasks
from leapahead.cli import screen, typed
from leapahead.cli.command import INTERRUPTED, option
from leapahead.cli.options import FILE_OF_PROMPTS, Option
from leapahead.cli.screen import Console
from leapahead.cli.typed import Finite, HomePath
from leapahead.core import openmp
from leapahead.core.errors import BadParameter, counted, needing
from leapahead.training.settings import CLLM, SCHEDULES, Folder, RunSettings

if TYPE_CHECKING:
    from leapahead.training.evaluate import Evaluation
    from leapahead.training.loop import Watch
    from leapahead.training.run import Trained

Result = TypeVar("Result", bound="Trained")
FILE = HomePath(path_type=Path)
TEXTS, TRAINING = "Text options", "Training options"
AT_LEAST_ONE = click.IntRange(min=1)
ABOVE_0 = Finite(min=0, min_open=True)

PROMPTS: tuple[Option, ...] = (
    option(
        "--data",
        type=FILE,
        argument="data",
        metavar="FILE",
        group=TEXTS,
        help=f"Prompts: {FILE_OF_PROMPTS}.",
    ),
    option(
        "--texts",
        type=FILE,
        argument="texts",
        metavar="FILE",
        group=TEXTS,
        help="Texts of an earlier run, its texts.jsonl, instead of prompts or beside them.",
    ),
    option(
        "-n",
        "--max-new-tokens",
        type=AT_LEAST_ONE,
        default=128,
        metavar="N",
        group=TEXTS,
        help="Longest answer in tokens.",
    ),
)
SAMPLED: Option = option(
    "--sampled",
    type=float,
    default=0.5,
    metavar="SHARE",
    group=TEXTS,
    help="Share of the texts that are sampled at temperature 1; the others are greedy.",
)
EVALUATED: tuple[Option, ...] = (
    option(
        "--text-batch",
        type=AT_LEAST_ONE,
        default=16,
        metavar="N",
        group=TEXTS,
        help="Number of texts decoded together.",
    ),
    option(
        "--held-out",
        type=float,
        default=0.05,
        metavar="SHARE",
        group=TEXTS,
        help="Share of the texts that are not trained on but evaluated with.",
    ),
    option(
        "--evaluate",
        type=FILE,
        argument="evaluate",
        multiple=True,
        metavar="FILE",
        group=TEXTS,
        help="Further prompts, whose texts are only evaluated. May be repeated.",
    ),
    option(
        "--evaluate-prompts",
        type=AT_LEAST_ONE,
        default=40,
        metavar="N",
        group=TEXTS,
        help="Greatest number of prompts of each such file.",
    ),
)
LENGTH: tuple[Option, ...] = (
    option(
        "--minutes",
        type=ABOVE_0,
        metavar="N",
        group=TRAINING,
        show_default="30",
        help="Length in minutes, without decoding the texts.",
    ),
    option(
        "--steps", type=AT_LEAST_ONE, metavar="N", group=TRAINING, help="Length in optimizer steps, instead of minutes."
    ),
)
TUNING_RATE: Option = option(
    "--lr",
    type=ABOVE_0,
    metavar="RATE",
    group=TRAINING,
    show_default="0.05 / hidden size",
    help="Greatest learning rate.",
)
STEPS: tuple[Option, ...] = (
    option(
        "--schedule",
        type=click.Choice(SCHEDULES),
        default="cosine",
        group=TRAINING,
        help="How the learning rate falls.",
    ),
    option("--batch", type=AT_LEAST_ONE, default=16, metavar="N", group=TRAINING, help="Number of texts in a forward."),
    option(
        "--accumulate",
        type=AT_LEAST_ONE,
        default=1,
        metavar="N",
        group=TRAINING,
        help="Number of forwards in an optimizer step.",
    ),
)
SEED: Option = option(
    "--seed", type=int, default=0, group=TRAINING, help="Seed of the weights, the order and the sampled texts."
)
OUT: tuple[Option, ...] = (
    option(
        "--out",
        type=typed.Folder(),
        required=True,
        metavar="FOLDER",
        help="New folder for the texts, the checkpoint and what is trained.",
    ),
    option("--resume", is_flag=True, help="Continue the interrupted run in the folder --out."),
    option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)


def files(values: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as arguments of settings: files by their names."""
    given = {name: value for name, value in values.items() if value is not None}
    for name in ("data", "texts"):
        given[name] = str(given.get(name, ""))
    given["evaluate"] = tuple(map(str, given["evaluate"]))
    return given


def train(
    settings: RunSettings,
    folder: Folder,
    resume: bool,
    text_batch: int,
    model: dict[str, Any],
    run: Callable[[LLM, Watch], Result],
) -> Result:
    """Loads the target and runs a training; ends the process as interrupted where the training was.

    Args:
        settings: of the training.
        folder: of its run.
        resume: whether it goes on with what the folder holds.
        text_batch: texts that the target decodes together.
        model: arguments of `LLM`.
        run: the training.

    Raises:
        LeapaheadError: a file or a package is missing, or the training cannot run.
    """
    for file in filter(None, (settings.data, settings.texts, *settings.evaluate)):
        if Path(file).is_dir():
            raise BadParameter(f"{file} is a folder; give a file, such as a training's {Path(file) / 'texts.jsonl'}")
        if not Path(file).is_file():
            if Path(file).exists():
                raise BadParameter(f"{file} is a pipe or a device, and a training reads its files twice; give a file")
            raise BadParameter(f"there is no file {file}")
    if not resume:  # what a run was begun with cannot be left out
        _check_decoding(settings)
    folder.check(settings, resume)
    for file in filter(None, (settings.data, *settings.evaluate)):
        tasks.read_file(Path(file))
    plots.require("train")
    name = str(click.get_current_context().info_name)
    with needing(name, "train", "torch", "transformers", "safetensors"):
        from leapahead.training import texts
        from leapahead.training.loop import Watch
    if settings.texts:
        texts.check_file(Path(settings.texts))
    with screen.loading(model["model"]):
        llm = LLM(**model, max_batch=text_batch)
    try:
        with sigterm_interrupts(), openmp.watched(), screen.progress(name) as bar:
            trained = run(llm, Watch(bar, bar.say, screen.interrupts_between_steps))
    except KeyboardInterrupt:
        screen.say(f"interrupted; the same command with --resume goes on with what {folder.path} holds")
        raise Exit(INTERRUPTED) from None
    if trained.folder is None:
        screen.say(f"interrupted after step {trained.state.step}; the same command with --resume goes on")
        raise Exit(INTERRUPTED)
    return trained


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within the block SIGTERM, which the schedulers of clusters send before they end a job, does what Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # Ctrl-C is ignored, as in jobs that a shell has begun in the background
            raise KeyboardInterrupt
        handler(number, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_decoding(settings: RunSettings) -> None:
    """Refuses options of how texts are decoded, where none are.

    Raises:
        BadParameter: one was given.
    """
    if settings.data:
        return
    ctx = click.get_current_context()
    unread = ["sampled"]  # the texts of `evaluate` are greedy
    if not settings.evaluate:
        unread += ["max_new_tokens", *(["text_batch"] if settings.kind != CLLM else [])]  # trajectories are decoded
    for name in unread:
        if ctx.params.get(name) is not None and ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise BadParameter(
                f"{name}={ctx.params[name]} is not possible with texts={settings.texts}, since these texts are there "
                "already; leave it out, or give data=FILE of further prompts"
            )


def command_line() -> str:
    """The command line as it was typed, for the model card; without what says only how it ran."""
    ctx = click.get_current_context()
    parts = ["leapahead", str(ctx.info_name)]
    for parameter in ctx.command.params:
        name = str(parameter.name)
        if ctx.get_parameter_source(name) != ParameterSource.COMMANDLINE or name in ("resume", "as_json"):
            continue
        value, flag = ctx.params[name], max(parameter.opts, key=len)
        for each in value if isinstance(value, tuple) else (value,):
            parts += [flag] if each is True else [flag, str(each)]
    return shlex.join(parts)


def show(trained: Trained, result: str, as_json: bool, **more: Any) -> bool:
    """Prints how the training went, as one JSON object or as the first line; whether tables are to follow.

    Args:
        trained: of a training that has ended.
        result: what it calls the folder in JSON.
        as_json: print one JSON object.
        more: fields of that object.
    """
    state, folder = trained.state, trained.folder
    if as_json:
        found = {result: str(folder), "steps": state.step, "seconds": state.seconds, "loss": state.loss}
        click.echo(json.dumps({**found, "evaluations": [asdict(each) for each in trained.evaluations], **more}))
        return False
    click.echo(f"{folder}: {counted(state.step, 'step')} in {state.seconds / 60:.1f} minutes, loss {state.loss:.3f}")
    return bool(trained.evaluations)


def table(rows: Iterable[tuple[str, Evaluation]]) -> None:
    """Prints evaluations, each with its name."""
    found = list(rows)
    depths = [str(depth + 1) for depth in range(len(found[0][1].depths))]
    shown = screen.new_table(("texts", "tokens", *depths, "chain", "tree"), head=("set",))
    for name, each in found:
        rates = (f"{rate:.2f}" for rate in each.depths)
        shown.add_row(name, str(each.texts), str(each.tokens), *rates, f"{each.chain:.2f}", f"{each.tree:.2f}")
    Console().print(shown)
