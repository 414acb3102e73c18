"""GGUF files: the check before llama.cpp loads one, what its header tells, a digest of the weights.

A download that stopped half-way leaves a file of the full size whose end is zero where the space was reserved first;
llama.cpp loads it and generates nonsense. It itself refuses a file that is shorter than its header promises. By some
headers it ends the process, so these are refused before.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from leapahead.core.errors import BadParameter

Result = TypeVar("Result")

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of the other types of a value
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BLOCK = 1 << 20  # bytes that are compared with zero at once
LEAST = 1 << 14  # bytes; a shorter run of zeros at the end is not refused: most of a norm's weights may be zero
PIECES, LENGTH = 4, 256  # of each tensor, so many pieces of so many bytes are part of the digest
UTF8 = (*range(0xC0), *range(0xC2, 0xF5))  # bytes that UTF-8 has
BROKEN = (OSError, ValueError, struct.error, KeyError, OverflowError, RecursionError)  # raised by a broken header


class Header(NamedTuple):
    """The metadata of a file.

    Attributes:
        values: numbers and strings, by key.
        arrays: where the entries of each array lie, by key.
        end: where the metadata end.
    """

    values: dict[str, Any]
    arrays: dict[str, slice]
    end: int


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
        BadParameter: no such file, not a GGUF file, not one of a model, or an incomplete one.
    """
    if not os.path.isfile(path):  # Path raises an error where a folder may not be entered
        raise BadParameter(f"there is no file {str(path)!r}; give the path of a GGUF file")
    for part in _parts(path):
        with part.open("rb") as opened:
            if opened.read(len(MAGIC)) != MAGIC:
                raise BadParameter(f"{str(part)!r} is not a GGUF file: it does not begin with {MAGIC.decode()}")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if part.name == path.name:
                    _check_header(part, data)
                _check_end(part, data)


def is_gguf(path: object) -> bool:
    """Whether this names a GGUF file: one of that name, or one that begins like it, as in the stores of some tools."""
    if not isinstance(path, (str, os.PathLike)) or str(path).lower().endswith(".gguf"):
        return isinstance(path, (str, os.PathLike))
    try:
        file = Path(path).expanduser()
        if not os.path.isfile(file):
            return False
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except (OSError, RuntimeError):  # not to be read, or of a user who does not exist
        return False


def has_tensor(path: Path, name: str) -> bool:
    """Whether a complete GGUF file has a tensor of that name."""
    return tensor(path, name) is not None


def tensor(path: Path, name: str) -> bytes | None:
    """The data of a tensor of a complete GGUF file, padding behind them included; None where it has none."""
    for part in _parts(path):
        with part.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for found in _tensors(data):
                if found.name == name:
                    return data[found.begin : found.end]
    return None


def values(path: Path) -> dict[str, Any]:
    """The values in the header of a GGUF file that are numbers or strings, by key.

    Raises:
        BadParameter: the header is broken.
    """
    return _with_header(path, lambda data: _header(data).values)


def metadata(path: Path) -> bytes:
    """A GGUF file without the tensors of that at `path`: its vocabulary and its chat template.

    Raises:
        BadParameter: the header is broken.
    """
    return _with_header(path, lambda data: data[:8] + bytes(8) + data[16 : _header(data).end])


def _with_header(path: Path, read: Callable[[mmap.mmap], Result]) -> Result:
    try:
        with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(data)
    except BROKEN as error:
        raise BadParameter(f"the header of {str(path)!r} is broken; download or copy the file again") from error


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
    except BROKEN:
        return ""  # removed or replaced since it was loaded
    return found.hexdigest()[:16]


def _parts(path: Path) -> list[Path]:
    """All files of a model, those that exist. llama.cpp reports a missing one."""
    if (match := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)) is None:
        return [path]
    names = (f"{match[1]}-{number:05}-of-{match[2]}.gguf" for number in range(1, int(match[2]) + 1))
    return [part for name in names if (part := path.with_name(name)).is_file()]


def _check_header(path: Path, data: mmap.mmap) -> None:
    """Refuses files of other kinds by name, and headers by which llama.cpp ends the process."""
    try:
        values, arrays, _ = _header(data)
        repeated = _repeated(data, arrays.get("tokenizer.ggml.tokens", slice(0)))
    except BROKEN:
        return  # llama.cpp reports it
    family = values.get("general.architecture")
    if "adapter" in (values.get("general.type"), family) or "adapter.type" in values:
        raise BadParameter(f"{str(path)!r} is an adapter and no model; merge it into its model, and give that file")
    if family == "clip" or values.get("general.type") == "mmproj":
        raise BadParameter(f"{str(path)!r} is a projector of images or sounds; give the file of its language model")
    if isinstance(number := values.get("split.no"), int) and number:
        raise BadParameter(
            f"{str(path)!r} is part {number + 1} of a model in several files; give the first "
            f"of them, {re.sub('-[0-9]{5}-of-', '-00001-of-', path.name)!r}"
        )
    for name, least, most in (("block_count", 1, math.inf), ("context_length", 1, 2**31 - 1)):
        value = values.get(f"{family}.{name}", 1)
        if isinstance(value, int) and not least <= value <= most:
            raise BadParameter(
                f"the GGUF file {str(path)!r} has {name} {value}, with which llama.cpp cannot load it; convert it again"
            )
    if repeated:
        raise BadParameter(
            f"the GGUF file {str(path)!r} has the token {repeated.decode(errors='replace')!r} twice, with which "
            "llama.cpp cannot load it; convert it again from a tokenizer whose tokens differ"
        )
    tokens = data[arrays.get("tokenizer.ggml.tokens", slice(0))]
    if values.get("tokenizer.ggml.model") == "llama" and tokens:
        for byte in UTF8:
            # llama.cpp looks for one of these for what no other token has, and ends the process without both.
            names = (f"<0x{byte:02X}>".encode(), bytes([byte]))
            if not any(len(name).to_bytes(8, "little") + name in tokens for name in names):
                raise BadParameter(
                    f"the GGUF file {str(path)!r} has no token for the byte 0x{byte:02X}, without which llama.cpp "
                    "cannot read every text; convert it again from a tokenizer with byte tokens"
                )


def _repeated(data: mmap.mmap, strings: slice) -> bytes:
    """The first string of an array that it has before; b"" where there is none. Empty ones do not count.

    Raises:
        struct.error, OverflowError: the array has no strings.
    """
    known, at = set[bytes](), strings.start or 0
    while at < strings.stop:
        text, at = _string(data, at)
        if text in known:
            return text
        if text:
            known.add(text)
    return b""


def _check_end(path: Path, data: mmap.mmap) -> None:
    start = _zeros_from(data)
    if len(data) - start < LEAST:
        return
    try:
        tensors = list(_tensors(data))
    except BROKEN:
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


def _header(data: mmap.mmap) -> Header:
    """The metadata of a file.

    Raises:
        struct.error, KeyError, OverflowError, RecursionError: a broken header.
    """
    values, arrays = dict[str, Any](), dict[str, slice]()
    (count,) = struct.unpack_from("<Q", data, 16)
    at = 24
    for _ in range(count):
        raw, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        key, begin = raw.decode(errors="replace"), at + 4
        at = _behind(data, begin, kind)
        if kind == STRING:
            values[key] = data[begin + 8 : at].decode(errors="replace")
        elif kind == ARRAY:
            arrays[key] = slice(begin + 12, at)
        else:
            (values[key],) = struct.unpack_from(f"<{FORMATS[kind]}", data, begin)
    return Header(values, arrays, at)


def _tensors(data: mmap.mmap) -> Iterator[Tensor]:
    """The tensors that the header of a file names, in the order of their data.

    Raises:
        struct.error, KeyError, UnicodeDecodeError, OverflowError, RecursionError: a broken header.
    """
    (tensor_count,) = struct.unpack_from("<Q", data, 8)
    header = _header(data)
    at, alignment = header.end, int(header.values.get("general.alignment", 32))
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
    for (offset, name), end in zip(found, ends, strict=False):  # a file of a vocabulary alone has none
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
    read = struct.Struct("<Q").unpack_from
    for _ in range(count):  # vocabularies have hundreds of thousands of strings
        at = at + 8 + read(data, at)[0] if entry == STRING else _behind(data, at, entry)
    return at
