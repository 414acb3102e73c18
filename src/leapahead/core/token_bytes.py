"""The bytes of a tokenizer's tokens, of which a character may need several: decoded alone, such a token is U+FFFD.

Transformers' fast tokenizers    their own JSON description
GGUF files                       the pieces that llama.cpp gives (`Pieces`)
OpenVINO folders                 tokenizer.json beside the graphs (`Described`)
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol, runtime_checkable

from leapahead.core.errors import Refused
from leapahead.core.text import Tokenizer

KNOWN = "fast tokenizers of Transformers, GGUF files and OpenVINO folders with tokenizer.json do"
A_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how vocabularies with "byte fallback" write a byte
PRINTED = (
    *range(0x21, 0x7F),
    *range(0xA1, 0xAD),
    *range(0xAE, 0x100),
)  # what byte-level BPE writes as itself
BYTES = {chr(byte): byte for byte in PRINTED}
BYTES |= {chr(0x100 + index): byte for index, byte in enumerate(b for b in range(0x100) if b not in PRINTED)}


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


def token_bytes(tokenizer: Tokenizer) -> tuple[list[bytes], list[int]]:
    """What `Pieces` gives, of any tokenizer that tells it. It takes about half a second for 150,000 tokens.

    Raises:
        Refused: the tokenizer does not tell.
    """
    if isinstance(tokenizer, Pieces):
        return tokenizer.pieces()
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # of a fast tokenizer of Transformers
    if callable(getattr(backend, "to_str", None)):
        return _read(json.loads(backend.to_str()), type(tokenizer).__name__)
    if isinstance(tokenizer, Described):
        return _read(json.loads(tokenizer.description()), type(tokenizer).__name__)
    raise Refused(f"the tokenizer {type(tokenizer).__name__} does not tell the bytes of its tokens; {KNOWN}")


def _read(description: Any, name: str) -> tuple[list[bytes], list[int]]:
    """The same from a description. How tokens become text is told by the decoder."""
    decoder = description.get("decoder") or {}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder]) if step}
    if not steps.keys() & {"ByteLevel", "ByteFallback"}:
        kind = "/".join(steps) or "none"
        raise Refused(f"the tokenizer {name} (decoder: {kind}) does not tell the bytes of its tokens; {KNOWN}")
    replace = steps.get("Replace", {})
    space = replace.get("pattern", {}).get("String", " ") if replace.get("content") == " " else " "

    def read(token: str) -> bytes:
        if "ByteLevel" in steps:
            return bytes(map(BYTES.__getitem__, token)) if BYTES.keys() >= set(token) else token.encode()
        byte = A_BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(space, " ").encode()

    vocabulary = description["model"]["vocab"]
    if isinstance(vocabulary, list):  # with the score of each token
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    added = description.get("added_tokens", ())
    found = {index: read(token) for token, index in vocabulary.items()}
    for token in added:  # the decoder reads them, too, such as runs of spaces; special ones are known by their spelling
        found[token["id"]] = token["content"].encode() if token.get("special") else read(token["content"])
    special = [token["id"] for token in added if token.get("special")]
    return [found.get(index, b"") for index in range(max(found, default=-1) + 1)], special
