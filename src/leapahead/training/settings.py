"""What a training run is told, and the folder that holds everything it writes.

run.json                 the settings
texts.jsonl              the target's own texts
evaluation-NAME.jsonl    those that are evaluated only
features/                hidden states, if they are kept on disk
checkpoint.safetensors   weights and optimizer state of the training, and how far it is
trajectories.jsonl       the states of Jacobi decoding that a target is tuned on
head/, draft/, tuned/    what is trained, by its kind, with its model card and its curves
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from leapahead.core.errors import BadParameter
from leapahead.core.storage import write_text
from leapahead.drafters.heads.config import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE,
    EAGLE3,
    FUSED,
    HYDRA,
    HYDRA_PREFIX,
    HYDRAS,
    KINDS,
    LAST,
    MEDUSA,
    MOST_DEPTHS,
    MTP,
    PASS,
    PEAGLE,
    PROBES,
    SPACE,
)

LOSSES = ("ce", "soft_ce", "kl", "reverse_kl", "jsd", "tv")
DIVERGENCES = {"forward-kl": "kl", "reverse-kl": "reverse_kl", "jsd": "jsd", "tvd": "tv"}  # the names of the losses
DRAFT, PARD = DRAFTS = ("draft", "pard")  # a draft model is distilled, and one with mask tokens
CLLM = "cllm"  # a target is tuned for Jacobi decoding
FEATURES = ("online", "disk")
SCHEDULES = ("cosine", "linear")
ADAMW, MUON = OPTIMIZERS = ("adamw", "muon")
USUAL_MINUTES = 30.0
MOST_SEED = 2**63  # prompts have the numbers after it, all of which must be less than 2**64
TRAINED = tuple(kind for kind in KINDS if kind not in (DSPARK, MTP, *PROBES))
USUAL_LOSS = {HYDRA: "ce"}  # soft_ce of the others
USUAL_DEPTHS = {MEDUSA: 5, EAGLE: 1, EAGLE3: 4, PEAGLE: 7, HYDRA: 5, HYDRA_PREFIX: 5, DFLASH: 7, DFLASH2: 7}
MEDUSA_RATE = 1e-3  # 2401.10774, and of Hydra
EAGLE_RATE = 0.5  # divided by the hidden size: 2e-3 for 256, 1.2e-4 for 4096
# Of kinds whose usual optimizer is Muon, divided likewise.
MUON_RATES = {EAGLE: 1.5, EAGLE3: 1.5, PEAGLE: 1.5, DFLASH: 3.0, DFLASH2: 3.0}
PASS_RATE = 1e-2
TUNING_RATE = 0.05  # of whole models, divided by the hidden size: 5e-4 for 96, 5e-5 for 1024
CHANGEABLE = ("minutes", "steps", "lr", "batch", "accumulate")  # when a run is resumed


@dataclass(frozen=True)
class RunSettings:
    """What every training run is told, whatever it trains.

    Attributes:
        kind: what is trained: a kind of head, `DRAFT` or `CLLM`.
        model: name of the target, for the model card.
        data: file of prompts, whose answers the target writes; "" for none.
        texts: file of texts that an earlier run has written; "" for none. With both, all of them are trained on.
        evaluate: files of prompts whose texts are evaluated beside the held-out ones.
        evaluate_prompts: the most prompts of each of these files, taken at equal distances.
        max_new_tokens: greatest length of the target's answers.
        sampled: share of the texts that are sampled at temperature 1; the others are greedy.
        held_out: share of the texts that are not trained on but evaluated.
        lr: greatest learning rate; 0 for the usual one.
        batch, accumulate: texts of a forward, and forwards of an optimizer step.
        schedule: how the learning rate falls, "cosine" or "linear".
        optimizer: one of `OPTIMIZERS`; "" for the usual one, which is Muon for the kinds of `MUON_RATES`, else AdamW.
        minutes, steps: the length of the training; exactly one is set.
        seed: of the weights, the order and the sampled texts.
    """

    kind: str
    model: str = "bundled"
    data: str = ""
    texts: str = ""
    evaluate: tuple[str, ...] = ()
    evaluate_prompts: int = 40
    max_new_tokens: int = 128
    sampled: float = 0.5
    held_out: float = 0.05
    lr: float = 0.0
    batch: int = 16
    accumulate: int = 1
    schedule: str = "cosine"
    optimizer: str = ""
    minutes: float | None = None
    steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(self, schedule=SCHEDULES)
        if self.optimizer:
            check_choice(self, optimizer=OPTIMIZERS)
        if not self.data and not self.texts:
            raise BadParameter("give data=FILE of prompts, texts=FILE that an earlier run has written, or both")
        if self.minutes is not None and self.steps is not None:
            raise BadParameter(f"give either minutes={self.minutes:g} or steps={self.steps}, not both")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise BadParameter(f"minutes={self.minutes:g} is not possible: it must be a finite number above 0")
        for name, least in (("batch", 1), ("accumulate", 1), ("steps", 1), ("lr", 0), ("seed", 0)):
            check_least(self, name, least)
        names = [Path(file).stem for file in self.evaluate]
        if twice := next((name for name in names if names.count(name) > 1), None):
            files = ",".join(self.evaluate)
            raise BadParameter(f"evaluate={files} is not possible: two files have the name {twice!r}; rename one")
        for name, most in (("sampled", 1.0), ("held_out", 0.9)):
            check_share(self, name, most)
        if self.seed >= MOST_SEED:
            raise BadParameter(f"seed={self.seed} is not possible: it must be less than {MOST_SEED}")

    @property
    def length(self) -> float | None:
        """The minutes of the training, the usual ones where nothing is set; None where its steps are."""
        return USUAL_MINUTES if self.minutes is None and self.steps is None else self.minutes

    def complete(self, hidden_size: int) -> Self:
        """The settings with the usual values in place of those that were left out, for a model of this width."""
        rate = self.lr or TUNING_RATE / hidden_size
        return replace(self, lr=rate, optimizer=self.optimizer or ADAMW, minutes=self.length)


@dataclass(frozen=True)
class Settings(RunSettings):
    """What the training of a head is told.

    Attributes:
        kind: one of `TRAINED`.
        prompt_tokens: the last tokens of a prompt that a head is trained on; the target reads all of them.
        features: "online", computed for every batch, or "disk", computed once.
        depths: of Medusa and Hydra, the number of heads; of DFlash and DFlash 2, that of the masks of a block; of
            P-EAGLE, one more than the masks; of EAGLE, the steps that it is trained on its own states.
        draft_vocab: tokens that the head can propose, the most frequent ones of the texts; 0 for all.
        layers: the hidden states that EAGLE-3, P-EAGLE, DFlash and DFlash 2 read; empty for the usual ones.
        loss: one of `LOSSES`.
    """

    prompt_tokens: int = 128
    features: str = "online"
    depths: int = 0
    draft_vocab: int = 0
    layers: tuple[int, ...] = ()
    loss: str = ""

    def __post_init__(self) -> None:
        check_choice(self, kind=TRAINED, features=FEATURES)
        if self.loss:
            check_choice(self, loss=LOSSES)
        super().__post_init__()
        if self.kind in (EAGLE, DFLASH, DFLASH2) and self.draft_vocab:
            raise BadParameter(f"draft_vocab is not possible with {self.kind}, whose output layer is the target's")
        layers = ",".join(map(str, self.layers))
        if self.kind not in FUSED and layers:
            raise BadParameter(f"layers={layers} is not possible with {self.kind}, which reads the last hidden state")
        if len(set(self.layers)) < len(self.layers) or min(self.layers, default=0) < LAST:
            raise BadParameter(f"layers={layers} is not possible: they must be different, and numbered from 0 on")
        check_least(self, "depths", 0, MOST_DEPTHS)
        check_least(self, "draft_vocab", 0)
        if self.kind == PEAGLE and self.depths == 1:
            raise BadParameter("depths=1 is not possible with peagle, which has no mask then; give at least 2")

    def complete(self, hidden_size: int) -> Self:
        """The settings with the usual values in place of those that were left out, for a target of this width."""
        optimizer = self.optimizer or (MUON if self.kind in MUON_RATES else ADAMW)
        if self.kind in (MEDUSA, *HYDRAS):
            rate = MEDUSA_RATE
        else:
            rate = (MUON_RATES.get(self.kind, EAGLE_RATE) if optimizer == MUON else EAGLE_RATE) / hidden_size
        return replace(
            self,
            optimizer=optimizer,
            depths=self.depths or USUAL_DEPTHS[self.kind],
            loss=self.loss or USUAL_LOSS.get(self.kind, "soft_ce"),
            lr=self.lr or rate,
            minutes=self.length,
        )


@dataclass(frozen=True)
class DraftSettings(RunSettings):
    """What the distillation of a draft model is told (DistillSpec, 2310.08461).

    Attributes:
        kind: one of `DRAFTS`; of `PARD` the draft model learns to predict several tokens in one forward.
        draft: name or folder of the draft model to start from; "bundled" for the bundled one.
        divergence: between the target's distribution and the draft model's, one of `DIVERGENCES`.
        on_policy: share of the batches whose answers the draft model samples itself; the others have the target's.
        retention, least_retention: of PARD, share of the places that a mask of depth 1 is trained at, to the power of
            the depth for the others, and the least such share. Not read for encoder-decoder models.
    """

    kind: str = DRAFT
    draft: str = "bundled"
    divergence: str = "forward-kl"
    on_policy: float = 0.0
    retention: float = 0.7
    least_retention: float = 0.2

    def __post_init__(self) -> None:
        check_choice(self, kind=DRAFTS, divergence=tuple(DIVERGENCES))
        super().__post_init__()
        for name in ("on_policy", "retention", "least_retention"):
            check_share(self, name, 1.0)
        if self.kind != PARD:
            check_unset(self, "retention", "least_retention")


@dataclass(frozen=True)
class CllmSettings(RunSettings):
    """What the consistency tuning of a target is told (CLLM, 2403.00835).

    Attributes:
        sampled: 0, since the trajectories are greedy.
        block: guesses of a state of Jacobi decoding.
        states: states of each text that are trained in a batch.
        ar_weight: of the cross entropy of the text, beside the consistency loss.
        keep_weight: of the divergence from the original target's distributions, after each token of prompt and text.
    """

    kind: str = CLLM
    sampled: float = 0.0
    block: int = 8
    states: int = 16
    ar_weight: float = 10.0
    keep_weight: float = 0.0

    def __post_init__(self) -> None:
        check_choice(self, kind=(CLLM,))
        super().__post_init__()
        check_share(self, "sampled", 0.0)
        for name, least in (("block", 1), ("states", 1), ("ar_weight", 0), ("keep_weight", 0)):
            check_least(self, name, least)


@dataclass(frozen=True)
class ProbeSettings(RunSettings):
    """What the training of probes is told (PaSS, 2311.13581; SPACE, 2402.11809).

    Attributes:
        kind: one of `PROBES`.
        depths: probes of a group.
        groups: places of each text that have a group in a batch.
        loss: of a probe, one of `LOSSES`.
        ar_weight: of SPACE, weight of the text's cross entropy, beside the probes' losses.
    """

    kind: str = PASS
    depths: int = 4
    groups: int = 32
    loss: str = "soft_ce"
    ar_weight: float = 1.0

    def __post_init__(self) -> None:
        check_choice(self, kind=PROBES, loss=LOSSES)
        super().__post_init__()
        check_least(self, "depths", 1, MOST_DEPTHS)
        check_least(self, "groups", 1)
        check_least(self, "ar_weight", 0)
        if self.kind != SPACE:
            check_unset(self, "ar_weight")

    def complete(self, hidden_size: int) -> Self:
        """The settings with the usual values in place of those that were left out, for a model of this width."""
        rate = TUNING_RATE / hidden_size if self.kind == SPACE else PASS_RATE
        return replace(self, lr=self.lr or rate, optimizer=self.optimizer or ADAMW, minutes=self.length)


def check_choice(settings: RunSettings, **known: Sequence[str]) -> None:
    """Refuses a setting that is none of the known values."""
    for name, values in known.items():
        if (value := getattr(settings, name)) not in values:
            raise BadParameter(f"{name}={value!r} is not possible; choose one of {', '.join(values)}")


def check_least(settings: RunSettings, name: str, least: int, most: float = math.inf) -> None:
    """Refuses a setting that is too small, too large or not finite; None is what was left out."""
    value = getattr(settings, name)
    if value is not None and not (least <= value <= most and value < math.inf):
        finite = "a finite number of " * isinstance(value, float)
        limits = f"{finite}at least {least}" if most == math.inf else f"from {least} to {most}"
        raise BadParameter(f"{name}={value} is not possible: it must be {limits}")


def check_unset(settings: RunSettings, *names: str) -> None:
    """Refuses settings that are not read for the kind that is trained."""
    for name in names:
        if (value := getattr(settings, name)) != getattr(type(settings), name):
            raise BadParameter(f"{name}={value} is not possible with {settings.kind}, which does not read it")


def check_share(settings: RunSettings, name: str, most: float) -> None:
    """Refuses a setting that is no share up to `most`."""
    if not 0 <= getattr(settings, name) <= most:
        raise BadParameter(f"{name}={getattr(settings, name)} is not possible: it must be from 0 to {most:g}")


@dataclass(frozen=True)
class Folder:
    """The folder of a training run, see the module.

    Attributes:
        path: of the folder.
        result: name of the folder in it that holds what is trained.
    """

    path: Path
    result: str = "head"

    @property
    def texts(self) -> Path:
        return self.path / "texts.jsonl"

    def evaluation(self, name: str) -> Path:
        return self.path / f"evaluation-{name}.jsonl"

    @property
    def features(self) -> Path:
        return self.path / "features"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories.jsonl"

    @property
    def trained(self) -> Path:
        """What is trained."""
        return self.path / self.result

    def check(self, settings: RunSettings, resume: bool) -> None:
        """Checks that the folder is new and can be written, or if it is resumed, that it was begun with these settings.

        A folder with settings alone is new: a run has failed before it wrote a text.

        Raises:
            BadParameter: it is not.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BadParameter(f"{self.path} is a file; give a new folder")
        there = next(each for each in (self.path, *self.path.absolute().parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise BadParameter(f"{self.path} cannot be written, because {there} is no writable folder; give another")
        if resume:
            _check_same(self._run, _plain(settings))
        elif self.path.exists() and any(each != self._run for each in self.path.iterdir()):
            raise BadParameter(f"{self.path} is not empty; give a new folder, or go on with --resume")

    def begin(self, settings: RunSettings) -> None:
        """Makes the folder and notes the settings in it.

        Raises:
            BadParameter: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self._run, json.dumps(_plain(settings), indent=2) + "\n")
        except OSError as error:
            raise BadParameter(f"{self.path} cannot be written: {error.strerror}") from None

    @property
    def _run(self) -> Path:
        return self.path / "run.json"


def _plain(settings: RunSettings) -> dict[str, Any]:
    """The settings as they are read from a JSON file."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return found


def _check_same(file: Path, given: dict[str, Any]) -> None:
    """Refuses to resume what was begun with other settings."""
    try:
        begun = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise BadParameter(f"{file.parent} holds no training that could be resumed; leave --resume out") from None
    for name, value in given.items():
        if name not in CHANGEABLE and begun.get(name) != value:
            raise BadParameter(
                f"{name}={value!r} is not possible with --resume, because {file.parent} was begun with "
                f"{begun.get(name)!r}; give the same again, or a new folder"
            )
