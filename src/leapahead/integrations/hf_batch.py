"""The rows of a batch as Transformers sees them: ids with left padding, processors, criteria, scores, padding, streams.

What of `generation_config` is honoured stands in `hf_fields`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.sampling import LogitsProcessor, PrefixFree, SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import UNLIMITED, TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.base import Drafter
from leapahead.engine.request import Request
from leapahead.integrations.hf_fields import PREFIX_FREE
from leapahead.models.base import Target, read_prompt
from leapahead.models.choices import Choices
from leapahead.planner.draft import Proposal, SectionStore, Step

# Processors that hold something for every row of the batch.
BATCH_PROCESSORS = (
    RepetitionPenaltyLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)


class _Called:
    """Processors with the prefixes of Transformers: left padding included, on the device of `input_ids`."""

    def __init__(self, pads: Tensor, processors: Sequence[Any]) -> None:
        self.pads = pads  # int64 [pads]
        self.processors = processors

    def __call__(self, prefixes: Tensor, scores: Tensor) -> Tensor:
        device, home = self.pads.device, scores.device
        ids = torch.cat([self.pads.expand(len(prefixes), -1), prefixes.to(device)], dim=1)  # [nodes, length]
        scores = scores.to(device)
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores.to(home)


class _Ids:
    """The ids of one row as Transformers would hold them, growing in place."""

    def __init__(self, ids: Tensor) -> None:
        self._room = ids.clone()
        self._length = len(ids)
        self._waiting: list[int] = []  # a device is written to only where someone reads

    def add(self, token: int) -> None:
        self._waiting.append(token)

    @property
    def tensor(self) -> Tensor:
        """int64 [1, length]."""
        start, self._length = self._length, self._length + len(self._waiting)
        while self._length > len(self._room):
            self._room = torch.cat([self._room, torch.empty_like(self._room)])
        if self._waiting:
            self._room[start : self._length] = torch.tensor(self._waiting)
            self._waiting = []
        return self._room[None, : self._length]


class Row:
    """One row of the batch.

    Attributes:
        new: the tokens after the prompt, in the order in which the target chose them.
        length: how many of them there were when the row's criteria ended it; None while they have not.
        scores, logits: float32 [1, vocab] for each token, if they are wanted.
    """

    def __init__(self, batch: Batch, index: int, ids: Tensor, pads: int, processors: Sequence[Any]) -> None:
        self.batch = batch
        self.pads = ids[:pads]
        self.prompt: list[int] = ids[pads:].tolist()
        self.processors = [_of_row(processor, index, len(batch.input_ids)) for processor in processors]
        self.ids = _Ids(ids)
        self.new: list[int] = []
        self.length: int | None = None
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.choices: Choices | None = None
        self.node: int | None = None

    def request(
        self, drafter: Drafter, seed: int, cache: SectionStore | None, on_step: Callable[[Step], None]
    ) -> Request:
        """The row as a request for the engine."""
        most = max(1, self.batch.max_length - self.batch.input_ids.shape[1])
        stop = StopParams(max_new_tokens=most, criteria=(self.take,))
        return Request(
            self.prompt,
            drafter,
            self.params(seed),
            stop,
            drafter_cache=cache,
            on_choices=self.begin_step,
            on_step=on_step,
        )

    def begin_step(self, proposal: Proposal, choices: Choices) -> None:
        """Called before the tokens of a step are taken: their logits are read from these choices."""
        self.choices, self.node = choices, 0

    def params(self, seed: int) -> SamplingParams:
        """The processors in their order, and the temperature for the sampler.

        Transformers' temperature is a processor among the others. The sampler must know it to rank drafts, so it is
        left to the sampler where it comes last; elsewhere the last scores are multiplied by it, and the sampler divides
        by it again.
        """
        processors, temperature = list(self.processors), 0.0
        if self.batch.config.do_sample:
            temperature = 1.0
            for index, processor in enumerate(self.processors):
                if type(processor) is TemperatureLogitsWarper:
                    temperature = processor.temperature
                    last = index == len(self.processors) - 1
                    processors = processors[:-1] if last else [*self.processors, _Times(temperature)]
        return SamplingParams(processors=self._calls(processors), temperature=temperature, seed=seed)

    def _calls(self, processors: Sequence[Any]) -> tuple[LogitsProcessor, ...]:
        """Neighbours that read the prefix become one call."""
        calls: list[LogitsProcessor] = [PrefixFree(_as_float32)] if self.batch.in_float64 else []
        reading: list[Any] = []
        for processor in [*processors, None]:
            free = processor is None or _is_prefix_free(processor)
            if free and reading:
                calls.append(_Called(self.pads, reading))
                reading = []
            if not free:
                reading.append(processor)
            elif processor is not None:
                calls.append(PrefixFree(_Called(self.pads, [processor])))
        return tuple(calls)

    def take(self, tokens: Sequence[int]) -> bool:
        """Takes one new token: keeps its scores and calls the criteria. True when the row need not go on."""
        assert self.choices is not None
        assert self.node is not None
        if self.batch.keeps:
            self.record(self.choices.logits[self.node])
        self.node = self.choices.tree.child(self.node, tokens[-1])
        self.new.append(tokens[-1])
        self.ids.add(tokens[-1])
        if self.batch.ended(self) and self.length is None:
            self.length = len(self.new)
        return self.length is not None and (self.batch.pads_after or self.batch.settled(len(self.new)))

    def record(self, logits: Tensor) -> None:
        """Keeps what the user wants of the logits [vocab] after the row's present ids."""
        logits = logits[None].to(self.pads.device, torch.float32, copy=True)
        if self.batch.keep_logits:
            self.logits.append(logits)
        if self.batch.keep_scores:
            self.scores.append(LogitsProcessorList(self.processors)(self.ids.tensor, logits.clone()))

    def read_on(self, target: Target, length: int, pad: int) -> None:
        """Records what Transformers computes for a row that has ended: the scores after its padding."""
        with target.lock:
            session = target.open(self.prompt + self.new, SamplingParams())
            try:
                read_prompt(target, session)
                while len(self.new) < length:
                    choices = target.step([session], [TokenTree.root(session.tokens[-1])])[0]
                    self.record(choices.logits[0])
                    session.commit(Verdict((0,), (pad,), accepted=0))
                    self.new.append(pad)
                    self.ids.add(pad)
            finally:
                session.close()


class Batch:
    """What the rows share.

    Args:
        input_ids, processors, criteria, config, model_kwargs: as Transformers prepared them.
        in_float64: whether the model computes in float64, of which Transformers keeps float32.

    Attributes:
        pads_after: a row that has ended is padded, as Transformers does where there is an EOS criterion. Without one it
            lets ended rows go on until all have ended, and so do we.
        max_length: greatest number of ids of a row, left padding included.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: Sequence[Any],
        criteria: Sequence[Any],
        config: Any,
        model_kwargs: Mapping[str, Any],
        in_float64: bool,
    ) -> None:
        self.input_ids = input_ids
        self.config = config
        self.in_float64 = in_float64
        self.keep_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.keep_logits = bool(config.return_dict_in_generate and config.output_logits)
        self.pads_after = any(hasattr(criterion, "eos_token_id") for criterion in criteria)  # as in `_sample`
        # The two criteria of nearly every call are decided without a tensor; the others are called.
        self.eos = {t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.flatten().tolist()}
        self.max_length = min((c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)), default=UNLIMITED)
        plain = (EosTokenCriteria, MaxLengthCriteria)
        self.criteria = StoppingCriteriaList(c for c in criteria if type(c) not in plain)
        pads = _left_padding(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        self.rows = [Row(self, i, input_ids[i], count, processors) for i, count in enumerate(pads)]

    @property
    def keeps(self) -> bool:
        return self.keep_scores or self.keep_logits

    @property
    def pad(self) -> int | None:
        token = self.config._pad_token_tensor
        return None if token is None else int(token)

    def ended(self, row: Row) -> bool:
        """Whether the last token ends the row, by any criterion."""
        asked = False
        if self.criteria:
            asked = bool(self.criteria(row.ids.tensor, tuple(row.scores) if self.keep_scores else None).all())
        return asked or row.new[-1] in self.eos or self.input_ids.shape[1] + len(row.new) >= self.max_length

    def settled(self, count: int) -> bool:
        """Whether every row has ended, none of them after `count` tokens."""
        return all(row.length is not None and row.length <= count for row in self.rows)

    def finish(self, target: Target) -> Tensor:
        """int64 [batch, length + new]: the rows, padded on the right."""
        for row in self.rows:
            if row.length is None:
                row.length = len(row.new)
                warnings.warn(
                    f"the text reached the context of {target.info.context_length} tokens of {target.info.name} "
                    "and ends there; lower max_new_tokens or shorten the prompt",
                    stacklevel=2,
                )
        length = max(row.length or 0 for row in self.rows)
        for row in self.rows:
            if self.pads_after:
                del row.new[row.length :]
            if len(row.new) < length:
                if self.pad is None:
                    raise ContextOverflow("rows of different lengths need a pad_token_id; set it in generation_config")
                if self.keeps:
                    row.read_on(target, length, self.pad)
                row.new += [self.pad] * (length - len(row.new))
            del row.new[length:], row.scores[length:], row.logits[length:]
        new = torch.tensor([row.new for row in self.rows], device=self.input_ids.device)
        return torch.cat([self.input_ids, new], dim=1)

    def stacked(self, name: str) -> tuple[Tensor, ...] | None:
        """For each new token, float32 [batch, vocab]."""
        if not getattr(self, f"keep_{name}"):
            return None
        return tuple(torch.cat(each) for each in zip(*(getattr(row, name) for row in self.rows), strict=True))


def _left_padding(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> list[int]:
    """How many tokens on the left of each row are padding."""
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise BadParameter(
            "the prompt is empty; give input_ids of at least one token (inputs_embeds are not supported)"
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device).long()
    if mask.shape != input_ids.shape:
        raise Refused(
            f"an attention_mask of shape {tuple(mask.shape)} for input_ids of shape {tuple(input_ids.shape)} is not "
            "supported by leapahead.hf: it must have one entry for each token"
        )
    pads = (mask == 0).sum(dim=1, keepdim=True)
    if bool((pads == mask.shape[1]).any()):
        raise BadParameter("a row of the batch is all padding; give at least one token")
    places = torch.arange(mask.shape[1], device=mask.device)
    if bool(((mask != 0) != (places >= pads)).any()):
        raise Refused(
            "an attention_mask with zeros behind a token (right padding, or holes) is not supported by leapahead.hf; "
            "pad on the left: tokenizer.padding_side = 'left'"
        )
    if position_ids is not None:
        own = position_ids.to(mask.device)
        if own.shape != mask.shape:  # Transformers made one row for all
            own = (
                own[:1].expand_as(mask)
                if own.ndim == 2 and own.shape[1] == mask.shape[1]
                else torch.full_like(mask, -1)
            )
        if bool(((own != places - pads) & (mask != 0)).any()):
            raise Refused("position_ids that do not count the tokens of each row are not supported by leapahead.hf")
    return [int(count) for count in pads]


def _of_row(processor: Any, row: int, rows: int) -> Any:
    """What a processor that knows the batch is to one row of it; all others as they are."""
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
        mine._prefix_allowed_tokens_fn = lambda _, prefix: allowed(row, prefix)
    return mine


def _is_prefix_free(processor: Any) -> bool:
    kind = type(processor)
    if kind is _Times:
        return True
    return kind.__name__ in PREFIX_FREE and str(kind.__module__).startswith("transformers.")


@dataclass(frozen=True)
class _Times:
    """Multiplies by the temperature, which the sampler divides by."""

    temperature: float

    def __call__(self, prefixes: Tensor, scores: Tensor) -> Tensor:
        return scores * self.temperature


def _as_float32(prefixes: Tensor, scores: Tensor) -> Tensor:
    """Transformers computes all scores in float32, those of a float64 model too."""
    return scores.to(torch.float32)


class Streaming:
    """Hands a streamer the tokens as Transformers would: the prompt [batch, length], then one column [batch] at a time.

    Rows run at different speeds; a column is complete when the slowest row that goes on has reached it.
    """

    def __init__(self, streamer: Any, batch: Batch) -> None:
        self.streamer = streamer
        self.batch = batch
        self.sent = 0
        if streamer is not None:
            streamer.put(batch.input_ids.cpu())

    def columns(self) -> None:
        while self.streamer is not None and not self.batch.settled(self.sent):
            tokens = [self._token(row) for row in self.batch.rows]
            if None in tokens:
                return
            self.streamer.put(torch.tensor(tokens))
            self.sent += 1

    def _token(self, row: Row) -> int | None:
        if self.batch.pads_after and row.length is not None and row.length <= self.sent:
            return self.batch.pad
        return row.new[self.sent] if self.sent < len(row.new) else None

    def end(self, sequences: Tensor) -> None:
        if self.streamer is None:
            return
        for column in sequences[:, self.batch.input_ids.shape[1] + self.sent :].unbind(dim=1):
            self.streamer.put(column.cpu())
        self.streamer.end()
