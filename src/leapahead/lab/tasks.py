"""Prompt sets: published ones from a folder of files, or the small one of our own. Knows nothing of models.

    humaneval.jsonl    field prompt      humaneval
    gsm8k_test.jsonl   field question    gsm8k
    mt_bench.jsonl     field turns       mt_bench
    spec_bench.jsonl   field turns       spec_bench/CATEGORY; its categories from MT-Bench are spec_bench/mt_bench

A conversation of several turns is cut to its first: the later ones answer a text that each model would write itself.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from leapahead.errors import BadParameter

# file -> (task, field of the prompt)
FILES = {"humaneval.jsonl": ("humaneval", "prompt"), "gsm8k_test.jsonl": ("gsm8k", "question")}
CONVERSATIONS = {"mt_bench.jsonl": "mt_bench", "spec_bench.jsonl": "spec_bench"}
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}

Prompt = str | list[dict[str, str]]  # text, or chat messages


@dataclass(frozen=True)
class Task:
    """A named set of prompts.

    Attributes:
        name: as in reports.
        prompts: text each, or the messages of a chat.
    """

    name: str
    prompts: list[Prompt]

    @property
    def chat(self) -> bool:
        """Whether it is made of conversations, which go through the chat template where there is one."""
        return any(not isinstance(prompt, str) for prompt in self.prompts)

    @property
    def digest(self) -> str:
        """Twelve digits that tell these prompts from others."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:12]


def load(folder: Path, limit: int | None = None) -> dict[str, list[str]]:
    """Task -> prompts, of HumanEval and GSM8K where their files are in `folder`; the first ones.

    Raises:
        BadParameter: there is no known file.
    """
    tasks: dict[str, list[str]] = {}
    for file, (task, field) in FILES.items():
        path = folder / file
        if path.is_file():
            with path.open(encoding="utf-8") as lines:
                tasks[task] = [json.loads(line)[field] for line in lines][:limit]
    if not tasks:
        raise BadParameter(f"{folder} holds none of the files {', '.join(FILES)}; pass --data FOLDER")
    return tasks


def read(folder: Path | None, names: Sequence[str] = (), limit: int | None = None) -> list[Task]:
    """The tasks of a folder, or of our own set.

    Args:
        folder: None for our own.
        names: which; a name without its category means all of them, `NAME=K` takes K prompts of each. All tasks if
            there are none.
        limit: prompts of each other, taken at equal distances, so that every part of a file is there.

    Raises:
        BadParameter: no known file, a line without a prompt, or an unknown name.
    """
    found = _bundled() if folder is None else _of_folder(folder)
    limits = dict(_limited(name, limit) for name in names)
    for name in limits:
        if not any(_named(task, name) for task in found):
            known = list(dict.fromkeys(part for task in found for part in (task, task.partition("/")[0])))
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise BadParameter(f"there is no task {name!r}{hint}; there are {', '.join(found)}")
    if not names:
        return [Task(task, _spread(prompts, limit)) for task, prompts in found.items()]
    chosen = {task: [limits[name] for name in limits if _named(task, name)] for task in found}
    return [Task(task, _spread(found[task], some[-1])) for task, some in chosen.items() if some]


def _limited(name: str, limit: int | None) -> tuple[str, int | None]:
    """`NAME=K` as name and limit."""
    name, equals, count = name.partition("=")
    if equals and (not count.isdecimal() or int(count) < 1):
        raise BadParameter(f"the task {name}={count} is not possible: after = stands how many prompts are taken")
    return name, int(count) if equals else limit


def _named(task: str, name: str) -> bool:
    return task == name or task.startswith(name + "/")


def _spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def _bundled() -> dict[str, list[Prompt]]:
    tasks: dict[str, list[Prompt]] = {}
    path = Path(str(resources.files("leapahead"))) / "lab" / "prompts.jsonl"
    for where, record in _records(path):
        field = "prompt" if "prompt" in record else "turns"
        tasks.setdefault(record["task"], []).append(_prompt(record, field, where))
    return tasks


def _of_folder(folder: Path) -> dict[str, list[Prompt]]:
    tasks: dict[str, list[Prompt]] = {}
    for file, (task, field) in FILES.items():
        if (folder / file).is_file():
            tasks[task] = [_prompt(record, field, where) for where, record in _records(folder / file)]
    for file, task in CONVERSATIONS.items():
        if (folder / file).is_file():
            for where, record in _records(folder / file):
                name = task
                if task == "spec_bench" and (category := record.get("category")):
                    name = f"{task}/{'mt_bench' if category in MT_BENCH else category}"
                tasks.setdefault(name, []).append(_prompt(record, "turns", where))
    tasks = {task: prompts for task, prompts in tasks.items() if prompts}
    if not tasks:
        raise BadParameter(f"{folder} holds prompts in none of the files {', '.join((*FILES, *CONVERSATIONS))}")
    return tasks


def _records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(where it stands, what it says) of every line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON strings may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadParameter(f"{path} cannot be read: {reason}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                raise BadParameter(f"{where} is not JSON") from None
            if not isinstance(record, dict):
                raise BadParameter(f"{where} is not a JSON object")
            records.append((where, record))
    return records


def _prompt(record: dict[str, Any], field: str, where: str) -> Prompt:
    value = record.get(field)
    first = value[0] if field == "turns" and isinstance(value, list) and value else value
    if not isinstance(first, str) or not first:
        raise BadParameter(f"{where}: the field {field!r} holds no text")
    return [{"role": "user", "content": first}] if field == "turns" else first
