"""The file format of the drafter cache: reading, validating, writing and locking.

    cache.npz ── header            uint8, JSON: magic, format, tokenizer, vocabulary, id of this save, and the sections
              ├─ suffix/tokens     the arrays of a section; numbers only, so nothing in a file is ever executed
              └─ suffix/lengths

This module does not know what the arrays mean. The header keeps the names of format 1 ("leapahead memory", "parts"), so
that older files still load.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from math import prod
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter

try:
    fcntl: Any = import_module("fcntl")
except ModuleNotFoundError:  # Windows
    fcntl = None

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

MAGIC, FORMAT = "leapahead memory", 1
MAX_BYTES = 256_000_000  # of a file, and of its arrays
LOCK_TIMEOUT = 30.0  # seconds that a save waits for another process's save
REMEDY = "name another file, or delete this one to start with an empty cache"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class SavedSection:
    """A section as a file holds it.

    Attributes:
        layout: see `Section.layout`.
        arrays: read-only.
    """

    file: Path
    layout: int
    arrays: Arrays


@dataclass(frozen=True)
class Contents:
    """A file that was read and validated, except for what only the sections can check.

    Attributes:
        id: of the save; every save has another one.
    """

    file: Path
    id: str
    tokenizer: str
    vocab_size: int
    sections: dict[str, SavedSection]


def read(file: Path, unless: str | None = None) -> Contents | None:
    """Reads and validates a file.

    Returns:
        Its contents; None if the id of the save is `unless`.

    Raises:
        BadParameter: there is no such file, or it is not a drafter cache, damaged, too large, or of a newer format.
    """
    if os.path.exists(file) and not (file.is_file() or file.is_dir()):  # a device, which may have no end, or a pipe
        raise BadParameter(f"{file} is not a drafter cache of leapahead, since it is not a file; name another")
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read() if size <= MAX_BYTES else b""
    except FileNotFoundError:
        raise BadParameter(
            f"there is no drafter cache {file}; `leapahead generate --drafter-cache FILE` creates one"
        ) from None
    except OSError as error:
        raise BadParameter(f"the drafter cache {file} cannot be read ({summary(error)}); name another file") from error
    if size > MAX_BYTES:
        raise too_large(str(file), size)
    with unpacked(data, str(file), REMEDY) as (header, array):
        return _contents(file, header, array, unless)


@contextmanager
def unpacked(data: bytes, name: str, remedy: str) -> Iterator[tuple[dict[str, Any], Callable[[str], Array]]]:
    """The header and the arrays by name of what `pack` wrote. What is raised inside is an error of the data.

    Args:
        name: of the data, for errors.
        remedy: for errors.

    Raises:
        BadParameter: it is something else, damaged, or too large.
    """
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            if (total := sum(member.file_size for member in archive.infolist())) > MAX_BYTES:
                raise too_large(name, total, remedy)
            header = json.loads(_array(archive.read("header.npy")).tobytes())
            if not isinstance(header, dict):
                raise ValueError("its header is not that of a drafter cache")
            yield header, lambda member: _array(archive.read(f"{member}.npy"))
    except BadParameter:
        raise
    except Exception as error:  # damaged data may raise anything in zipfile, json and the arrays' headers
        raise BadParameter(
            f"{name} is not a drafter cache of leapahead, or it is damaged ({summary(error)}); {remedy}"
        ) from error


def pack(stream: IO[bytes], header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Writes a header, which JSON can hold, and arrays of numbers. What is equal is written as equal bytes.

    Raises:
        BadParameter: the arrays are too large together.
    """
    members = {"header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays}
    if (size := sum(array.nbytes + 256 for array in members.values())) > MAX_BYTES:
        raise too_large("this drafter cache", size)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for key, array in members.items():
            with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w") as member:  # without the time of day
                np.lib.format.write_array(member, array, allow_pickle=False)


def write(file: Path, tokenizer: str, vocab_size: int, sections: Mapping[str, tuple[int, Arrays]]) -> str:
    """Writes a file beside `file` and renames it, so that an interrupted write leaves the old file intact.

    A new file can be read by its owner only; a file that is replaced keeps its permissions.

    Args:
        sections: name -> (layout, arrays).

    Returns:
        The id of the save.

    Raises:
        BadParameter: the arrays are too large together.
        OSError: the file cannot be written.
    """
    save = secrets.token_hex(8)
    header = {
        "magic": MAGIC,
        "format": FORMAT,
        "id": save,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "parts": {name: {"layout": layout, "arrays": list(arrays)} for name, (layout, arrays) in sections.items()},
    }
    members = {f"{name}/{key}": np.asarray(a) for name, (_, arrays) in sections.items() for key, a in arrays.items()}
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".part", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            pack(stream, header, members)
            stream.flush()
            os.fsync(stream.fileno())
        if file.exists():
            os.chmod(temporary, file.stat().st_mode & 0o777)
        os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return save


@contextmanager
def locked(file: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Holds the lock of a file, which one thread of one process has at a time. The system frees that of a dead process.

    Args:
        timeout: seconds to wait for it.

    Raises:
        BadParameter: another process still holds it.
        OSError: the lock file cannot be created.
    """
    lock = file.with_name(f".{file.name}.lock")
    deadline = monotonic() + timeout
    while (handle := _try_lock(lock)) is None:
        if monotonic() > deadline:
            raise BadParameter(
                f"another process has been saving to {file} for {timeout:.0f} s; try again, or delete {lock} if there "
                "is no such process"
            )
        sleep(0.02)
    try:
        yield
    finally:
        if fcntl is None:
            os.close(handle)  # Windows does not delete a file that is open
            lock.unlink(missing_ok=True)
        else:
            lock.unlink(missing_ok=True)  # while the lock is held: who waits for it sees that the file is gone
            os.close(handle)


def summary(error: Exception) -> str:
    """The message of an error on one short line."""
    message = str((error.strerror if isinstance(error, OSError) else None) or error)
    return " ".join(message.split())[:120] or type(error).__name__


def not_written(file: Path, error: OSError) -> BadParameter:
    """The error of a save that failed."""
    if error.errno in DISK_FULL:
        remedy = "free some space or name a file on another disk"
    else:
        remedy = "name a file in a folder that exists and can be written to"
    return BadParameter(f"the drafter cache cannot be written to {file} ({summary(error)}); {remedy}")


def _contents(
    file: Path, header: Mapping[str, Any], array: Callable[[str], Array], unless: str | None
) -> Contents | None:
    if header.get("magic") != MAGIC:
        raise ValueError("its header is not that of a drafter cache")
    if header["format"] != FORMAT:
        raise BadParameter(
            f"{file} has format {header['format']} and this version of leapahead reads format {FORMAT}; "
            "update leapahead, or name another file"
        )
    save, tokenizer, vocab_size = header["id"], header["tokenizer"], header["vocab_size"]
    if not isinstance(save, str) or not isinstance(tokenizer, str) or type(vocab_size) is not int or vocab_size < 1:
        raise ValueError("its header is not valid")
    if save == unless:
        return None
    sections = {}
    for name, described in header["parts"].items():
        if type(described["layout"]) is not int:
            raise ValueError("its header is not valid")
        arrays = {key: array(f"{name}/{key}") for key in described["arrays"]}
        sections[str(name)] = SavedSection(file, described["layout"], arrays)
    return Contents(file, save, tokenizer, vocab_size, sections)


def _array(data: bytes) -> Array:
    """The array of an .npy file, read-only.

    Raises:
        ValueError: it does not consist of numbers, or is not as long as its header says.
    """
    stream = BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read_header(stream)
    if dtype.kind not in "biuf":
        raise ValueError(f"it holds an array of {dtype}, which is not a number type")
    if len(data) - stream.tell() != prod(shape) * dtype.itemsize:
        raise ValueError("an array is not as long as its header says")
    flat = np.frombuffer(data, dtype=dtype, offset=stream.tell()) if prod(shape) else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran_order else "C")


def too_large(what: str, size: int, remedy: str = REMEDY) -> BadParameter:
    """The error of a drafter cache that exceeds `MAX_BYTES`."""
    return BadParameter(
        f"{what} takes {size / 1e6:.0f} MB and a drafter cache takes at most {MAX_BYTES / 1e6:.0f} MB; {remedy}"
    )


def _try_lock(lock: Path) -> int | None:
    """An open file descriptor that holds the lock; None while another holds it."""
    if fcntl is None:
        try:
            return os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except (FileExistsError, PermissionError):  # the latter while the file is being deleted
            return None
    handle, is_held = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600), False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_held = os.fstat(handle).st_ino == lock.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not is_held:  # another process holds the lock, or has deleted this file; or locks are not possible here
            os.close(handle)
    return handle if is_held else None
