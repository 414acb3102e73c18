"""`leapahead train-draft`: distils a draft model from a model, on the model's own texts or the draft model's.

With `--kind pard` it learns to predict several tokens in one forward, too.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leapahead.api import LLM
from leapahead.cli import training
from leapahead.cli.command import Command, option
from leapahead.cli.options import EXACT, TRANSFORMERS_MODEL, all_of, model_arguments
from leapahead.models.loading import BUNDLED
from leapahead.training.settings import DIVERGENCES, DRAFT, DRAFTS, DraftSettings, Folder

if TYPE_CHECKING:
    from leapahead.training.draft_run import TrainedDraft
    from leapahead.training.loop import Watch

DISTILLATION = "Distillation options"


@click.command(
    name="train-draft",
    cls=Command,
    examples=(
        "leapahead train-draft -m Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --data prompts.jsonl --out my-draft",
        "leapahead train-draft --draft bundled --data prompts.txt --out my-draft --minutes 10 --divergence tvd",
        "leapahead train-draft -m Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --kind pard --data prompts.jsonl --out my-pard",
        "leapahead generate -m Qwen/Qwen3-8B --draft my-draft/draft 'def add(a, b):'",
    ),
)
@all_of(TRANSFORMERS_MODEL, (EXACT,))
@option(
    "--draft",
    required=True,
    metavar="MODEL",
    group=DISTILLATION,
    help="The draft model to start from: a model of Transformers with the same tokenizer, or `bundled`.",
)
@option(
    "--kind",
    type=click.Choice(DRAFTS),
    default=DRAFT,
    group=DISTILLATION,
    help="An ordinary draft model, or one of PARD (2504.18583), which predicts eight tokens in one forward with mask "
    "tokens.",
)
@option(
    "--divergence",
    type=click.Choice(list(DIVERGENCES)),
    default="forward-kl",
    group=DISTILLATION,
    help="Between the two models' distributions: Kullback-Leibler from either side, Jensen-Shannon, total variation.",
)
@option(
    "--on-policy",
    type=float,
    default=0.0,
    metavar="SHARE",
    group=DISTILLATION,
    help="Share of the batches whose answers the draft model samples itself; the others have the model's answers.",
)
@option(
    "--retention",
    type=float,
    default=0.7,
    metavar="SHARE",
    group=DISTILLATION,
    help="PARD: share of the places at which the first mask is trained; of the d-th mask, to the power of d. Not read "
    "for encoder-decoder models.",
)
@option(
    "--least-retention",
    type=float,
    default=0.2,
    metavar="SHARE",
    group=DISTILLATION,
    help="PARD: the least such share.",
)
@all_of(training.PROMPTS, (training.SAMPLED,), training.EVALUATED, training.LENGTH, (training.TUNING_RATE,))
@all_of(training.STEPS, (training.SEED,), training.OUT)
def train_draft(out: Path, resume: bool, as_json: bool, text_batch: int, **values: Any) -> None:
    """Distil a draft model from a model of Transformers (DistillSpec, 2310.08461).

    The model first answers the prompts; the draft model learns to have the same distribution after every token. With
    `--kind pard` it also learns to predict the next tokens from mask tokens behind a text, so that one forward drafts
    eight tokens; of encoder-decoder models this is the Spec-Drafter of SpecDec (2203.16487). The model itself does not
    change, so texts stay its own. After Ctrl-C, --resume continues the run. The folder OUT/draft holds the result, an
    ordinary model of Transformers; `--draft OUT/draft` drafts with it.
    """
    command = training.command_line()
    model = model_arguments(values)
    settings = DraftSettings(model=model["model"] or BUNDLED, **training.files(values))

    def run(llm: LLM, watch: Watch) -> TrainedDraft:
        from leapahead.training.draft_run import train_draft

        return train_draft(llm, settings, out, watch, resume, command, bool(model.get("trust_remote_code")))

    trained = training.train(settings, Folder(out, DRAFT), resume, text_batch, model, run)
    if training.show(trained, "draft", as_json, before=[asdict(each) for each in trained.before]):
        names = ("as before", "distilled")
        training.table(
            (f"{each.name}: {name}", each)
            for pair in zip(trained.before, trained.evaluations, strict=True)
            for name, each in zip(names, pair, strict=True)
        )
        click.echo(
            "1 to 5: how often the token at that depth of a chain is accepted where those before it are; chain, tree: "
            "committed tokens of a step with chains of 5, with trees of 16 nodes"
        )
