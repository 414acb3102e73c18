"""Tokens to text, a token at a time. Knows a tokenizer's four methods and no model.

tokens   ... | 14  203 | 91 ...       the window is decoded with and without the new token; what is longer is new,
         done└ window ─┘ new          except bytes that may be the beginning of a character
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Protocol

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no character (yet)
UNFINISHED = 3  # bytes, at most, of a UTF-8 character that still misses one
ASKED = 256  # ids whose text goes into a fingerprint
PROBE = (  # texts whose ids do
    'def add(a: int, b: int = 10) -> int:\n    """Return the sum."""\n\treturn a + b  # 1234567890\r\n',
    "It's 3:45 p.m.; they'll pay $1,299.99 (50% off) — \"naïve\" façade, antidisestablishmentarianism…\n\n\n",
    '{"name": "x_1", "items": [1, 2.5e-3, null, true]}</div><p class=\'a\'>https://example.org/?q=a&b=c#d</p>',
    "Größe, año, été, Привет, мир! 日本語と中文，한국어 العربية हिन्दी ∀x∈ℝ: x²≥0 😀👩‍💻",
)


class Tokenizer(Protocol):
    """What is asked of a tokenizer: the part of Hugging Face's interface that is used here."""

    eos_token_id: int | None

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


def fingerprint(tokenizer: Tokenizer) -> str:
    """Names a tokenizer: 16 hex digits, equal for all that give the same ids to the same text, in any process.

    Made of the number of ids that stand for something, the text of some hundred of them, and the ids of some texts.
    Ids of no text behind the last one that has some do not count: a model's vocabulary may be padded with them, and
    whether its tokenizer is depends on who loads it.
    """
    size = len(tokenizer)
    while size and not tokenizer.decode([size - 1]):
        size -= 1
    asked = sorted({index * (size - 1) // (ASKED - 1) for index in range(ASKED)}) if size else []
    known = [
        size,
        [tokenizer.decode([token]).strip() for token in asked],  # spaces at the edges are a matter of the decoder
        [list(map(int, tokenizer.encode(text, add_special_tokens=False))) for text in PROBE],
    ]
    return sha256(json.dumps(known).encode()).hexdigest()[:16]


def difference(one: Tokenizer, other: Tokenizer) -> str:
    """Where two tokenizers part; "" where neither does on what is asked. One may have more ids behind the other's.

    Asked are some hundred ids that both have, and the ids of some texts.
    """
    size = min(len(one), len(other))
    for token in sorted({index * (size - 1) // (ASKED - 1) for index in range(ASKED)}) if size else []:
        here, there = (each.decode([token]).strip() for each in (one, other))
        if here != there and here and there:
            return f"token {token} is {here!r} in one and {there!r} in the other"
    for text in PROBE:
        if (ids := one.encode(text, add_special_tokens=False)) != other.encode(text, add_special_tokens=False):
            return f"the text {text[:20]!r}... becomes other tokens ({ids[:5]}...)"
    return ""


class Detokenizer:
    """The text that each token adds; all of it together is the decoded whole, special tokens left out.

    A token costs the decoding of a bounded window, however long the text is. Ids that the tokenizer does not have (a
    model's vocabulary may be padded) add no text. Only a tokenizer that changes earlier text in the light of later
    tokens (`clean_up_tokenization_spaces`) can differ from decoding the whole at once.
    """

    WINDOW = 24  # tokens; reached only where the text stays unfinished, as in random bytes
    KEPT = 12  # of them, when it is cut

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = len(tokenizer)
        self._window: list[int] = []
        self._clean = 0  # length of the window's beginning after which its text was last complete
        self._sent = 0  # characters of the window's text that were given out

    def add(self, token: int) -> str:
        """The text that is certain now; "" while a character is unfinished."""
        if token >= self._known:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(text) - len(text.rstrip(REPLACEMENT))
        if len(self._window) > self.WINDOW:  # no text, then: give it out but for its end
            held = min(held, UNFINISHED)
        new = text[self._sent : len(text) - held]
        self._sent = max(self._sent, len(text) - held)
        if not held and not new:  # a special token: as the window's only context it would lose a leading space
            if len(self._window) > self.WINDOW:
                self._window.pop()
        elif not held:  # the window goes on from the last place where the text was complete
            self._shift(self._clean, held)
            self._clean = len(self._window)
        elif len(self._window) > self.WINDOW:
            self._shift(len(self._window) - self.KEPT, held)
            self._clean = 0
        return new

    def flush(self) -> str:
        """What was held back, as the decoder shows it. To be called after the last token."""
        text = self._decode(self._window)
        new, self._sent = text[self._sent :], len(text)
        return new

    def _shift(self, start: int, held: int) -> None:
        if start > 0:
            self._window = self._window[start:]
            self._sent = len(self._decode(self._window)) - held

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class TextStream:
    """The text of one generation as it may be shown: nothing that a stop string could still take back.

    Args:
        tokenizer: None gives no text at all.
        stop_strings: the text ends before the one that stopped it.
        include_stop: the text ends behind it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop_strings: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stops = tuple(stop_strings)
        self._include_stop = include_stop
        self._held: list[tuple[str, bool]] = []  # (text, drafted)

    def add(self, token: int, drafted: bool) -> None:
        if self._detokenizer is not None and (text := self._detokenizer.add(token)):
            self._held.append((text, drafted))

    def take(self) -> tuple[tuple[str, bool], ...]:
        """The (text, drafted) spans that are certain, in order, neighbours unlike each other."""
        text = "".join(text for text, _ in self._held)
        return self._give(len(text) - self._doubtful(text))

    def finish(self, stopped_by: int | str | None) -> tuple[tuple[str, bool], ...]:
        """The last spans. `stopped_by`: the stop string that ended the text, if one did."""
        if isinstance(stopped_by, str):
            at = "".join(text for text, _ in self._held).find(stopped_by)
            return self._give(at + len(stopped_by) * self._include_stop)
        if self._detokenizer is not None and (text := self._detokenizer.flush()):
            self._held.append((text, False))
        return self._give(sum(len(text) for text, _ in self._held))

    def _doubtful(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string could begin."""
        longest = min(len(text), max((len(stop) - 1 for stop in self._stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)

    def _give(self, length: int) -> tuple[tuple[str, bool], ...]:
        given: list[tuple[str, bool]] = []
        while self._held and length > 0:
            text, drafted = self._held.pop(0)
            if len(text) > length:
                self._held.insert(0, (text[length:], drafted))
            if given and given[-1][1] == drafted:
                given[-1] = (given[-1][0] + text[:length], drafted)
            else:
                given.append((text[:length], drafted))
            length -= len(text)
        return tuple(given)
