"""What drafters keep from one text to the next, by name: pools, texts, adjacencies; bounded, shared, kept in a file.

    memory.npz ── header            uint8, JSON: magic, format, tokenizer, vocabulary, id of this save, and the parts
               ├─ suffix/...        a part's arrays, of integers and floats: nothing in a file is ever run
               ├─ lookahead/keys    [n]
               ├─ lookahead/tails   [n, N-1]
               └─ theirs/...        a part that nobody here knows goes through load and save as it is

A save merges with what others saved meanwhile, under a lock, and replaces the file in one go. Knows no drafter, and of
the parts only which of their arrays hold tokens. A text never depends on it: a memory only makes drafts better.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from math import prod
from pathlib import Path
from threading import Lock
from time import monotonic, sleep
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter

try:
    fcntl: Any = import_module("fcntl")
except ModuleNotFoundError:  # Windows
    fcntl = None

Arrays = Mapping[str, npt.NDArray[Any]]

MAGIC, FORMAT = "leapahead memory", 1
LARGEST = 256_000_000  # bytes of a file and of its arrays
PATIENCE = 30.0  # seconds that a save waits for another process's
BEGIN_ANEW = "name another file, or delete this one to begin anew"


class Section(ABC):
    """What the sources of one kind keep: it can be written down as plain arrays, and takes over what others wrote.

    Class attributes:
        layout: of the arrays; another number where they mean something else.
        token_arrays: names of those that hold token ids and nothing else.
    """

    layout: ClassVar[int] = 1
    token_arrays: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Everything, as arrays of integers and floats (no objects)."""

    @abstractmethod
    def merge(self, arrays: Arrays) -> None:
        """Takes over another's arrays, as if its texts had come before this one's, within the part's bounds.

        What both have counts once: two processes that save in turn meet their own words again.

        Args:
            arrays: not to be written.

        Raises:
            ValueError: they are not what `arrays` gives; nothing has changed then.
        """

    def figures(self) -> dict[str, Any]:
        """Plain types, for `stats` and for the command that shows a memory."""
        return {}


P = TypeVar("P", bound=Section)


@dataclass(frozen=True)
class Saved:
    """A part as a file has it."""

    file: Path
    layout: int
    arrays: Arrays


@dataclass(frozen=True)
class Contents:
    """A file, read and found to be in order, but for what only the parts can judge.

    Attributes:
        id: of the save; another one after each.
    """

    file: Path
    id: str
    tokenizer: str
    vocab_size: int
    parts: dict[str, Saved]


class DrafterCache:
    """The parts of one vocabulary. It holds pieces of prompts and texts: who can read its file can read those.

    Attributes:
        parts: that sources asked for, or that were adopted.
        unknown: parts of a file that nobody has asked for yet.
        vocab_size: token ids are below it; 0 while the memory belongs to no vocabulary.
        path: where it came from and is saved to, if it has a file.
    """

    def __init__(self) -> None:
        self.sections: dict[str, Section] = {}
        self.unknown: dict[str, Saved] = {}
        self.vocab_size = 0
        self.path: Path | None = None
        self._tokenizer: str | Callable[[], str] = ""
        self._seen: dict[Path, str] = {}  # file -> the save that is merged in already
        self._lock = Lock()

    def section(self, name: str, make: Callable[[], P]) -> P:
        """The part of that name, made when it is first asked for.

        Raises:
            BadParameter: what a file has under that name is no such part.
        """
        with self._lock:
            found = self.sections.get(name)
            if found is None:
                found = make()
                if (saved := self.unknown.get(name)) is not None:
                    self._teach(name, found, saved)
                    del self.unknown[name]
                self.sections[name] = found
            return found  # type: ignore[return-value]

    def adopt(self, make: Callable[[str], Section | None]) -> None:
        """Turns the parts of a file into live ones where `make` knows their names, before any source asks for them."""
        for name in list(self.unknown):
            if (part := make(name)) is not None:
                self.section(name, lambda made=part: made)  # type: ignore[misc]

    @property
    def tokenizer(self) -> str:
        """Its fingerprint; "" while the memory belongs to no vocabulary."""
        if not isinstance(self._tokenizer, str):
            self._tokenizer = self._tokenizer()
        return self._tokenizer

    def belong(self, tokenizer: str | Callable[[], str], vocab_size: int) -> None:
        """To this vocabulary and no other, from now on.

        Args:
            tokenizer: its fingerprint, or what gives it when there is something to compare it with.
            vocab_size: token ids are below it.

        Raises:
            BadParameter: it belongs to another one.
        """
        if not self.vocab_size:
            self._tokenizer, self.vocab_size = tokenizer, vocab_size
        elif differs := self._differs(tokenizer if isinstance(tokenizer, str) else tokenizer(), vocab_size):
            raise BadParameter(
                f"the memory{f' {self.path}' if self.path else ''} belongs to {differs[0]} and the model has "
                f"{differs[1]}; give each vocabulary a memory of its own"
            )

    def _differs(self, tokenizer: str, vocab_size: int) -> tuple[str, str] | None:
        """What is ours and what is theirs, in words, where they are not the same."""
        if self.vocab_size != vocab_size:
            return f"a vocabulary of {self.vocab_size}", f"one of {vocab_size}"
        if self.tokenizer != tokenizer:
            return f"the tokenizer {self.tokenizer!r}", f"{tokenizer!r}"
        return None

    @classmethod
    def load(cls, path: str | Path) -> DrafterCache:
        """From a file. Its parts become live when they are asked for, or by `adopt`.

        Raises:
            BadParameter: there is no such file, or it is no memory, a damaged one, too large, or a newer version's.
        """
        memory = cls()
        memory.path = Path(path).absolute()
        memory.take_over(path)
        return memory

    def take_over(self, path: str | Path) -> None:
        """Merges a file in, as if its texts had come before.

        Raises:
            BadParameter: as of `load`; or it belongs to another vocabulary.
        """
        contents = _read(_real(path))
        assert contents is not None
        self._take_over(contents)
        self._seen[contents.file] = contents.id

    def _take_over(self, contents: Contents) -> None:
        if not self.vocab_size:
            self._tokenizer, self.vocab_size = contents.tokenizer, contents.vocab_size
        elif differs := self._differs(contents.tokenizer, contents.vocab_size):
            raise BadParameter(
                f"{contents.file} belongs to {differs[1]} and cannot be merged with "
                f"{f'{self.path}, of ' if self.path else ''}{differs[0]}; give each vocabulary a file of its own"
            )
        for name, saved in contents.parts.items():
            with self._lock:
                if (part := self.sections.get(name)) is not None:
                    self._teach(name, part, saved)
                elif name in self.unknown and self.unknown[name].file != saved.file:
                    raise BadParameter(
                        f"{self.unknown[name].file} and {saved.file} both have a part {name!r}, which nothing that is "
                        "installed here knows how to merge; install what wrote it, or leave one file out"
                    )
                else:
                    self.unknown[name] = saved

    def _teach(self, name: str, part: Section, saved: Saved) -> None:
        if saved.layout != part.layout:
            raise BadParameter(
                f"{saved.file} has the part {name!r} in layout {saved.layout}, and what is installed here reads layout "
                f"{part.layout}; {BEGIN_ANEW}"
            )
        try:
            for key in part.token_arrays:
                tokens = saved.arrays[key]
                if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
                    raise ValueError(f"{key} has a token outside the vocabulary of {self.vocab_size}")
            part.merge(saved.arrays)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise BadParameter(
                f"{saved.file} is damaged in its part {name!r} ({_short(error)}); {BEGIN_ANEW}"
            ) from error

    def written(self) -> dict[str, tuple[int, Arrays]]:
        """Of every part its layout and its arrays, as a save writes them."""
        with self._lock:
            parts, unknown = dict(self.sections), dict(self.unknown)
        live = {name: (part.layout, part.arrays()) for name, part in parts.items()}
        return {**live, **{name: (saved.layout, saved.arrays) for name, saved in unknown.items()}}

    def save(self, path: str | Path | None = None, replace: bool = False) -> Path:
        """Writes everything to a file, after merging with what another process saved there since it was last read.

        A new file can be read by its owner only. A crash leaves the file as it was.

        Args:
            path: by default the memory's own.
            replace: what is there goes, unread.

        Raises:
            BadParameter: there is nowhere to write, what is there is no memory or another vocabulary's, or another
                process does not let go of it.
        """
        if path is None and self.path is None:
            raise BadParameter("the memory has no file; say where to save it")
        if not self.vocab_size:
            raise BadParameter("the memory belongs to no vocabulary yet; give it to an LLM, then save it")
        shown = Path(path or self.path or "")
        file = _real(shown)
        try:
            with _locked(file):
                if not replace and file.exists():
                    contents = _read(file, but=self._seen.get(file))
                    if contents is not None:
                        self._take_over(contents)
                self._seen[file] = _write(file, self.tokenizer, self.vocab_size, self.written())
        except OSError as error:
            raise BadParameter(
                f"the memory cannot be written to {shown} ({_short(error)}); "
                "name a file in a folder that exists and can be written to"
            ) from error
        if self.path is None:
            self.path = shown
        return shown


# ----------------------------------------------------------------------------------------------------------- the file


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _read(file: Path, but: str | None = None) -> Contents | None:
    """What is in a file; None if it is the save `but`."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read() if size <= LARGEST else b""
    except FileNotFoundError:
        raise BadParameter(f"there is no memory {file}; `leapahead generate --drafter-cache FILE` makes one") from None
    except OSError as error:
        raise BadParameter(f"the memory {file} cannot be read ({_short(error)}); name another file") from error
    if size > LARGEST:
        raise _too_large(str(file), size)
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            if (total := sum(member.file_size for member in archive.infolist())) > LARGEST:
                raise _too_large(str(file), total)
            return _contents(file, archive, but)
    except BadParameter:
        raise
    except Exception as error:  # a file is anybody's: zip, JSON and the arrays' headers may raise anything
        raise BadParameter(
            f"{file} is no memory of leapahead, or a damaged one ({_short(error)}); {BEGIN_ANEW}"
        ) from error


def _contents(file: Path, archive: zipfile.ZipFile, but: str | None) -> Contents | None:
    header = json.loads(_array(archive.read("header.npy")).tobytes())
    if not isinstance(header, dict) or header.get("magic") != MAGIC:
        raise ValueError("its header is not of a memory")
    if header["format"] != FORMAT:
        raise BadParameter(
            f"{file} is written in format {header['format']} and this leapahead reads format {FORMAT}; "
            "update leapahead, or name another file"
        )
    name, tokenizer, vocab_size = header["id"], header["tokenizer"], header["vocab_size"]
    if not isinstance(name, str) or not isinstance(tokenizer, str) or type(vocab_size) is not int or vocab_size < 1:
        raise ValueError("its header is not in order")
    if name == but:
        return None
    parts = {}
    for part, described in header["parts"].items():
        if type(described["layout"]) is not int:
            raise ValueError("its header is not in order")
        arrays = {key: _array(archive.read(f"{part}/{key}.npy")) for key in described["arrays"]}
        parts[str(part)] = Saved(file, described["layout"], arrays)
    return Contents(file, name, tokenizer, vocab_size, parts)


def _array(data: bytes) -> npt.NDArray[Any]:
    """An .npy file in memory, read-only; as large as it says, and of plain numbers."""
    stream = BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, columns_first, dtype = read(stream)
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of {dtype}")
    if len(data) - stream.tell() != prod(shape) * dtype.itemsize:
        raise ValueError("an array is not as long as it says")
    flat = np.frombuffer(data, dtype=dtype, offset=stream.tell()) if prod(shape) else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if columns_first else "C")


def _write(file: Path, tokenizer: str, vocab_size: int, parts: Mapping[str, tuple[int, Arrays]]) -> str:
    """Returns the id of the save."""
    name = secrets.token_hex(8)
    header = {
        "magic": MAGIC,
        "format": FORMAT,
        "id": name,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "parts": {part: {"layout": layout, "arrays": list(arrays)} for part, (layout, arrays) in parts.items()},
    }
    members: dict[str, npt.NDArray[Any]] = {"header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)}
    for part, (_, arrays) in parts.items():
        members.update({f"{part}/{key}": np.asarray(array) for key, array in arrays.items()})
    if (size := sum(array.nbytes + 256 for array in members.values())) > LARGEST:
        raise _too_large("the memory", size)
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".part", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
                for key, array in members.items():
                    with archive.open(f"{key}.npy", "w") as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        if file.exists():
            os.chmod(temporary, file.stat().st_mode & 0o777)
        os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return name


def _too_large(what: str, size: int) -> BadParameter:
    return BadParameter(f"{what} has {size / 1e6:.0f} MB and a memory at most {LARGEST / 1e6:.0f}; {BEGIN_ANEW}")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process at a time; the lock of one that dies is free."""
    lock = file.with_name(f".{file.name}.lock")
    deadline = monotonic() + PATIENCE
    while (handle := _try_lock(lock)) is None:
        if monotonic() > deadline:
            raise BadParameter(
                f"another process has been saving to {file} for {PATIENCE:.0f} s; try again, or delete {lock} if there "
                "is no such process"
            )
        sleep(0.02)
    try:
        yield
    finally:
        if fcntl is None:
            os.close(handle)  # what is open cannot be deleted there
            lock.unlink(missing_ok=True)
        else:
            lock.unlink(missing_ok=True)  # still held: who waits for it will see that it is gone
            os.close(handle)


def _try_lock(lock: Path) -> int | None:
    if fcntl is None:
        try:
            return os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except (FileExistsError, PermissionError):  # the latter while it is being deleted
            return None
    handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino == lock.stat().st_ino:
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)  # another has it, or had it and deleted it
    return None
