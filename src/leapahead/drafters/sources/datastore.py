"""Retrieval from a datastore (REST, 2311.08252): what followed the last tokens in a corpus, found in its suffix array.

    text    the cat sat | the cat ran | ...             documents, each followed by a separator, which is no token
    order   ... 1  5 | 0  4 ...                         the suffix array: indices into `text`, without separators
            "cat ran", "cat sat": one interval of it; a drafted token narrows it by two binary searches
    first   [token] -> the first index into `order` of a suffix that begins with it; a search starts there

The file is memory-mapped: only what is needed is read, and processes share it. `corpus` writes it. Its tokens are
big-endian, so that bytes compare as tokens do and a search compares slices of the file.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import log
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import file_path
from leapahead.core.text import Tokenizer, fingerprint
from leapahead.models.base import CHAIN
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Candidate, Source

LONGEST, SHORTEST = 16, 2  # tokens of a match
ORDERED = 64  # tokens by which suffixes are sorted; a match with its draft is not followed any further
MAX_COUNTED = 64  # occurrences of an interval whose continuations are counted
LENGTH_BUCKETS = (2, 3, 4, 5, 6, 8, 12, 16, 24)
COUNT_BUCKETS = (1, 2, 4, 16, 64)

MAGIC, VERSION = b"LEAPDATA", 1
PREFIX = struct.Struct("<8sII")  # magic, version, bytes of the JSON that follows
ALIGNMENT = 64  # bytes
MAX_HEADER = 1 << 16  # bytes
FORMATS = {"uint16": "H", "uint32": "I"}  # of `struct`
REBUILD = "build it again with `leapahead datastore build`"


class Interval(NamedTuple):
    """The suffixes low .. high-1 of the suffix array begin with the same `length` tokens."""

    low: int
    high: int
    length: int


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
        model: name of the model whose tokenizer was used.
        fingerprint: of that tokenizer.
        vocab_size: token ids are below it.
        tokens: number of tokens, without separators.
        documents: number of documents.
        dtype: of a token.
        places: dtype of an index.
    """

    model: str
    fingerprint: str
    vocab_size: int
    tokens: int
    documents: int
    dtype: str
    places: str

    @classmethod
    def of(cls, model: str, fingerprint: str, vocab_size: int, tokens: int, documents: int) -> Header:
        """With the smallest types that hold every token, every index and the separator."""
        small = tokens + documents + ORDERED < 1 << 32
        dtypes = "uint16" if vocab_size <= 0xFFFF else "uint32", "uint32" if small else "uint64"
        return cls(model, fingerprint, vocab_size, tokens, documents, *dtypes)

    def __post_init__(self) -> None:
        """Raises ValueError for values that are not possible."""
        numbers = self.vocab_size, self.tokens, self.documents
        if not all(type(number) is int for number in numbers) or not 0 < self.documents <= self.tokens < 1 << 48:
            raise ValueError("its numbers of tokens and documents are not possible")
        if self.dtype not in FORMATS or self.places not in ("uint32", "uint64"):
            raise ValueError("its number types are unknown")
        if not 0 < self.vocab_size <= self.separator:
            raise ValueError("its vocabulary does not fit its tokens")
        if not isinstance(self.model, str) or not isinstance(self.fingerprint, str):
            raise ValueError("the name of its tokenizer is not text")

    @property
    def separator(self) -> int:
        """Follows every document; greater than every token."""
        return (1 << 8 * np.dtype(self.dtype).itemsize) - 1

    def packed(self) -> bytes:
        """The header as bytes, padded."""
        header = json.dumps(asdict(self)).encode()
        whole = PREFIX.pack(MAGIC, VERSION, len(header)) + header
        return whole.ljust(_aligned(len(whole)), b"\0")

    def layout(self, start: int) -> tuple[list[tuple[int, int, np.dtype[Any]]], int]:
        """Offset, length and type of `text`, `order` and `first`, and the length of the file in bytes."""
        token, index = np.dtype(">" + np.dtype(self.dtype).str[1:]), np.dtype("<" + np.dtype(self.places).str[1:])
        found = []
        for length, dtype in (
            (self.tokens + self.documents, token),
            (self.tokens, index),
            (self.vocab_size + 1, index),
        ):
            found.append((start, length, dtype))
            end = start + length * dtype.itemsize
            start = _aligned(end)
        return found, end


class Store:
    """A file that `leapahead datastore build` wrote, memory-mapped.

    Args:
        path: of the file.
        option: the name by which the user gave it, for messages.

    Attributes:
        path: of the file.
        header: of the file.
        size: of the file, in bytes.

    Raises:
        BadParameter: the file cannot be read, or it is not a valid datastore.
    """

    def __init__(self, path: str | Path, option: str = "path") -> None:
        self.path = str(file_path(option, path))
        if os.path.exists(self.path) and not (os.path.isfile(self.path) or os.path.isdir(self.path)):
            raise BadParameter(f"{self.path!r} is not a datastore, since it is a device or a pipe; name a file")
        try:
            with open(self.path, "rb") as file:
                self.header, start = _header(file.read(PREFIX.size + MAX_HEADER))
                layout, size = self.header.layout(start)
                self.size = file.seek(0, 2)
                if self.size != size:
                    raise ValueError(f"it has {self.size} bytes instead of {size}, so it is not complete")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BadParameter(f"the datastore {self.path!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise BadParameter(f"{self.path!r} is not a valid datastore: {error}; {REBUILD}") from None
        self.text, self.order, first = (
            np.frombuffer(self._bytes, dtype, length, offset) for offset, length, dtype in layout
        )
        self._start, self._width = start, self.text.itemsize
        self._order, self._first = _scalars(self.order), _scalars(first)
        if self._first[0] != 0 or self._first[-1] != self.header.tokens or np.any(first[1:] < first[:-1]):
            raise BadParameter(f"{self.path!r} is not a valid datastore: its index is damaged; {REBUILD}")

    @property
    def largest(self) -> int:
        """The greatest token id of the corpus."""
        return int(self.text[min(int(self.order[-1]), len(self.text) - 1)])

    def check(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """Refuses the datastore of another tokenizer.

        Models with the same tokenizer may have vocabularies padded to different sizes, so the sizes need not be equal.

        Args:
            tokenizer: of the target; None if it is not known.
            vocab_size: of the target.

        Raises:
            BadParameter: the tokenizers differ, or a token id of the file is outside the vocabulary.
        """
        built_with = f"the datastore {self.path!r} was built with another tokenizer ({self.header.fingerprint}, of "
        built_with += repr(self.header.model)
        if tokenizer is not None and self.header.fingerprint != (own := fingerprint(tokenizer)):
            raise BadParameter(f"{built_with}) than this model's ({own}); {REBUILD} and this --model")
        if self.largest >= vocab_size:
            raise BadParameter(
                f"{built_with}): it has the token id {self.largest}, which is outside this model's vocabulary of "
                f"{vocab_size}; {REBUILD}"
            )

    def longest(self, tokens: Sequence[int], most: int = LONGEST) -> Interval | None:
        """The occurrences of the longest suffix of `tokens`, from SHORTEST to `most` tokens; None if there are none.

        If n tokens occur, so do n - 1 of them; so the length is found by binary search.
        """
        tail: list[int] = []
        for token in reversed(tokens[-most:]):
            if token >= self.header.vocab_size:
                break
            tail.insert(0, token)
        key = self._packed(tail)
        count = trial = len(tail)
        best, at = SHORTEST - 1, 0
        fails = count + 1
        while best + 1 < fails:
            found = self._begins(key[(count - trial) * self._width :], tail[-trial])
            if found is None:
                fails = trial
            else:
                best, at = trial, found
            trial = (best + fails) // 2
        if best < SHORTEST:
            return None
        key = key[(count - best) * self._width :]
        return Interval(at, self._bound(key, at, self._first[tail[-best] + 1], 0, True), best)

    def narrowed(self, interval: Interval, token: int) -> Interval | None:
        """The part of an interval that continues with `token`; None if there is none."""
        if token >= self.header.vocab_size or interval.length >= ORDERED:
            return None
        key = self._packed([token])
        low = self._bound(key, interval.low, interval.high, interval.length, False)
        high = self._bound(key, low, interval.high, interval.length, True)
        return Interval(low, high, interval.length + 1) if high > low else None

    def after(self, interval: Interval) -> tuple[Counter[int], int]:
        """Counts the tokens that follow in at most MAX_COUNTED occurrences, spread evenly over an interval.

        Returns:
            token -> count, and the number of occurrences, including those at the end of a document.
        """
        step = -((interval.low - interval.high) // MAX_COUNTED)  # rounded up
        at = self.order[interval.low : interval.high : step].astype(np.int64) + interval.length
        found = Counter(self.text.take(at, mode="clip").tolist())
        for token in [token for token in found if token >= self.header.vocab_size]:
            del found[token]  # the end of a document
        return found, len(at)

    def _packed(self, tokens: Sequence[int]) -> bytes:
        return struct.pack(f">{len(tokens)}{FORMATS[self.header.dtype]}", *tokens)

    def _begins(self, key: bytes, token: int) -> int | None:
        """The first suffix that begins with `key`, whose first token is `token`; None if there is none."""
        high = self._first[token + 1]
        at = self._bound(key, self._first[token], high, 0, False)
        if at == high:
            return None
        start = self._start + self._order[at] * self._width
        return at if self._bytes[start : start + len(key)] == key else None

    def _bound(self, key: bytes, low: int, high: int, skipped: int, upper: bool) -> int:
        """The first suffix in low .. high-1 that is not below `key` after its first `skipped` tokens; high if none is.

        Args:
            upper: find the first one above `key` instead.
        """
        text, order, width, size = self._bytes, self._order, self._width, len(key)
        start = self._start + skipped * width
        while low < high:
            middle = (low + high) >> 1
            at = start + order[middle] * width
            here = text[at : at + size]
            if here < key or (upper and here == key):
                low = middle + 1
            else:
                high = middle
        return low


class Datastore(Source):
    """Proposes what followed the longest match of the last 2 to 16 tokens in a corpus.

    Args:
        store: the corpus; all sequences share it.
    """

    name: ClassVar[str] = "datastore"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, store: Store) -> None:
        self.store = store
        self._matched = LONGEST  # length of the match when the text had `_num_read` tokens
        self._num_read = 0

    def root(self, sequence: SequenceView) -> Interval | None:
        new = len(sequence.tokens) - self._num_read
        interval = self.store.longest(sequence.tokens, min(LONGEST, self._matched + new))
        self._matched = interval.length if interval is not None else SHORTEST - 1
        self._num_read += new
        return interval

    def follow(self, state: Interval, token: int) -> Interval | None:
        return self.store.narrowed(state, token)

    def candidates(self, state: Interval, limit: int) -> list[Candidate]:
        counts, occurrences = self.store.after(state)
        feature = (_bucket(state.length, LENGTH_BUCKETS), _bucket(state.high - state.low, COUNT_BUCKETS))
        return [Candidate(token, log(count / occurrences), feature) for token, count in counts.most_common(limit)]

    def figures(self) -> dict[str, Any]:
        return {"tokens": self.store.header.tokens}


def _bucket(value: int, edges: tuple[int, ...]) -> int:
    return next((index for index, edge in enumerate(edges) if value <= edge), len(edges))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _header(begin: bytes) -> tuple[Header, int]:
    """The header and the offset of what follows it. Raises ValueError if it is not valid."""
    if len(begin) < PREFIX.size or not begin.startswith(MAGIC):
        raise ValueError(f"it does not begin with {MAGIC.decode()}")
    _, version, length = PREFIX.unpack_from(begin)
    if version != VERSION:
        raise ValueError(f"its version is {version}, and this version of leapahead reads version {VERSION}")
    try:
        if length > MAX_HEADER:
            raise ValueError("too long")
        given = json.loads(begin[PREFIX.size : PREFIX.size + length])
        known = {field.name: given[field.name] for field in fields(Header)}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("its header is damaged") from None
    return Header(**known), _aligned(PREFIX.size + length)


def _scalars(numbers: npt.NDArray[Any]) -> memoryview:
    """The array for reading single numbers, which is slow from an array itself."""
    return numbers.astype(np.dtype(numbers.dtype.name), copy=False).data
