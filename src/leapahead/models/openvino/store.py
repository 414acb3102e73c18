"""Folders with a model for OpenVINO: written whole or not at all, and kept in the cache folder of this package.

    OUT/openvino_model.xml, .bin          the graph, and its weights
    OUT/openvino_tokenizer.xml, ...       the tokenizer as a graph
    OUT/config.json, tokenizer.json, ...  as they came with the model
    CACHE/openvino/KEY/                   a folder of the same kind, made from the files that KEY is a digest of

This module does not import OpenVINO.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import flag
from leapahead.core.storage import cache_directory
from leapahead.models.openvino.options import MODEL, is_openvino

ORIGIN = "leapahead.json"  # of a folder in the cache: what it was made from
FORMAT = 4  # increased when folders of earlier versions must not be used again
PIECES, LENGTH = 256, 1 << 12  # of each file, so many pieces of so many bytes are part of the digest


@dataclass(frozen=True)
class Kept:
    """A model in the cache.

    Attributes:
        folder: of the model.
        source: the folder or file that it was made from; it need not exist any more.
        weights: the type of the weights.
        size: in bytes, of all files.
    """

    folder: Path
    source: str
    weights: str
    size: int


@contextmanager
def written(out: Path, force: bool, remedy: str = "name another folder, or make space there") -> Iterator[Path]:
    """An empty folder beside `out`, which becomes `out` when the block ends, and is removed after an error.

    Args:
        out: the folder to write.
        force: replace `out` if it is a folder with a model for OpenVINO.
        remedy: the end of the message if it cannot be written.

    Raises:
        BadParameter: `out` exists and is not to be replaced, or the block raised an OSError.
    """
    _check(out, force)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
            made = Path(work) / "made"
            made.mkdir()
            yield made
            replaced = Path(work) / "replaced"
            try:
                if out.exists():
                    out.rename(replaced)
                made.rename(out)
            except BaseException:
                if replaced.exists():
                    replaced.rename(out)
                raise
    except OSError as error:
        raise BadParameter(f"{out} cannot be written ({error.strerror or error}); {remedy}") from error


def check_space(folder: Path, size: int) -> None:
    """To be called before files of `size` bytes are written by a library that does not tell why it failed.

    Raises:
        OSError: the disk of `folder` has less space.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(errno.ENOSPC, f"it takes {size / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free")


def _check(out: Path, force: bool) -> None:
    if not out.parent.is_dir():
        raise BadParameter(f"{out} cannot be written, because the folder {out.parent} does not exist: create it first")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise BadParameter(f"{out} is not a folder: name a folder that is to be created")
    if not out.exists() or not any(out.iterdir()):
        return
    if not flag("force", force):
        raise BadParameter(f"{out} exists; name another folder, or replace it with the option 'force'")
    if not is_openvino(out):
        raise BadParameter(f"{out} has no {MODEL}, so it is not replaced: name another folder, or remove it yourself")


# --------------------------------------------------------------------------------------------------------- the cache


def kept(source: Path, files: Iterable[Path], weights: str, make: Callable[[Path], None]) -> Path:
    """The folder in the cache that was made from these files; it is made if it is not there.

    Args:
        source: what the user named.
        files: all that the result depends on: by name, size, time of the last change, and bytes from the first to the
            last, since files that were unpacked or built with a fixed time have equal times.
        weights: the type of the weights.
        make: writes the files of the model into an empty folder.

    Raises:
        BadParameter: the cache cannot be written.
    """
    digest = hashlib.sha256(f"{FORMAT} {weights}".encode())
    for file in sorted(files):
        found = file.stat()
        digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns} ".encode())
        with file.open("rb") as opened:
            last = max(found.st_size - LENGTH, 0)
            for start in sorted({index * last // (PIECES - 1) for index in range(PIECES)}):
                opened.seek(start)
                digest.update(opened.read(LENGTH))
    folder = _place() / digest.hexdigest()[:16]
    if _is_whole(folder):
        return folder
    remedy = "set LEAPAHEAD_CACHE to another folder, writable and with space"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():  # what an ended process or a loss of power left of one
            shutil.rmtree(folder)
    except OSError as error:
        raise BadParameter(f"{folder} cannot be written ({error.strerror or error}); {remedy}") from error
    try:
        with written(folder, False, remedy) as made:
            make(made)
            whole = [file for file in made.rglob("*") if file.is_file()]
            sizes = {file.relative_to(made).as_posix(): file.stat().st_size for file in whole}
            origin = {"source": str(source.resolve()), "weights": weights, "files": sizes}
            (made / ORIGIN).write_text(json.dumps(origin), encoding="utf-8")
    except BadParameter:
        if _is_whole(folder):  # another process has made it meanwhile
            return folder
        raise
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder of the cache has all its files, of the sizes that they were written with."""
    try:
        sizes = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def all_kept() -> list[Kept]:
    """The models in the cache, in the order of their sources."""
    found = []
    for file in _place().glob(f"*/{ORIGIN}"):
        try:
            origin = json.loads(file.read_text(encoding="utf-8"))
            size = sum(each.stat().st_size for each in file.parent.rglob("*") if each.is_file())
            found.append(Kept(file.parent, str(origin["source"]), str(origin["weights"]), size))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # removed meanwhile, or not ours
    return sorted(found, key=lambda each: (each.source, each.weights))


def remove_kept() -> int:
    """Removes all models in the cache, and what an ended process left of one; returns the bytes that were freed.

    Raises:
        BadParameter: something cannot be removed.
    """
    place = _place()
    size = sum(each.stat().st_size for each in place.rglob("*") if each.is_file())
    try:
        if place.is_dir():
            shutil.rmtree(place)
    except OSError as error:
        raise BadParameter(f"{place} cannot be removed: {error.strerror or error}") from error
    return size


def _place() -> Path:
    return cache_directory() / "openvino"
