"""The target's own texts, on which heads are trained: prompts, and what the target answers, as token ids.

A head is trained on what it will have to predict: the target's answers, not those of a data set. Part of them is
greedy and part sampled at temperature 1. They are written to a file as they come, so that an interrupted run goes on.
The first line of the file says which model wrote them:

    {"model": "bundled", "weights": "0f3c...", ...}
    {"index": 0, "prompt": [5, 8], "answer": [9, 1, 7], "temperature": 0}
"""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leapahead.api import LLM
from leapahead.bench import tasks
from leapahead.core.errors import BadParameter, counted
from leapahead.engine.request import Handle, Request
from leapahead.engine.waiting import check
from leapahead.inputs import Options
from leapahead.models.loading import Loaded
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.weights import digest

Progress = Callable[[str, int, int], None]  # what is done, how much of it, and how much there is
AHEAD = 2  # times as many texts as are decoded together are given to the engine
LEAST = 2  # tokens of an answer that can be trained on: one is drafted from, one is predicted


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer.

    Attributes:
        index: of the prompt in its file.
        prompt, answer: token ids.
        temperature: 0 or 1.
    """

    index: int
    prompt: list[int]
    answer: list[int]
    temperature: float = 0.0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Wish:
    """Texts that are wanted of a file of prompts.

    Attributes:
        data: the file.
        max_new_tokens: greatest length of an answer.
        sampled: share of the texts that are sampled at temperature 1.
        seed: of the first prompt's text; the others have the numbers after it.
        limit: the most prompts, taken at equal distances; None for all.
    """

    data: Path
    max_new_tokens: int
    sampled: float = 0.0
    seed: int = 0
    limit: int | None = None

    def temperature(self, index: int) -> float:
        """Of the prompt with this index: sampled texts are spread evenly over the file."""
        return float(int((index + 1) * self.sampled) > int(index * self.sampled))


def prompts(llm: LLM, wish: Wish) -> list[list[int]]:
    """Token ids of the prompts of a file, without repeated ones and those that leave no room for an answer.

    Raises:
        BadParameter: the file cannot be read, or no prompt is left.
    """
    task = tasks.read_file(wish.data, wish.limit)
    loaded = Loaded(llm.target, llm.tokenizer, llm.eos_token_ids)
    fitting = tasks.encoded(task, loaded, wish.max_new_tokens)
    found = list({tuple(tokens): None for tokens in fitting})
    if found and (left_out := len(task.prompts) - len(fitting)):
        warnings.warn(
            f"{left_out} of {len(task.prompts)} prompts of {wish.data} left out: they leave no room for "
            f"max_new_tokens={wish.max_new_tokens} in the context of {llm.target.info.name}",
            UserWarning,
            stacklevel=2,
        )
    if not found:
        raise BadParameter(
            f"{wish.data} holds no prompt that leaves room for max_new_tokens={wish.max_new_tokens} in the context of "
            f"{llm.target.info.name}"
        )
    return [list(tokens) for tokens in found]


def write(
    llm: LLM,
    wish: Wish,
    path: Path,
    progress: Progress,
    what: str = "the target's texts",
    known: Sequence[list[int]] = (),
) -> list[Text]:
    """The target's texts; those that the file does not hold yet are decoded and added to it.

    Args:
        llm: the target. Texts are decoded together, with its drafter.
        wish: which texts.
        path: the file.
        progress: is called after every text.
        what: they are, for `progress`.
        known: what `prompts` gives, where that is known already.

    Raises:
        BadParameter: the file holds texts of another model or of other prompts, or cannot be written.
    """
    wanted = known or prompts(llm, wish)
    head = {**_model(llm), **asdict(wish), "data": wish.data.name}
    if path.exists() and cut(path):
        kept = _read(path, head)
    else:
        _append(path, {"model": llm.target.info.name, **head})
        kept = {}
    left = [index for index in range(len(wanted)) if index not in kept]
    for index, text in kept.items():
        if index >= len(wanted) or text.prompt != wanted[index]:
            raise BadParameter(f"{path} holds texts of other prompts than {wish.data}; give a new folder")
    for text in _decoded(llm, wish, wanted, left):
        _append(path, asdict(text))
        kept[text.index] = text
        progress(what, len(kept), len(wanted))
    return [kept[index] for index in sorted(kept)]


def read(llm: LLM, path: Path) -> list[Text]:
    """Texts that an earlier run has written.

    Raises:
        BadParameter: there are none, or another model wrote them.
    """
    found = _read(path, _model(llm), "give texts that this model has written")
    return sorted(found.values(), key=lambda text: text.index)


def check_file(path: Path) -> None:
    """Refuses what cannot hold texts of a training run, before a model is loaded.

    Raises:
        BadParameter: it does not.
    """
    _read(path, {})


def written_for(path: Path) -> str:
    """The name of the file of prompts that a file of texts was written for."""
    with path.open(encoding="utf-8") as file:
        return str(json.loads(file.readline())["data"])


def digest_of(texts: Sequence[Text]) -> str:
    """16 hex digits of the numbers and the tokens of some texts, in order."""
    content = json.dumps([(text.index, text.prompt, text.answer) for text in texts])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def without(found: Sequence[Text], evaluated: Sequence[Text]) -> list[Text]:
    """The texts whose prompts are not among those of texts that are evaluated only; a warning tells of the others."""
    prompts = {tuple(text.prompt) for text in evaluated}
    kept = [text for text in found if tuple(text.prompt) not in prompts]
    if left_out := len(found) - len(kept):
        warnings.warn(
            f"{left_out} of {len(found)} texts left out of the training: their prompts are among those that are only "
            "evaluated",
            UserWarning,
            stacklevel=2,
        )
    return kept


def divide(texts: Sequence[Text], held_out: float, seed: int) -> tuple[list[Text], list[Text]]:
    """The texts to train on, and the held-out ones; without those that are too short to train on.

    Of a held-out prompt that is in two files, of an earlier run and of prompts, no text is trained on.

    Raises:
        BadParameter: too few are left.
    """
    usable = [text for text in texts if len(text.answer) >= LEAST]
    count = max(1, round(held_out * len(usable))) if held_out else 0
    if len(usable) < count + 1:
        raise BadParameter(
            f"{counted(len(usable), 'text')} with at least {LEAST} tokens, too few to train on; give more prompts"
        )
    chosen = set(random.Random(seed).sample(range(len(usable)), count))
    held_out_prompts = {tuple(usable[place].prompt) for place in chosen}
    groups: tuple[list[Text], list[Text]] = ([], [])
    for place, text in enumerate(usable):
        if place in chosen or tuple(text.prompt) not in held_out_prompts:
            groups[place in chosen].append(text)
    if not groups[0]:
        raise BadParameter("all texts are answers to held-out prompts; give more prompts")
    return groups


def _decoded(llm: LLM, wish: Wish, wanted: Sequence[list[int]], left: Sequence[int]) -> Iterator[Text]:
    """The texts of some prompts, each when it ends."""
    engine, waiting = llm.engine, deque(left)
    running: dict[Handle, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < AHEAD * engine.max_batch:
                index = waiting.popleft()
                running[engine.submit(_request(llm, wish, wanted, index))] = index
            engine.step()
            for handle in [handle for handle in running if handle.done]:
                check(handle)
                index = running.pop(handle)
                yield Text(index, wanted[index], handle.tokens, wish.temperature(index))
    finally:
        engine.cancel(*running)


def _request(llm: LLM, wish: Wish, wanted: Sequence[list[int]], index: int) -> Request:
    options: Options = {
        "max_new_tokens": wish.max_new_tokens,
        "temperature": wish.temperature(index),
        "seed": wish.seed + index,
    }
    ((request, _),) = llm.requests([wanted[index]], options)
    return request


def _model(llm: LLM) -> dict[str, Any]:
    """What names the model in the first line; its weights decide whether texts are its own."""
    assert isinstance(llm.target, TransformersTarget), "only such a target is trained for"
    return {"weights": digest(llm.target.model)}


def _append(path: Path, record: dict[str, Any]) -> None:
    """Adds a line to the file.

    Raises:
        BadParameter: it cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise BadParameter(
            f"{path} cannot be written: {error.strerror}; where that is remedied, --resume goes on with what it holds"
        ) from None


def _read(path: Path, expected: dict[str, Any], remedy: str = "give a new folder") -> dict[int, Text]:
    """The texts of a file by their index, without a last line that an interrupt left incomplete."""
    try:
        with path.open(encoding="utf-8") as file:  # line by line: all of it would take more memory than the texts
            records = (json.loads(line) for line in file if line.endswith("\n") and line != "\n")
            head = next(records)
            texts = [Text(**record) for record in records]
        given = {name: head[name] for name in (*expected, "weights", "data")}  # every first line has these two
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"{path} cannot be read: {error}") from None
    except (ValueError, TypeError, KeyError, StopIteration):
        raise BadParameter(f"{path} holds no texts of a training run; give one's texts.jsonl") from None
    for name, value in expected.items():
        if given[name] != value:
            raise BadParameter(f"{path} was written with {name} {given[name]!r}, not {value!r}; {remedy}")
    return {text.index: text for text in texts}


def cut(path: Path) -> bool:
    """Removes a last line that an interrupt left incomplete, in place, since a full disk has no room for a copy.

    Returns:
        Whether a line is left.

    Raises:
        BadParameter: the file cannot be read or written.
    """
    try:
        with path.open("r+b") as file:
            length = file.read().rfind(b"\n") + 1
            file.truncate(length)
    except OSError as error:
        raise BadParameter(f"{path} cannot be written: {error.strerror}") from None
    return length > 0
