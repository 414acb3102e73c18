"""`leapahead train-cllm`: tunes a copy of a model such that Jacobi decoding converges in fewer steps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leapahead.api import LLM
from leapahead.cli import screen, training
from leapahead.cli.command import Command, option
from leapahead.cli.options import TRANSFORMERS_MODEL, all_of, model_arguments
from leapahead.cli.training import AT_LEAST_ONE
from leapahead.models.loading import BUNDLED
from leapahead.training.settings import CllmSettings, Folder

if TYPE_CHECKING:
    from leapahead.training.cllm_run import TunedTarget
    from leapahead.training.loop import Watch

TUNING = "Tuning options"


@click.command(
    name="train-cllm",
    cls=Command,
    examples=(
        "leapahead train-cllm -m Qwen/Qwen3-0.6B --data prompts.jsonl --out my-cllm",
        "leapahead train-cllm --texts my-head/texts.jsonl --out my-cllm --minutes 20 --ar-weight 1 --keep-weight 1",
        "leapahead generate -m my-cllm/tuned -d jacobi 'def add(a, b):'",
    ),
)
@all_of(TRANSFORMERS_MODEL)
@option("--block", type=AT_LEAST_ONE, default=8, metavar="N", group=TUNING, help="Guesses of a state, see `-d jacobi`.")
@option(
    "--states",
    type=AT_LEAST_ONE,
    default=16,
    metavar="N",
    group=TUNING,
    help="States of each text's trajectory that are trained in a batch.",
)
@option(
    "--ar-weight",
    type=float,
    default=10.0,
    metavar="W",
    group=TUNING,
    help="Weight of the text's cross entropy beside the consistency loss; more keeps the model nearer to its texts.",
)
@option(
    "--keep-weight",
    type=float,
    default=0.0,
    metavar="W",
    group=TUNING,
    help="Weight of the divergence from the untuned model after every token of prompt and text; more changes the model "
    "less.",
)
@all_of(training.PROMPTS, training.EVALUATED, training.LENGTH, (training.TUNING_RATE,))
@all_of(training.STEPS, (training.SEED,), training.OUT)
def train_cllm(out: Path, resume: bool, as_json: bool, text_batch: int, **values: Any) -> None:
    """Tune a copy of a model of Transformers for Jacobi decoding (CLLM, 2403.00835).

    The model first answers the prompts greedily, and Jacobi decoding shows which states it goes through on the way; the
    copy learns to predict the text from these states. Its texts are others than the model's: Jacobi decoding is
    lossless with respect to the tuned model. After Ctrl-C, --resume continues the run. The folder OUT/tuned holds the
    result, an ordinary model of Transformers.
    """
    command = training.command_line()
    model = model_arguments(values)
    settings = CllmSettings(model=model["model"] or BUNDLED, **training.files(values))

    def run(llm: LLM, watch: Watch) -> TunedTarget:
        from leapahead.training.cllm_run import train_cllm

        return train_cllm(llm, settings, out, watch, resume, command, bool(model.get("trust_remote_code")))

    trained = training.train(settings, Folder(out), resume, text_batch, model, run)
    found = {name: [asdict(each) for each in getattr(trained, name)] for name in ("before", "after")}
    if training.show(trained, "tuned", as_json, **found) or as_json:
        return
    table = screen.new_table(("texts", "acceptance length", "loss of prompts", "loss of answers"), head=("set",))
    for pair in zip(trained.before, trained.after, strict=True):
        for name, each in zip(("before", "tuned"), pair, strict=True):
            numbers = (f"{each.acceptance_length:.2f}", f"{each.prompt_loss:.3f}", f"{each.answer_loss:.3f}")
            table.add_row(f"{each.name}: {name}", str(each.texts), *numbers)
    screen.Console().print(table)
    click.echo("Jacobi decoding of each model's own texts; it is lossless with respect to the tuned model")
