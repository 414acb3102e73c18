"""A training of probes in order: the target's texts, the training, the evaluation, the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leapahead.api import LLM
from leapahead.bench import plots
from leapahead.bench.conditions import conditions
from leapahead.drafters.heads import checkpoint
from leapahead.drafters.heads.config import PROBE_TYPE, SPACE
from leapahead.models import loading
from leapahead.models.transformers.families import TUNED
from leapahead.models.transformers.linears import is_packed, unpack
from leapahead.models.transformers.model import TransformersTarget
from leapahead.training import card, decoding
from leapahead.training.batches import Order
from leapahead.training.cllm_run import TUNED_FOLDER, losses_of
from leapahead.training.decoding import Sets
from leapahead.training.loop import Training, Watch
from leapahead.training.probes import ProbeRecipe, masked_executor
from leapahead.training.run import Trained, by_temperature, gathered, run_of
from leapahead.training.settings import Folder, ProbeSettings
from leapahead.training.student import Student

HEAD_FOLDER, PROBES_FOLDER = "head", "probes"


@dataclass(frozen=True)
class Losses:
    """Losses of a tuned target and of the one that it was tuned from, on one set of texts, in nats a token.

    Attributes:
        name: of the set.
        prompts, answers: mean -log p of the prompts, which no model wrote, and of the untuned model's answers; before
            the tuning and after it.
    """

    name: str
    prompts: tuple[float, float]
    answers: tuple[float, float]


@dataclass(frozen=True)
class TrainedProbes(Trained):
    """What a training of probes ended with.

    Attributes:
        losses: of SPACE, what the tuning has changed, by set of texts.
    """

    losses: Sequence[Losses] = ()


def folder_of(path: Path, kind: str) -> Folder:
    """The folder of a run: `path`/head for PaSS, and for SPACE `path`/tuned, whose folder `probes` holds the head."""
    return Folder(path, TUNED_FOLDER if kind == SPACE else HEAD_FOLDER)


def train_probes(
    llm: LLM,
    settings: ProbeSettings,
    path: Path,
    watch: Watch,
    resume: bool = False,
    command: str = "",
    trust_remote_code: bool = False,
) -> TrainedProbes:
    """Trains probes for a target, for SPACE together with a copy of it, with a model card and curves.

    Args:
        llm: the target, which writes the texts with its drafter; it was loaded by `settings.model`. Its weights stay as
            they are. It is closed afterwards.
        settings: of the training.
        path: the folder of the run, which does not exist yet or is empty; see `folder_of`.
        watch: what is told of the progress, and what stops the training.
        resume: go on with the run that the folder holds.
        command: for the model card.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        LeapaheadError: a setting is impossible, the target takes no probes, or a file cannot be written.
    """
    plots.require("train")
    folder = folder_of(path, settings.kind)
    folder.check(settings, resume)
    target, tokenizer = llm.target, llm.tokenizer
    executor = masked_executor(target)
    assert isinstance(target, TransformersTarget), "others have no such executor"
    student = None
    if settings.kind == SPACE:
        where = loading.bundled() if settings.model == loading.BUNDLED else settings.model
        student = Student.load(where, settings.model, executor.device, trust_remote_code)
    own = ProbeRecipe(target.model if student is None else student.model, executor, settings.complete(_width(target)))
    folder.begin(settings)
    measured = conditions(target)
    trained, held_out, sets = gathered(llm, settings, folder, watch)
    llm.close()
    if student is None and is_packed(target.model):  # there are no gradients through packed weights
        with target.lock:
            unpack(target.model)
    order, some = Order(trained, settings.batch, settings.seed), held_out[: settings.batch]
    training = Training(own, order, own.batch, own.settings, folder.checkpoint, own.batch(some) if some else None)
    state = training.run(watch)
    if not training.is_done:
        return TrainedProbes(own.settings, state, None)
    own.module.eval()
    sets = {**by_temperature(held_out), **sets}
    head, drafted_for = folder.trained, llm.target
    found = list[Losses]()
    if student is not None:
        head = folder.trained / PROBES_FOLDER
        student.model.config.update({TUNED: {"method": SPACE, "from": settings.model}})
        student.save(folder.trained)
    write(own, head, settings.model if student is None else str(folder.trained), target)
    if student is not None:
        device = str(executor.device)
        drafted_for = loading.load(str(folder.trained), device=device, trust_remote_code=trust_remote_code).target
        found = losses(target, drafted_for, sets)
    evaluations = decoding.evaluations(
        drafted_for, tokenizer, sets, watch.progress, "drafting with the probes", drafter="head", head=str(head)
    )
    run = run_of(own.settings, trained, folder, state, evaluations, measured, command)
    card.write(folder.trained, _card(own, run, found), card.figures(run))
    return TrainedProbes(own.settings, state, folder.trained, evaluations, found)


def _width(target: TransformersTarget) -> int:
    return int(target.model.get_input_embeddings().weight.shape[-1])


def losses(target: Any, tuned: Any, sets: Sets) -> list[Losses]:
    """What a tuning has changed on sets of texts; empty ones are left out."""
    found = []
    for name, texts in sets.items():
        if texts:
            (prompts, answers), (later, others) = (losses_of(each, texts) for each in (target, tuned))
            found.append(Losses(name, (prompts, later), (answers, others)))
    return found


def write(own: ProbeRecipe, folder: Path, name: str, target: TransformersTarget) -> None:
    """Writes the probes: `config.json` and `model.safetensors`, in the precision of the target.

    Args:
        name: of the model that they draft for.
        target: that they were trained for.

    Raises:
        BadParameter: the folder cannot be written.
    """
    dtype = target.model.dtype
    config = {
        PROBE_TYPE: own.settings.kind,
        "num_probes": own.depths,
        "vocab_size": target.info.vocab_size,
        "base_model_name_or_path": name,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    weight = own.module.embeddings.weight.detach().to("cpu", dtype)
    checkpoint.write(folder, config, {"embeddings.weight": weight})


def _card(own: ProbeRecipe, run: card.Run, found: Sequence[Losses]) -> str:
    """The content of `README.md`."""
    settings = own.settings
    name, model = card.NAMES[settings.kind], f"`{settings.model}`"
    parameters = sum(each.numel() for each in own.parameters.values())
    rows = [
        ("Tuned from" if own.is_tuned else "Target", model),
        ("Kind", f"{name} ({card.PAPERS[settings.kind]})"),
        ("Parameters", f"{parameters:,}" + (", those of the model included" if own.is_tuned else "")),
        ("Probes of a group", str(own.depths)),
        *([("Lossless", "with respect to this tuned model, not to the one that it was tuned from")] * own.is_tuned),
    ]
    if own.is_tuned:
        title, use = f"{settings.model}, tuned to predict several tokens", f"-m FOLDER --head FOLDER/{PROBES_FOLDER}"
        what = (
            "A model that predicts several tokens ahead at mask tokens, which ride in its own forwards. Its texts are "
            f"others\nthan those of {model}: decoding is lossless with respect to the tuned model."
        )
    else:
        title, use = f"{name} probes for {settings.model}", "-m MODEL --head FOLDER"
        what = (
            f"Look-ahead embeddings for {model}. They ride in its own forwards and predict several tokens ahead, which "
            "the\nmodel verifies: the text is its own."
        )
    method = (
        f"{settings.groups} groups of {own.depths} probes in each text of a step; the loss of depth d has the weight "
        f"0.8^d; loss {settings.loss}."
    ) + (f" Beside them, {settings.ar_weight:g} times the cross entropy of the text." if own.is_tuned else "")
    body = [
        f"# {title}\n",
        f"{what}\n",
        "| | |\n| --- | --- |\n" + "".join(f"| {key} | {value} |\n" for key, value in rows),
        "## Use\n",
        f"    leapahead generate {use} PROMPT\n",
        f"## Training\n\n{card.training(run, method)}",
        "![Loss and agreement](curves.png)\n",
        f"## Measured\n\n{card.measured(run.evaluations, card.DECODED)}{_changed(found)}",
    ]
    return card.whole(body, run, settings.model, settings.kind)


def _changed(found: Sequence[Losses]) -> str:
    """What the tuning has changed, a table with a row for every set of texts."""
    if not found:
        return ""
    lines = [
        "\nLosses in nats a token, before the tuning and after it: of the prompts, which no model wrote, and of the "
        "answers, which\nthe model wrote before the tuning.\n",
        "| Texts | Loss of the prompts, before | after | Loss of the answers, before | after |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for each in found:
        values = " | ".join(f"{value:.3f}" for value in (*each.prompts, *each.answers))
        lines.append(f"| {each.name} | {values} |")
    return "\n".join(lines) + "\n"
