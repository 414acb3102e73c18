"""A consistency tuning in order: the target's texts and trajectories, the training, the evaluation, the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from leapahead.api import LLM
from leapahead.bench import plots
from leapahead.bench.conditions import conditions
from leapahead.core.errors import BadParameter
from leapahead.models import loading
from leapahead.models.base import Target
from leapahead.models.transformers.families import TUNED
from leapahead.training import card, cllm, decoding, trajectories
from leapahead.training.batches import Order
from leapahead.training.cllm import CllmRecipe
from leapahead.training.decoding import Sets
from leapahead.training.loop import Training, Watch
from leapahead.training.run import Trained, by_temperature, gathered, run_of
from leapahead.training.sequences import Sequences
from leapahead.training.settings import CllmSettings, Folder
from leapahead.training.student import Student
from leapahead.training.texts import Progress, Text

TUNED_FOLDER = "tuned"
MEASURED = "measured.json"  # in that folder
TOLD = ("block", "states", "ar_weight", "keep_weight", "lr", "batch")  # the settings that the file has
TOGETHER = 8  # texts of a forward in which losses are measured


@dataclass(frozen=True)
class Measured:
    """What was measured of a model, tuned or not, on one set of texts.

    Attributes:
        name: of the set.
        texts: their number.
        acceptance_length: of Jacobi decoding of their prompts.
        prompt_loss: mean -log p of a token of the prompts, which the model did not write, in nats.
        answer_loss: the same of the untuned model's answers.
    """

    name: str
    texts: int
    acceptance_length: float
    prompt_loss: float
    answer_loss: float


@dataclass(frozen=True)
class TunedTarget(Trained):
    """What a consistency tuning ended with.

    Attributes:
        before, after: what was measured of the target and of the tuned one, by set of texts.
    """

    before: Sequence[Measured] = ()
    after: Sequence[Measured] = ()


def train_cllm(
    llm: LLM,
    settings: CllmSettings,
    path: Path,
    watch: Watch,
    resume: bool = False,
    command: str = "",
    trust_remote_code: bool = False,
) -> TunedTarget:
    """Tunes a copy of a target for Jacobi decoding and writes it to `path`/tuned, with a model card and curves.

    Args:
        llm: the target, which writes the texts with its drafter; it was loaded by `settings.model` and stays as it is.
            It is closed afterwards.
        settings: of the training.
        path: the folder of the run, which does not exist yet or is empty.
        watch: what is told of the progress, and what stops the training.
        resume: go on with the run that the folder holds.
        command: for the model card.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        LeapaheadError: a setting is impossible, the target cannot be tuned, or a file cannot be written.
    """
    plots.require("train")
    folder = Folder(path, TUNED_FOLDER)
    folder.check(settings, resume)
    target, tokenizer, together = llm.target, llm.tokenizer, llm.engine.max_batch
    executor = cllm.masked_executor(target)
    where = loading.bundled() if settings.model == loading.BUNDLED else settings.model
    student = Student.load(where, settings.model, executor.device, trust_remote_code)
    complete = settings.complete(student.hidden_size)
    folder.begin(settings)
    measured = conditions(target)
    trained, held_out, sets = gathered(llm, settings, folder, watch, _greedy)
    llm.close()
    watched = held_out[: settings.batch]
    recorded = trajectories.write(
        target, tokenizer, [*trained, *watched], settings.block, together, folder.trajectories, watch.progress
    )
    own = CllmRecipe(student, executor, complete, recorded, executor.model)
    known, only_watched = {each.index for each in recorded}, {text.index for text in watched}
    watched = [text for text in watched if text.index in known]  # a text that came out short has no trajectory
    order = Order([each.text for each in recorded if each.index not in only_watched], settings.batch, settings.seed)
    training = Training(own, order, own.batch, complete, folder.checkpoint, own.batch(watched) if watched else None)
    state = training.run(watch)
    if not training.is_done:
        return TunedTarget(complete, state, None)
    student.model.config.update({TUNED: {"method": "cllm", "from": settings.model}})
    student.save(folder.trained)
    sets = {"held out": by_temperature(held_out).get("held out, greedy", []), **sets}
    tuned = loading.load(str(folder.trained), device=str(executor.device), trust_remote_code=trust_remote_code).target
    before, after = (
        measure(each, tokenizer, settings.block, sets, watch.progress, what)
        for each, what in ((target, "Jacobi decoding as before"), (tuned, "Jacobi decoding after the tuning"))
    )
    run = run_of(complete, trained, folder, state, (), measured, command)
    card.write(folder.trained, _card(student, complete, run, before, after), card.figures(run, CllmRecipe.AGREEMENT))
    found = TunedTarget(complete, state, folder.trained, (), before, after)
    _write(found, run, folder.trained / MEASURED)
    return found


def _write(found: TunedTarget, run: card.Run, path: Path) -> None:
    """Writes what the model card tells as numbers: how it was tuned, and what was measured before and after.

    Raises:
        BadParameter: the file cannot be written.
    """
    data = {
        "texts": run.texts,
        "steps": found.state.step,
        "seconds": round(found.state.seconds, 1),
        "settings": {name: getattr(found.settings, name) for name in TOLD},
        "before": [asdict(each) for each in found.before],
        "after": [asdict(each) for each in found.after],
        "conditions": run.conditions,
    }
    try:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadParameter(f"{path} cannot be written: {error.strerror}") from None


def _greedy(texts: Sequence[Text]) -> list[Text]:
    """The greedy ones of some texts.

    Raises:
        BadParameter: there are texts, and none of them is greedy.
    """
    found = [text for text in texts if text.temperature == 0]
    if texts and not found:
        raise BadParameter(
            "none of the texts is greedy, as Jacobi trajectories are; give data=FILE of prompts, or other texts"
        )
    return found


def measure(target: Target, tokenizer: Any, block: int, sets: Sets, progress: Progress, what: str) -> list[Measured]:
    """Measures a model on sets of texts; arguments as of `decoding.acceptance`.

    Args:
        block: of Jacobi decoding.
    """
    found = decoding.acceptance(target, tokenizer, sets, progress, what, drafter="jacobi", block=block)
    return [
        Measured(name, len(sets[name]), stats.acceptance_length, *losses_of(target, sets[name]))
        for name, stats in found.items()
    ]


@torch.no_grad()
def losses_of(target: Any, texts: Sequence[Text]) -> tuple[float, float]:
    """The mean -log p of a token of the prompts, but for their first ones, and of a token of the answers, in nats."""
    sums, counts = [0.0, 0.0], [0, 0]
    for start in range(0, len(texts), TOGETHER):
        some = texts[start : start + TOGETHER]
        for part, each in enumerate((_prompts(some), some)):
            batch = Sequences(each, target.device)
            if each:
                sums[part] += F.cross_entropy(batch.logits(target.model), batch.next, reduction="sum").item()
                counts[part] += len(batch.next)
    prompts, answers = (total / max(1, count) for total, count in zip(sums, counts, strict=True))
    return prompts, answers


def _prompts(texts: Sequence[Text]) -> list[Text]:
    """The prompts as texts whose answer is all but the first token."""
    return [Text(text.index, text.prompt[:1], text.prompt[1:]) for text in texts if len(text.prompt) > 1]


def _card(
    student: Student, settings: CllmSettings, run: card.Run, before: Sequence[Measured], after: Sequence[Measured]
) -> str:
    """The content of `README.md`."""
    parameters = sum(each.numel() for each in student.model.parameters())
    rows = [
        ("Tuned from", f"`{settings.model}`"),
        ("Parameters", f"{parameters:,}, {str(student.dtype).removeprefix('torch.')}"),
        ("Lossless", "with respect to this tuned model, not to the one that it was tuned from"),
    ]
    method = (
        f"Consistency loss of up to {settings.states} states of each text, in blocks of {settings.block} guesses, + "
        f"{settings.ar_weight:g} times the cross entropy of the text"
        + (f" + {settings.keep_weight:g} times the divergence from the untuned model." if settings.keep_weight else ".")
    )
    body = [
        f"# {settings.model}, tuned for Jacobi decoding\n",
        "A model whose Jacobi decoding converges in fewer steps (CLLM, 2403.00835). Its texts are others than those of "
        f"\n`{settings.model}`: decoding is lossless with respect to the tuned model.\n",
        "| | |\n| --- | --- |\n" + "".join(f"| {key} | {value} |\n" for key, value in rows),
        "## Use\n",
        "    leapahead generate -m FOLDER -d jacobi PROMPT\n",
        f"## Training\n\n{card.training(run, method)}",
        "![Loss and agreement](curves.png)\n",
        f"## Measured\n\n{_table(before, after)}",
    ]
    return card.whole(body, run, settings.model, "cllm")


def _table(before: Sequence[Measured], after: Sequence[Measured]) -> str:
    """A table with two rows for every set of texts."""
    if not after:
        return "No texts were held out.\n"
    lines = [
        "Acceptance length: committed tokens of a step of Jacobi decoding, of each model's own greedy texts. Losses "
        "are nats\na token: of the prompts, which no model wrote, and of the answers, which the model wrote before the "
        "tuning.\n",
        "| Texts | Number | Model | Acceptance length | Loss of the prompts | Loss of the answers |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for pair in zip(before, after, strict=True):
        for name, each in zip(("before", "tuned"), pair, strict=True):
            lines.append(
                f"| {each.name} | {each.texts} | {name} | {each.acceptance_length:.2f} | {each.prompt_loss:.3f} | "
                f"{each.answer_loss:.3f} |"
            )
    return "\n".join(lines) + "\n"
