"""Rows of a measurement that takes hours, kept as they come, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leapahead.core.storage import write_json

Rows = list[dict[str, Any]]


class Kept:
    """Rows by the name of what was measured.

    Args:
        file: JSON file; None keeps nothing.
        conditions: rows that the file holds of other ones are measured again.
    """

    def __init__(self, file: Path | None = None, conditions: str = "") -> None:
        self._file, self._conditions = file, conditions
        self._rows: dict[str, Rows] = {}
        if file is not None and file.is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["conditions"] == conditions:
                self._rows = found["rows"]

    def get(self, name: str) -> Rows | None:
        """Those that were kept under this name."""
        return self._rows.get(name)

    def add(self, name: str, rows: Rows) -> None:
        self._rows[name] = rows
        if self._file is not None:
            write_json(self._file, {"conditions": self._conditions, "rows": self._rows})
