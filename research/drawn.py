"""The figures of the documentation: each measured on the bundled model, written as a JSON file and a plot.

compression, compression-sampled    greedy, and at temperature 1           jacobi      both
pool, pool-sampled                  the same; with a row for each task     match, match-sampled
expected                            by formula                             cost        on the shapes of a 135M model
calibration, calibration-sampled    of `auto` with 16 nodes per step       growth      of indexes, up to 100,000 tokens
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from leapahead.bench import tasks
from leapahead.bench.conditions import Data, Progress
from leapahead.bench.plots import require, sampling
from leapahead.core.sampling import SamplingParams
from leapahead.models.base import read_prompt
from leapahead.models.loading import Loaded
from research import curves, plots

# For the pool also summaries, and text that is written freely.
POOL_TASKS = (*tasks.TEXTS, "spec_bench/summarization", "mt_bench/writing")
TEMPERATURES = {"": 0.0, "-sampled": 1.0}  # by the ending of the file name
COMPRESSION_PROMPTS, PROMPTS, MATCH_PROMPTS = 8, 10, 40  # of each task
PRESET = {"preset": "7b"}  # (W, N, G) = (15, 5, 15): 2402.02057, table 4
CALIBRATED, NODES = 10, 16  # prompts of each task, and nodes per step
PREFILLED = 1024  # tokens
ALPHAS = (0.3, 0.425, 0.5, 0.7, 0.8, 0.9)

Named = Iterator[tuple[str, Data]]  # names of files with their data, in the order of measurement


def draw(part: str, loaded: Loaded, data: Path, folder: Path, progress: Progress) -> None:
    """Measures a part and writes FOLDER/NAME.json and FOLDER/NAME.svg; an interruption keeps what is finished."""
    require()
    folder.mkdir(exist_ok=True)
    for name, found in PARTS[part](loaded, data, progress):
        (folder / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
        plots.save(found, folder / name, kinds=("svg",))


def _twice(
    name: str, measure: Callable[..., Data], limit: int, loaded: Loaded, data: Path, progress: Progress
) -> Named:
    """Greedy and at temperature 1."""
    prompts, words = _prompts(loaded, data, tasks.TEXTS, limit, 128)
    for ending, temperature in TEMPERATURES.items():
        found = measure(
            loaded.target,
            prompts,
            eos_token_ids=loaded.eos_token_ids,
            temperature=temperature,
            progress=_at(temperature, progress),
        )
        yield f"{name}{ending}", _with(found, words)


def _jacobi(loaded: Loaded, data: Path, progress: Progress) -> Named:
    prompts, words = _prompts(loaded, data, tasks.TEXTS, PROMPTS, 128)
    found = curves.jacobi(loaded.target, prompts, eos_token_ids=loaded.eos_token_ids, progress=progress)
    yield "jacobi", _with(found, words)


def _pool(loaded: Loaded, data: Path, progress: Progress) -> Named:
    """The plot shows HumanEval and GSM8K together; `tasks` has the numbers of every task."""
    for ending, temperature in TEMPERATURES.items():

        def measure(names: tuple[str, ...], temperature: float = temperature) -> Data:
            prompts, words = _prompts(loaded, data, names, PROMPTS, 512)
            found = curves.pool(
                loaded.target,
                prompts,
                PRESET,
                max_new_tokens=512,
                eos_token_ids=loaded.eos_token_ids,
                temperature=temperature,
                progress=_at(temperature, progress),
            )
            return _with(found, words)

        alone = [(task, measure((task,))) for task in POOL_TASKS]
        rows = [{"task": task, "prompts": each["conditions"]["prompts"], **each["overall"]} for task, each in alone]
        yield f"pool{ending}", {**measure(tasks.TEXTS), "tasks": rows}


def _expected(_loaded: Loaded, _data: Path, _progress: Progress) -> Named:
    yield "expected", curves.expected(ALPHAS)


def _cost(_loaded: Loaded, _data: Path, progress: Progress) -> Named:
    from research.overhead import target_135m

    yield "cost", curves.cost(target_135m(), range(1, 251), progress=progress)


def _growth(_loaded: Loaded, _data: Path, progress: Progress) -> Named:
    from research.overhead import target_135m

    target, prompt = target_135m(), [7 + n % 900 for n in range(PREFILLED)]
    for _ in range(2):  # the first one is a warm-up
        target.forget()
        began = perf_counter()
        session = target.open(prompt, SamplingParams())
        read_prompt(target, session)
        session.close()
        seconds = perf_counter() - began
    yield "growth", curves.growth(prefill=seconds / PREFILLED, progress=progress)


PARTS: dict[str, Callable[[Loaded, Path, Progress], Named]] = {
    "compression": partial(_twice, "compression", curves.compression, COMPRESSION_PROMPTS),
    "jacobi": _jacobi,
    "pool": _pool,
    "match": partial(_twice, "match", curves.match, MATCH_PROMPTS),
    "expected": _expected,
    "cost": _cost,
    "calibration": partial(_twice, "calibration", partial(curves.calibration, options={"nodes": NODES}), CALIBRATED),
    "growth": _growth,
}


def _prompts(loaded: Loaded, data: Path, names: tuple[str, ...], limit: int, room: int) -> tuple[list[list[int]], str]:
    """Token ids, and the numbers of prompts in words."""
    found = {task.name: tasks.encoded(task, loaded, room) for task in tasks.read(data, names, limit)}
    return [tokens for each in found.values() for tokens in each], tasks.in_words(found)


def _with(found: Data, words: str) -> Data:
    conditions: dict[str, Any] = {**found["conditions"], "data": words}
    return {**found, "conditions": conditions}


def _at(temperature: float, progress: Progress) -> Progress:
    """The same progress bar with the temperature in its text."""
    return lambda what, done, total: progress(f"{sampling(temperature)}, {what}", done, total)
