"""Encoder-decoder models of Transformers as targets: T5, BART, mBART, Marian and what is built like them, unpatched.

A session's prompt is the encoder's input and its tokens are the decoder's; see `leapahead.models.decoder`. The decoder
is run by the executors of causal language models (`forward`), through a view of it that knows positions and sources
(`decoder_view`). Which of them a model gets is decided by the same test of the model: trees, chains, or one token at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.parameters import is_whole
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import UNLIMITED
from leapahead.models.base import LOGITS, NOTHING, TOP_K, Capture, TargetInfo, checked_prompt, require
from leapahead.models.choices import PromptRows
from leapahead.models.decoder import AT_START, Decoder, DecoderInput
from leapahead.models.transformers import executors, families
from leapahead.models.transformers.crossed import CrossedCache, CrossedRow
from leapahead.models.transformers.decoder_view import DecoderView
from leapahead.models.transformers.forward import (
    Batch,
    CachedExecutor,
    CachedState,
    ChainExecutor,
    Executor,
    Layers,
    MaskedExecutor,
    Outputs,
)
from leapahead.models.transformers.model import NODES, TransformersSession, TransformersTarget
from leapahead.models.transformers.modes import forwards
from leapahead.models.transformers.selftest import OwnOutputs

PLAIN = {"full_attention": families.Pattern()}


def new_target(model: Any, *, as_configured: bool = True, **options: Any) -> TransformersTarget:
    """The target of a loaded model of Transformers, whatever its kind.

    Args:
        as_configured: see `EncoderDecoderTarget`.
        options: of `TransformersTarget`.
    """
    is_divided = options.pop("is_divided", False)
    if getattr(families.language_model(model, is_divided).config, "is_encoder_decoder", False):
        if is_divided:
            raise Refused("the weights of an encoder-decoder model cannot be divided; leave out tensor_parallel")
        return EncoderDecoderTarget(model, as_configured=as_configured, **options)
    return TransformersTarget(model, is_divided=is_divided, **options)


def refuse_other_inputs(model: Any, name: str = "") -> None:
    """Refuses an encoder-decoder model whose encoder reads speech or images.

    Raises:
        Refused: it does.
    """
    if model.config.is_encoder_decoder and model.main_input_name != "input_ids":
        name = name or model.config.name_or_path or type(model).__name__
        raise Refused(f"the encoder of {name} reads {model.main_input_name}, and leapahead gives encoders token ids")


class DecoderExecutor(MaskedExecutor):
    """Trees of the decoder, all sessions in one forward."""

    model: DecoderView

    def masks(self, batch: Batch) -> Any:
        if batch.inputs.straight or self.model.bias is None:
            return super().masks(batch)
        mask = batch.inputs.masks(self.patterns, self.model.dtype)
        assert isinstance(mask, torch.Tensor), "there is one pattern"
        return self.model.masks(batch.inputs, mask)

    def call(self, model: Any, batch: Batch, layers: Layers = (), **options: Any) -> Outputs:
        output = model(
            input_ids=batch.inputs.tokens,
            attention_mask=self.masks(batch),
            cache=self.cache,
            places=None if batch.inputs.straight else batch.inputs.positions,
        )
        self.cache.end()
        return Outputs(output.logits)


class StepExecutor(ChainExecutor):
    """One token of one session at a time, for decoders that pass no other test."""

    capabilities = frozenset({LOGITS, TOP_K})


class EncoderDecoderSession(TransformersSession):
    """One sequence: the tokens of the decoder. The prompt is read when the source is encoded."""

    state: CachedState
    source: tuple[int, ...] = ()
    """The encoder's input."""

    @property
    def row(self) -> CrossedRow:
        row = self.state.row
        assert isinstance(row, CrossedRow)
        return row

    @property
    def unread(self) -> int:
        return super().unread + (len(self.source) if self.row.cross is None else 0)


class EncoderDecoderTarget(TransformersTarget):
    """An encoder-decoder model; see `TransformersTarget`. It gives no hidden states and has no exact mode.

    Args:
        as_configured: whether requests may apply what the generation config says of texts beyond their first token,
            see `Request`; else nothing of it is read.

    Raises:
        Refused: the model's own forward cannot be matched or depends on how many tokens are read at once, it does not
            say which token its texts begin with, or it takes other inputs than token ids.
    """

    model: DecoderView
    executor: CachedExecutor
    session_class = EncoderDecoderSession

    def __init__(self, model: Any, *, name: str | None = None, as_configured: bool = True, **options: Any) -> None:
        model, self._as_configured = families.language_model(model), as_configured
        name = name or model.config.name_or_path or type(model).__name__
        refuse_other_inputs(model, name)
        if model.config.model_type == "switch_transformers":
            raise Refused(
                f"the experts of {name} leave out tokens of a forward that come behind the first "
                f"{model.config.expert_capacity} of an expert, so that drafts could change its text; use Transformers' "
                "generate, or another model"
            )
        super().__init__(model, name=name, **{**options, "hidden_states": False})
        if self.model.embeds is not None:
            self.max_nodes = self.context_length  # positions that are corrected are counted from 0

    def _language_model(self, model: Any, is_divided: bool) -> Any:
        if (embeddings := getattr(model.get_decoder(), "get_input_embeddings", None)) is None:
            raise Refused(
                f"the decoder of a {type(model).__name__} is not made like those of T5 and BART; use another model"
            )
        return DecoderView(model, _decoder(model, embeddings().weight.shape[0], self._as_configured).start)

    def _information(self, **known: Any) -> TargetInfo:
        model = self.model.model
        decoder = _decoder(model, known["vocab_size"], self._as_configured)
        sizes = [each.get_input_embeddings().weight.shape[0] for each in (model.get_encoder(), model.get_decoder())]
        if sizes[0] != sizes[1]:
            decoder = replace(decoder, source_vocab_size=sizes[0])
        return super()._information(**known, decoder=decoder)

    def _tested_executor(self, exclusive: bool, exact: bool, own: OwnOutputs) -> tuple[Executor, dict[str, str]]:
        if exact:
            raise Refused(
                f"{self._name} cannot be decoded in exact mode (it is an encoder-decoder model); leave out exact"
            )
        self.context_length -= _reserved_positions(self.model.model.get_decoder())
        if self.model.relative:
            self.context_length = UNLIMITED
        self.model.ids = self._ids
        length = min(self.context_length + NODES, UNLIMITED)
        return executors.tested(self.model, self._name, self._ids, _executors(self.model, length), own)

    @property
    def cache(self) -> CrossedCache:
        cache = self.executor.cache
        assert isinstance(cache, CrossedCache)
        return cache

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> EncoderDecoderSession:
        """See `Target.open`. `tokens` are the encoder's input."""
        return self.open_decoder(tokens, params, AT_START, capture, reserve, owner)

    def open_decoder(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        begin: DecoderInput,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> EncoderDecoderSession:
        """See `EncodesPrompts`. Sources that are encoded for an open or a kept session are not encoded again."""
        require(self.info, capture.needs, "this capture")
        self._changes.look(self)
        source = checked_prompt(tokens, self.info)
        text = checked_prompt(begin.text or self.model.start, replace(self.info, decoder=None))
        sampler = self._sampler(params, text)  # before there is a state, which nobody would close if this failed
        reserve = min(max(0, reserve - len(source)) + len(text), self.info.context_length)
        key = f"{owner} {source}" if begin.states is None else f"{owner} given {next(self._given)}"
        with forwards(f"a text of {len(text)} tokens", 1, self.device, self.autocast):
            known = self.cache.known(key) if begin.states is None else None
            reuse = capture.reusable(len(text), capture.top_k > 0) if known is not None else 0
            state = self.executor.open(text, reuse, reserve, key)
        session = EncoderDecoderSession(text, state, sampler, capture)
        session.source = session.row.source = tuple(source)
        session.row.states, session.row.cross = begin.states, known
        return session

    def prefill(self, session: TransformersSession, max_tokens: int) -> PromptRows | None:
        """One forward of the encoder over the whole source, then the decoder's own tokens but the last in chunks."""
        assert isinstance(session, EncoderDecoderSession)
        row = session.row
        if row.cross is not None:
            return super().prefill(session, max_tokens)
        with forwards(f"a prompt of {len(row.source)} tokens", 1, self.device, self.autocast):
            row.cross, row.states = self.model.encode(row.source, row.states), None
        return None

    def fork(self, session: TransformersSession, params: SamplingParams) -> EncoderDecoderSession:
        assert isinstance(session, EncoderDecoderSession)
        found = super().fork(session, params)
        assert isinstance(found, EncoderDecoderSession)
        found.source = found.row.source = session.source
        found.row.cross = session.row.cross
        return found

    def source(self, session: Any) -> Sequence[int]:
        """See `EncodesPrompts`."""
        found: tuple[int, ...] = session.source
        return found

    def forget(self) -> None:
        super().forget()
        self.model.forget()


def _executors(model: DecoderView, usual_length: int) -> Iterator[executors.Named]:
    """What may fit a decoder, from the most able to the least."""
    if model.embeds is not None or model.bias is not None:
        if model.boolean:
            yield "trees by a boolean mask", lambda: DecoderExecutor(model, CrossedCache(usual_length), PLAIN, True)
        yield "trees by an additive mask", lambda: DecoderExecutor(model, CrossedCache(usual_length), PLAIN, False)
    yield "chains", lambda: ChainExecutor(model, CrossedCache(usual_length))
    yield "one token at a time", lambda: StepExecutor(model, CrossedCache(usual_length))


def _decoder(model: Any, vocab_size: int, as_configured: bool) -> Decoder:
    """What the generation config says of a model's texts, as Transformers reads it.

    Where it does not say how they begin, the config may. Unless `as_configured`, that is all.

    Raises:
        Refused: they do not say how a text begins, or ask for what is not supported.
        BadParameter: they name something else than tokens of the vocabulary.
    """

    def field(name: str) -> Any:
        return getattr(model.generation_config, name, None)

    def tokens(name: str, found: Any) -> tuple[int, ...]:
        """One token, or a list of them."""
        listed = found if isinstance(found, list) else [] if found is None else [found]
        if not all(is_whole(token) and 0 <= token < vocab_size for token in listed):
            raise BadParameter(
                f"{name}={found!r} of the model's configuration is not possible: its vocabulary has the token ids 0 to "
                f"{vocab_size - 1}; correct generation_config.json or config.json"
            )
        return tuple(listed)

    names, configs = ("decoder_start_token_id", "bos_token_id"), (model.generation_config, model.config)
    given = [getattr(config, name, None) for name in names for config in configs]
    start = next((token for token in given if token is not None), None)
    if not isinstance(start, int):
        raise Refused(
            f"{type(model).__name__} does not say which token its texts begin with (decoder_start_token_id={start!r}); "
            "set model.generation_config.decoder_start_token_id"
        )
    first = tokens("decoder_start_token_id", start)
    if not as_configured:
        return Decoder(first, longest_source=_longest_source(model))
    if field("begin_suppress_tokens"):
        raise Refused("begin_suppress_tokens of the generation config is not supported; remove it, or use leapahead.hf")
    if isinstance(forced_bos := field("forced_bos_token_id"), list):
        raise BadParameter(f"forced_bos_token_id={forced_bos!r} is not possible: it must be a token id")
    words = field("bad_words_ids") or []
    if not (isinstance(words, list) and all(isinstance(word, list) and word for word in words)):
        raise BadParameter(
            f"bad_words_ids={words!r} of the model's configuration is not possible: give lists of tokens"
        )
    eos = field("eos_token_id")
    ends = [[token] for token in (eos if isinstance(eos, list) else [eos])]  # which bad words do not ban
    return Decoder(
        first,
        next(iter(tokens("forced_bos_token_id", forced_bos)), None),
        tokens("forced_eos_token_id", field("forced_eos_token_id")),
        (
            *(tokens("bad_words_ids", word) for word in words if word not in ends),
            *((token,) for token in tokens("suppress_tokens", field("suppress_tokens"))),
        ),
        _longest_source(model),
    )


def _longest_source(model: Any) -> int:
    """Greatest number of tokens that the encoder reads."""
    encoder = model.get_encoder()
    if any(getattr(part, "has_relative_attention_bias", False) for part in encoder.modules()):
        return UNLIMITED
    own = getattr(model.config, "max_encoder_position_embeddings", None)
    return families.context_length(encoder.config) - _reserved_positions(encoder) if own is None else int(own)


def _reserved_positions(model: Any) -> int:
    """How many of its positions no token has: those up to the one of padding, where a model counts as RoBERTa does."""
    found = (getattr(getattr(part, "position_embeddings", None), "padding_idx", None) for part in model.modules())
    return max((index + 1 for index in found if index is not None), default=0)
