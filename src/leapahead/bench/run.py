"""Tasks x targets x temperatures x batch sizes, every drafter in each: one cell after another, each kept when it ends.

plan      what is to be measured
cell      (task, target, temperature, batch): all contenders taking turns (`lab.cell`)
record    the file that keeps the finished cells (`lab.record`)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from leapahead.bench.cell import PLAIN, measure_cell, passes, tie_on
from leapahead.bench.conditions import conditions
from leapahead.bench.contender import Configuration, Contender, Ours, Setting
from leapahead.bench.peers import Entry, Peer
from leapahead.bench.record import Cell, Record
from leapahead.bench.tasks import Task, encoded, has_template
from leapahead.core.errors import BadParameter, Refused
from leapahead.models import loading
from leapahead.models.loading import Loaded

Progress = Callable[[str, int, int], None]  # what is being done, passes done, passes in all
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        tasks: see `lab.tasks.read`.
        models: hub name, folder, GGUF file; None is the bundled one.
        configurations: of drafters; plain decoding is always there.
        peers: what others offer, measured on the targets that they can run.
        temperatures, batches: each with each.
        rounds: measured ones; a warm-up comes before them.
        max_new_tokens: of each text.
        seed: of the order of turns, of the dice, and of the bootstrap.
        data: where the prompts are from, for the conditions.
        dtype, device: of models that are no GGUF files.
        threads: of torch, and of llama.cpp; None for their own choice.
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
    data: str = "our own prompts"
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        names = [configuration.name for configuration in self.configurations] + [peer.label for peer in self.peers]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadParameter(f"{twice} is there twice; give each once")
        labels = self.labels
        if again := next((label for label in labels if labels.count(label) > 1), None):
            raise BadParameter(f"the model {again} is there twice; give each model once")

    @property
    def labels(self) -> list[str]:
        """The models' names in the results: a path's last part, where that tells them apart."""
        short = [_short(model) for model in self.models]
        return [
            name if short.count(name) == 1 or model is None else model
            for name, model in zip(short, self.models, strict=True)
        ]

    def conditions(self, date: str) -> dict[str, Any]:
        """Of the whole bench; what only a loaded model tells comes with it."""
        return {
            "date": date,
            **conditions(),
            "data": self.data,
            "tasks": {
                task.name: {"prompts": len(task.prompts), "chat": task.chat, "digest": task.digest}
                for task in self.tasks
            },
            "targets": {},
            "drafters": {each.name: {"drafter": each.drafter, **each.options} for each in self.configurations},
            "peers": {peer.label: peer.version() for peer in self.peers},
            "rounds": self.rounds,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "figures": "speed-up: median of the rounds' ratios to plain decoding in the same round, tokens per second "
            "without prefill, after a warm-up; 95 % percentile bootstrap over rounds and prompts. Of conversations the "
            "first turn only. Counters are of one pass over the prompts, forwards of all passes.",
        }


def run(
    plan: Plan,
    record: Record,
    *,
    progress: Progress = lambda what, done, total: None,
    say: Say = lambda line: None,
    load: Callable[[str | None, Plan], Loaded] | None = None,
) -> None:
    """Measures every cell of the plan that the record does not have.

    Args:
        plan: what.
        record: is written after every cell.
        progress: called as passes end.
        say: called with a line for what is left out.
        load: a model by its name; `load_model` unless a test has its own.

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

        with ExitStack() as ending:
            contenders, refused = _entered(plan, entry, tell, ending)
            record.describe("targets", label, {**_describe(entry.loaded, plan), "refused": refused})
            for task, cell in todo[label]:
                bar.begin(cell)
                rows = _cell(plan, entry.loaded, contenders, task, cell, bar, tell)
                if rows:
                    record.add([{"task": task.name, "target": label, **row} for row in rows])
                bar.end()


def load_model(model: str | None, plan: Plan) -> Loaded:
    """As the plan has it. Only a GGUF file takes its threads with it; torch has them for all."""
    if model is not None and model.lower().endswith(".gguf"):
        options: dict[str, Any] = {} if plan.threads is None else {"n_threads": plan.threads}
        return loading.load(model, device=plan.device, **options)
    if plan.threads is not None:
        _set_torch_threads(plan.threads)
    return loading.load(model, dtype=plan.dtype, device=plan.device)


def _entered(plan: Plan, entry: Entry, say: Say, ending: ExitStack) -> tuple[list[Contender], dict[str, str]]:
    """Who takes part on a loaded model, plain decoding first; and why the others do not."""
    loaded = entry.loaded
    makers: dict[str, Callable[[], Contender]] = {PLAIN: lambda: Ours(PLAIN, loaded.target, loaded.tokenizer, PLAIN)}
    for each in plan.configurations:
        if each.name != PLAIN:
            makers[each.name] = partial(Ours, each.name, loaded.target, loaded.tokenizer, each.drafter, each.options)
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
    plan: Plan, loaded: Loaded, contenders: Sequence[Contender], task: Task, cell: Cell, bar: _Bar, say: Say
) -> list[dict[str, Any]]:
    """The rows; none if no prompt fits."""
    _, _, temperature, batch = cell
    prompts = encoded(task, loaded, plan.max_new_tokens)
    if len(prompts) < len(task.prompts):
        say(
            f"{task.name}: {len(task.prompts) - len(prompts)} of {len(task.prompts)} prompts left out: with "
            f"{plan.max_new_tokens} new tokens they do not fit the context of {loaded.target.context_length}"
        )
    if not prompts:
        return []
    setting = Setting(temperature, batch, plan.max_new_tokens, loaded.eos_token_ids, plan.seed)
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
        rounds=plan.rounds,
        seed=plan.seed,
        judge=tie_on(loaded.target),
        tokenizer=loaded.tokenizer,
        progress=bar.step,
    )


def _describe(loaded: Loaded, plan: Plan) -> dict[str, Any]:
    """What a loaded target tells of itself."""
    target = loaded.target
    told: dict[str, Any] = {
        "name": target.name,
        "context": target.context_length,
        "precision": target.precision,
        "chat": "chat template" if has_template(loaded.tokenizer) else "plain text",
    }
    model: Any = getattr(target, "model", None)  # not every target has one
    if type(target).__module__.endswith(".llama_cpp"):
        import llama_cpp

        from leapahead.models.llama_cpp.context import physical_cores

        buffer = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(model.pointer, buffer, len(buffer))  # as "llama 7B Q4_K - Medium"
        dtype = buffer.value.decode("utf-8", "replace")
        told |= {"backend": "llama.cpp", "dtype": dtype, "threads": plan.threads or physical_cores()}
    elif model is not None:
        import torch

        dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
        told |= {"backend": "transformers", "dtype": dtype, "device": device, "threads": torch.get_num_threads()}
    return told


def _set_torch_threads(threads: int) -> None:
    try:
        import torch
    except ModuleNotFoundError:
        return  # the load says what is missing
    torch.set_num_threads(threads)


def _short(model: str | None) -> str:
    if model is None:
        return loading.BUNDLED
    return Path(model).name if Path(model).exists() else model


class _Bar:
    """Passes done and to do; a cell that ends early is counted as whole."""

    def __init__(self, plan: Plan, todo: dict[str, list[tuple[Task, Cell]]], progress: Progress) -> None:
        self._progress = progress
        contenders = len({PLAIN, *(each.name for each in plan.configurations)}) + len(plan.peers)
        self._sizes = [
            contenders * passes(len(task.prompts), cell[3], plan.rounds)
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
