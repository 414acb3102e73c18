"""What a training run is told, and the folder that holds everything it writes.

run.json                 the settings
texts.jsonl              the target's own texts
evaluation-NAME.jsonl    those that are evaluated only
features/                hidden states, if they are kept on disk
checkpoint.safetensors   weights and optimizer state of the training, and how far it is
head/                    the trained head, its model card and its curves
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter
from leapahead.drafters.heads.config import EAGLE, EAGLE3, MEDUSA

LOSSES = ("ce", "soft_ce", "kl", "reverse_kl", "tv")
FEATURES = ("online", "disk")
SCHEDULES = ("cosine", "linear")
USUAL_MINUTES = 30.0
USUAL_LOSS = {MEDUSA: "ce", EAGLE: "soft_ce", EAGLE3: "soft_ce"}
USUAL_DEPTHS = {MEDUSA: 5, EAGLE: 1, EAGLE3: 4}
MEDUSA_RATE = 1e-3  # 2401.10774
EAGLE_RATE = 0.5  # divided by the hidden size: 2e-3 for 256, 1.2e-4 for 4096
CHANGEABLE = ("minutes", "steps", "lr")  # when a run is resumed


@dataclass(frozen=True)
class Settings:
    """What one training run is told.

    Attributes:
        kind: "medusa", "eagle" or "eagle3".
        model: name of the target, for the model card.
        data: file of prompts; "" where `texts` is given.
        texts: file of texts that an earlier run has written; "" for none.
        evaluate: files of prompts whose texts are evaluated beside the held-out ones.
        evaluate_prompts: the most prompts of each of these files, taken at equal distances.
        max_new_tokens: greatest length of the target's answers.
        sampled: share of the texts that are sampled at temperature 1; the others are greedy.
        held_out: share of the texts that are not trained on but evaluated.
        prompt_tokens: the last tokens of a prompt that a head is trained on; the target reads all of them.
        features: "online", computed for every batch, or "disk", computed once.
        depths: of Medusa, its number of heads; of EAGLE, the steps that it is trained on its own states.
        draft_vocab: tokens that the head can propose, the most frequent ones of the texts; 0 for all.
        layers: the hidden states that EAGLE-3 reads; empty for its usual ones.
        loss: one of `LOSSES`.
        lr: greatest learning rate.
        batch, accumulate: texts of a forward, and forwards of an optimizer step.
        schedule: how the learning rate falls, "cosine" or "linear".
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
    prompt_tokens: int = 128
    features: str = "online"
    depths: int = 0
    draft_vocab: int = 0
    layers: tuple[int, ...] = ()
    loss: str = ""
    lr: float = 0.0
    batch: int = 16
    accumulate: int = 1
    schedule: str = "cosine"
    minutes: float | None = None
    steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("kind", tuple(USUAL_LOSS)), ("features", FEATURES), ("schedule", SCHEDULES)):
            if (value := getattr(self, name)) not in known:
                raise BadParameter(f"{name}={value!r} is not possible; choose one of {', '.join(known)}")
        if self.loss and self.loss not in LOSSES:
            raise BadParameter(f"loss={self.loss!r} is not possible; choose one of {', '.join(LOSSES)}")
        if bool(self.data) == bool(self.texts):
            raise BadParameter("give either data, a file of prompts, or texts, those that an earlier run has written")
        if self.minutes is not None and self.steps is not None:
            raise BadParameter("give either minutes or steps, not both")
        if self.kind == EAGLE and self.draft_vocab:
            raise BadParameter("draft_vocab is not possible with eagle, whose output layer is the target's")
        if self.kind != EAGLE3 and self.layers:
            raise BadParameter(f"layers is not possible with {self.kind}, which reads the last hidden state")
        for name, least in (("depths", 0), ("draft_vocab", 0), ("batch", 1), ("accumulate", 1), ("steps", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadParameter(f"{name}={value} is not possible: it must be at least {least}")
        for name, most in (("sampled", 1.0), ("held_out", 0.9)):
            if not 0 <= getattr(self, name) <= most:
                raise BadParameter(f"{name}={getattr(self, name)} is not possible: it must be from 0 to {most:g}")
        if self.lr < 0 or (self.minutes is not None and self.minutes <= 0):
            raise BadParameter("lr and minutes must be above 0")

    def complete(self, hidden_size: int) -> Settings:
        """The settings with the usual values in place of those that were left out, for a target of this width."""
        rate = MEDUSA_RATE if self.kind == MEDUSA else EAGLE_RATE / hidden_size
        return replace(
            self,
            depths=self.depths or USUAL_DEPTHS[self.kind],
            loss=self.loss or USUAL_LOSS[self.kind],
            lr=self.lr or rate,
            minutes=USUAL_MINUTES if self.minutes is None and self.steps is None else self.minutes,
        )


@dataclass(frozen=True)
class Folder:
    """The folder of a training run, see the module."""

    path: Path

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
    def head(self) -> Path:
        return self.path / "head"

    def check(self, settings: Settings, resume: bool) -> None:
        """Checks that the folder is new, or if it is resumed, that it was begun with the same settings.

        Raises:
            BadParameter: it is not.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BadParameter(f"{self.path} is a file; give a new folder")
        if resume:
            _check_same(self._run, _plain(settings))
        elif self.path.exists() and any(self.path.iterdir()):
            raise BadParameter(f"{self.path} is not empty; give a new folder, or go on with --resume")

    def begin(self, settings: Settings) -> None:
        """Makes the folder and notes the settings in it.

        Raises:
            BadParameter: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._run.write_text(json.dumps(_plain(settings), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadParameter(f"{self.path} cannot be written: {error.strerror}") from None

    @property
    def _run(self) -> Path:
        return self.path / "run.json"


def _plain(settings: Settings) -> dict[str, Any]:
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
