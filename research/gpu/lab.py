"""What the cells of one cost share: the model on its device, its targets, prompts, and the speed of a drafter."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from leapahead.bench import tasks
from leapahead.bench.conditions import Data, Progress, silent
from leapahead.bench.contender import Ours, Pass, Setting
from leapahead.check import distinct
from leapahead.core.errors import Refused
from leapahead.models import loading
from leapahead.models.transformers import pretrained
from leapahead.models.transformers.model import TransformersTarget
from leapahead.planner.profile import LatencyProfiles
from research.standin import COSTS
from research.standin_memory import build

TINY = "tiny"  # the bundled model itself
KINDS: dict[str, dict[str, Any]] = {
    "captured": {"static": "graphs"},
    "eager": {"static": "off"},
    "compiled": {"static": "compiled"},
    "exact": {"exact": True},
    "exact-eager": {"exact": True, "static": "off"},
}
CAPTURED, EAGER, COMPILED, EXACT, EXACT_EAGER = KINDS


@dataclass(frozen=True)
class Settings:
    """What a run measures with.

    Attributes:
        device: of the model.
        dtype: of its weights.
        data: folder of prompts; None for the bundled ones.
        prompts: of each task, at most; batches take as many as they have sequences, if that is more.
        max_new_tokens: of each text.
        exact_tokens: that exact mode compares at most.
        rounds: of repeated measurements.
        vllm_python: the Python of an environment with vLLM; None for this one.
    """

    device: torch.device
    dtype: str = "bfloat16"
    data: Path | None = None
    prompts: int = 4
    max_new_tokens: int = 64
    exact_tokens: int = 20_000
    rounds: int = 15
    vllm_python: str | None = None


@dataclass(eq=False)
class Lab:
    """Of one cost: a name of `COSTS`, or "tiny".

    Attributes:
        kinds: options of the targets by kind.
    """

    cost: str
    settings: Settings
    progress: Progress = silent
    kinds: Mapping[str, dict[str, Any]] = field(default_factory=lambda: KINDS)
    _targets: dict[str, TransformersTarget] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.settings.device

    @cached_property
    def model(self) -> Any:
        """On the device, in evaluation mode."""
        if self.cost == TINY:
            model, _, _ = pretrained.load_files(loading.bundled(), self.settings.dtype, trust_remote_code=False)
            return model.to(self.device)
        return build(self.cost, self.device, self.settings.dtype, progress=self.progress)

    @cached_property
    def tokenizer(self) -> Any:
        return loading.load_tokenizer(loading.BUNDLED, trust_remote_code=False)

    @property
    def weights(self) -> int:
        """Bytes of the weights that a forward of one token reads: all but an embedding of which it reads one row."""
        model = self.model
        every = {id(each): each for each in model.parameters()}
        if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
            del every[id(model.get_input_embeddings().weight)]
        return sum(each.numel() * each.element_size() for each in every.values())

    def loaded(self, kind: str) -> loading.Loaded:
        """A target of a kind of `KINDS`, over the same weights.

        Raises:
            Refused: this model or device has not got it; the message says why.
        """
        if kind not in self._targets:
            name = f"{self.cost} stand-in" if self.cost in COSTS else self.cost
            self._targets[kind] = TransformersTarget(self.model, name=name, exclusive=True, **self.kinds[kind])
        target = self._targets[kind]
        return loading.Loaded(target, self.tokenizer, ())

    def prompts(self, task: str, most: int | None = None, least: int = 1) -> list[list[int]]:
        """Token ids of a task's prompts, of so many at most. None comes twice: a drafter would know its text already.

        Raises:
            Refused: there are fewer than `least`.
        """
        (found,) = tasks.read(self.settings.data, [task], most)
        whole = tasks.encoded(found, self.loaded(EAGER), self.settings.max_new_tokens + 1)
        if len(whole) < least:
            raise Refused(f"{least} prompts of {task} are needed and there are {len(whole)}; name a folder with --data")
        return whole

    @cached_property
    def tasks(self) -> list[str]:
        """The names of code and mathematics problems: HumanEval and GSM8K, or those of the bundled prompts."""
        there = [each.name for each in tasks.read(self.settings.data)]
        return [name for name in tasks.TEXTS if name in there] or there[:2]

    def speed(
        self,
        kind: str,
        drafter: str,
        options: dict[str, Any],
        prompts: Sequence[list[int]],
        setting: Setting,
        passes: int = 2,
    ) -> tuple[Data, Pass]:
        """How fast a drafter decodes some prompts the last time: the first captures graphs and measures profiles.

        Returns:
            Tokens per second without the prefill, acceptance length, nodes of a step, distinct 4-grams; and the pass.
        """
        loaded = self.loaded(kind)
        ours = Ours(drafter, loaded.target, loaded.tokenizer, drafter, options, LatencyProfiles(loaded.target.info))
        try:
            for _ in range(passes):
                ours.begin_round()
                found = ours.run([list(each) for each in prompts], setting)
        finally:
            ours.close()
        texts = [text.tokens for text in found.texts]
        every = [text.stats for text in found.texts if text.stats is not None]
        steps = sum(each.steps for each in every)
        return {
            "drafter": drafter,
            "options": options,
            "tokens": sum(map(len, texts)),
            "tokens_per_second": sum(map(len, texts)) / found.seconds,
            "acceptance_length": sum(each.committed for each in every) / steps,
            "nodes_per_step": sum(each.nodes for each in every) / steps,
            "distinct_4": distinct(texts),
        }, found

    def release(self) -> None:
        """Drops the targets and the model, and gives the device's memory back."""
        self._targets.clear()
        self.__dict__.pop("model", None)
        gc.collect()  # what refers to itself
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
