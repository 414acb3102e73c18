"""Runs a bench: tasks x targets x temperatures x batch sizes, with every drafter and peer in each cell.

plan      what is to be measured
cell      (task, target, temperature, batch), in which all contenders take turns (`bench.cell`)
record    the file to which every finished cell is written (`bench.record`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from leapahead.bench.cell import PLAIN, groups_of, measure_cell, passes, tie_on
from leapahead.bench.conditions import Progress, conditions, describe, silent
from leapahead.bench.contender import Configuration, Contender, Ours, Setting
from leapahead.bench.peers import Entry, Peer
from leapahead.bench.record import Cell, Record
from leapahead.bench.tasks import Task, encoded, has_template, predicted
from leapahead.core.errors import BadParameter, Refused
from leapahead.models import loading
from leapahead.models.loading import Loaded
from leapahead.planner.profile import LatencyProfiles

Say = Callable[[str], None]
Texts = dict[int, list[int]]  # prompt -> plain decoding's tokens
LEAST_PASSES = 4  # of every contender over the batches of a task, since few make few samples of the speed-up


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        tasks: see `bench.tasks.read`.
        models: hub name, folder or GGUF file; None for the bundled model.
        configurations: of drafters; plain decoding is always measured.
        peers: other implementations, measured on the targets that they can run.
        temperatures, batches: all combinations are measured.
        rounds: measured rounds, after a warm-up; see `rounds_of`.
        max_new_tokens: of each text.
        seed: of the order, of the sampling and of the bootstrap.
        data: origin of the prompts, for the conditions.
        dtype, device: of models that are not GGUF files.
        threads: of torch and of llama.cpp; None for their defaults.
        exact: load the models in exact mode.
    """

    tasks: Sequence[Task]
    models: Sequence[str | None] = (None,)
    configurations: Sequence[Configuration]
    peers: Sequence[Peer] = ()
    temperatures: Sequence[float] = (0.0, 1.0)
    batches: Sequence[int] = (1,)
    rounds: int = 5
    max_new_tokens: int = 64
    seed: int = 0
    data: str = "the bundled prompts"
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        names = [configuration.name for configuration in self.configurations] + [peer.label for peer in self.peers]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadParameter(f"{twice} was given twice; give each once")
        labels = self.labels
        if again := next((label for label in labels if labels.count(label) > 1), None):
            raise BadParameter(f"the model {again} was given twice; give each model once")

    @property
    def labels(self) -> list[str]:
        """The models' names in the results: the last part of a path, where that is unique."""
        short = [_short(model) for model in self.models]
        return [
            name if short.count(name) == 1 or model is None else model
            for name, model in zip(short, self.models, strict=True)
        ]

    def rounds_of(self, task: Task, batch: int) -> int:
        """The rounds of a cell: of batches as many more as give `LEAST_PASSES` passes over the task's groups."""
        groups = len(groups_of(task.prompts, batch))
        return self.rounds if batch == 1 else max(self.rounds, -(-LEAST_PASSES // groups))

    def conditions(self, date: str) -> dict[str, Any]:
        """The conditions of the bench; those of the targets are added when they are loaded."""
        return {
            "date": date,
            **conditions(),
            "data": self.data,
            "tasks": {
                task.name: {"prompts": len(task.prompts), "chat": task.chat, "digest": task.digest}
                for task in self.tasks
            },
            "targets": {},
            "drafters": {each.name: each.as_dict() for each in self.configurations},
            "peers": {peer.label: peer.version() for peer in self.peers},
            "rounds": self.rounds,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            **({"exact": True} if self.exact else {}),
            "figures": "speed-up: median over the rounds of the ratio to plain decoding in the same round, tokens per "
            "second without prefill, after a warm-up; 95 % percentile bootstrap over rounds and prompts. Only the "
            "first turn of conversations. Counters are of one pass over the prompts, forwards of all passes.",
        }


def run(
    plan: Plan,
    record: Record,
    *,
    progress: Progress = silent,
    say: Say = lambda line: None,
    load: Callable[[str | None, Plan], Loaded] | None = None,
) -> None:
    """Measures every cell of the plan that the record does not have.

    Args:
        plan: what is to be measured.
        record: written after every cell.
        progress: called after every pass, with the numbers of passes done and in all.
        say: called with a line for everything that is left out.
        load: loads a model of the plan; by default `load_model`.

    Raises:
        LeapaheadError: a model cannot be loaded, or the record cannot be written; finished cells are in the record.
    """
    cells = {
        label: [
            (task, (task.name, label, float(temperature), batch))
            for task in plan.tasks
            for temperature in plan.temperatures
            for batch in plan.batches
        ]
        for label in plan.labels
    }
    todo = {label: [each for each in some if not record.finished(each[1])] for label, some in cells.items()}
    bar = _Bar(plan, todo, progress)
    for label, model in zip(plan.labels, plan.models, strict=True):
        if not todo[label]:
            continue
        bar.show(f"loading {label}")
        entry = Entry((load or load_model)(model, plan), model, plan.threads)

        def tell(line: str, label: str = label) -> None:
            say(f"{label}: {line}")

        known: dict[tuple[str, float], Texts] = {}  # by task and temperature
        with ExitStack() as ending:
            contenders, refused = _entered(plan, entry, tell, ending)
            record.describe("targets", label, {**_describe(entry.loaded), "refused": refused})
            for task, cell in todo[label]:
                bar.begin(cell)
                texts = known.setdefault((task.name, cell[2]), {})
                rows = _cell(plan, entry.loaded, contenders, task, cell, bar, tell, texts)
                if rows:
                    record.add([{"task": task.name, "target": label, **row} for row in rows])
                bar.end()


def load_model(model: str | None, plan: Plan) -> Loaded:
    """Loads a model as the plan says. GGUF files and OpenVINO have their own number of threads; torch's is global."""
    if loading.engine_of(model) != "transformers":
        options: dict[str, Any] = {} if plan.threads is None else {"n_threads": plan.threads}
        return loading.load(model, device=plan.device, exact=plan.exact, **options)
    if plan.threads is not None:
        _set_torch_threads(plan.threads)
    return loading.load(model, dtype=plan.dtype, device=plan.device, exact=plan.exact)


def _entered(plan: Plan, entry: Entry, say: Say, ending: ExitStack) -> tuple[list[Contender], dict[str, str]]:
    """The contenders for a loaded model, plain decoding first; and the reasons of those that are refused."""
    loaded, latency = entry.loaded, LatencyProfiles(entry.loaded.target.info)
    makers: dict[str, Callable[[], Contender]] = {}
    for each in (Configuration(PLAIN), *plan.configurations):
        drafter = (each.drafter, each.options, latency, each.acceptance)
        makers[each.name] = partial(Ours, each.name, loaded.target, loaded.tokenizer, *drafter)
    for peer in plan.peers:
        makers[f"peer:{peer.label}"] = partial(peer.enter, f"peer:{peer.label}", entry)
    contenders, refused = list[Contender](), dict[str, str]()
    for name, make in makers.items():
        try:
            contenders.append(make())
        except Refused as error:
            refused[name] = str(error)
            say(f"{name} is left out: {error}")
        else:
            ending.callback(contenders[-1].close)
    return contenders, refused


def _cell(
    plan: Plan,
    loaded: Loaded,
    contenders: Sequence[Contender],
    task: Task,
    cell: Cell,
    bar: _Bar,
    say: Say,
    texts: Texts,
) -> list[dict[str, Any]]:
    """The rows of a cell; none if no prompt fits into the context."""
    _, _, temperature, batch = cell
    prompts = encoded(task, loaded, plan.max_new_tokens)
    if len(prompts) < len(task.prompts):
        say(
            f"{task.name}: {len(task.prompts) - len(prompts)} of {len(task.prompts)} prompts left out: with "
            f"{plan.max_new_tokens} new tokens they do not fit the context of {loaded.target.info.context_length}"
        )
    if not prompts:
        return []
    expected = predicted(task, loaded)
    setting = Setting(temperature, batch, plan.max_new_tokens, loaded.eos_token_ids, plan.seed, expected)
    able = []
    for each in contenders:
        if reason := each.refusal(prompts, setting):
            say(f"{task.name}, temperature {temperature:g}, batch {batch}: {each.name} is left out: {reason}")
        else:
            able.append(each)
    return measure_cell(
        able,
        prompts,
        setting,
        rounds=plan.rounds_of(task, batch),
        seed=plan.seed,
        judge=tie_on(loaded.target),
        tokenizer=loaded.tokenizer,
        progress=bar.step,
        expected=texts,
    )


def _describe(loaded: Loaded) -> dict[str, Any]:
    """The description of a loaded target, for the conditions."""
    info = loaded.target.info
    return {
        "name": info.name,
        "context": info.context_length,
        "precision": info.precision,
        "chat": "chat template" if has_template(loaded.tokenizer) else "plain text",
        **({"reference": info.reference} if info.reference else {}),
        **describe(loaded.target),
    }


def _set_torch_threads(threads: int) -> None:
    try:
        import torch
    except ModuleNotFoundError:
        return  # loading the model reports what is missing
    torch.set_num_threads(threads)


def _short(model: str | None) -> str:
    if model is None:
        return loading.BUNDLED
    return Path(model).name if Path(model).exists() else model


class _Bar:
    """Counts passes; a cell that ends early counts as complete."""

    def __init__(self, plan: Plan, todo: dict[str, list[tuple[Task, Cell]]], progress: Progress) -> None:
        self._progress = progress
        contenders = len({PLAIN, *(each.name for each in plan.configurations)}) + len(plan.peers)
        self._sizes = [
            contenders * passes(len(task.prompts), cell[3], plan.rounds_of(task, cell[3]))
            for some in todo.values()
            for task, cell in some
        ]
        self._done, self._cells, self._within = 0, 0, 0
        self._what = ""

    def show(self, what: str) -> None:
        self._progress(what, self._done + self._within, sum(self._sizes))

    def begin(self, cell: Cell) -> None:
        task, target, temperature, batch = cell
        self._what = f"{target}, {task}, temperature {temperature:g}, batch {batch}"
        self._within = 0
        self.show(self._what)

    def step(self, name: str) -> None:
        self._within = min(self._within + 1, self._sizes[self._cells])
        self.show(f"{self._what}: {name}")

    def end(self) -> None:
        self._done += self._sizes[self._cells]
        self._cells, self._within = self._cells + 1, 0
        self.show(self._what)
