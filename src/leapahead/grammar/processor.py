"""A grammar as a logits processor with Transformers' calling convention, for `leapahead.hf` and other hosts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from leapahead.grammar.compiled import Compiled, State


class GrammarProcessor:
    """Bans what a grammar does not allow. A function of its arguments, so that drafts under it are exact.

    It takes time in the length of the text at every call; the option `grammar` of `LLM.generate` does not.

    Args:
        compiled: the grammar, from `Grammars.compile`.
        prompt_length: tokens before the text, padding included: `input_ids.shape[1]`.
    """

    def __init__(self, compiled: Compiled, prompt_length: int) -> None:
        self._compiled, self._prompt_length = compiled, prompt_length
        self._states: dict[int, State] = {}  # by length of a row of logits

    def __call__(self, prefixes: Any, logits: Any, /) -> Any:
        """prefixes: int [rows, length]; logits: float [rows, vocab]; returns float [rows, vocab]."""
        vocab_size = logits.shape[-1]
        if vocab_size not in self._states:
            self._states[vocab_size] = self._compiled.follow([], vocab_size)
        state = self._states[vocab_size]
        allowed = np.stack([state.mask(0, row[self._prompt_length :].tolist()) for row in prefixes])
        xp = array_namespace(logits)
        return xp.where(xp.asarray(allowed, device=device(logits)), logits, -math.inf)
