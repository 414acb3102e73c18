"""Incremental detokenization, and the comparison of tokenizers. Uses a tokenizer's four methods and no model.

tokens   ... | 14  203 | 91 ...       the window is decoded with and without the new token; the text by which the
         done└ window ─┘ new          first is longer is new, except bytes that may begin an unfinished character
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Protocol
from weakref import WeakKeyDictionary

REPLACEMENT = "\ufffd"  # a decoder's output for bytes that are not (yet) a character
UNFINISHED = 3  # greatest number of bytes of an unfinished UTF-8 character
PROBED_IDS = 256  # number of ids whose text is part of a fingerprint
PROBE = (  # texts whose ids are part of it
    'def add(a: int, b: int = 10) -> int:\n    """Return the sum."""\n\treturn a + b  # 1234567890\r\n',
    "It's 3:45 p.m.; they'll pay $1,299.99 (50% off) — \"naïve\" façade, antidisestablishmentarianism…\n\n\n",
    '{"name": "x_1", "items": [1, 2.5e-3, null, true]}</div><p class=\'a\'>https://example.org/?q=a&b=c#d</p>',
    "Größe, año, été, Привет, мир! 日本語と中文，한국어 العربية हिन्दी ∀x∈ℝ: x²≥0 😀👩‍💻",
)


class Tokenizer(Protocol):
    """The part of Hugging Face's tokenizer interface that is used here."""

    eos_token_id: int | None

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str: ...


_bounds: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()  # of a tokenizer, with the length that it had


def id_bound(tokenizer: Tokenizer) -> int:
    """The number that all ids of a tokenizer are below: its length, or more where the ids have gaps.

    The length of Transformers' tokenizers is the number of their entries. All of these are looked at once, and again
    when tokens were added.
    """
    length, entries = len(tokenizer), getattr(tokenizer, "get_vocab", None)
    if entries is None:
        return length
    known = None
    with suppress(TypeError):  # of a class without weak references, or without a hash
        known = _bounds.get(tokenizer)
    if known is None or known[0] != length:
        known = length, max(length, max(entries().values(), default=-1) + 1)
        with suppress(TypeError):
            _bounds[tokenizer] = known
    return known[1]


def fingerprint(tokenizer: Tokenizer) -> str:
    """Identifies a tokenizer by 16 hex digits, equal for all that give the same ids to the same text, in any process.

    A hash of the number of ids, the text of a few hundred ids, and the ids of some texts. Trailing ids without text do
    not count: a model's vocabulary may be padded with them, and loaders differ in whether the tokenizer has them.
    """
    size = len(tokenizer)
    while size and not tokenizer.decode([size - 1]):
        size -= 1
    probed = sorted({index * (size - 1) // (PROBED_IDS - 1) for index in range(PROBED_IDS)}) if size else []
    known = [
        size,
        [tokenizer.decode([token]).strip() for token in probed],  # decoders differ in spaces at the edges
        [list(map(int, tokenizer.encode(text, add_special_tokens=False))) for text in PROBE],
    ]
    return sha256(json.dumps(known).encode()).hexdigest()[:16]


def unnamed(vocab_size: int) -> str:
    """In place of the fingerprint of a tokenizer that is not known."""
    return f"vocabulary of {vocab_size}"


def difference(one: Tokenizer, other: Tokenizer) -> str:
    """Describes the first difference of two tokenizers; "" if none is found.

    Compares the text of a few hundred ids that both have, and the ids of some texts. Either may have additional ids
    after those of the other.
    """
    size = min(len(one), len(other))
    for token in sorted({index * (size - 1) // (PROBED_IDS - 1) for index in range(PROBED_IDS)}) if size else []:
        here, there = (each.decode([token]).strip() for each in (one, other))
        if here != there and here and there:
            return f"token {token} is {here!r} in one and {there!r} in the other"
    for text in PROBE:
        if (ids := one.encode(text, add_special_tokens=False)) != other.encode(text, add_special_tokens=False):
            return f"the text {text[:20]!r}... has other token ids ({ids[:5]}...)"
    return ""


class Detokenizer:
    """Gives the text that each token adds, so that the pieces together are the text of all tokens decoded at once.

    A token costs the decoding of a bounded window, however long the text is. Ids that the tokenizer does not have (a
    model's vocabulary may be padded) add no text. The result can differ from decoding all tokens at once only with
    tokenizers whose later tokens change earlier text (`clean_up_tokenization_spaces`).

    Args:
        tokenizer: gives the text.
        skip_special_tokens: whether special tokens are left out.
        before: the tokens that the text follows, of which the last ones are read. Some decoders drop the space at the
            beginning of what they are given, and the one between a prompt and its text would be lost.
    """

    WINDOW = 24  # tokens; reached only where the text stays unfinished, as in random bytes
    KEPT = 12  # tokens left of a window that is cut

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._size = id_bound(tokenizer)
        self._window: list[int] = []
        self._complete = 0  # number of the window's first tokens after which its text was last complete
        self._sent = 0  # characters of the window's text that were returned
        known = [token for token in before[-self.KEPT :] if token < self._size]
        text = self._decode(known) if known else ""
        if not text.endswith(REPLACEMENT):  # whose bytes the first token might complete
            self._window, self._complete, self._sent = known, len(known), len(text)

    def add(self, token: int) -> str:
        """The text that the token adds; "" while a character is unfinished."""
        if token >= self._size:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(text) - len(text.rstrip(REPLACEMENT))
        if len(self._window) > self.WINDOW:  # these bytes are no text: return all but the last
            held = min(held, UNFINISHED)
        new = text[self._sent : len(text) - held]
        self._sent = max(self._sent, len(text) - held)
        if not held and not new:  # a special token: as the only context it would remove the next token's leading space
            if len(self._window) > self.WINDOW:
                self._window.pop()
        elif not held:  # the window now begins where the text was last complete
            self._shift(self._complete, held)
            self._complete = len(self._window)
        elif len(self._window) > self.WINDOW:
            self._shift(len(self._window) - self.KEPT, held)
            self._complete = 0
        return new

    def flush(self) -> str:
        """The text that was held back, as the decoder returns it. To be called after the last token."""
        text = self._decode(self._window)
        new, self._sent = text[self._sent :], len(text)
        return new

    def _shift(self, start: int, held: int) -> None:
        if start > 0:
            self._window = self._window[start:]
            self._sent = len(self._decode(self._window)) - held

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skips)


class TextStream:
    """The text of one request in pieces that are final: text that may belong to a stop string is held back.

    Args:
        tokenizer: None for no text at all.
        stop_strings: the text ends before the one that stopped it.
        include_stop: the text ends after it.
        before: see `Detokenizer`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, before=before) if tokenizer is not None else None
        self._stops = sorted(stop_strings)
        self._include_stop = include_stop
        self._held: deque[tuple[str, bool]] = deque()  # (text, drafted)

    def add(self, token: int, drafted: bool) -> None:
        """Takes the next token and whether it had been drafted."""
        if self._detokenizer is not None and (text := self._detokenizer.add(token)):
            self._held.append((text, drafted))

    def take(self) -> tuple[tuple[str, bool], ...]:
        """The new (text, drafted) spans that are final, in order. Neighbouring spans differ in `drafted`."""
        if len(self._held) <= 1 and not self._stops:  # as in most steps
            given, self._held = tuple(self._held), deque()
            return given
        text = "".join(text for text, _ in self._held)
        return self._give(len(text) - self._held_back(text))

    def finish(self, stopped_by: int | str | None) -> tuple[tuple[str, bool], ...]:
        """The last spans.

        Args:
            stopped_by: the stop string that ended the text, if one did.
        """
        if isinstance(stopped_by, str):
            text, last = "".join(text for text, _ in self._held), self._held[-1][0] if self._held else ""
            # The last token completes it. A marker that the engine's text lacks may stand before it, or divide it.
            at = text.find(stopped_by, max(0, len(text) - len(last) - len(stopped_by) + 1))
            return self._give(len(text) if at < 0 else at + len(stopped_by) * self._include_stop)
        if self._detokenizer is not None and (text := self._detokenizer.flush()):
            self._held.append((text, False))
        return self._give(sum(len(text) for text, _ in self._held))

    def _held_back(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        if not self._stops:
            return 0
        longest = min(len(text), max(len(stop) - 1 for stop in self._stops))
        return next((n for n in range(longest, 0, -1) if self._begins(text[-n:])), 0)

    def _begins(self, text: str) -> bool:
        """Whether a stop string begins with it: the first one that is not before it in alphabetical order, if any."""
        at = bisect_left(self._stops, text)
        return at < len(self._stops) and self._stops[at].startswith(text)

    def _give(self, length: int) -> tuple[tuple[str, bool], ...]:
        given: list[tuple[list[str], bool]] = []  # a text that nobody has read piece by piece may have very many
        while self._held and length > 0:
            text, drafted = self._held.popleft()
            if len(text) > length:
                self._held.appendleft((text[length:], drafted))
            if not given or given[-1][1] != drafted:
                given.append(([], drafted))
            given[-1][0].append(text[:length])
            length -= len(text)
        return tuple(("".join(texts), drafted) for texts, drafted in given)
