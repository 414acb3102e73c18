"""Builds a datastore from a corpus: reads its files, tokenises them, sorts the suffixes and writes one file.

    files, folders, .jsonl ──> documents ──> tokens, a separator after each ──> suffix array ──> header|text|order|first

See `leapahead.drafters.sources.datastore` for the parts of the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import file_path, flag, unicode_text
from leapahead.core.storage import replaceable, replacing
from leapahead.core.text import Tokenizer, fingerprint
from leapahead.core.tree import IntArray
from leapahead.drafters.sources.datastore import MAGIC, ORDERED, Header

SUFFIXES = (".jsonl", ".ndjson")  # of files of records, in lower case
FIELDS = ("text", "content", "output", "completion")  # of records; the first that a record has is read
PIECE = 1 << 20  # characters that are tokenised at once, about; longer documents are split at the end of a line
BINARY_CHECK = 1 << 13  # bytes at the beginning of a file in which a zero byte marks it as binary
Progress = Callable[[str, int, int], None]  # what, done, total


def silent(what: str, done: int, total: int) -> None:
    """Reports no progress."""


@dataclass
class Corpus:
    """Text files, folders of them, and files of JSON lines (.jsonl, .ndjson).

    A file in a folder that cannot be read as text, or as records, is skipped. A path that was given must be readable.

    Args:
        paths: of them, or a single path.
        column: the field of the records; by default the first of FIELDS that a record has.

    Attributes:
        skipped: file -> why it was skipped.
    """

    paths: Sequence[Path]
    column: str | None = None
    skipped: dict[Path, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths = [self.paths] if isinstance(self.paths, (str, os.PathLike)) else self.paths
        self.paths = [file_path("paths", path) for path in paths]

    def files(self) -> list[tuple[Path, bool]]:
        """Every file once, in order, and whether it was given by name. Hidden files must be.

        Raises:
            BadParameter: a path does not exist, or may not be entered.
        """
        found: dict[Path, bool] = {}
        for path in self.paths:
            try:
                if path.is_dir():
                    inside = sorted(each for each in path.rglob("*") if each.is_file())
                elif path.exists():
                    found[path] = True
                    continue
                else:
                    raise BadParameter(f"there is no file or folder {str(path)!r}")
            except OSError as error:
                raise BadParameter(f"{str(path)!r} cannot be read: {error.strerror}") from None
            visible = [each for each in inside if not any(p.startswith(".") for p in each.relative_to(path).parts)]
            found.update((each, found.get(each, False)) for each in visible)
        return list(found.items())

    def documents(self, progress: Progress = silent) -> Iterator[str]:
        """The documents of all files.

        Args:
            progress: called for each file and each document, with kilobytes.

        Raises:
            BadParameter: a file that was given by name cannot be read, or a field is named and no file has records.
        """
        files = self.files()
        if self.column and not any(_has_records(path) for path, _ in files):
            raise BadParameter(
                f"there is no field {self.column!r}, since no file of the corpus is one of JSON lines "
                f"({', '.join(SUFFIXES)}); leave --field out"
            )
        sizes = [path.stat().st_size for path, _ in files]
        total, before = sum(sizes) // 1000, 0
        for (path, named), size in zip(files, sizes, strict=True):
            progress(f"reading {path.name} (kB)", before // 1000, total)
            try:
                documents = self._documents(path)
            except BadParameter as error:
                if named:
                    raise
                self.skipped[path], documents = str(error), []
            done = before
            for document in documents:
                yield document
                done += len(document)
                progress(f"tokenising {path.name} (kB)", done // 1000, total)
            before += size

    def _documents(self, path: Path) -> list[str]:
        text = _read(path)
        if not _has_records(path):
            return [text]
        lines = enumerate(text.split("\n"), 1)
        return [self._record(line, f"line {number} of {str(path)!r}") for number, line in lines if line.strip()]

    def _record(self, line: str, where: str) -> str:
        """The text of one record."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise BadParameter(f"{where} is not JSON") from None
        if not isinstance(record, dict):
            raise BadParameter(f"{where} is not a JSON object")
        name = next((name for name in ((self.column,) if self.column else FIELDS) if name in record), None)
        if name is None:
            wanted = f"no field {self.column!r}" if self.column else f"none of the fields {', '.join(FIELDS)}"
            raise BadParameter(f"{where} has {wanted}, but {', '.join(record) or 'none'}; name one with --field")
        text = record[name]
        if not isinstance(text, str):
            raise BadParameter(f"the field {name!r} in {where} is not text")
        return unicode_text(f"the field {name!r} in {where}", text)


def _has_records(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _read(path: Path) -> str:
    """The text of a file.

    Raises:
        BadParameter: it cannot be read, or is not UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(BINARY_CHECK)
            if b"\0" not in begin:
                return (begin + file.read()).decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    except OSError as error:
        raise BadParameter(f"{str(path)!r} cannot be read: {error.strerror}") from None
    raise BadParameter(f"{str(path)!r} is not UTF-8 text; a corpus is text files, folders of them and JSON lines")


def build(
    corpus: Corpus,
    out: Path,
    tokenizer: Tokenizer,
    *,
    model: str = "",
    force: bool = False,
    progress: Progress = silent,
) -> Header:
    """Writes the datastore of a corpus. If it fails, a file that was there is as it was.

    Args:
        corpus: what to read.
        out: the file to write.
        tokenizer: of the models that the datastore is for.
        model: name of the model, for messages.
        force: replace `out` if it exists.
        progress: called with what is being done, how much of it is done, and the total.

    Raises:
        BadParameter: `out` exists, is part of the corpus, or cannot be written; the corpus cannot be read, or has no
            text.
    """
    out = file_path("out", out)
    place = replaceable(out)
    if not os.path.isdir(place.parent):
        raise BadParameter(f"there is no folder {str(place.parent)!r} to write {place.name!r} to; create it first")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise BadParameter(f"{out} cannot be written: the folder {place.parent} is not writable; name another file")
    if out.exists() and not flag("force", force):
        raise BadParameter(f"{out} exists; name another file, or replace it with the option 'force'")
    if out.exists() and not _is_datastore(out) and any(path.samefile(out) for path, _ in corpus.files()):
        raise BadParameter(f"{out} cannot be replaced, because it is a file of the corpus; name another file")
    ids = [found for text in corpus.documents(progress) if len(found := _encoded(text, tokenizer, progress))]
    if not ids:
        raise BadParameter(f"there is no text in {', '.join(repr(str(path)) for path in corpus.paths)}")
    tokens = sum(map(len, ids))
    vocab_size = max(len(tokenizer), 1 + max(int(each.max()) for each in ids))
    header = Header.of(model, fingerprint(tokenizer), vocab_size, tokens, len(ids))
    write(place, header, ids, progress)
    return header


def write(out: Path, header: Header, documents: Sequence[npt.ArrayLike], progress: Progress = silent) -> None:
    """Writes the file of some documents beside `out` and renames it.

    Args:
        out: the file to write.
        header: of the file; it states the number of tokens and documents.
        documents: their token ids.
        progress: see `build`.

    Raises:
        BadParameter: it cannot be written.
    """
    text = np.full(header.tokens + header.documents, header.separator, dtype=np.int64)
    at = 0
    for ids in documents:
        found = np.asarray(ids)
        text[at : at + len(found)] = found
        at += len(found) + 1
    # The suffixes that begin with a separator are last, and left out.
    order = suffix_array(np.minimum(text, header.vocab_size), progress=progress)[: header.tokens]
    first = np.searchsorted(text[order], np.arange(header.vocab_size + 1))
    begin = header.packed()
    layout, _ = header.layout(len(begin))
    try:
        with replacing(out) as part, part.open("xb") as file:
            file.write(begin)
            for (start, _, dtype), numbers in zip(layout, (text, order, first), strict=True):
                file.write(b"\0" * (start - file.tell()))
                file.write(numbers.astype(dtype).view(np.uint8).data)
    except OSError as error:
        raise BadParameter(f"{str(out)!r} cannot be written: {error.strerror}") from None


def _is_datastore(path: Path) -> bool:
    """Whether this is a datastore, which a folder of the corpus may hold: it is no text, so it is skipped."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def suffix_array(text: IntArray, depth: int = ORDERED, progress: Progress = silent) -> IntArray:
    """The suffix array of a text: its indices in the order of the suffixes that begin there, int64 [n].

    By prefix doubling. First, as many tokens as fit into 63 bits form one key. Then the rank of an index and that of
    the index `width` further form the key, for the indices whose order is not decided yet. It ends at `depth` tokens,
    because no match is longer.

    Args:
        text: int64 [n], not negative.
        depth: suffixes are sorted by at least so many tokens.
        progress: called before each round.
    """
    n = len(text)
    bits = (int(text.max()) + 1).bit_length()  # 0 is the text's end, before every token
    width = min(max(1, 63 // bits), depth)
    rounds = 1 + max(0, int(np.ceil(np.log2(depth / width))))
    progress("sorting", 0, rounds)
    key = np.zeros(n, dtype=np.int64)
    for shift in range(width):
        key <<= bits
        key[: max(0, n - shift)] |= text[shift:] + 1
    order = np.argsort(key)
    rank = np.empty(n, dtype=np.int64)  # the first index into `order` of a suffix with the same key
    where, heads = np.arange(n), _heads(key[order])
    rank[order] = where[heads]
    for done in range(1, rounds):
        progress("sorting", done, rounds)
        equal = _repeated(heads)
        where = where[equal]  # indices into `order` that are not decided yet
        if not len(where):
            break
        some = order[where]
        ahead = some + width
        second = np.where(ahead < n, rank[np.minimum(ahead, n - 1)] + 1, 0)
        by = np.lexsort((second, rank[some]))
        some, second = some[by], second[by]
        heads = _heads(rank[some], second)
        order[where] = some
        rank[some] = where[heads]
        width *= 2
    progress("sorting", rounds, rounds)
    return order


def _heads(*sorted_keys: npt.NDArray[Any]) -> IntArray:
    """For each of some sorted keys, the index of the first one that equals it, int64 [n]."""
    new = np.ones(len(sorted_keys[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in sorted_keys])
    return np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))


def _repeated(heads: IntArray) -> npt.NDArray[np.bool_]:
    """Whether each key equals another one, bool [n]."""
    return np.bincount(heads, minlength=len(heads))[heads] > 1


def _encoded(text: str, tokenizer: Tokenizer, progress: Progress) -> IntArray:
    """The token ids of a document, uint32 [tokens]; a long one is tokenised in pieces of whole lines."""
    ids: list[int] = []
    start = 0
    while start < len(text):
        if len(text) > PIECE:
            progress("tokenising a long document (MB)", start // 10**6, len(text) // 10**6)
        end = text.find("\n", start + PIECE) + 1 or len(text)
        ids += tokenizer.encode(text[start:end], add_special_tokens=False)
        start = end
    return np.array(ids, dtype=np.uint32)
