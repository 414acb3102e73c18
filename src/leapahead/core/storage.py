"""The directory for what this package stores for later processes, and files that are replaced in one step."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter


def real(path: str | Path) -> Path:
    """The file itself, where the path is a symbolic link: what replaces the file keeps the link."""
    return Path(os.path.realpath(path))


def replaceable(file: Path) -> Path:
    """Where a new file is renamed to, so that it takes the place of `file`: a symbolic link stays, its target changes.

    Raises:
        BadParameter: there is a folder, a device or a pipe, which is never replaced.
    """
    if os.path.exists(file) and not os.path.isfile(file):  # false for a name that is too long, of which Path complains
        what = "a folder" if file.is_dir() else "a device or another special file"
        raise BadParameter(f"{file} cannot be written, because it is {what}; name another file")
    return real(file) if os.path.islink(file) else file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a file to be written within the block, which then takes the place of `path` in one step.

    So no reader finds half of it, and a full disk or an interrupt leaves what there was.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces the file in one step, see `replacing`.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> bool:
    """As `write_text`, in a folder that is made where there is none; False where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content))
    except OSError:
        return False
    return True


@cache
def _absolute(folder: Path) -> Path:
    """A relative folder is one of the working directory at its first use; programs may change that directory later."""
    return folder.absolute()


def cache_directory() -> Path:
    """The directory for what this package stores for later processes; it need not exist."""
    common = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(common).is_absolute():  # which the XDG specification has programs ignore
        common = "~/.cache"
    folder = os.environ.get("LEAPAHEAD_CACHE") or Path(common) / "leapahead"
    try:
        return _absolute(Path(folder).expanduser())
    except RuntimeError:  # there is no such user, or no home directory
        usual = Path(tempfile.gettempdir()) / "leapahead"
        if os.environ.get("LEAPAHEAD_CACHE"):
            warnings.warn(
                f"LEAPAHEAD_CACHE={folder} is not possible, since there is no such home folder; {usual} is used; "
                "set it to another folder",
                UserWarning,
                stacklevel=1,  # here, so that it is told once
            )
        return usual
