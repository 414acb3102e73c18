"""GGUF files: the check before llama.cpp loads one, of weights at its end that are all zero; a digest of the weights.

A download that stopped half-way leaves a file of the full size whose end is zero where the space was reserved first;
llama.cpp loads it and generates nonsense. llama.cpp itself refuses a file that is shorter than its header promises.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from leapahead.core.errors import BadParameter

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of the other types of a value
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BLOCK = 1 << 20  # bytes that are compared with zero at once
LEAST = 1 << 14  # bytes; a shorter run of zeros at the end is not refused: most of a norm's weights may be zero


PIECES, LENGTH = 4, 256  # of each tensor, so many pieces of so many bytes are part of the digest


class Tensor(NamedTuple):
    """A tensor of a file, whose data lie at [begin, end), padding behind them included."""

    name: str
    begin: int
    end: int


def check_file(path: Path) -> None:
    """Refuses what is not a complete GGUF file. Of a model in several files all are checked.

    A file is incomplete if more than half of a weight is zero, up to the end of the file, and at least `LEAST` bytes.
    A shorter run of zeros is not refused: embeddings of unused tokens may be zero.

    Raises:
        BadParameter: no such file, not a GGUF file, or an incomplete one.
    """
    if not path.is_file():
        raise BadParameter(f"there is no file {str(path)!r}; give the path of a GGUF file")
    for part in _parts(path):
        with part.open("rb") as opened:
            if opened.read(len(MAGIC)) != MAGIC:
                raise BadParameter(f"{str(part)!r} is not a GGUF file: it does not begin with {MAGIC.decode()}")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check_end(part, data)


def has_tensor(path: Path, name: str) -> bool:
    """Whether a complete GGUF file has a tensor of that name."""
    for part in _parts(path):
        with part.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if any(tensor.name == name for tensor in _tensors(data)):
                return True
    return False


def values(path: Path) -> dict[str, Any]:
    """The values in the header of a GGUF file that are numbers or strings, by key.

    Raises:
        BadParameter: the header is broken.
    """
    found: dict[str, Any] = {}
    try:
        with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            (count,) = struct.unpack_from("<Q", data, 16)
            at = 24
            for _ in range(count):
                key, at = _string(data, at)
                (kind,) = struct.unpack_from("<I", data, at)
                if kind == STRING:
                    found[key.decode()] = _string(data, at + 4)[0].decode()
                elif kind in FORMATS:
                    (found[key.decode()],) = struct.unpack_from(f"<{FORMATS[kind]}", data, at + 4)
                at = _behind(data, at + 4, kind)
    except (OSError, ValueError, struct.error, KeyError, OverflowError, RecursionError) as error:
        raise BadParameter(f"the header of {str(path)!r} is broken; download or copy the file again") from error
    return found


def weights_digest(path: Path) -> str:
    """16 hex digits of the names, the sizes and some bytes of all tensors; "" where the file cannot be read.

    The metadata do not count. Takes some milliseconds, whatever the size of the file.
    """
    found = sha256()
    try:
        for part in _parts(path):
            with part.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for name, begin, end in _tensors(data):
                    found.update(f"{name} {end - begin} ".encode())
                    last = max(begin, end - LENGTH)
                    for index in range(PIECES):
                        start = begin + index * (last - begin) // (PIECES - 1)
                        found.update(data[start : min(start + LENGTH, end)])
    except (OSError, ValueError, struct.error, KeyError, OverflowError, RecursionError):
        return ""  # removed or replaced since it was loaded
    return found.hexdigest()[:16]


def _parts(path: Path) -> list[Path]:
    """All files of a model, those that exist. llama.cpp reports a missing one."""
    if (match := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)) is None:
        return [path]
    names = (f"{match[1]}-{number:05}-of-{match[2]}.gguf" for number in range(1, int(match[2]) + 1))
    return [part for name in names if (part := path.with_name(name)).is_file()]


def _check_end(path: Path, data: mmap.mmap) -> None:
    start = _zeros_from(data)
    if len(data) - start < LEAST:
        return
    try:
        tensors = list(_tensors(data))
    except (struct.error, KeyError, UnicodeDecodeError, OverflowError, RecursionError):
        return  # a broken header, which llama.cpp reports
    for tensor in tensors:
        if tensor.name.endswith(".weight") and 2 * (tensor.end - max(tensor.begin, start)) > tensor.end - tensor.begin:
            raise BadParameter(
                f"the GGUF file {str(path)!r} is incomplete: its last {len(data) - start} bytes are zero, among them "
                f"the weights {tensor.name}; download or copy it again"
            )


def _zeros_from(data: mmap.mmap) -> int:
    """Where the zeros at the end of a file begin; its length where it does not end with zeros."""
    end = len(data)
    while end > 0:
        block = data[max(end - BLOCK, 0) : end]
        if kept := len(block.rstrip(b"\0")):
            return end - len(block) + kept
        end -= len(block)
    return 0


def _tensors(data: mmap.mmap) -> Iterator[Tensor]:
    """The tensors that the header of a file names, in the order of their data.

    Raises:
        struct.error, KeyError, UnicodeDecodeError, OverflowError, RecursionError: a broken header.
    """
    tensor_count, value_count = struct.unpack_from("<QQ", data, 8)
    at, alignment = 24, 32
    for _ in range(value_count):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        if key == b"general.alignment":
            (alignment,) = struct.unpack_from("<I", data, at + 4)
        at = _behind(data, at + 4, kind)
    found = []
    for _ in range(tensor_count):
        raw, at = _string(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        at += 4 + 8 * dimensions + 4
        (offset,) = struct.unpack_from("<Q", data, at)
        at += 8
        found.append((offset, raw.decode()))
    data_begin = -(-at // max(alignment, 1)) * alignment
    found.sort()
    ends = [offset for offset, _ in found[1:]] + [len(data) - data_begin]
    for (offset, name), end in zip(found, ends, strict=True):
        yield Tensor(name, data_begin + offset, data_begin + end)


def _string(data: mmap.mmap, at: int) -> tuple[bytes, int]:
    """A string, and where it ends."""
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length], at + 8 + length


def _behind(data: mmap.mmap, at: int, kind: int) -> int:
    """Where a value of the metadata ends."""
    if kind == STRING:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    if kind != ARRAY:
        return at + SIZES[kind]
    entry, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if entry in SIZES:
        return at + int(count) * SIZES[entry]
    for _ in range(count):
        at = _behind(data, at, entry)
    return at
