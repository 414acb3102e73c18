"""The tokens of a tokenizer as llguidance takes them: the bytes of each id, and which ids are special.

Transformers' fast tokenizers    their own JSON description
GGUF files                       the pieces that llama.cpp gives (`Pieces`)
OpenVINO folders                 tokenizer.json beside the graphs (`Described`)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from leapahead.core.errors import Refused, first_line, needing
from leapahead.core.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ADVICE = (
    "constrained decoding takes fast tokenizers of Transformers, GGUF files and OpenVINO folders with tokenizer.json"
)


@runtime_checkable
class Pieces(Protocol):
    """A tokenizer that gives the bytes of its tokens."""

    def pieces(self) -> tuple[list[bytes], list[int]]:
        """The bytes of every id, b"" where it stands for no text; and the ids of special tokens."""


@runtime_checkable
class Described(Protocol):
    """A tokenizer with a description as the `tokenizers` library writes it."""

    def description(self) -> str:
        """The JSON text.

        Raises:
            Refused: there is none.
        """


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
        pieces, special = _pieces(tokenizer)
        wrapped = _Wrapped(tokenizer, pieces[:vocab_size], [t for t in special if t < vocab_size], eos_token_ids[0])
        return LLTokenizer(TokenizerWrapper(wrapped), eos_token=list(eos_token_ids))
    except ValueError as error:
        raise Refused(f"llguidance cannot read this tokenizer ({first_line(error)}); {ADVICE}") from None


def _pieces(tokenizer: Tokenizer) -> tuple[list[bytes], list[int]]:
    """See `Pieces`. llguidance reads the description of a tokenizer, and counts all added tokens as special ones."""
    from llguidance import LLTokenizer

    if isinstance(tokenizer, Pieces):
        return tokenizer.pieces()
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # of a fast tokenizer of Transformers
    if callable(getattr(backend, "to_str", None)):
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        text = backend.to_str()
    elif isinstance(tokenizer, Described):
        text = tokenizer.description()
    else:
        raise Refused(f"the tokenizer {type(tokenizer).__name__} does not tell the bytes of its tokens; {ADVICE}")
    tokens = LLTokenizer(text)
    special = [token["id"] for token in json.loads(text).get("added_tokens", ()) if token.get("special")]
    return [tokens.decode_bytes([token]) for token in range(tokens.vocab_size)], special
