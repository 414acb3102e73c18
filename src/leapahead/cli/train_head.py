"""`leapahead train-head`: trains a head that drafts for a model, on the model's own texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leapahead.api import LLM
from leapahead.cli import training
from leapahead.cli.command import Command, option
from leapahead.cli.options import TRANSFORMERS_MODEL, all_of, model_arguments
from leapahead.cli.training import ABOVE_0, AT_LEAST_ONE, TRAINING
from leapahead.core.errors import BadParameter
from leapahead.drafters.heads.config import EAGLE, EAGLE3
from leapahead.models.loading import BUNDLED
from leapahead.training.settings import (
    EAGLE_RATE,
    FEATURES,
    LOSSES,
    MEDUSA_RATE,
    MUON_RATES,
    OPTIMIZERS,
    TRAINED,
    Folder,
    Settings,
)

if TYPE_CHECKING:
    from leapahead.training.loop import Watch
    from leapahead.training.run import Trained

HEAD = "Head options"


def _usual_rates() -> str:
    """The learning rates of all kinds, as `Settings.complete` takes them."""
    kinds: dict[float, list[str]] = {}
    for kind, rate in MUON_RATES.items():
        kinds.setdefault(rate, []).append(kind)
    others = ", ".join(kind for kind in TRAINED if kind not in MUON_RATES)
    muon = ", ".join(f"{rate:g} / hidden size for {', '.join(names)}" for rate, names in kinds.items())
    return f"{MEDUSA_RATE:g} for {others}; of other kinds {EAGLE_RATE:g} / hidden size with adamw, and with muon {muon}"


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
@all_of(TRANSFORMERS_MODEL)
@option("--kind", type=click.Choice(TRAINED), required=True, group=HEAD, help="Kind of the head.")
@all_of(training.PROMPTS, (training.SAMPLED,), training.EVALUATED)
@option("--ttt", type=AT_LEAST_ONE, metavar="N", group=HEAD, show_default="4; 1 for eagle",
        help="EAGLE: steps for which the head is trained on its own states.")  # fmt: skip
@option(
    "--heads",
    type=AT_LEAST_ONE,
    metavar="N",
    group=HEAD,
    show_default="5; 7 for peagle, dflash and dflash2",
    help="Medusa, Hydra: number of heads; P-EAGLE: depths; DFlash, DFlash 2: masks of a block of one token more.",
)
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
    help="EAGLE-3, P-EAGLE, DFlash and DFlash 2: the layers whose hidden states it reads.",
)
@option(
    "--loss",
    type=click.Choice(LOSSES),
    group=HEAD,
    show_default="ce for hydra; else soft_ce",
    help="Loss of each token.",
)
@all_of(training.LENGTH)
@option(
    "--lr",
    type=ABOVE_0,
    metavar="RATE",
    group=TRAINING,
    show_default=_usual_rates(),
    help="Greatest learning rate.",
)
@option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    group=TRAINING,
    show_default="muon for eagle, eagle3, peagle, dflash and dflash2; else adamw",
    help="AdamW, or Muon for the matrices of hidden layers and AdamW for the rest.",
)
@all_of(training.STEPS)
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
@all_of((training.SEED,), training.OUT)
def train_head(out: Path, resume: bool, as_json: bool, text_batch: int, **values: Any) -> None:
    """Train a head that drafts for a model of Transformers: EAGLE-3, P-EAGLE, EAGLE, Medusa, Hydra, Hydra++, DFlash
    or DFlash 2.

    The model first answers the prompts; the head learns to predict these answers from the model's hidden states. The
    model itself does not change. After Ctrl-C, --resume continues the run. The folder OUT/head holds the result, with a
    model card; `--head OUT/head` drafts with it.
    """
    command = training.command_line()
    model = model_arguments(values)
    settings = _settings(values, model["model"])

    def run(llm: LLM, watch: Watch) -> Trained:
        from leapahead.training.run import train_head

        return train_head(llm, settings, out, watch, resume, command)

    trained = training.train(settings, Folder(out), resume, text_batch, model, run)
    if training.show(trained, "head", as_json):
        training.table((each.name, each) for each in trained.evaluations)
        click.echo(
            "1 to 5: how often the token at that depth of a chain is right where those before it are; chain, tree: "
            "tokens per forward of the target with a chain of 5, with a tree of 16 nodes"
        )


def _settings(values: dict[str, Any], model: str | None) -> Settings:
    """The settings that the options mean."""
    layers, kind = values.pop("layers"), values["kind"]
    heads, ttt = values.pop("heads"), values.pop("ttt")
    has_steps = kind in (EAGLE, EAGLE3)
    if (wrong := heads if has_steps else ttt) is not None:
        raise BadParameter(f"{'--heads' if has_steps else '--ttt'} {wrong} is not possible with {kind}")
    try:
        numbers = () if layers is None else tuple(int(layer) for layer in layers.split(","))
    except ValueError:
        given = layers or "''"
        raise BadParameter(f"--layers {given} is not possible: give numbers of layers, divided by commas") from None
    return Settings(model=model or BUNDLED, layers=numbers, depths=heads or ttt or 0, **training.files(values))
