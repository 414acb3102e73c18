"""The result file of a bench: conditions and rows, rewritten after every cell so that no finished cell is lost."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from leapahead.bench.cell import PLAIN
from leapahead.bench.figures import overall, overall_beside
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.core.storage import replaceable, write_text

FILE = "bench.json"
OVERALL = "overall"  # the task of rows over all tasks
FREE = ("date", "commit", "resumed")  # conditions that may differ when a bench is resumed; all of them are kept
GROWING = ("tasks", "targets", "contexts", "kv_cache")  # conditions to which names may be added
# What a report reads of every row, and of the conditions.
ROW = {
    *("task", "target", "drafter", "temperature", "batch", "speedup", "tokens_per_second", "acceptance_length"),
    *("steps", "nodes_per_step", "time_to_first_token", "distinct_4", "prompts", "tokens", "mismatches", "ties"),
    *("forwards", "seconds", "peak_memory_mib", "peak_gpu_memory_mib", "accepted_at", "accepted_by", "drafted_by"),
}
CONDITIONS = {
    *("date", "versions", "commit", "cpu", "gpu", "system", "data", "tasks", "targets", "max_new_tokens", "rounds"),
    *("seed", "figures"),
}

Row = dict[str, Any]
Cell = tuple[str, str, float, int]  # task, target, temperature, batch


class Record:
    """The results so far.

    Attributes:
        conditions: of the measurement.
        rows: of the finished cells, without the overall rows, which are computed when the file is written.
    """

    def __init__(self, folder: Path, conditions: dict[str, Any]) -> None:
        self.folder, self.conditions = folder, conditions
        self.rows: list[Row] = []

    @property
    def path(self) -> Path:
        return self.folder / FILE

    @classmethod
    def open(cls, folder: Path, conditions: dict[str, Any], resume: bool) -> Record:
        """A new record, or the existing one, resumed. One without rows, as of a bench that was killed, counts as none.

        Raises:
            BadParameter: there is one and `resume` is false, it is not a bench's file, or its conditions differ; or a
                task has the name of the rows over all tasks.
            LeapaheadError: the folder cannot be written to.
        """
        record = cls(folder, conditions)
        if OVERALL in conditions.get("tasks", ()):
            raise BadParameter(f"a task cannot be named {OVERALL!r}, as rows over all tasks are; rename its file")
        if record.path.is_file() and (found := read(folder))["results"]:
            if not resume:
                raise BadParameter(
                    f"{record.path} already holds results; pass --resume to continue, or choose another --out"
                )
            record.rows = [row for row in found["results"] if row["task"] != OVERALL]
            record.conditions = _agreed(found["conditions"], conditions)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            record._write(record.path)
        except OSError as error:
            raise LeapaheadError(f"{folder} cannot be written to: {error.strerror}; choose another --out") from None
        return record

    def describe(self, kind: str, name: str, description: dict[str, Any]) -> None:
        """Adds a name to one of the `GROWING` conditions.

        Raises:
            BadParameter: the name is there with another description.
        """
        known = self.conditions.setdefault(kind, {})
        if name in known and known[name] != description:
            differing = next(
                key for key in {**known[name], **description} if known[name].get(key) != description.get(key)
            )
            raise _disagree(f"{differing} of {name}", known[name].get(differing), description.get(differing))
        known[name] = description

    def finished(self, cell: Cell) -> bool:
        """Whether the cell has been measured."""
        return any(_cell(row) == cell for row in self.rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Adds the rows of a finished cell, and writes the file.

        Raises:
            LeapaheadError: the file cannot be written; the message names the file where the results were saved instead.
        """
        self.rows += rows
        try:
            self._write(self.path)
        except OSError as error:
            raise LeapaheadError(f"{self.path} cannot be written: {error.strerror}; {self._rescue()}") from None

    def discard(self) -> None:
        """Removes the file, and the folder if nothing else is in it, so that a later bench is not refused there."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.folder.rmdir()

    def as_dict(self) -> dict[str, Any]:
        """The content of the file."""
        return {"conditions": self.conditions, "results": [*self.rows, *self._overall()]}

    def _overall(self) -> list[Row]:
        """A row over all tasks for every contender that was measured on more than one."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row["target"], row["drafter"], row["temperature"], row["batch"]), []).append(row)
        rows = []
        for key, mine in groups.items():
            target, _, temperature, batch = key
            plain = groups.get((target, PLAIN, temperature, batch), [])
            if len(mine) > 1 and [row["task"] for row in mine] == [row["task"] for row in plain]:
                seed = self.conditions["seed"]
                rows.append({"task": OVERALL, "target": target, **overall(mine, plain, seed)})
                bases = {row.get("beside", {}).get("target") for row in mine}  # of a form of a model: the first form
                base = groups.get((*bases, *key[1:]), []) if len(bases) == 1 else []
                if [row["task"] for row in base] == [row["task"] for row in mine]:
                    rows[-1]["beside"] = {"target": base[0]["target"], **overall_beside(mine, base, seed)}
        return rows

    def _write(self, path: Path) -> None:
        """Replaces the file in one step."""
        write_text(replaceable(path), json.dumps(self.as_dict(), indent=1) + "\n")

    def _rescue(self) -> str:
        """Writes to the directory of temporary files; says where."""
        try:
            path = Path(tempfile.mkdtemp(prefix="leapahead-bench-")) / FILE
            self._write(path)
        except OSError:
            return "nor can the directory of temporary files, so the last cell is in the printed table only"
        return f"all results so far are in {path}"


def read(folder: Path) -> dict[str, Any]:
    """The content of a bench's file.

    Raises:
        BadParameter: there is none, or it is not a bench's file.
    """
    path = folder / FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        conditions, rows = found["conditions"], found["results"]
        if not isinstance(conditions, dict) or not isinstance(rows, list):
            raise TypeError
        if rows and not (conditions.keys() >= CONDITIONS and all(row.keys() >= ROW for row in rows)):
            raise KeyError
    except OSError as error:
        raise BadParameter(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadParameter(f"{path} is not the result of a bench; choose another --out") from None
    return found


def _cell(row: Row) -> Cell:
    return row["task"], row["target"], row["temperature"], row["batch"]


def _agreed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old conditions with the additions of the new ones; BadParameter where they contradict each other."""
    plain = json.loads(json.dumps(new))  # as JSON gives them back
    for key in {**old, **plain}:
        if key in FREE:
            continue
        if key in GROWING:
            for name in set(old.get(key, {})) & set(plain.get(key, {})):
                if old[key][name] != plain[key][name]:
                    raise _disagree(f"{key}: {name}", old[key][name], plain[key][name])
        elif old.get(key) != plain.get(key):
            raise _disagree(key, old.get(key), plain.get(key))
    again = {key: plain[key] for key in ("date", "commit")}
    agreed = {**plain, **{key: old[key] for key in again}, "resumed": [*old.get("resumed", []), again]}
    return {**agreed, **{key: {**old.get(key, {}), **plain.get(key, {})} for key in GROWING}}


def _disagree(what: str, old: Any, new: Any) -> BadParameter:
    return BadParameter(
        f"the bench cannot be resumed: the condition {what!r} was {_short(old)} and is {_short(new)}; "
        "choose another --out"
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
