"""The token table of a model: its own likeliest next tokens after each token alone. Read from and written to a file.

    CACHE/tables/DIGEST.safetensors
        header    JSON: type, shape and place of the arrays; format, model, context and the digest of the weights
        tokens    int32 [vocab, k]       likeliest first
        logp      float16 [vocab, k]     their log-probabilities among the k, falling

There is one file per model, named by the digest of its weights. So a table is found whatever the model is called, and
never used for a fine-tune of it. The bundled models bring theirs. A file is memory-mapped, so processes share it. It is
written beside its place and renamed. `leapahead.token_table` computes tables. The text of a request never depends on
one, only its speed does.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.core.storage import cache_directory, replaceable
from leapahead.models.base import IdentifiesWeights, Target

FORMAT = "leapahead token table 1"
NAME = "token_table.safetensors"  # in the folder of a bundled model
LENGTH = struct.Struct("<Q")  # bytes of the header that follows
MAX_HEADER = 1 << 16  # bytes
ALIGNMENT = 64  # bytes
MOST_K = 1024
REMEDY = "replace it with `leapahead tune --table`"


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The likeliest next tokens after each token of a vocabulary. The arrays are read-only.

    Attributes:
        tokens: int32 [vocab, k], likeliest first.
        logp: float16 [vocab, k], natural logarithms of their probabilities, which sum to 1 over the k.
        context: the tokens before each one, see `leapahead.token_table`.
        weights: digest of the model's weights; "" where the model does not identify them.
        model: its name, for reports.
        path: of the file that it was loaded from.
    """

    tokens: npt.NDArray[np.int32]
    logp: npt.NDArray[np.float16]
    context: tuple[int, ...] = ()
    weights: str = ""
    model: str = ""
    path: Path | None = None

    @property
    def k(self) -> int:
        """Number of tokens that are kept after each one."""
        return int(self.tokens.shape[1])

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        return self.tokens.nbytes + self.logp.nbytes

    def save(self, path: str | Path | None = None) -> Path:
        """Writes the table; by default to where `stored` finds it. A file that is there is replaced as a whole.

        Returns:
            The path.

        Raises:
            BadParameter: it cannot be written, or no path is named and the model does not identify its weights.
        """
        if path is None and not self.weights:
            raise BadParameter(f"{self.model or 'this model'} does not identify its weights; name a file for its table")
        file = replaceable(Path(path) if path is not None else writable_place(self.weights))
        part = ""
        try:
            handle, part = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".part", dir=file.parent)
            with os.fdopen(handle, "wb") as stream:
                stream.write(self._header())
                stream.write(np.ascontiguousarray(self.tokens, dtype="<i4").data)
                stream.write(np.ascontiguousarray(self.logp, dtype="<f2").data)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(part, 0o644)
            os.replace(part, file)
            part = ""
        except OSError as error:
            raise _not_written(file, error.strerror or str(error), named=path is not None) from None
        finally:
            if part:
                Path(part).unlink(missing_ok=True)
        return file

    def _header(self) -> bytes:
        """The header of a safetensors file, padded so that the arrays are aligned."""
        shape, middle = list(self.tokens.shape), 4 * self.tokens.size
        header = {
            "__metadata__": {
                "format": FORMAT,
                "model": self.model,
                "context": " ".join(map(str, self.context)),
                "weights": self.weights,
            },
            "tokens": {"dtype": "I32", "shape": shape, "data_offsets": [0, middle]},
            "logp": {"dtype": "F16", "shape": shape, "data_offsets": [middle, middle + 2 * self.tokens.size]},
        }
        data = json.dumps(header).encode()
        data = data.ljust(-(-(LENGTH.size + len(data)) // ALIGNMENT) * ALIGNMENT - LENGTH.size)
        return LENGTH.pack(len(data)) + data

    @classmethod
    def load(cls, path: str | Path) -> TokenTable:
        """Maps a file into memory and validates it.

        Raises:
            BadParameter: there is no such file, or it is no token table, damaged, or of another format.
        """
        try:
            with open(path, "rb") as file:
                table = _table(*_header(file), file.fileno(), Path(path))
        except OSError as error:
            raise BadParameter(f"the token table {str(path)!r} cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = str(error) if type(error) is ValueError else "its header is damaged"
            raise BadParameter(f"{str(path)!r} is not a valid token table: {reason}; {REMEDY}") from None
        return table


def place(weights: str) -> Path:
    """Where the table of a model is stored, by the digest of its weights."""
    return cache_directory() / "tables" / f"{weights}.safetensors"


def writable_place(weights: str, size: int = 0) -> Path:
    """The same, in a folder that exists. To be called before a table of `size` bytes is computed for nothing.

    Raises:
        BadParameter: no file can be written there, or none of that size.
    """
    file = place(weights)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        free = disk_usage(file.parent).free
    except OSError as error:
        raise _not_written(file, error.strerror or str(error)) from None
    if free < size:
        raise _not_written(file, f"it takes {size / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise _not_written(file, "its folder is not writable")
    return file


def _not_written(file: Path, reason: str, named: bool = False) -> BadParameter:
    remedy = "name another file" if named else "set LEAPAHEAD_CACHE to another folder, writable and with space"
    return BadParameter(f"the token table cannot be written to {file} ({reason}); {remedy}")


def stored(target: Target | None) -> TokenTable | None:
    """The stored table of a target: the user's, or the one that comes with a bundled model.

    None where there is none, where its file is damaged (a warning says so), or where the target does not identify its
    weights. The whole file is validated, which takes milliseconds for each 10 MB.
    """
    weights = target.weights_digest() if isinstance(target, IdentifiesWeights) else ""
    if target is None or not weights:
        return None
    for file in (place(weights), *_bundled()):
        if not os.path.isfile(file):  # nor where the folder of the cache cannot be entered
            continue
        try:
            table = TokenTable.load(file)
        except BadParameter as error:
            warnings.warn(f"{error}. Drafting goes on without it.", UserWarning, stacklevel=2)
            continue
        if table.weights == weights and len(table.tokens) == target.info.vocab_size:
            return table
    return None


def _bundled() -> Iterator[Path]:
    """The tables that come with this package."""
    assets = Path(str(resources.files("leapahead"))) / "assets"
    return assets.glob(f"*/{NAME}")


def _header(file: Any) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and its length in bytes. Raises ValueError if it is none of ours."""
    begin = file.read(LENGTH.size)
    length = LENGTH.unpack(begin)[0] if len(begin) == LENGTH.size else MAX_HEADER + 1
    data = file.read(length) if length <= MAX_HEADER else b""
    try:
        header = json.loads(data)
        known = header["__metadata__"]["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("it has no header of a token table") from None
    if known != FORMAT:
        raise ValueError(f"its format is {str(known)[:40]!r}, and this version of leapahead reads {FORMAT!r}")
    return header, LENGTH.size + length


def _table(header: dict[str, Any], start: int, handle: int, path: Path) -> TokenTable:
    """The table of an open file. Raises ValueError, KeyError or TypeError if it is damaged."""
    metadata, (vocab, k) = header["__metadata__"], header["tokens"]["shape"]
    if type(vocab) is not int or type(k) is not int or not (0 < k <= min(vocab, MOST_K) and vocab < 1 << 31):
        raise ValueError(f"a table of {vocab} times {k} tokens is not possible")
    if not all(isinstance(metadata[key], str) for key in ("model", "weights", "context")):
        raise ValueError("its header is damaged")
    size, length = vocab * k, os.fstat(handle).st_size
    expected = {
        "tokens": {"dtype": "I32", "shape": [vocab, k], "data_offsets": [0, 4 * size]},
        "logp": {"dtype": "F16", "shape": [vocab, k], "data_offsets": [4 * size, 6 * size]},
    }
    if any(header[key] != value for key, value in expected.items()):
        raise ValueError("its header is damaged")
    if length != start + 6 * size:
        raise ValueError(f"it has {length} bytes instead of {start + 6 * size}, so it is not complete")
    data = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    tokens = np.frombuffer(data, "<i4", size, start).reshape(vocab, k)
    logp = np.frombuffer(data, "<f2", size, start + 4 * size).reshape(vocab, k)
    if tokens.min() < 0 or tokens.max() >= vocab or not np.isfinite(logp).all() or logp.max() > 0:
        raise ValueError("it has a token outside of its vocabulary, or a log-probability that is not possible")
    context = tuple(map(int, metadata["context"].split()))
    return TokenTable(tokens, logp, context, metadata["weights"], metadata["model"], path)
