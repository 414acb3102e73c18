"""A distillation of a draft model in order: the target's texts, the training, the evaluation, the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from leapahead.api import LLM
from leapahead.bench import plots
from leapahead.bench.conditions import conditions
from leapahead.models.transformers.encoder_decoder import EncoderDecoderTarget
from leapahead.models.transformers.model import TransformersTarget
from leapahead.training import card, decoding, draft_model, pard, spec_drafter
from leapahead.training.batches import Order
from leapahead.training.draft_model import DraftRecipe
from leapahead.training.evaluate import DEPTH, NODES, Evaluation
from leapahead.training.loop import Training, Watch
from leapahead.training.pard import MASKS, PardRecipe
from leapahead.training.run import Trained, by_temperature, gathered, run_of
from leapahead.training.settings import DRAFT, PARD, DraftSettings, Folder
from leapahead.training.spec_drafter import PLACES, SpecDrafterRecipe
from leapahead.training.student import Student

SINGLE = "\nWith mask tokens the draft model runs once a step; before, it runs for every level."


@dataclass(frozen=True)
class TrainedDraft(Trained):
    """What the distillation of a draft model ended with.

    Attributes:
        before: the evaluations of the draft model that the training started from, by set of texts.
    """

    before: Sequence[Evaluation] = ()


def train_draft(
    llm: LLM,
    settings: DraftSettings,
    path: Path,
    watch: Watch,
    resume: bool = False,
    command: str = "",
    trust_remote_code: bool = False,
) -> TrainedDraft:
    """Distils a draft model from a target and writes it to `path`/draft, with a model card and curves.

    Args:
        llm: the target, which writes the texts with its drafter. It is closed afterwards.
        settings: of the training.
        path: the folder of the run, which does not exist yet or is empty.
        watch: what is told of the progress, and what stops the training.
        resume: go on with the run that the folder holds.
        command: for the model card.
        trust_remote_code: whether Python code that comes with the draft model may run.

    Raises:
        LeapaheadError: a setting is impossible, the models do not fit together, or a file cannot be written.
    """
    plots.require("train")
    folder = Folder(path, DRAFT)
    folder.check(settings, resume)
    target = llm.target
    student = draft_model.load(settings.draft, target, llm.tokenizer, trust_remote_code)
    assert isinstance(target, TransformersTarget), "others are refused"
    reader = target if isinstance(target, EncoderDecoderTarget) else None
    if reader is not None:
        spec_drafter.check(settings)
    is_parallel = settings.kind == PARD
    executor = pard.executor_of(student) if is_parallel and reader is None else None
    complete = settings.complete(student.hidden_size)
    folder.begin(settings)
    measured = conditions(target)
    trained, held_out, sets = gathered(llm, settings, folder, watch, partial(draft_model.fitting, student))
    llm.close()
    ends, mask = llm.eos_token_ids, None
    if is_parallel:
        everything = [*trained, *held_out, *(text for texts in sets.values() for text in texts)]
        mask = pard.mask_token(student, everything, (*ends, *(reader.model.start if reader else ())))
        student.model.config.pard_token = mask  # which tells those who draft with it
    elif hasattr(student.model.config, "pard_token"):
        del student.model.config.pard_token  # the masks of one that was trained with them are not kept up
    if reader is not None:
        own: DraftRecipe = SpecDrafterRecipe(student, reader, complete, ends, mask)
    elif executor is not None and mask is not None:
        own = PardRecipe(student, target, complete, ends, executor, mask)
    else:
        own = DraftRecipe(student, target, complete, ends)
    some = held_out[: settings.batch]
    order = Order(trained, settings.batch, settings.seed)
    training = Training(own, order, own.batch, complete, folder.checkpoint, own.batch(some) if some else None)
    state = training.run(watch)
    if not training.is_done:
        return TrainedDraft(complete, state, None)
    student.save(folder.trained)
    sets = {**by_temperature(held_out), **sets}
    how: dict[str, Any] = {"drafter": "draft_model", "trust_remote_code": trust_remote_code}
    before, found = (
        decoding.evaluations(target, llm.tokenizer, sets, watch.progress, what, forwards, draft=draft, **how)
        for draft, what, forwards in (
            (settings.draft, "drafting as before", None),
            (str(folder.trained), "drafting with the result", 1 if is_parallel else None),
        )
    )
    run = run_of(complete, trained, folder, state, found, measured, command)
    card.write(folder.trained, _card(student, complete, run, before), card.figures(run, own.AGREEMENT))
    return TrainedDraft(complete, state, folder.trained, found, before)


def _card(student: Student, settings: DraftSettings, run: card.Run, before: Sequence[Evaluation]) -> str:
    """The content of `README.md`."""
    parameters = sum(each.numel() for each in student.model.parameters())
    is_parallel, is_both = settings.kind == PARD, student.is_encoder_decoder
    method = (
        f"Divergence: {settings.divergence}. In {settings.on_policy:.0%} of the batches the draft model sampled the "
        "answers itself."
    )
    if is_parallel and is_both:
        method += (
            f" In every step a block of {MASKS} masks stood at {PLACES} places of each text (SpecDec, 2203.16487)."
        )
    elif is_parallel:
        method += (
            f" Masks of depth d were trained at a share of {settings.retention:g}^d of the places, of at least "
            f"{settings.least_retention:g}, d up to {MASKS} (PARD, 2504.18583)."
        )
    rows = [
        ("Target", f"`{settings.model}`"),
        ("Distilled from", f"`{settings.draft}`"),
        ("Parameters", f"{parameters:,}, {str(student.dtype).removeprefix('torch.')}"),
        *([("Mask token", str(student.model.config.pard_token))] if is_parallel else []),
    ]
    body = [
        f"# Draft model for {settings.model}\n",
        f"A small model that drafts for `{settings.model}`, which verifies its drafts: the text is the target's own. "
        "It was\ntrained to have the target's distribution (DistillSpec, 2310.08461).\n",
        "| | |\n| --- | --- |\n" + "".join(f"| {key} | {value} |\n" for key, value in rows),
        "## Use\n",
        "    leapahead generate -m MODEL --draft FOLDER PROMPT\n",
        f"## Training\n\n{card.training(run, method)}",
        "![Loss and agreement](curves.png)\n",
        f"## Measured\n\n{_measured(before, run.evaluations, is_parallel)}",
    ]
    return card.whole(body, run, settings.model, "draft-model")


def _measured(before: Sequence[Evaluation], after: Sequence[Evaluation], is_parallel: bool) -> str:
    """A table with two rows for every set of texts."""
    if not after:
        return "No texts were held out.\n"
    depths = " | ".join(str(depth) for depth in range(1, DEPTH + 1))
    lines = [
        "Decoding with the draft model alone. Columns 1 to 5: how often the token at that depth of a chain is accepted "
        f"where\nthose before it are. Acceptance length: committed tokens of a step, with chains of {DEPTH} and with "
        f"trees of {NODES} nodes.{SINGLE * is_parallel}\n",
        f"| Texts | Number | Draft model | {depths} | Acceptance length, chain | Tree |",
        f"| --- | ---: | --- | {' | '.join(['---:'] * DEPTH)} | ---: | ---: |",
    ]
    for pair in zip(before, after, strict=True):
        for name, each in zip(("as before", "distilled"), pair, strict=True):
            rates = " | ".join(f"{rate:.2f}" for rate in each.depths)
            lines.append(f"| {each.name} | {each.texts} | {name} | {rates} | {each.chain:.2f} | {each.tree:.2f} |")
    return "\n".join(lines) + "\n"
