"""The file of the results: a record for each row, written when the row is done.

    conditions    of the measurement, and of the comparison of texts, as they were in the first run
    not_covered   see `rows`
    rows          key -> the row's description, `measured` and `checked`: temperature -> figures, with their commit,
                  and with the machine and the versions of their run where these are others than the first one's

Rows that are not measured have their description only, so that the page is made from this file alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter, LeapaheadError
from research.systems.rows import NOT_COVERED
from research.systems.system import System

FILE = "systems.json"
MEASURED, CHECKED = "measured", "checked"
MACHINE = ("cpu", "system", "versions")  # conditions that are kept with the figures where they differ
FREE = ("date", "commit", *MACHINE)  # conditions that may differ when a run is resumed

Row = dict[str, Any]


class Record:
    """The results so far.

    Attributes:
        path: of the file.
        content: as it is written.
    """

    def __init__(self, folder: Path, systems: Sequence[System], resume: bool) -> None:
        """A new record, or the one in the folder, with the rows of `systems` in their order.

        What was measured with another command is dropped.

        Raises:
            BadParameter: there is one and `resume` is false, or it is no such file.
            LeapaheadError: the folder cannot be written to.
        """
        self.path = folder / FILE
        self.content: dict[str, Any] = {"conditions": {}, "not_covered": (), "rows": {}}
        if self.path.is_file():
            if not resume:
                raise BadParameter(f"{self.path} already holds results; pass --resume, or choose another --out")
            self.content = read(folder)
        self._now: dict[str, dict[str, Any]] = {}  # conditions of this run, by the kind of figures
        old, rows = self.content["rows"], {}
        for system in systems:
            before = old.get(system.key, {})
            kept = before if before.get("command") == system.command else {}
            figures = {kind: kept[kind] for kind in (MEASURED, CHECKED) if kind in kept}
            rows[system.key] = {**system.as_dict(), **figures}
        self.content |= {"not_covered": NOT_COVERED, "rows": rows}
        self._write()

    def agree(self, kind: str, conditions: dict[str, Any]) -> None:
        """Keeps the conditions of one kind of figures.

        Commit, machine and versions may be others than those of the figures that are there, see `add`.

        Raises:
            BadParameter: the record has figures that were made under other conditions.
        """
        plain: dict[str, Any] = json.loads(json.dumps(conditions))  # as JSON gives them back
        self._now[kind] = plain
        known = self.content["conditions"].get(kind)
        if known is not None and any(kind in row for row in self.content["rows"].values()):
            for name in (name for name in {**known, **plain} if name not in FREE):
                if known.get(name) != plain.get(name):
                    raise BadParameter(
                        f"{self.path} cannot be resumed: {name} was {known.get(name)} and is {plain.get(name)}; "
                        "choose another --out"
                    )
        else:
            self.content["conditions"][kind] = plain

    def has(self, system: System, kind: str, temperature: float) -> bool:
        """Whether there are such figures of a row."""
        return f"{temperature:g}" in self.content["rows"][system.key].get(kind, {})

    def add(self, system: System, kind: str, temperature: float, figures: Row) -> None:
        """Adds figures of a row, with the commit that made them and what else is new, and writes the file."""
        now, first = self._now.get(kind, {}), self.content["conditions"].get(kind, {})
        other = {name: now[name] for name in MACHINE if name in now and now[name] != first.get(name)}
        kept = {**figures, "commit": now.get("commit"), **other}
        self.content["rows"][system.key].setdefault(kind, {})[f"{temperature:g}"] = kept
        self._write()

    def mismatches(self) -> list[str]:
        """A line for each row whose texts differ from plain decoding's, though its rule is exact."""
        lines = []
        for row in self.content["rows"].values():
            for kind in (MEASURED, CHECKED):
                for temperature, each in row.get(kind, {}).items():
                    if each["mismatches"]:
                        lines.append(f"{row['key']}, {kind} at temperature {temperature}: {each['mismatches']}")
        return lines

    def _write(self) -> None:
        """Writes a temporary file and renames it, so that an interrupted write leaves the old file."""
        part = self.path.with_suffix(".part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
            os.replace(part, self.path)
        except OSError as error:
            raise LeapaheadError(f"{self.path} cannot be written: {error.strerror}; choose another --out") from None


def read(folder: Path) -> dict[str, Any]:
    """The content of the file in a folder.

    Raises:
        BadParameter: there is none, or it is another file.
    """
    path = folder / FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["conditions"], dict) or not isinstance(found["rows"], dict):
            raise KeyError
    except OSError as error:
        raise BadParameter(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BadParameter(f"{path} is not a record of systems") from None
    return found
