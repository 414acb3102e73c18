"""A tokenizer whose text keeps the special tokens that parsers look for, such as [TOOL_CALLS]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from leapahead.core.text import Tokenizer, id_bound


class WithMarkers:
    """Decodes like another tokenizer, and gives the text of some special tokens where those are left out.

    Args:
        tokenizer: of the model.
        markers: of formats; those that are no single token of the vocabulary are text anyway.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        found = {token: marker for marker in markers if (token := special_token(tokenizer, marker)) is not None}
        self._markers = found

    def __len__(self) -> int:
        return id_bound(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if not skip_special_tokens or not self._markers:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        text, since = "", 0
        for at, token in enumerate(token_ids):
            if token in self._markers:
                text += self._part(token_ids[since:at]) + self._markers[token]
                since = at + 1
        return text + self._part(token_ids[since:])

    def _part(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if len(token_ids) else ""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        return self._tokenizer.apply_chat_template(
            conversation, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **variables
        )


def special_token(tokenizer: Tokenizer, marker: str) -> int | None:
    """The special token whose text is `marker`; None where the tokenizer writes it with ordinary tokens."""
    tokens = tokenizer.encode(marker, add_special_tokens=False)
    if len(tokens) != 1 or tokenizer.decode(tokens, skip_special_tokens=True).strip() == marker:
        return None
    return tokens[0] if tokenizer.decode(tokens, skip_special_tokens=False).strip() == marker else None
