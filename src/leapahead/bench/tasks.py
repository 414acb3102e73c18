"""Prompt sets for measurements: published ones from a folder, a file of the user's, or the bundled ones; and their ids.

    humaneval.jsonl    field prompt      humaneval
    gsm8k_test.jsonl   field question    gsm8k
    mt_bench.jsonl     field turns       mt_bench
    spec_bench.jsonl   field turns       spec_bench/CATEGORY; its categories from MT-Bench are spec_bench/mt_bench
    edits.jsonl        field prompt      edits; the field prediction is what drafters are told to expect of the text

A single category of mt_bench has the name mt_bench/CATEGORY. A file with any other name is a task of its own, see
`read_file`.

Of a conversation only the first turn is used, since later turns refer to an answer that every model writes itself. Of
a chat, answers of the assistant at the end are left out, as in the data of fine-tunings: the model writes its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter, ContextOverflow
from leapahead.core.parameters import limited, meant
from leapahead.core.text import Tokenizer
from leapahead.inputs import Inputs, encode
from leapahead.models.loading import Loaded

# file -> (task, field of the prompt)
FILES = {"humaneval.jsonl": ("humaneval", "prompt"), "gsm8k_test.jsonl": ("gsm8k", "question")}
TEXTS = tuple(task for task, _ in FILES.values())
EDITS = "edits"
CONVERSATIONS = {"mt_bench.jsonl": "mt_bench", "spec_bench.jsonl": "spec_bench"}
FIELDS = ("prompt", "question", "turns", "messages")  # of a prompt, in a file of any name
JSON_LINES = (".jsonl", ".json", ".ndjson")  # suffixes of such files; all others have a prompt on each line
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}

Prompt = str | list[dict[str, str]]  # text, or chat messages


@dataclass(frozen=True)
class Task:
    """A named set of prompts.

    Attributes:
        name: as in reports.
        prompts: text each, or the messages of a chat.
        predictions: of prompts that have one, what the text is expected to be.
    """

    name: str
    prompts: list[Prompt]
    predictions: Mapping[str, str] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """Whether it has conversations, which go through the chat template where the tokenizer has one."""
        return any(not isinstance(prompt, str) for prompt in self.prompts)

    @property
    def texts(self) -> list[str]:
        """The prompts that are plain text."""
        return [prompt for prompt in self.prompts if isinstance(prompt, str)]

    @property
    def digest(self) -> str:
        """A hash of the prompts, twelve hexadecimal digits."""
        content = [self.prompts, self.predictions] if self.predictions else self.prompts
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def read(path: Path | None, names: Sequence[str] = (), limit: int | None = None) -> list[Task]:
    """The tasks of a folder, the one of a file, or the bundled ones.

    Args:
        path: a folder, or a file, see `read_file`; None for the bundled prompts.
        names: of the tasks; a name without a category means all its categories, `NAME=K` takes K prompts of each. All
            tasks by default.
        limit: greatest number of prompts of each task without `=K`, taken at equal distances from the file.

    Raises:
        BadParameter: no such folder or file, no known file, a line without a prompt, or a name that is unknown or given
            twice with other numbers.
    """
    limits: dict[str, int | None] = {}
    for name, most in (_limited(name, limit) for name in names):
        if limits.setdefault(name, most) != most:
            raise BadParameter(f"the task {name} was given twice, with {limits[name]} and {most} prompts; give it once")
    if path is None:
        found = _bundled()
    elif path.exists() and not path.is_dir():  # a pipe, too
        found = {path.stem: read_file(path)}
    else:
        found = _of_folder(path) | _parts(path, set(limits))
    for name in limits:
        if not any(_named(task, name) for task in found):
            known = list(dict.fromkeys(part for task in found for part in (task, task.partition("/")[0])))
            raise BadParameter(f"there is no task {name!r}{meant(name, known)}; there are {', '.join(found)}")
    chosen = {task: [limits[name] for name in limits if _named(task, name)] if names else [limit] for task in found}
    return [_limited_to(found[task], some[-1]) for task, some in chosen.items() if some]


def read_file(path: Path, limit: int | None = None) -> Task:
    """The prompts of one file, whatever its name.

    Args:
        path: JSON lines (.jsonl, .json, .ndjson) that have one of the fields `prompt`, `question`, `turns`, of which
            the first is used, and `messages`, those of a chat, without answers of the assistant at its end; beside a
            prompt that is text there may be `prediction`, the text that is expected. Files with another suffix have a
            prompt in each line.
        limit: greatest number of prompts, taken at equal distances from the file.

    Raises:
        BadParameter: the file cannot be read, holds no prompts, a line without one, or a prompt twice with different
            predictions.
    """
    predictions: dict[str, str] = {}
    if path.suffix.lower() not in JSON_LINES:
        found: list[Prompt] = [line.removesuffix("\r") for line in _lines(path) if line.strip()]
    else:
        found = []
        for where, record in _records(path):
            fields = [field for field in FIELDS if field in record]
            if not fields:
                raise BadParameter(f"{where} has none of the fields {', '.join(FIELDS)}")
            found.append(prompt := _prompt(record, fields[0], where))
            if (expected := record.get("prediction")) is not None:
                if not isinstance(prompt, str) or not isinstance(expected, str) or not expected:
                    raise BadParameter(
                        f"{where}: the field 'prediction' must be text, beside a prompt that is text, too"
                    )
                _predict(predictions, prompt, expected, where)
    if not found:
        raise BadParameter(f"{path} holds no prompts")
    return _limited_to(Task(path.stem, found, predictions), limit)


def encoded(task: Task, loaded: Loaded, max_new_tokens: int = 0) -> list[list[int]]:
    """Token ids of a task's prompts, without those that do not fit into the context with `max_new_tokens`.

    Conversations go through the chat template; without one, their messages are separated by empty lines.
    """
    info = loaded.target.info
    room = info.context_length - max_new_tokens if info.decoder is None else info.decoder.longest_source
    return [tokens for prompt in task.prompts if (tokens := _tokens(prompt, loaded)) and len(tokens) <= room]


def fitting(tasks: Sequence[Task], loaded: Loaded, max_new_tokens: int) -> list[list[int]]:
    """Token ids of all prompts that fit into the context, see `encoded`.

    Raises:
        BadParameter: none does.
    """
    found = [tokens for task in tasks for tokens in encoded(task, loaded, max_new_tokens)]
    if not found:
        raise BadParameter(
            f"no prompt fits the context of {loaded.target.info.context_length} tokens with "
            f"max_new_tokens={max_new_tokens}; give fewer, or shorter prompts"
        )
    return found


def predicted(task: Task, loaded: Loaded) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Token ids of the predictions, by those of their prompts."""
    inputs = Inputs(loaded.target.info, loaded.tokenizer, loaded.eos_token_ids)
    return {
        tuple(tokens): inputs.prediction(text)
        for prompt, text in task.predictions.items()
        if (tokens := _tokens(prompt, loaded))
    }


def _tokens(prompt: Prompt, loaded: Loaded) -> list[int]:
    """Token ids of a prompt; none if it is longer than the context."""
    try:
        return encode(readable(prompt, loaded.tokenizer), loaded.tokenizer, loaded.target.info)
    except ContextOverflow:
        return []


def readable(prompt: Prompt, tokenizer: Tokenizer | None) -> Prompt:
    """The prompt; where the tokenizer has no chat template, messages as one text, separated by empty lines."""
    if isinstance(prompt, str) or has_template(tokenizer):
        return prompt
    return "\n\n".join(message["content"] for message in prompt)


def in_words(prompts: Mapping[str, Sequence[object]]) -> str:
    """The numbers of prompts by task, in words."""
    return ", ".join(f"{len(each)} {task}" for task, each in prompts.items() if each) + " prompts"


def has_template(tokenizer: Tokenizer | None) -> bool:
    """Whether the tokenizer has a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def _limited(name: str, limit: int | None) -> tuple[str, int | None]:
    """`NAME=K` as name and limit."""
    name, equals, count = name.partition("=")
    if equals and (not count.isdecimal() or int(count) < 1):
        raise BadParameter(f"the task {name}={count} is not possible: give a number of prompts after =")
    return name, int(count) if equals else limit


def _named(task: str, name: str) -> bool:
    return task == name or task.startswith(name + "/")


def _limited_to(task: Task, limit: int | None) -> Task:
    """The task with at most so many of its prompts, taken at equal distances."""
    count = len(task.prompts)
    if limit is None or limit >= count:
        return task
    return replace(task, prompts=[task.prompts[index * count // limit] for index in range(limit)])


def _tasks(prompts: Mapping[str, list[Prompt]]) -> dict[str, Task]:
    return {name: Task(name, some) for name, some in prompts.items() if some}


def _bundled() -> dict[str, Task]:
    found: dict[str, list[Prompt]] = {}
    path = Path(str(resources.files("leapahead"))) / "bench" / "prompts.jsonl"
    for where, record in _records(path):
        field = "prompt" if "prompt" in record else "turns"
        found.setdefault(record["task"], []).append(_prompt(record, field, where))
    return _tasks(found)


def _of_folder(folder: Path) -> dict[str, Task]:
    if not folder.is_dir():
        raise BadParameter(f"there is no folder or file {str(folder)!r} of prompts")
    found: dict[str, list[Prompt]] = {}
    for file, (task, name) in FILES.items():
        if (folder / file).is_file():
            found[task] = [_prompt(record, name, where) for where, record in _records(folder / file)]
    if edits := _edits(folder / f"{EDITS}.jsonl"):
        found[EDITS] = [*edits]
    for file, task in CONVERSATIONS.items():
        if (folder / file).is_file():
            for where, record in _records(folder / file):
                name = task
                if task == "spec_bench" and (category := record.get("category")):
                    name = f"{task}/{'mt_bench' if category in MT_BENCH else category}"
                found.setdefault(name, []).append(_prompt(record, "turns", where))
    tasks = _tasks(found)
    if not tasks:
        raise BadParameter(
            f"{folder} holds prompts in none of the files {', '.join((*FILES, *CONVERSATIONS, EDITS + '.jsonl'))}; "
            "give a file with another name itself, in place of the folder"
        )
    return tasks | {EDITS: replace(tasks[EDITS], predictions=edits)} if edits else tasks


def _edits(path: Path) -> dict[str, str]:
    """Prompt -> prediction, of the file of edits; empty where there is none."""
    if not path.is_file():
        return {}
    found: dict[str, str] = {}
    for where, record in _records(path):
        if not all(isinstance(text := record.get(name), str) and text for name in ("prompt", "prediction")):
            raise BadParameter(f"{where}: an edit must have the texts 'prompt' and 'prediction'")
        _predict(found, record["prompt"], record["prediction"], where)
    return found


def _predict(predictions: dict[str, str], prompt: str, expected: str, where: str) -> None:
    """Adds a prediction; BadParameter where the prompt has another one."""
    if predictions.setdefault(prompt, expected) != expected:
        raise BadParameter(f"{where}: an earlier line has the same prompt with another 'prediction'; leave one out")


def _parts(folder: Path, names: set[str]) -> dict[str, Task]:
    """The categories of mt_bench among the names."""
    path, parts = folder / "mt_bench.jsonl", dict[str, list[Prompt]]()
    if any(name.startswith("mt_bench/") for name in names) and path.is_file():
        for where, record in _records(path):
            if (name := f"mt_bench/{record.get('category')}") in names:
                parts.setdefault(name, []).append(_prompt(record, "turns", where))
    return _tasks(parts)


def _records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file and line, content) of every line that is not empty."""
    records = []
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # also numbers and nesting beyond what Python reads
                raise BadParameter(f"{where} is not JSON; write a JSON object on each line") from None
            if not isinstance(record, dict):
                raise BadParameter(f"{where} is not a JSON object; write one on each line")
            records.append((where, record))
    return records


def _lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read() if path.is_file() else limited(file.read, str(path))
        return text.split("\n")  # not splitlines: JSON strings may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadParameter(f"{path} cannot be read: {reason}") from None


def _prompt(record: dict[str, Any], field: str, where: str) -> Prompt:
    value = record.get(field)
    if field == "messages":
        return _messages(value, where)
    first = value[0] if field == "turns" and isinstance(value, list) and value else value
    if not isinstance(first, str) or not first:
        raise BadParameter(f"{where}: the field {field!r} holds no text")
    return [{"role": "user", "content": first}] if field == "turns" else first


def _messages(value: Any, where: str) -> Prompt:
    """The messages of a chat, up to the last one that the model is to answer."""
    if not isinstance(value, list) or not value:
        raise BadParameter(f"{where}: the field 'messages' holds no messages")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise BadParameter(f"{where}: a message must have the texts 'role' and 'content'")
    found = [{name: message[name] for name in ("role", "content")} for message in value]
    while found and found[-1]["role"] == "assistant":
        found.pop()
    if not found:
        raise BadParameter(f"{where}: the field 'messages' must have a message that the model is to answer")
    return found
