"""The file of a batch's results, which grows by a line at a time and with which an interrupted batch goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.core.storage import replaceable


class Results:
    """A new file, or the one of an interrupted batch. Nothing of it is changed before it is opened.

    Args:
        path: of the file.
        resume: whether results that are there are kept.
        models: the names that the results' model may have.

    Attributes:
        kept: custom_id -> id, of the requests that were answered.

    Raises:
        BadParameter: the file has results and `resume` is false, or it has something else, or results of another model.
    """

    def __init__(self, path: Path, resume: bool, models: Collection[str]) -> None:
        self.path, self._models = path, models
        self.kept: dict[str, str] = {}
        if path.exists() and not path.is_file():
            if resume:
                raise BadParameter(f"--resume is not possible with {path}, which is no regular file; leave it out")
        elif path.exists() and path.stat().st_size:
            if not resume:
                raise BadParameter(f"{path} already holds results; pass --resume to continue, or name another file")
            for _ in self._good():
                pass

    def open(self) -> BinaryIO:
        """The file, to add results to. A line that was cut and those of requests that have failed are removed first.

        Raises:
            LeapaheadError: it cannot be written.
        """
        try:
            if self.path.is_file():
                self._clean()
            return self.path.open("ab")
        except OSError as error:
            raise LeapaheadError(f"{self.path} cannot be written: {error.strerror}; name another file") from None

    def unwritable(self, error: OSError) -> LeapaheadError:
        """What the user is told where a result cannot be added."""
        return LeapaheadError(
            f"{self.path} cannot be written: {error.strerror}; where that is remedied, --resume goes on with what it "
            "holds"
        )

    def _clean(self) -> None:
        """Replaces the file in one step, so that an error leaves it as it was."""
        place = replaceable(self.path)
        part = place.with_name(f".{place.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.writelines(self._good())
            if part.stat().st_size < place.stat().st_size:
                part.chmod(place.stat().st_mode & 0o777)
                part.replace(place)
        finally:
            part.unlink(missing_ok=True)

    def _good(self) -> Iterator[bytes]:
        """The lines of answered requests, which `kept` then has."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):  # cut
                    return
                try:
                    found = json.loads(line)
                    custom_id, key, response, error = (found[name] for name in ("custom_id", "id", "response", "error"))
                    model = None if error is not None else response["body"]["model"]
                    hash(custom_id)  # which must not be a list
                except (ValueError, KeyError, TypeError):
                    raise BadParameter(
                        f"{self.path} holds no result of run-batch in line {number}; name another file"
                    ) from None
                if error is not None:
                    continue
                if model not in self._models:
                    raise BadParameter(
                        f"{self.path} holds a result of the model {model!r} in line {number}, and this one is named "
                        f"{', '.join(map(repr, self._models))}; give the same command as before, or name another file"
                    )
                self.kept[custom_id] = key
                yield line
