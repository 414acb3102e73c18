"""The rows of a batch as Transformers sees them: ids with left padding, criteria, scores, padding behind the end.

input_ids            row 0   p p p a b c     pads | prompt      the target, the drafter and positions: prompt + new
                     row 1   d e f g h i                        processors, criteria: pads + prompt + new
sequences            row 0   p p p a b c | x y E p p            rows that end early are padded with pad_token_id
                     row 1   d e f g h i | u v w x E
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import UNLIMITED, TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.base import Drafter
from leapahead.engine.request import Request
from leapahead.integrations.hf_encoded import EncoderInput
from leapahead.integrations.hf_fields import is_text_alone
from leapahead.integrations.hf_images import ReadPrompt, read
from leapahead.integrations.hf_processors import of_row, sampling_params
from leapahead.models.base import Session, Target, read_prompt
from leapahead.models.choices import Choices
from leapahead.models.decoder import AT_START, DecoderInput
from leapahead.models.encoder_decoder import EncodesPrompts, opened
from leapahead.models.prompt_entries import PromptEntries
from leapahead.models.transformers.model import TransformersTarget
from leapahead.planner.draft import Proposal, SectionStore, Step


class _Ids:
    """The ids of one row as Transformers would hold them, growing in place."""

    def __init__(self, ids: Tensor) -> None:
        self._room = ids.clone()
        self._length = len(ids)
        self._waiting: list[int] = []  # written to the device when the ids are read

    def add(self, token: int) -> None:
        self._waiting.append(token)

    @property
    def tensor(self) -> Tensor:
        """int64 [1, length]."""
        start, self._length = self._length, self._length + len(self._waiting)
        while self._length > len(self._room):
            self._room = torch.cat([self._room, torch.empty_like(self._room)])
        if self._waiting:
            self._room[start : self._length] = torch.tensor(self._waiting, device="cpu")
            self._waiting = []
        return self._room[None, : self._length]

    def cut(self, length: int) -> None:
        """Takes back all but so many ids."""
        assert self.tensor.shape[1] >= length
        self._length = length


class Row:
    """One row of the batch.

    Args:
        batch: that it belongs to.
        index: of the row.
        ids: int64 [length], the prompt with left padding.
        pads: the number of padding tokens on the left.
        processors: of the batch.
        encoded: of an encoder-decoder model, what its encoder read.

    Attributes:
        new: the new tokens, in the order in which the target chose them.
        read: what the model made of its prompt, where that has more than tokens.
        length: the number of new tokens at which the row's criteria ended it; None until then.
        scores, logits: float32 [1, vocab] for each new token, where the user wants them.
    """

    def __init__(
        self,
        batch: Batch,
        index: int,
        ids: Tensor,
        pads: int,
        processors: Sequence[Any],
        encoded: EncoderInput | None = None,
    ) -> None:
        self.batch, self.encoded = batch, encoded
        self.pads = ids[:pads]
        self.prompt: list[int] = ids[pads:].tolist()
        self.processors = [of_row(processor, index, len(batch.input_ids)) for processor in processors]
        self.ids = _Ids(ids)
        self.new: list[int] = []
        self.read: ReadPrompt | None = None
        self.length: int | None = None
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self._choices: Choices | None = None  # of the step under way
        self._node: int | None = None  # of its tree, after which the next token is taken

    def request(
        self,
        drafter: Drafter,
        seed: int,
        prediction: Sequence[int],
        drafter_cache: SectionStore | None,
        on_step: Callable[[Step], None],
    ) -> Request:
        """The row as a request for the engine."""
        batch, encoded = self.batch, self.encoded
        begin: DecoderInput | PromptEntries = AT_START if self.read is None else self.read.entries
        return Request(
            self.prompt if encoded is None else encoded.tokens,
            drafter,
            sampling_params(self.processors, self.pads, batch.config.do_sample, seed, batch.in_float64),
            StopParams(max_new_tokens=max(1, batch.max_length - batch.input_ids.shape[1]), criteria=(self._take,)),
            prediction=prediction,
            drafter_cache=drafter_cache,
            begin=begin if encoded is None else DecoderInput(tuple(self.prompt), encoded.states),
            as_configured=False,  # the processors do it
            on_choices=self._begin_step,
            on_step=on_step,
        )

    def _begin_step(self, proposal: Proposal, choices: Choices) -> None:
        """Called before the tokens of a step are taken, whose logits are read from these choices."""
        self._choices, self._node = choices, 0
        if self.read is not None and not self.new:
            self.read.check(choices.logits[0])

    def _take(self, tokens: Sequence[int]) -> bool:
        """Takes the last of `tokens`: records its scores and calls the criteria. True when the row need not go on."""
        assert self._choices is not None
        assert self._node is not None
        if self.batch.keeps:
            self.record(self._choices.logits[self._node])
        self._node = self._choices.tree.child(self._node, tokens[-1])
        self.new.append(tokens[-1])
        self.ids.add(tokens[-1])
        if self.batch.ended(self) and self.length is None:
            self.length = len(self.new)
        self.batch.check_all()
        return self.length is not None and (self.batch.pads_after or self.batch.settled(len(self.new)))

    def cut(self, length: int) -> None:
        """Takes back what is behind so many new tokens."""
        self.ids.cut(self.batch.input_ids.shape[1] + length)
        del self.new[length:], self.scores[length:], self.logits[length:]

    def record(self, logits: Tensor) -> None:
        """Records what the user wants of the logits [vocab] after the row's present ids."""
        logits = logits[None].to(self.pads.device, torch.float32, copy=True)
        if self.batch.keep_logits:
            self.logits.append(logits)
        if self.batch.keep_scores:
            self.scores.append(LogitsProcessorList(self.processors)(self.ids.tensor, logits.clone()))

    def _open(self, target: Target) -> Session:
        tokens, encoded = self.prompt + self.new, self.encoded
        if self.read is not None:
            return opened(target, tokens, SamplingParams(), self.read.entries)
        if encoded is None or not isinstance(target, EncodesPrompts):
            return target.open(tokens, SamplingParams())
        return target.open_decoder(encoded.tokens, SamplingParams(), DecoderInput(tuple(tokens), encoded.states))

    def read_on(self, target: Target, length: int, pad: int) -> None:
        """Records the scores that Transformers computes for a row that has ended, with padding as its new tokens."""
        with target.lock:
            session = self._open(target)
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


class JointCriteria:
    """Criteria of the user, called as Transformers does: once for each column, with all rows.

    Such criteria may count the rows, or keep a state for each. Rows advance by different numbers of tokens. A column is
    judged when every row that still runs has reached it, and what is behind an end that is found then is taken back.

    Args:
        batch: with more than one row.
        criteria: of the user.
    """

    def __init__(self, batch: Batch, criteria: Sequence[Any]) -> None:
        self._batch, self._criteria = batch, StoppingCriteriaList(criteria)
        self._ids = batch.input_ids
        self._scores: tuple[Tensor, ...] = ()
        self._count = 0  # columns that were judged

    def check(self) -> None:
        """Judges the columns that are complete."""
        batch, rows = self._batch, self._batch.rows
        while not batch.settled(self._count):
            padded = [batch.pads_after and row.length is not None and row.length <= self._count for row in rows]
            if not all(is_padded or len(row.new) > self._count for row, is_padded in zip(rows, padded, strict=True)):
                return
            tokens = [batch.pad if p else row.new[self._count] for row, p in zip(rows, padded, strict=True)]
            self._ids = torch.cat([self._ids, torch.tensor(tokens, device=self._ids.device)[:, None]], dim=1)
            if batch.keep_scores:  # a row that has ended keeps its last ones
                self._scores += (torch.cat([row.scores[: self._count + 1][-1] for row in rows]),)
            self._count += 1
            done = self._criteria(self._ids, self._scores if batch.keep_scores else None)
            for row, is_done in zip(rows, done.tolist(), strict=True):
                if is_done and (row.length is None or row.length > self._count):
                    row.length = self._count


class Batch:
    """What the rows share.

    Args:
        input_ids, processors, criteria, config, model_kwargs: as Transformers prepared them.
        in_float64: whether the model computes in float64; Transformers converts its logits to float32.
        encoded: what the encoder of an encoder-decoder model read for every row; the ids are the decoder's then.

    Attributes:
        pads_after: whether a row that has ended is padded. Transformers does so where there is an EOS criterion;
            without one, ended rows continue until all have ended.
        read_once: whether the prompts consist of more than tokens, see `hf_images`.
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
        encoded: Sequence[EncoderInput] | None = None,
    ) -> None:
        self.input_ids, self.config, self.in_float64 = input_ids, config, in_float64
        self.keep_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.keep_logits = bool(config.return_dict_in_generate and config.output_logits)
        self.pads_after = any(hasattr(criterion, "eos_token_id") for criterion in criteria)  # as in `_sample`
        # The two criteria of nearly every call are decided without a tensor; the others are called.
        self._eos = {t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.flatten().tolist()}
        self.max_length = min((c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)), default=UNLIMITED)
        others = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        # Those of Transformers judge each row by itself, so a row can end before the others have reached its end.
        own = [len(input_ids) == 1 or type(c).__module__ == StoppingCriteria.__module__ for c in others]
        self._criteria = StoppingCriteriaList(c for c, alone in zip(others, own, strict=True) if alone)
        joint = [c for c, alone in zip(others, own, strict=True) if not alone]
        self.read_once = encoded is None and not is_text_alone(model_kwargs)
        mask, positions = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
        if encoded is not None:
            mask = positions = None
        pads = _left_padding(input_ids, mask, None if self.read_once else positions)
        self.rows = [
            Row(self, i, input_ids[i], count, processors, encoded[i] if encoded is not None else None)
            for i, count in enumerate(pads)
        ]
        self._joint = JointCriteria(self, joint) if joint else None

    def read(self, model: Any, target: TransformersTarget, model_kwargs: Mapping[str, Any]) -> None:
        """Has the model read the prompts of all rows, see `hf_images.read`."""
        pads = [len(row.pads) for row in self.rows]
        for row, prompt in zip(self.rows, read(model, target, self.input_ids, pads, model_kwargs), strict=True):
            row.read = prompt

    @property
    def keeps(self) -> bool:
        """Whether the user wants scores or logits."""
        return self.keep_scores or self.keep_logits

    @property
    def pad(self) -> int | None:
        """The padding token."""
        token = self.config._pad_token_tensor
        return None if token is None else int(token)

    def ended(self, row: Row) -> bool:
        """Whether the last token ends the row, by any criterion."""
        by_criteria = False
        if self._criteria:
            scores = tuple(row.scores) if self.keep_scores else None
            by_criteria = bool(self._criteria(row.ids.tensor, scores).all())
        return by_criteria or row.new[-1] in self._eos or self.input_ids.shape[1] + len(row.new) >= self.max_length

    def check_all(self) -> None:
        """Calls the criteria that are called with all rows, for what all rows have reached."""
        if self._joint is not None:
            self._joint.check()

    def settled(self, count: int) -> bool:
        """Whether every row has ended, none of them after more than `count` tokens."""
        return all(row.length is not None and row.length <= count for row in self.rows)

    def finish(self, target: Target) -> Tensor:
        """int64 [batch, length + new]: the rows, padded on the right."""
        for row in self.rows:
            if row.length is None:
                row.length = len(row.new)
                warnings.warn(
                    f"the text reached {len(row.prompt) + len(row.new)} tokens, for which {target.info.name} has room, "
                    "and ends there; lower max_new_tokens or shorten the prompt",
                    stacklevel=2,
                )
        length = max(row.length or 0 for row in self.rows)
        for row in self.rows:
            if self.pads_after:
                row.cut(row.length or 0)
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
        """The "scores" or "logits": float32 [batch, vocab] for each new token; None where they are not wanted."""
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
        own = own if own.ndim == 3 else own[None]  # Qwen-VL has several for a token, which are equal in text
        if own.shape[1:] != mask.shape:  # Transformers gives one row for all
            fits = own.ndim == 3 and own.shape[2] == mask.shape[1]
            own = own[:, :1].expand(-1, *mask.shape) if fits else torch.full_like(mask, -1)
        if bool(((own != places - pads) & (mask != 0)).any()):
            raise Refused("position_ids that do not count the tokens of each row are not supported by leapahead.hf")
    return [int(count) for count in pads]
