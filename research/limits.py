"""`python -m research limits`: how much drafting gains where a step takes what was measured, and nothing else does.

    gain = tokens x T'(1) / sum of T(rows)        T: of a target; T'(1): of a plain step on the fastest one

First T(n) of several targets is measured, which take turns. Then `auto` decodes real texts on the bundled model, and a
step takes T(rows) of one of the targets on a simulated clock. The plan knows these times, drafting takes none, and a
change of the number of rows costs nothing. So this is what `auto` gains where its plan is right about all times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np

from leapahead.bench import tasks
from leapahead.bench.conditions import Data, Progress, conditions
from leapahead.bench.contender import Ours, Setting
from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.cli.options import all_of
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models import loading
from leapahead.models.base import Session, Target, read_prompt
from research.command_parts import data_options, length_option, show
from research.simulation import Fixed

SIZES = (*range(1, 17), 20, 24, 32, 48, 64)  # rows
SHOWN = (4, 8, 16)
CONTEXT, REPEATS = 300, 4  # tokens; forwards of one size in a row, of which the first is not counted
WARM_UP = 6  # plain steps of a target before its sizes are measured: it has been idle while others had their turn
TEMPERATURES = (0.0, 1.0)

Times = Mapping[int, float]  # rows -> seconds


def times(targets: Mapping[str, Target], rounds: int, progress: Progress) -> dict[str, dict[int, float]]:
    """Median seconds of a step by its rows, for each target: chains over 300 tokens. The targets take turns.

    Of a target that pads drafted steps, sizes between its multiples are not measured.
    """
    sizes = {
        name: [n for n in SIZES if n == 1 or (n % target.info.bucket == 0 and n <= target.max_nodes)]
        for name, target in targets.items()
    }
    found: dict[str, dict[int, list[float]]] = {name: {n: [] for n in each} for name, each in sizes.items()}
    with ExitStack() as opened:
        sessions = {}
        for name, target in targets.items():
            tokens = [(1 + 7 * index) % target.info.vocab_size for index in range(CONTEXT + max(SIZES))]
            session = opened.enter_context(closing(target.open(tokens[:CONTEXT], SamplingParams())))
            read_prompt(target, session)
            sessions[name] = session, tokens
        for done in range(rounds):
            for index, (name, target) in enumerate(targets.items()):
                progress(name, done * len(targets) + index, rounds * len(targets))
                for _ in range(WARM_UP):
                    _step(target, *sessions[name], 1)
                for n, seconds in found[name].items():
                    seconds += [_step(target, *sessions[name], n) for _ in range(REPEATS)][1:]
    return {name: {n: median(seconds) for n, seconds in each.items()} for name, each in found.items()}


def _step(target: Target, session: Session, tokens: list[int], size: int) -> float:
    tree = TokenTree.chain(tokens[CONTEXT - 1], tokens[CONTEXT : CONTEXT + size - 1])
    with target.lock:
        began = perf_counter()
        _ = target.step([session], [tree])[0][0]
        return perf_counter() - began


class Clock:
    """Moved by every step of a target.

    Args:
        target: whose steps are to take these times.
        known: of forwards by their rows.
        bucket: rows to whose multiples drafted steps are padded.
    """

    def __init__(self, target: Target, known: Times, bucket: int) -> None:
        self.now = 0.0
        self.latency = Fixed(replace(target.info, bucket=bucket), known, lambda: self.now)
        self._rows, self._seconds, self._bucket = list(known), list(known.values()), bucket
        self._target, self._whole = target, target.step
        target.step = self._step  # type: ignore[method-assign]

    def _step(self, sessions: Sequence[Session], trees: Sequence[TokenTree], *args: Any, **options: Any) -> Any:
        rows = sum(map(len, trees))
        if rows > len(trees):
            rows = -(-rows // self._bucket) * self._bucket
        self.now += float(np.interp(rows, self._rows, self._seconds))
        return self._whole(sessions, trees, *args, **options)

    def close(self) -> None:
        """Leaves the target as it was."""
        self._target.step = self._whole  # type: ignore[method-assign]


def gains(loaded: loading.Loaded, sets: Sequence[tasks.Task], known: Times, bucket: int, most: int) -> Iterator[Data]:
    """For each temperature and task, the tokens of all texts and the seconds that `auto` takes for them.

    Args:
        loaded: the model of which the texts are.
        known: seconds of a step by its rows.
        bucket: see `Clock`.
        most: tokens of a text.
    """
    ends = tuple(loaded.eos_token_ids)
    for temperature in TEMPERATURES:
        with closing(Clock(loaded.target, known, bucket)) as clock:
            ours = Ours("auto", loaded.target, loaded.tokenizer, "auto", {}, clock.latency)
            with closing(ours):
                for task in sets:
                    ours.begin_round()  # as a bench does: `edits` has prompts of `humaneval`
                    prompts = tasks.encoded(task, loaded, most)
                    setting = Setting(temperature, 1, most, ends, 1, tasks.predicted(task, loaded))
                    began = clock.now
                    texts = [text for prompt in prompts for text in ours.run([list(prompt)], setting).texts]
                    steps = [text.stats.steps for text in texts if text.stats is not None]
                    yield {
                        "task": task.name,
                        "temperature": temperature,
                        "tokens": sum(len(text.tokens) for text in texts),
                        "steps": sum(steps),
                        "seconds": clock.now - began,
                    }


def measured(names: Sequence[str], rounds: int) -> Iterator[Data]:
    """A row for each model: its bucket, and the seconds of a step by its rows. All are loaded at once."""
    loaded = {}
    for name in names:
        with screen.loading(name):
            loaded[Path(name).name] = loading.load(name).target
    with screen.progress("measuring") as bar:
        found = times(loaded, rounds, bar)
    for name, target in loaded.items():
        told = conditions(target, context=CONTEXT, rounds=rounds)
        yield {"model": name, "bucket": target.info.bucket, "seconds": found[name], "conditions": told}


def ratio(row: Data, fastest: float, temperature: float) -> float:
    """How many times as fast as plain decoding with steps of `fastest` seconds `auto` is, all texts together."""
    some = [each for each in row["gains"] if each["temperature"] == temperature]
    seconds: float = sum(each["seconds"] for each in some)
    tokens: int = sum(each["tokens"] for each in some)
    return fastest * tokens / seconds


def cells(row: Data, fastest: float) -> list[str]:
    """A line of the table: times in units of the fastest plain step."""
    known = {int(n): seconds for n, seconds in row["seconds"].items()}
    return [
        row["model"],
        f"{1e3 * known[1]:.1f}",
        *(f"{known[n] / fastest:.2f}" for n in (1, *SHOWN)),
        *(f"{ratio(row, fastest, temperature):.2f}" for temperature in TEMPERATURES),
    ]


COLUMNS = ("model", "T(1), ms", *(f"T({n})" for n in (1, *SHOWN)), "greedy", "temperature 1")


@click.command(cls=Command, examples=("python -m research limits model.gguf model-openvino/ --task gsm8k",))
@click.argument("models", nargs=-1, required=True)
@all_of(data_options("the bundled prompts"))
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Each measures every size.")
@length_option(64)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures as JSON.")
def main(
    models: tuple[str, ...],
    data: Path | None,
    names: tuple[str, ...],
    limit: int | None,
    rounds: int,
    max_new_tokens: int,
    out: Path | None,
) -> None:
    """Print what `auto` would gain if a step took what it was measured to take, and nothing else took time.

    MODELS are what `leapahead generate -m` takes, of one precision or of several: T(n) and the gains are in units of a
    plain step of the fastest one. Texts and drafts are those of the bundled model, and time is simulated.
    """
    if data is not None and not data.is_dir():
        raise BadParameter(f"there is no folder {str(data)!r} of prompts")
    sets = tasks.read(data, names, limit)
    rows = list(measured(models, rounds))
    bundled = loading.load()
    with screen.progress("simulating") as bar:
        for done, row in enumerate(rows):
            bar(row["model"], done, len(rows))
            row["gains"] = list(gains(bundled, sets, row["seconds"], row["bucket"], max_new_tokens))
    fastest = min(row["seconds"][1] for row in rows)
    show(COLUMNS, [cells(row, fastest) for row in rows])
    if out is not None:
        prompts = tasks.in_words({task.name: task.prompts for task in sets})
        found = {"rows": rows, "prompts": prompts, "max_new_tokens": max_new_tokens}
        try:
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise LeapaheadError(f"{out} cannot be written: {error.strerror or error}") from None
        click.echo(f"written: {out}")
