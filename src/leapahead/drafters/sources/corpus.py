"""A corpus becomes a datastore: its files are read, tokenised, put in order and written as one file.

    files, folders, .jsonl ──> documents ──> ids, a separator behind each ──> suffix array ──> head|text|order|first

`datastore` reads what is written here, and says what the parts are.
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
from leapahead.core.text import Tokenizer, fingerprint
from leapahead.core.tree import IntArray
from leapahead.drafters.sources.datastore import ORDERED, Head

FIELDS = ("text", "content", "output", "completion")  # of a .jsonl file's records, the first that there is
PIECE = 1 << 20  # characters that are tokenised at once, about; longer documents are cut at a line's end
LOOKED_AT = 1 << 13  # bytes of a file that tell whether it is text
Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass
class Corpus:
    """Text files, folders of them, and .jsonl files.

    Args:
        paths: of them.
        column: the field of a .jsonl file's records; by default the first of FIELDS that a record has.

    Attributes:
        skipped: files found in folders that are not text. A file that was named must be.

    Raises:
        BadParameter: a path that is not there, that cannot be read, or that is no text.
    """

    paths: Sequence[Path]
    column: str | None = None
    skipped: list[Path] = field(default_factory=list)

    def files(self) -> list[tuple[Path, bool]]:
        """Each once, in order, and whether it was named. Hidden files are found only by name."""
        found: dict[Path, bool] = {}
        for path in self.paths:
            if path.is_dir():
                inside = sorted(each for each in path.rglob("*") if each.is_file())
                visible = [each for each in inside if not any(p.startswith(".") for p in each.relative_to(path).parts)]
                found.update((each, found.get(each, False)) for each in visible)
            elif path.exists():
                found[path] = True
            else:
                raise BadParameter(f"there is no file or folder {str(path)!r}")
        return list(found.items())

    def documents(self, progress: Progress) -> Iterator[str]:
        files = self.files()
        for done, (path, named) in enumerate(files):
            progress(f"reading {path.name}", done, len(files))
            text = self._read(path)
            if text is None and named:
                raise BadParameter(
                    f"{str(path)!r} is not UTF-8 text; a corpus is text files, folders of them and .jsonl"
                )
            if text is None:
                self.skipped.append(path)
            elif path.suffix == ".jsonl":
                yield from self._records(path, text)
            else:
                yield text

    def _read(self, path: Path) -> str | None:
        """None for what is not text."""
        try:
            with path.open("rb") as file:
                begin = file.read(LOOKED_AT)
                return None if b"\0" in begin else (begin + file.read()).decode("utf-8-sig")
        except UnicodeDecodeError:
            return None
        except OSError as error:
            raise BadParameter(f"{str(path)!r} cannot be read: {error.strerror}") from None

    def _records(self, path: Path, text: str) -> Iterator[str]:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            where = f"line {number} of {str(path)!r}"
            try:
                record = json.loads(line)
            except ValueError:
                raise BadParameter(f"{where} is not JSON") from None
            if not isinstance(record, dict):
                raise BadParameter(f"{where} is not a JSON object")
            name = next((name for name in ((self.column,) if self.column else FIELDS) if name in record), None)
            if name is None:
                wanted = f"no field {self.column!r}" if self.column else f"none of the fields {', '.join(FIELDS)}"
                raise BadParameter(f"{where} has {wanted}, but {', '.join(record) or 'none'}; name one with --field")
            if not isinstance(record[name], str):
                raise BadParameter(f"the field {name!r} in {where} is not text")
            yield record[name]


def build(
    corpus: Corpus,
    out: Path,
    tokenizer: Tokenizer,
    *,
    model: str = "",
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Head:
    """Writes the datastore of a corpus, under another name first, so that `out` is whole or is not there.

    Args:
        corpus: what to read.
        out: the file to write.
        tokenizer: of the model that will be helped.
        model: its name, for those who ask later.
        force: replace `out` if it exists.
        progress: called with what is done now, and how much of it.

    Raises:
        BadParameter: `out` exists or cannot be written; a corpus that cannot be read, or that is empty.
    """
    if out.exists() and not force:
        raise BadParameter(f"{out} exists: name another file, or force its replacement (--force, force=True)")
    if not out.parent.is_dir():
        raise BadParameter(f"there is no folder {str(out.parent)!r} to write {out.name!r} to")
    ids = [found for text in corpus.documents(progress) if len(found := _encoded(text, tokenizer))]
    if not ids:
        raise BadParameter(f"there is no text in {', '.join(repr(str(path)) for path in corpus.paths)}")
    tokens = sum(map(len, ids))
    vocab_size = max(len(tokenizer), 1 + max(int(each.max()) for each in ids))
    head = Head.of(model, fingerprint(tokenizer), vocab_size, tokens, len(ids))
    write(out, head, ids, progress)
    return head


def write(
    out: Path,
    head: Head,
    documents: Sequence[npt.ArrayLike],
    progress: Progress = lambda what, done, total: None,
) -> None:
    """The file of these documents' ids."""
    text = np.full(head.tokens + head.documents, head.separator, dtype=np.int64)
    at = 0
    for ids in documents:
        found = np.asarray(ids)
        text[at : at + len(found)] = found
        at += len(found) + 1
    order = suffix_array(np.minimum(text, head.vocab_size), progress=progress)[: head.tokens]  # separators are last
    first = np.searchsorted(text[order], np.arange(head.vocab_size + 1))
    begin = head.packed()
    layout, _ = head.layout(len(begin))
    partly = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with partly.open("wb") as file:
            file.write(begin)
            for (start, _, dtype), numbers in zip(layout, (text, order, first), strict=True):
                file.write(b"\0" * (start - file.tell()))
                numbers.astype(dtype).tofile(file)
        os.replace(partly, out)
    except OSError as error:
        raise BadParameter(f"{str(out)!r} cannot be written: {error.strerror}") from None
    finally:
        partly.unlink(missing_ok=True)


def suffix_array(text: IntArray, depth: int = ORDERED, progress: Progress = lambda what, done, total: None) -> IntArray:
    """The places of a text in the order of what begins there, int64 [n].

    By prefix doubling: as many tokens as fit a number are one key; then the rank of a place and that of the place
    `width` further are one, for the places that others still equal. It ends at `depth` tokens: a match is never longer,
    and the order beyond is not needed.

    Args:
        text: int64 [n], not negative.
        depth: tokens by which to order, at least.
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
    rank = np.empty(n, dtype=np.int64)  # the first of `order` that begins alike
    where, heads = np.arange(n), _heads(key[order])
    rank[order] = where[heads]
    for done in range(1, rounds):
        progress("sorting", done, rounds)
        equal = _repeated(heads)
        where = where[equal]  # of `order`, still to be settled
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
    """For each of some sorted keys, where the run of those like it begins, int64 [n]."""
    new = np.ones(len(sorted_keys[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in sorted_keys])
    return np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))


def _repeated(heads: IntArray) -> npt.NDArray[np.bool_]:
    """Which are in a run of more than one."""
    return np.bincount(heads, minlength=len(heads))[heads] > 1


def _encoded(text: str, tokenizer: Tokenizer) -> IntArray:
    ids: list[int] = []
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        ids += tokenizer.encode(text[start:end], add_special_tokens=False)
        start = end
    return np.array(ids, dtype=np.uint32)
