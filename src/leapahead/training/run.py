"""A training run of a head in order: the target's texts, its hidden states, the training, the evaluation, the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from leapahead.api import LLM
from leapahead.bench import plots
from leapahead.bench.conditions import Data, conditions
from leapahead.core.errors import BadParameter
from leapahead.training import card, texts
from leapahead.training.batches import Order, batch_of
from leapahead.training.evaluate import Evaluation, evaluate
from leapahead.training.export import export
from leapahead.training.features import Features, Online, Stored, training_target
from leapahead.training.loop import State, Training, Watch
from leapahead.training.recipes import config_of, recipe
from leapahead.training.settings import Folder, RunSettings, Settings
from leapahead.training.texts import Text, Wish

MOST_HELD_OUT = 40  # texts of each temperature that are evaluated


@dataclass(frozen=True)
class Trained:
    """What a training run ended with.

    Attributes:
        settings: complete.
        state: of the training.
        folder: of what was trained; None where the training was stopped before its end.
        evaluations: of what was trained, by set of texts.
    """

    settings: RunSettings
    state: State
    folder: Path | None
    evaluations: Sequence[Evaluation] = ()


def train_head(
    llm: LLM, settings: Settings, path: Path, watch: Watch, resume: bool = False, command: str = ""
) -> Trained:
    """Trains a head for a target and writes it to `path`/head, with a model card and curves.

    Args:
        llm: the target, which writes the texts with its drafter. It is closed afterwards.
        settings: of the training.
        path: the folder of the run, which does not exist yet or is empty.
        watch: what is told of the progress, and what stops the training.
        resume: go on with the run that the folder holds.
        command: for the model card.

    Raises:
        LeapaheadError: a setting is impossible, no head can be trained for the target, or a file cannot be written.
    """
    plots.require("train")
    folder = Folder(path)
    folder.check(settings, resume)
    target = training_target(llm.target)
    if settings.draft_vocab > target.vocab_size:
        raise BadParameter(
            f"draft_vocab={settings.draft_vocab} is not possible, since {target.name} has {target.vocab_size} tokens; "
            "give fewer, or leave it out for all"
        )
    complete = settings.complete(target.hidden_size)
    config_of(target, complete, settings.draft_vocab or target.vocab_size)  # refuses layers before a text is decoded
    folder.begin(settings)
    measured = conditions(llm.target)
    trained, held_out, sets = gathered(llm, settings, folder, watch)
    llm.close()
    own = recipe(target, complete, trained)
    features: Features = Online(target, own.layers)
    if settings.features == "disk":
        features = Stored(target, own.layers, folder.features, [*trained, *held_out], watch.progress)
    batches = partial(batch_of, features=features, prompt_tokens=settings.prompt_tokens, width=target.hidden_size)
    some = held_out[: settings.batch]
    watched = batches(some) if some else None
    order = Order(trained, settings.batch, settings.seed)
    training = Training(own, order, batches, complete, folder.checkpoint, watched)
    state = training.run(watch)
    if not training.is_done:
        return Trained(complete, state, None)
    export(own, folder.trained)
    sets = {**by_temperature(held_out), **sets}
    found = evaluate(own, Online(target, own.layers), sets, watch.progress)
    run = run_of(complete, trained, folder, state, found, measured, command)
    card.write(folder.trained, card.text(own, run), card.figures(run))
    return Trained(complete, state, folder.trained, found)


def run_of(
    settings: RunSettings,
    trained: Sequence[Text],
    folder: Folder,
    state: State,
    evaluations: Sequence[Evaluation],
    measured: Data,
    command: str,
) -> card.Run:
    """What a model card tells of a run; see `card.Run`."""
    return card.Run(
        settings,
        len(trained),
        sum(len(text.answer) for text in trained),
        sum(text.temperature > 0 for text in trained) / len(trained),
        [texts.written_for(file) for file in _files(settings, folder)],
        state,
        evaluations,
        measured,
        command,
    )


def _files(settings: RunSettings, folder: Folder) -> list[Path]:
    """The files of the texts that are trained on: those of an earlier run, and those that this one writes."""
    return [Path(settings.texts)] * bool(settings.texts) + [folder.texts] * bool(settings.data)


def gathered(
    llm: LLM,
    settings: RunSettings,
    folder: Folder,
    watch: Watch,
    usable: Callable[[Sequence[Text]], Sequence[Text]] = list,
) -> tuple[list[Text], list[Text], dict[str, list[Text]]]:
    """The texts to train on, the held-out ones, and those of the files that are evaluated only, by their names.

    Args:
        usable: which of the texts are trained on or held out; all by default.

    Raises:
        BadParameter: as of `texts.prompts`, `texts.write`, `texts.read` and `texts.divide`.
    """
    longest = settings.max_new_tokens
    trained_on = [Wish(Path(settings.data), longest, settings.sampled, settings.seed)] if settings.data else []
    evaluated = [Wish(Path(name), longest, limit=settings.evaluate_prompts) for name in settings.evaluate]
    prompts = {wish: texts.prompts(llm, wish) for wish in (*trained_on, *evaluated)}  # before a text is decoded
    found = texts.read(llm, Path(settings.texts)) if settings.texts else []
    for wish in trained_on:
        before = 1 + max((text.index for text in found), default=-1)  # so that no two texts have one number
        own = texts.write(llm, wish, folder.texts, watch.progress, known=prompts[wish])
        found += [replace(text, index=before + text.index) for text in own]
    sets = {}
    for wish in evaluated:
        what, known = wish.data.stem, prompts[wish]
        written = texts.write(llm, wish, folder.evaluation(what), watch.progress, f"texts of {what}", known)
        sets[what] = [text for text in written if len(text.answer) >= texts.LEAST]
    found = texts.without(found, [text for each in sets.values() for text in each])
    return *texts.divide(usable(found), settings.held_out, settings.seed), sets


def by_temperature(held_out: Sequence[Text]) -> dict[str, list[Text]]:
    """The held-out texts that are evaluated, as one set of texts for each temperature."""
    names = {0.0: "held out, greedy", 1.0: "held out, temperature 1"}
    return {
        name: [text for text in held_out if text.temperature == temperature][:MOST_HELD_OUT]
        for temperature, name in names.items()
    }
