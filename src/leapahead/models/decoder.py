"""What is particular to encoder-decoder models: how their texts begin, and what a session of one may be given.

    prompt  ── encoder ──> states ── cross-attention of every decoder layer, computed once ──┐
    text:   start tokens | chosen tokens ...     the decoder, step after step <──────────────┘

The prompt of such a model is the input of its encoder. A session's tokens are those of the decoder, so that positions,
noise, penalties and drafts count the text alone. This module imports no backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from leapahead.core.errors import Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import UNLIMITED


@dataclass(frozen=True)
class Decoder:
    """How the decoder of an encoder-decoder model writes; the fields have the names of Transformers' generation config.

    Attributes:
        start: the tokens that a text begins with before anything is chosen: `decoder_start_token_id`.
        forced_bos: `forced_bos_token_id`, the first token that is chosen; None where the model chooses it itself.
        forced_eos: `forced_eos_token_id`, one of which is chosen where the text reaches its greatest length.
        bad_words: `bad_words_ids`, and every one of `suppress_tokens`: sequences that are never written.
        longest_source: greatest number of tokens that the encoder reads.
        source_vocab_size: the encoder's, where it has a vocabulary of its own; 0 where it has the decoder's.
    """

    start: tuple[int, ...]
    forced_bos: int | None = None
    forced_eos: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    longest_source: int = UNLIMITED
    source_vocab_size: int = 0

    def applied(self, params: SamplingParams, begin: int, max_new_tokens: int) -> SamplingParams:
        """The parameters of a text that is written in this way.

        Args:
            params: of the user.
            begin: tokens of the decoder that are given.
            max_new_tokens: greatest number of tokens that follow.

        Raises:
            Refused: the first token is forced, and a grammar decides what it may be.
        """
        forced = dict(params.forced)
        if params.grammar is not None and self.forced_bos is not None:
            raise Refused(
                f"a grammar is not possible with this model, whose texts begin with a forced token ({self.forced_bos}, "
                "forced_bos_token_id); leave out the grammar"
            )
        if self.forced_bos is not None:
            forced.setdefault(1, (self.forced_bos,))
        if self.forced_eos and params.grammar is None:  # which decides where a text ends
            forced[begin + max_new_tokens - 1] = self.forced_eos
        if not (forced or self.bad_words):
            return params
        return replace(params, bad_words=params.bad_words + self.bad_words, forced=tuple(forced.items()))


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


def prompt_vocabulary(vocab_size: int, decoder: Decoder | None) -> int:
    """The size of the vocabulary that the tokens of prompts are of."""
    return vocab_size if decoder is None else decoder.source_vocab_size or vocab_size


def longest_prompt(context_length: int, decoder: Decoder | None) -> int:
    """Greatest number of tokens of a prompt, behind which the context of a model without encoder has room for one."""
    return context_length - 1 if decoder is None else decoder.longest_source
