"""The logits processors of Transformers, as the sampler of one row of a batch calls them.

Transformers calls a processor once per step for the whole batch. Here it is called with the prefixes of the drafted
nodes of one row, `([nodes, length], [nodes, vocab])`, so that it must be a function of its arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from leapahead.core.processors import LogitsProcessor, PrefixFree
from leapahead.core.sampling import SamplingParams
from leapahead.integrations.hf_fields import PREFIX_FREE

# Processors that hold something for every row of the batch.
BATCH_PROCESSORS = (
    RepetitionPenaltyLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)


def of_row(processor: Any, row: int, rows: int) -> Any:
    """A processor for one row of the batch: a copy where it holds something for every row, else itself."""
    mine = copy.copy(processor) if isinstance(processor, BATCH_PROCESSORS) else processor
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(processor.prompt_ignore_length, Tensor):
        mine.prompt_ignore_length = int(processor.prompt_ignore_length[row])
    elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        prompt = row * len(processor.encoder_input_ids) // rows  # the same for all its num_return_sequences rows
        mine.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
    elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        mine.generated_ngrams = [processor.generated_ngrams[row * processor.batch_size // rows]]
        mine.batch_size = 1
    elif isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed: Callable[[int, Tensor], list[int]] = processor._prefix_allowed_tokens_fn
        prompt = row // processor._num_beams  # the same for all its num_return_sequences rows
        mine._prefix_allowed_tokens_fn = lambda _, prefix: allowed(prompt, prefix)
        mine._num_beams = 1
    return mine


def sampling_params(processors: Sequence[Any], pads: Tensor, sampled: bool, seed: int, float64: bool) -> SamplingParams:
    """The processors of one row in their order, and the temperature for the sampler.

    In Transformers the temperature is one of the processors. Here the sampler divides by it, since drafters rank their
    candidates with it. Where the temperature is not the last processor, the final scores are multiplied by it, so that
    the sampler's division restores them.

    Args:
        processors: as `of_row` gives them.
        pads: int64 [pads], the padding on the left of the row.
        sampled: whether the text is sampled.
        seed: of the Gumbel noise.
        float64: whether the model computes in float64; Transformers converts its logits to float32.
    """
    called, temperature = list(processors), 0.0
    if sampled:
        temperature = 1.0
        for index, processor in enumerate(processors):
            if type(processor) is TemperatureLogitsWarper:
                temperature = processor.temperature
                is_last = index == len(processors) - 1
                called = list(processors[:-1]) if is_last else [*processors, _Times(temperature)]
    calls = ([PrefixFree(_as_float32)] if float64 else []) + _calls(called, pads)
    return SamplingParams(processors=tuple(calls), temperature=temperature, seed=seed)


def _calls(processors: Sequence[Any], pads: Tensor) -> list[LogitsProcessor]:
    """The processors as the sampler takes them; neighbours that read the prefix become one call."""
    calls: list[LogitsProcessor] = []
    reading: list[Any] = []
    for processor in [*processors, None]:
        is_free = processor is None or _is_prefix_free(processor)
        if is_free and reading:
            calls.append(_Called(pads, reading))
            reading = []
        if not is_free:
            reading.append(processor)
        elif processor is not None:
            calls.append(PrefixFree(_Called(pads, [processor])))
    return calls


class _Called:
    """Calls processors with what Transformers gives them: left padding included, on the device of `input_ids`."""

    def __init__(self, pads: Tensor, processors: Sequence[Any]) -> None:
        self.pads, self.processors = pads, processors

    def __call__(self, prefixes: Tensor, scores: Tensor) -> Tensor:
        """The processed scores, [nodes, vocab], for prefixes [nodes, length without padding]."""
        device, home = self.pads.device, scores.device
        ids = torch.cat([self.pads.expand(len(prefixes), -1), prefixes.to(device)], dim=1)  # [nodes, length]
        scores = scores.to(device)
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores.to(home)


def _is_prefix_free(processor: Any) -> bool:
    """Whether a processor does not read the prefix, so that one call serves nodes of every depth."""
    kind = type(processor)
    return kind is _Times or (kind.__name__ in PREFIX_FREE and str(kind.__module__).startswith("transformers."))


@dataclass(frozen=True)
class _Times:
    """Multiplies scores by the temperature, which the sampler divides by."""

    temperature: float

    def __call__(self, prefixes: Tensor, scores: Tensor) -> Tensor:
        return scores * self.temperature


def _as_float32(prefixes: Tensor, scores: Tensor) -> Tensor:
    """Converts scores to float32, as Transformers does before its processors."""
    return scores.to(torch.float32)
