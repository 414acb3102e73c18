"""Transformers' own `generate` on the same model object as the target: greedy, prompt lookup, assisted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
import transformers

from leapahead.bench.contender import Contender, Pass, Setting, Text
from leapahead.bench.peers import Entry, Peer, where
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.stats import Stats
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.pretrained import load as load_target


@dataclass(frozen=True)
class Greedy(Peer):
    """`model.generate(...)`, one token per forward."""

    name: ClassVar[str] = "transformers"

    def version(self) -> str:
        return f"transformers {transformers.__version__}"

    def enter(self, name: str, entry: Entry) -> Contender:
        return Generate(name, self._model(entry), {})

    def _model(self, entry: Entry) -> Any:
        target = entry.loaded.target
        if not isinstance(target, TransformersTarget):
            raise Refused(f"Transformers cannot run {target.info.name}")
        if target.info.decoder is not None:
            raise Refused(f"only decoder-only models are compared with it, which {target.info.name} is not")
        return target.model


@dataclass(frozen=True)
class PromptLookup(Greedy):
    """`generate(prompt_lookup_num_tokens=...)`."""

    name: ClassVar[str] = "transformers-prompt-lookup"
    num_tokens: int = 10

    def enter(self, name: str, entry: Entry) -> Contender:
        return Generate(name, self._model(entry), {"prompt_lookup_num_tokens": self.num_tokens})


@dataclass(frozen=True)
class Assisted(Greedy):
    """`generate(assistant_model=...)`, by default with the bundled draft model."""

    name: ClassVar[str] = "transformers-assisted"
    draft: str = where("the folder of a draft model", default="")

    def __post_init__(self) -> None:
        if self.draft and not Path(self.draft).is_dir():
            raise BadParameter(f"the draft model {self.draft} is not a folder; give the folder of a Transformers model")

    def enter(self, name: str, entry: Entry) -> Contender:
        model = self._model(entry)
        folder = self.draft or str(resources.files("leapahead") / "assets" / "tiny-draft")
        dtype = str(model.dtype).removeprefix("torch.")
        target, _ = load_target(folder, dtype=dtype, device=str(model.device))
        draft_size, size = target.info.vocab_size, entry.loaded.target.info.vocab_size
        if draft_size != size:
            raise Refused(f"the draft model has a vocabulary of {draft_size} tokens and the target one of {size}")
        return Generate(name, model, {}, target.model)


class Generate(Contender):
    """`generate`, timed from its first token to its last; the prefill is timed separately.

    Args:
        name: of the row.
        model: of the target.
        config: of the generation.
        draft: the assistant model.

    Raises:
        Refused: Transformers cannot draft for this model.
    """

    def __init__(self, name: str, model: Any, config: dict[str, Any], draft: Any = None) -> None:
        self.name, self._model, self._options = name, model, config
        self._models = {} if draft is None else {"assistant_model": draft}
        self._drafts = bool(config or draft)
        if self._drafts and model._is_stateful:
            raise Refused("Transformers does not draft for recurrent models")

    def refusal(self, prompts: Sequence[list[int]], setting: Setting) -> str | None:
        if setting.temperature:
            return "its random numbers differ, so sampled texts cannot be compared"
        if self._drafts and setting.batch > 1:
            return "Transformers drafts for single sequences only"
        return None

    def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
        done = Pass([], 0.0)
        for start in range(0, len(prompts), setting.batch):
            done.add(self._together(prompts[start : start + setting.batch], setting))
        return done

    def _together(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ends = list(setting.eos_token_ids)
        config = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=setting.max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            repetition_penalty=1.0,  # otherwise the model's own settings would apply
            no_repeat_ngram_size=0,
            **self._options,
        )
        nodes: list[int] = []

        def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            nodes.append((args[0] if args else kwargs["input_ids"]).shape[1])

        clock = Clock()
        hook = self._model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            began = perf_counter()
            output = self._model.generate(
                torch.tensor(
                    [[0] * left + prompt for left, prompt in zip(padding, prompts, strict=True)],
                    device=self._model.device,
                ),
                attention_mask=torch.tensor(
                    [[0] * left + [1] * (longest - left) for left in padding], device=self._model.device
                ),
                generation_config=config,
                stopping_criteria=[clock],
                **self._models,
            )
            rows = output[:, longest:].tolist()  # waits for the device
            ended = perf_counter()
        finally:
            hook.remove()
        first, length = clock.calls[0]
        texts = []
        for row in rows:
            kept = _until_end(row, ends)
            timed = max(0, len(kept) - (length - longest))
            steps = min(timed, len(nodes) - 1)  # a sequence that ended early waits for the others
            stats = Stats(prefill_forwards=1, steps=steps, committed=timed, nodes=sum(nodes[1 : 1 + steps]))
            texts.append(Text(kept, first - began, stats, timed))
        return Pass(texts, ended - first, first - began)


class Clock(transformers.StoppingCriteria):  # type: ignore[misc]  # untyped there
    """Records times; never stops the text.

    Attributes:
        calls: (time, length of the sequence) after each step of the model, without those of its draft model.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        self.calls.append((perf_counter(), input_ids.shape[1]))
        return ended


def _until_end(row: list[int], ends: Sequence[int]) -> list[int]:
    """The row up to its first end token, without padding."""
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row
