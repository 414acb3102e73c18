"""`leapahead train-probes`: trains rows of a model's own forwards that predict several tokens ahead."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leapahead.api import LLM
from leapahead.cli import screen, training
from leapahead.cli.command import Command, option
from leapahead.cli.options import TRANSFORMERS_MODEL, all_of, model_arguments
from leapahead.cli.training import ABOVE_0, AT_LEAST_ONE, TRAINING
from leapahead.drafters.heads.config import PROBES, SPACE
from leapahead.models.loading import BUNDLED
from leapahead.training.settings import LOSSES, Folder, ProbeSettings

if TYPE_CHECKING:
    from leapahead.training.loop import Watch
    from leapahead.training.probe_run import TrainedProbes

GROUP = "Probe options"


@click.command(
    name="train-probes",
    cls=Command,
    examples=(
        "leapahead train-probes --kind pass -m Qwen/Qwen3-0.6B --data prompts.jsonl --out my-pass",
        "leapahead generate -m Qwen/Qwen3-0.6B --head my-pass/head 'def add(a, b):'",
        "leapahead train-probes --kind space --texts my-pass/texts.jsonl --out my-space --minutes 20",
        "leapahead generate -m my-space/tuned --head my-space/tuned/probes 'def add(a, b):'",
    ),
)
@all_of(TRANSFORMERS_MODEL)
@option(
    "--kind",
    type=click.Choice(PROBES),
    required=True,
    group=GROUP,
    help="pass: only the embeddings of the probes are trained; space: a copy of the model is tuned with them.",
)
@option(
    "--depths",
    type=AT_LEAST_ONE,
    default=4,
    metavar="N",
    group=GROUP,
    help="Probes of a group: tokens that it predicts.",
)
@option(
    "--groups",
    type=AT_LEAST_ONE,
    default=32,
    metavar="N",
    group=GROUP,
    help="Places of each text that have a group in a step of the training.",
)
@option("--loss", type=click.Choice(LOSSES), default="soft_ce", group=GROUP, help="Loss of each probe.")
@option(
    "--ar-weight",
    type=float,
    default=1.0,
    metavar="W",
    group=GROUP,
    help="space: weight of the text's cross entropy beside the probes'; more keeps the model nearer to its texts.",
)
@all_of(training.PROMPTS, (training.SAMPLED,), training.EVALUATED, training.LENGTH)
@option("--lr", type=ABOVE_0, metavar="RATE", group=TRAINING, show_default="1e-2; space: 0.05 / hidden size",
        help="Greatest learning rate.")  # fmt: skip
@all_of(training.STEPS, (training.SEED,), training.OUT)
def train_probes(out: Path, resume: bool, as_json: bool, text_batch: int, **values: Any) -> None:
    """Train probes for a model of Transformers: rows of its own forwards that predict several tokens ahead.

    The model first answers the prompts; the probes learn to predict these answers. With PaSS (2311.13581) the model
    itself does not change, and the folder OUT/head holds the probes. With SPACE (2402.11809) a copy of the model is
    tuned: its texts are others than the model's, and decoding is lossless with respect to the tuned model, which the
    folder OUT/tuned holds, and OUT/tuned/probes its probes. After Ctrl-C, --resume continues the run.
    """
    command = training.command_line()
    model = model_arguments(values)
    settings = ProbeSettings(model=model["model"] or BUNDLED, **training.files(values))
    folder = Folder(out, "tuned" if settings.kind == SPACE else "head")

    def run(llm: LLM, watch: Watch) -> TrainedProbes:
        from leapahead.training.probe_run import train_probes

        return train_probes(llm, settings, out, watch, resume, command, bool(model.get("trust_remote_code")))

    trained = training.train(settings, folder, resume, text_batch, model, run)
    if not training.show(trained, folder.result, as_json, losses=[asdict(each) for each in trained.losses]):
        return
    training.table((each.name, each) for each in trained.evaluations)
    click.echo(
        "1 to 5: how often the token at that depth of a chain is accepted where those before it are; chain, tree: "
        "committed tokens of a step with chains of 5, with trees of 16 nodes"
    )
    if not trained.losses:
        return
    table = screen.new_table(("prompts, before", "after", "answers, before", "after"), head=("losses",))
    for each in trained.losses:
        table.add_row(each.name, *(f"{value:.3f}" for value in (*each.prompts, *each.answers)))
    screen.Console().print(table)
    click.echo("nats a token; decoding is lossless with respect to the tuned model")
