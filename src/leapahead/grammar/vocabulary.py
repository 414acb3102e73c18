"""The tokens of a tokenizer as llguidance takes them: the bytes of each id, and which ids are special."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leapahead.core.errors import Refused, first_line, needing
from leapahead.core.text import Tokenizer
from leapahead.core.token_bytes import KNOWN, token_bytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MARK = b"\xff"  # begins special tokens in llguidance; it is in no text


class _Wrapped:
    """What llguidance's `TokenizerWrapper` asks for: the bytes of tokens, and the tokens of a text.

    A text that reads like a special token is written with ordinary tokens, since a grammar's text means text.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes], special: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = pieces, special, eos_token_id
        self._tokenizer, self._special = tokenizer, frozenset(special)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("this tokenizer takes text")  # which llguidance tries out
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        for token in tokens:
            marker = self.tokens[token].decode("utf-8", "replace") if token in self._special else ""
            if len(marker) > 1 and marker in text:
                middle = text.index(marker) + 1
                return self(text[:middle]) + self(text[middle:])
        return tokens


def vocabulary(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The tokens of a model. It takes about half a second for 150,000 of them.

    Args:
        tokenizer: of the model.
        vocab_size: length of a row of logits.
        eos_token_ids: the tokens that end a text, at least one.

    Raises:
        Refused: the bytes of its tokens cannot be found out, or no token ends a text.
        LeapaheadError: llguidance is not installed.
    """
    with needing("constrained decoding", "grammar", "llguidance"):
        from llguidance import LLTokenizer, TokenizerWrapper
    if tokenizer is None:
        raise Refused("a grammar needs a tokenizer, and the model was passed without one; pass tokenizer=...")
    if not eos_token_ids:
        raise Refused("a grammar needs a token that ends the text, and the tokenizer names none; set its eos_token")
    try:
        pieces, special = token_bytes(tokenizer)
        pieces = [b"" if piece.startswith(MARK) else piece for piece in pieces]
        wrapped = _Wrapped(tokenizer, pieces[:vocab_size], [t for t in special if t < vocab_size], eos_token_ids[0])
        return LLTokenizer(TokenizerWrapper(wrapped), eos_token=list(eos_token_ids))
    except ValueError as error:
        raise Refused(f"llguidance cannot read this tokenizer ({first_line(error)}); {KNOWN}") from None
