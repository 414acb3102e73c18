"""What is particular to encoder-decoder models: how their texts begin, and what a session of one may be given.

    prompt  ── encoder ──> states ── cross-attention of every decoder layer, computed once ──┐
    text:   start tokens | chosen tokens ...     the decoder, step after step <──────────────┘

The prompt of such a model is the input of its encoder. A session's tokens are those of the decoder, so that positions,
noise, penalties and drafts count the text alone. This module imports no backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decoder:
    """How the decoder of an encoder-decoder model writes; the fields have the names of Transformers' generation config.

    Attributes:
        start: the tokens that a text begins with before anything is chosen: `decoder_start_token_id`.
        forced_bos: `forced_bos_token_id`, the first token that is chosen; None where the model chooses it itself.
        forced_eos: `forced_eos_token_id`, one of which is chosen where the text reaches its greatest length.
        bad_words: `bad_words_ids`, and every one of `suppress_tokens`: sequences that are never written.
        begin_suppressed: `begin_suppress_tokens`, which are not chosen as the first token.
    """

    start: tuple[int, ...]
    forced_bos: int | None = None
    forced_eos: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    begin_suppressed: tuple[int, ...] = ()


@dataclass(frozen=True)
class DecoderInput:
    """What a session of an encoder-decoder model begins with, beside its prompt.

    Attributes:
        text: all tokens of the decoder so far, start tokens included; empty for the start tokens alone.
        states: the encoder's output for the prompt, [tokens, width], of the target's kind; None to compute it.
    """

    text: tuple[int, ...] = ()
    states: Any = None


AT_START = DecoderInput()
