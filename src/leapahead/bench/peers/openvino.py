"""OpenVINO GenAI's own pipeline on the target's folder: plain decoding and prompt lookup."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import openvino as ov
import openvino_genai

from leapahead.bench.contender import Contender, Pass, Setting, Text
from leapahead.bench.peers import Entry, Peer
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.stats import Stats
from leapahead.models.openvino.model import OpenVinoTarget

BACKENDS = ("PA", "SDPA")


@dataclass(frozen=True)
class Plain(Peer):
    """`LLMPipeline.generate`, one token per forward, with the target's threads and precision.

    Its attention backend is paged attention (PA), or the one that keeps a state in the model (SDPA), as it always is
    where the target is decoded by its states. Its cache has the target's type, or the one that is named.
    """

    name: ClassVar[str] = "openvino-genai"
    backend: str = "PA"
    cache: str = ""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise BadParameter(f"the backend {self.backend!r} is not possible; choose one of {', '.join(BACKENDS)}")

    def version(self) -> str:
        return f"openvino-genai {openvino_genai.__version__}"

    def enter(self, name: str, entry: Entry) -> Contender:
        return Generate(name, _target(entry), self.backend, self.cache, {}, {})


@dataclass(frozen=True)
class PromptLookup(Plain):
    """The same with `prompt_lookup=True`."""

    name: ClassVar[str] = "openvino-prompt-lookup"
    num_tokens: int = 5
    ngram: int = 3

    def enter(self, name: str, entry: Entry) -> Contender:
        options = {"num_assistant_tokens": self.num_tokens, "max_ngram_size": self.ngram}
        return Generate(name, _target(entry), self.backend, self.cache, {"prompt_lookup": True}, options)


def _target(entry: Entry) -> OpenVinoTarget:
    target = entry.loaded.target
    if not isinstance(target, OpenVinoTarget):
        raise Refused(f"OpenVINO GenAI runs OpenVINO folders only, which {target.info.name} is not")
    return target


def _scheduling() -> Any:
    """GenAI's own for a single text, but for its cache of prefixes, in which later rounds would find their prompts."""
    found = openvino_genai.SchedulerConfig()
    found.max_num_batched_tokens = sys.maxsize
    found.enable_prefix_caching = False
    return found


class Generate(Contender):
    """`generate`, timed from its first token to its last, by its own clock; the prefill is timed separately.

    Args:
        name: of the row.
        target: whose folder, threads and precision it takes.
        backend: of the attention.
        cache: type of the KV cache; "" for the target's.
        pipeline, generation: options.

    Raises:
        Refused: GenAI cannot load the model.
    """

    def __init__(
        self,
        name: str,
        target: OpenVinoTarget,
        backend: str,
        cache: str,
        pipeline: dict[str, Any],
        generation: dict[str, Any],
    ) -> None:
        self.name, self._options = name, generation
        model = target.model
        settings: dict[str, Any] = {
            "ATTENTION_BACKEND": backend if model.trees else "SDPA",
            "INFERENCE_PRECISION_HINT": model.computed_in,
            "KV_CACHE_PRECISION": cache or model.cached_in,
            "INFERENCE_NUM_THREADS": model.threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if settings["ATTENTION_BACKEND"] == "PA":
            settings["scheduler_config"] = _scheduling()
        try:
            self._pipeline: Any = openvino_genai.LLMPipeline(str(model.file.parent), "CPU", **settings, **pipeline)
        except RuntimeError as error:
            raise Refused(f"OpenVINO GenAI cannot load {target.info.name}: {str(error).splitlines()[-1]}") from None

    def refusal(self, prompts: Sequence[list[int]], setting: Setting) -> str | None:
        if setting.temperature:
            return "its random numbers differ, so sampled texts cannot be compared"
        if setting.batch > 1:
            return "it decodes one text at a time here"
        return None

    def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
        done = Pass([], 0.0)
        for prompt in prompts:
            done.add(self._one(prompt, setting))
        return done

    def _one(self, prompt: list[int], setting: Setting) -> Pass:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=setting.max_new_tokens,
            do_sample=False,
            ignore_eos=not setting.eos_token_ids,
            stop_token_ids=set(setting.eos_token_ids),
            apply_chat_template=False,
            **self._options,
        )
        if setting.eos_token_ids:
            config.eos_token_id = setting.eos_token_ids[0]
        result = self._pipeline.generate(ov.Tensor(np.array([prompt], np.int64)), config)
        tokens = [int(token) for token in result.tokens[0]]
        raw = result.perf_metrics.raw_metrics
        prefill = float(raw.m_times_to_first_token[0]) / 1e6  # microseconds
        seconds = float(raw.generate_durations[0]) / 1e6 - prefill
        timed, steps = len(tokens) - 1, len(raw.m_new_token_times) - 1
        stats = Stats(prefill_forwards=1, steps=steps, committed=timed, accepted=timed - steps)
        return Pass([Text(tokens, prefill, stats, timed)], seconds, prefill)
