"""Prompt sets: published ones from a folder of files. Knows nothing of models."""

from __future__ import annotations

import json
from pathlib import Path

from leapahead.errors import BadParameter

# file -> (task, field of the prompt)
FILES = {"humaneval.jsonl": ("humaneval", "prompt"), "gsm8k_test.jsonl": ("gsm8k", "question")}


def load(folder: Path, limit: int | None = None) -> dict[str, list[str]]:
    """Task -> prompts, of every known file in `folder`.

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
