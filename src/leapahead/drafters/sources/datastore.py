"""REST (2311.08252): what followed the last tokens in a corpus, found in its suffix array.

    text    the cat sat | the cat ran | ...             documents, each ended by a separator that no token has
    order   ... 1  5 | 0  4 ...                         places in the order of what begins there, separators left out
            "cat ran", "cat sat": one range, and a drafted token narrows it by two binary searches
    first   [token] -> the first place in `order` that begins with it, so that a search begins in a small range

The file is memory-mapped: what is not looked at is not read, and processes share it. `corpus` writes it. Its tokens are
big-endian, so that their bytes compare as they do and a search compares slices of the file.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.core.text import Tokenizer, fingerprint
from leapahead.drafters.base import Context
from leapahead.planner.source import Candidate, Source
from leapahead.models.base import CHAIN

LONGEST, SHORTEST = 16, 2  # tokens of a match
ORDERED = 64  # tokens by which suffixes are in order; a match and its draft are not followed any further
SAMPLED = 64  # places of a range that are looked at
LENGTHS = (2, 3, 4, 5, 6, 8, 12, 16, 24)
COUNTS = (1, 2, 4, 16, 64)

MAGIC, VERSION = b"LEAPDATA", 1
PREFIX = struct.Struct("<8sII")  # magic, version, bytes of the JSON behind it
ALIGNED = 64  # bytes
LONGEST_HEAD = 1 << 16  # bytes
FORMATS = {"uint16": "H", "uint32": "I"}  # of `struct`
BUILD = "build it again with `leapahead datastore build`"


class Place(NamedTuple):
    """Places low .. high-1 of the order begin with the same `length` tokens."""

    low: int
    high: int
    length: int


@dataclass(frozen=True)
class Head:
    """What a file says of itself.

    Attributes:
        model: whose tokenizer it was, by name.
        fingerprint: of that tokenizer.
        vocab_size: ids are below it.
        tokens: of all documents together, separators not counted.
        documents: how many.
        dtype: of a token.
        places: dtype of a place.
    """

    model: str
    fingerprint: str
    vocab_size: int
    tokens: int
    documents: int
    dtype: str
    places: str

    @classmethod
    def of(cls, model: str, fingerprint: str, vocab_size: int, tokens: int, documents: int) -> Head:
        """With the smallest types that hold every token and place, and a separator."""
        small = tokens + documents + ORDERED < 1 << 32
        dtypes = "uint16" if vocab_size <= 0xFFFF else "uint32", "uint32" if small else "uint64"
        return cls(model, fingerprint, vocab_size, tokens, documents, *dtypes)

    def __post_init__(self) -> None:
        """ValueError for what cannot be."""
        numbers = self.vocab_size, self.tokens, self.documents
        if not all(type(number) is int for number in numbers) or not 0 < self.documents <= self.tokens < 1 << 48:
            raise ValueError("its numbers of tokens and documents cannot be")
        if self.dtype not in FORMATS or self.places not in ("uint32", "uint64"):
            raise ValueError("its types of numbers are unknown")
        if not 0 < self.vocab_size <= self.separator:
            raise ValueError("its vocabulary does not fit its tokens")
        if not isinstance(self.model, str) or not isinstance(self.fingerprint, str):
            raise ValueError("its tokenizer has no name")

    @property
    def separator(self) -> int:
        """Stands behind every document, greater than every token."""
        return (1 << 8 * np.dtype(self.dtype).itemsize) - 1

    def packed(self) -> bytes:
        """The beginning of the file, padded."""
        head = json.dumps(asdict(self)).encode()
        whole = PREFIX.pack(MAGIC, VERSION, len(head)) + head
        return whole.ljust(_aligned(len(whole)), b"\0")

    def layout(self, start: int) -> tuple[list[tuple[int, int, np.dtype[Any]]], int]:
        """Text, order and first: where each begins, its length, its type; and the length of the file."""
        token, place = np.dtype(">" + np.dtype(self.dtype).str[1:]), np.dtype("<" + np.dtype(self.places).str[1:])
        found = []
        for length, dtype in (
            (self.tokens + self.documents, token),
            (self.tokens, place),
            (self.vocab_size + 1, place),
        ):
            found.append((start, length, dtype))
            end = start + length * dtype.itemsize
            start = _aligned(end)
        return found, end


class Store:
    """A file that `leapahead datastore build` wrote.

    Attributes:
        path: of the file.
        head: what it says of itself.
        size: bytes.

    Raises:
        BadParameter: one clear sentence for whatever is wrong with the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            with open(path, "rb") as file:
                self.head, start = _head(file.read(PREFIX.size + LONGEST_HEAD))
                layout, size = self.head.layout(start)
                self.size = file.seek(0, 2)
                if self.size != size:
                    raise ValueError(f"it has {self.size} bytes where {size} belong, so it is not whole")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BadParameter(f"the datastore {self.path!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise BadParameter(f"{self.path!r} is no datastore that can be used: {error}; {BUILD}") from None
        self.text, self.order, first = (
            np.frombuffer(self._bytes, dtype, length, offset) for offset, length, dtype in layout
        )
        self._start, self._width = start, self.text.itemsize
        self._places, self._first = _scalars(self.order), _scalars(first)
        if self._first[0] != 0 or self._first[-1] != self.head.tokens or np.any(first[1:] < first[:-1]):
            raise BadParameter(f"{self.path!r} is no datastore that can be used: its index is damaged; {BUILD}")

    @property
    def largest(self) -> int:
        """The greatest token id in it."""
        return int(self.text[min(int(self.order[-1]), len(self.text) - 1)])

    def longest(self, tokens: Sequence[int], most: int = LONGEST) -> Place | None:
        """Where it goes on as `tokens` end, by as many of them as are found somewhere, from SHORTEST to `most`.

        If n tokens are found, so are n - 1: a binary search over n.
        """
        tail: list[int] = []
        for token in reversed(tokens[-most:]):
            if token >= self.head.vocab_size:
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
        return Place(at, self._bound(key, at, self._first[tail[-best] + 1], 0, True), best)

    def narrowed(self, place: Place, token: int) -> Place | None:
        """The part of a range that goes on with `token`."""
        if token >= self.head.vocab_size or place.length >= ORDERED:
            return None
        key = self._packed([token])
        low = self._bound(key, place.low, place.high, place.length, False)
        high = self._bound(key, low, place.high, place.length, True)
        return Place(low, high, place.length + 1) if high > low else None

    def after(self, place: Place) -> tuple[Counter[int], int]:
        """token -> count of what follows at up to SAMPLED places spread over a range; and how many places those are."""
        step = -((place.low - place.high) // SAMPLED)  # rounded up
        at = self.order[place.low : place.high : step].astype(np.int64) + place.length
        found = Counter(self.text.take(at, mode="clip").tolist())
        for token in [token for token in found if token >= self.head.vocab_size]:
            del found[token]  # the end of a document
        return found, len(at)

    def _packed(self, tokens: Sequence[int]) -> bytes:
        return struct.pack(f">{len(tokens)}{FORMATS[self.head.dtype]}", *tokens)

    def _begins(self, key: bytes, token: int) -> int | None:
        """The first place in order that begins with `key`, whose first token is given."""
        high = self._first[token + 1]
        at = self._bound(key, self._first[token], high, 0, False)
        if at == high:
            return None
        start = self._start + self._places[at] * self._width
        return at if self._bytes[start : start + len(key)] == key else None

    def _bound(self, key: bytes, low: int, high: int, skipped: int, behind: bool) -> int:
        """The first of low .. high-1 with `key` or more behind `skipped` tokens, or, `behind`, with more; else high."""
        text, places, width, size = self._bytes, self._places, self._width, len(key)
        start = self._start + skipped * width
        while low < high:
            middle = (low + high) >> 1
            at = start + places[middle] * width
            here = text[at : at + size]
            if here < key or (behind and here == key):
                low = middle + 1
            else:
                high = middle
        return low


def opened(path: str | Path) -> Store:
    """The store of a file: one for all who ask, as long as the file stays as it is."""
    try:
        found = Path(path).stat()
    except OSError as error:
        raise BadParameter(f"the datastore {str(path)!r} cannot be read: {error.strerror}") from None
    return _opened(str(path), found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=8)
def _opened(path: str, *version: int) -> Store:
    return Store(path)


class Datastore(Source):
    """What followed the last 16 to 2 tokens in a corpus: the longest match that there is.

    Args:
        file: written by `leapahead datastore build`.
    """

    name: ClassVar[str] = "datastore"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN})

    def __init__(self, file: str | Path) -> None:
        self.store = opened(file)
        self._matched = LONGEST  # tokens, when `_read` of the text were there
        self._read = 0

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises BadParameter if the file's tokens are another tokenizer's."""
        head, mine = self.store.head, fingerprint(tokenizer)
        if head.fingerprint != mine:
            raise BadParameter(
                f"the datastore {self.store.path!r} was built with another tokenizer ({head.fingerprint}, of "
                f"{head.model!r}) than this model's ({mine}); {BUILD} and this --model"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises BadParameter if the file has an id that the target has not.

        Sizes alone tell less: one tokenizer serves models whose vocabularies are padded to different sizes.
        """
        if (largest := self.store.largest) >= vocab_size:
            raise BadParameter(
                f"the datastore {self.store.path!r} was built with another tokenizer, of {self.store.head.model!r}: it "
                f"has the id {largest}, which is outside this model's vocabulary of {vocab_size}; {BUILD}"
            )

    def begin(self, context: Context) -> None:
        self.check_vocabulary(context.vocab_size)

    def root(self, context: Context) -> Place | None:
        new = len(context.tokens) - self._read
        place = self.store.longest(context.tokens, min(LONGEST, self._matched + new))
        self._matched = place.length if place is not None else SHORTEST - 1
        self._read += new
        return place

    def follow(self, state: Place, token: int) -> Place | None:
        return self.store.narrowed(state, token)

    def candidates(self, state: Place, limit: int) -> list[Candidate]:
        found, places = self.store.after(state)
        feature = (_bucket(state.length, LENGTHS), _bucket(state.high - state.low, COUNTS))
        return [Candidate(token, log(times / places), feature) for token, times in found.most_common(limit)]

    def figures(self) -> dict[str, Any]:
        return {"tokens": self.store.head.tokens}


def _bucket(value: int, edges: tuple[int, ...]) -> int:
    return next((index for index, edge in enumerate(edges) if value <= edge), len(edges))


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _head(begin: bytes) -> tuple[Head, int]:
    """The head, and where the numbers begin. ValueError if there is none that can be."""
    if len(begin) < PREFIX.size or not begin.startswith(MAGIC):
        raise ValueError(f"it does not begin with {MAGIC.decode()}")
    _, version, length = PREFIX.unpack_from(begin)
    if version != VERSION:
        raise ValueError(f"its version is {version}, and {VERSION} is known here")
    try:
        if length > LONGEST_HEAD:
            raise ValueError("too long")
        given = json.loads(begin[PREFIX.size : PREFIX.size + length])
        known = {field.name: given[field.name] for field in fields(Head)}
    except (ValueError, KeyError, TypeError):
        raise ValueError("its head is damaged") from None
    return Head(**known), _aligned(PREFIX.size + length)


def _scalars(numbers: npt.NDArray[Any]) -> memoryview:
    """For reading one at a time, which an array is slow at."""
    return numbers.astype(np.dtype(numbers.dtype.name), copy=False).data
