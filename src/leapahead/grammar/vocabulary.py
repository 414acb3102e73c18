"""The tokens of a tokenizer as llguidance takes them: the bytes of each id, and which ids are special.

Transformers' fast tokenizers    their own JSON description
GGUF files                       the pieces that llama.cpp gives (`Pieces`)
OpenVINO folders                 tokenizer.json beside the graphs (`Described`)
"""

from __future__ import annotations

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
    """What llguidance's `TokenizerWrapper` asks for. Strings of special tokens are text for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes], special: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = pieces, special, eos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("this tokenizer takes text")
        return self._tokenizer.encode(text, add_special_tokens=False)


def vocabulary(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The tokens of a model. It takes about 0.3 seconds for 150,000 of them.

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
    eos = list(eos_token_ids)
    try:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # of a fast tokenizer of Transformers
        if callable(getattr(backend, "to_str", None)):
            backend = copy(backend)
            backend.no_padding()
            backend.no_truncation()
            return LLTokenizer(backend.to_str(), n_vocab=max(vocab_size, len(tokenizer)), eos_token=eos)
        if isinstance(tokenizer, Described):
            return LLTokenizer(tokenizer.description(), n_vocab=max(vocab_size, len(tokenizer)), eos_token=eos)
        if isinstance(tokenizer, Pieces):
            pieces, special = tokenizer.pieces()
            return LLTokenizer(TokenizerWrapper(_Wrapped(tokenizer, pieces, special, eos[0])), eos_token=eos)
    except ValueError as error:
        raise Refused(f"llguidance cannot read this tokenizer ({first_line(error)}); {ADVICE}") from None
    raise Refused(f"the tokenizer {type(tokenizer).__name__} does not tell the bytes of its tokens; {ADVICE}")
