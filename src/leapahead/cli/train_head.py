"""`leapahead train-head`: trains a head that drafts for a model, on the model's own texts."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.exceptions import Exit

from leapahead.api import LLM
from leapahead.bench import plots
from leapahead.cli import screen
from leapahead.cli.command import INTERRUPTED, Command, option
from leapahead.cli.options import MODEL, all_of, model_arguments
from leapahead.cli.screen import Console
from leapahead.core.errors import BadParameter, needing
from leapahead.drafters.heads.config import MEDUSA
from leapahead.models.loading import BUNDLED
from leapahead.training.settings import FEATURES, LOSSES, SCHEDULES, USUAL_LOSS, Folder, Settings

if TYPE_CHECKING:
    from leapahead.training.run import Trained

FILE = click.Path(path_type=Path)
TEXTS, HEAD, TRAINING = "Text options", "Head options", "Training options"
AT_LEAST_ONE = click.IntRange(min=1)


@click.command(
    name="train-head",
    cls=Command,
    examples=(
        "leapahead train-head --kind eagle3 -m Qwen/Qwen3-0.6B --data prompts.jsonl --out my-head",
        "leapahead train-head --kind medusa --data prompts.txt --out my-medusa --minutes 5",
        "leapahead train-head --kind eagle --texts my-head/texts.jsonl --out my-eagle --steps 500",
        "leapahead generate -m Qwen/Qwen3-0.6B --head my-head/head 'def add(a, b):'",
    ),
)
@all_of(MODEL)
@option("--kind", type=click.Choice(tuple(USUAL_LOSS)), required=True, group=HEAD, help="Kind of the head.")
@option(
    "--data",
    type=FILE,
    metavar="FILE",
    group=TEXTS,
    help="Prompts: a .txt file with one in each line, or JSON lines with one of the fields prompt, question, turns, "
    "messages.",
)
@option("--texts", type=FILE, metavar="FILE", group=TEXTS, help="Texts of an earlier run, its texts.jsonl, instead.")
@option("--max-new-tokens", type=AT_LEAST_ONE, default=128, metavar="N", group=TEXTS, help="Longest answer in tokens.")
@option(
    "--sampled",
    type=float,
    default=0.5,
    metavar="SHARE",
    group=TEXTS,
    help="Share of the texts that are sampled at temperature 1; the others are greedy.",
)
@option("--text-batch", type=AT_LEAST_ONE, default=16, metavar="N", group=TEXTS, help="Texts decoded together.")
@option(
    "--held-out",
    type=float,
    default=0.05,
    metavar="SHARE",
    group=TEXTS,
    help="Share of the texts that the head is not trained on but evaluated with.",
)
@option(
    "--evaluate",
    type=FILE,
    multiple=True,
    metavar="FILE",
    group=TEXTS,
    help="Further prompts, whose texts are only evaluated. May be repeated.",
)
@option(
    "--evaluate-prompts",
    type=AT_LEAST_ONE,
    default=40,
    metavar="N",
    group=TEXTS,
    help="The most prompts of each such file.",
)
@option("--ttt", type=AT_LEAST_ONE, metavar="N", group=HEAD, show_default="4; 1 for eagle",
        help="EAGLE: steps that the head is trained on its own states.")  # fmt: skip
@option("--heads", type=AT_LEAST_ONE, metavar="N", group=HEAD, show_default="5", help="Medusa: number of heads.")
@option(
    "--draft-vocab",
    type=AT_LEAST_ONE,
    metavar="N",
    group=HEAD,
    show_default="all",
    help="Tokens that the head can propose, the most frequent ones of the texts.",
)
@option(
    "--layers",
    metavar="I,J,K",
    group=HEAD,
    show_default="a low, a middle and a high one",
    help="EAGLE-3: the layers whose hidden states it reads.",
)
@option("--loss", type=click.Choice(LOSSES), group=HEAD, show_default="ce; soft_ce for EAGLE", help="Loss of a token.")
@option("--minutes", type=float, metavar="N", group=TRAINING, show_default="30", help="Length, without the texts.")
@option("--steps", type=AT_LEAST_ONE, metavar="N", group=TRAINING, help="Length in optimizer steps instead.")
@option("--lr", type=float, metavar="RATE", group=TRAINING, show_default="1e-3; EAGLE: 0.5 / hidden size",
        help="Greatest learning rate.")  # fmt: skip
@option("--schedule", type=click.Choice(SCHEDULES), default="cosine", group=TRAINING, help="How the rate falls.")
@option("--batch", type=AT_LEAST_ONE, default=16, metavar="N", group=TRAINING, help="Texts of a forward.")
@option("--accumulate", type=AT_LEAST_ONE, default=1, metavar="N", group=TRAINING, help="Forwards of a step.")
@option(
    "--prompt-tokens",
    type=AT_LEAST_ONE,
    default=128,
    metavar="N",
    group=TRAINING,
    help="The last tokens of each prompt that the head reads in training; the target reads all.",
)
@option(
    "--features",
    type=click.Choice(FEATURES),
    default="online",
    group=TRAINING,
    help="The target's hidden states: computed for every batch, or once and kept on disk.",
)
@option("--seed", type=int, default=0, group=TRAINING, help="Seed of the weights, the order and the sampled texts.")
@option("--out", type=FILE, required=True, metavar="FOLDER", help="New folder for the texts, the checkpoint, the head.")
@option("--resume", is_flag=True, help="Go on with the run in the folder --out, which was interrupted.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def train_head(out: Path, resume: bool, as_json: bool, text_batch: int, **values: Any) -> None:
    """Train a head that drafts for a model of Transformers: EAGLE-3, EAGLE or Medusa.

    The model first answers the prompts; the head learns to predict these answers from the model's hidden states. The
    model itself does not change. Ctrl-C ends the run such that --resume goes on with it. The folder OUT/head holds the
    result, with a model card; `--head OUT/head` drafts with it.
    """
    command = _command()
    model = model_arguments(values)
    settings = _settings(values, model["model"])
    for file in filter(None, (settings.data, settings.texts, *settings.evaluate)):
        if not Path(file).is_file():
            raise BadParameter(f"there is no file {file}")
    Folder(out).check(settings, resume)
    plots.require()
    with needing("train-head", "transformers", "torch", "transformers", "safetensors"):
        from leapahead.training import run
        from leapahead.training.loop import Watch
    with screen.loading(model["model"]):
        llm = LLM(**model, max_batch=text_batch)
    try:
        with screen.progress("train-head") as bar:
            watch = Watch(bar, bar.say, screen.interrupts_between_steps)
            trained = run.train_head(llm, settings, out, watch, resume, command)
    except KeyboardInterrupt:
        screen.say(f"interrupted; the same command with --resume goes on with what {out} holds")
        raise Exit(INTERRUPTED) from None
    if trained.head is None:
        screen.say(f"interrupted after step {trained.state.step}; the same command with --resume goes on")
        raise Exit(INTERRUPTED)
    _show(trained, as_json)


def _settings(values: dict[str, Any], model: str | None) -> Settings:
    """The settings that the options mean."""
    layers, kind = values.pop("layers"), values["kind"]
    heads, ttt = values.pop("heads"), values.pop("ttt")
    if (wrong := ttt if kind == MEDUSA else heads) is not None:
        raise BadParameter(f"{'--ttt' if kind == MEDUSA else '--heads'} {wrong} is not possible with {kind}")
    try:
        numbers = tuple(int(layer) for layer in layers.split(",")) if layers else ()
    except ValueError:
        raise BadParameter(f"--layers {layers} is not possible: give numbers of layers, divided by commas") from None
    given = {name: value for name, value in values.items() if value is not None}
    for name in ("data", "texts"):
        given[name] = str(given.get(name, ""))
    given["evaluate"] = tuple(map(str, given["evaluate"]))
    return Settings(model=model or BUNDLED, layers=numbers, depths=heads or ttt or 0, **given)


def _command() -> str:
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


def _show(trained: Trained, as_json: bool) -> None:
    state, head = trained.state, trained.head
    if as_json:
        found = {"head": str(head), "steps": state.step, "seconds": state.seconds, "loss": state.loss}
        click.echo(json.dumps({**found, "evaluations": [asdict(each) for each in trained.evaluations]}))
        return
    click.echo(f"{head}: {state.step} steps in {state.seconds / 60:.1f} minutes, loss {state.loss:.3f}")
    if not trained.evaluations:
        return
    depths = [str(depth + 1) for depth in range(len(trained.evaluations[0].depths))]
    table = screen.new_table(("texts", "tokens", *depths, "chain", "tree"), head=("set",))
    for each in trained.evaluations:
        rates = (f"{rate:.2f}" for rate in each.depths)
        table.add_row(each.name, str(each.texts), str(each.tokens), *rates, f"{each.chain:.2f}", f"{each.tree:.2f}")
    Console().print(table)
    click.echo(
        "1 to 5: how often the token at that depth of a chain is right where those before it are; chain, tree: tokens "
        "of a pass of the target with a chain of 5, with a tree of 16 nodes"
    )
