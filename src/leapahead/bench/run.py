"""Runs a bench: tasks x targets x temperatures x batch sizes, with every drafter and peer in each cell.

plan      what is to be measured (`bench.plan`)
cell      (task, target, temperature, batch), in which all contenders take turns (`bench.cell`)
record    the file to which every finished cell is written (`bench.record`)

Models that differ in their options only are forms of one model: they are loaded together, and measured in one cell. So
are all models of a plan that says so, which must have one tokenizer.
How sequences share the KV cache of a GGUF file depends on their number, so such a model is loaded for each batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from leapahead.bench.cell import PLAIN, Side, measure_sides, passes, tie_on
from leapahead.bench.conditions import Progress, describe, silent
from leapahead.bench.contender import Configuration, Contender, Ours, Setting
from leapahead.bench.figures import beside
from leapahead.bench.peers import Entry, Peer
from leapahead.bench.plan import Model, Plan
from leapahead.bench.record import Record
from leapahead.bench.tasks import Task, encoded, has_template, predicted
from leapahead.core.errors import LeapaheadError
from leapahead.drafters import registry
from leapahead.models import loading
from leapahead.models.base import IdentifiesWeights
from leapahead.models.loading import Loaded
from leapahead.planner.profile import LatencyProfiles

Say = Callable[[str], None]
Texts = dict[int, list[int]]  # prompt -> plain decoding's tokens
Known = dict[tuple[str, float, str], Texts]  # by form, temperature and prompts: other forms decide which fit


@dataclass(frozen=True)
class Todo:
    """A cell of the forms of one model that have not been measured.

    Attributes:
        task, temperature, batch: of the cell.
        labels: names of the forms.
    """

    task: Task
    temperature: float
    batch: int
    labels: Sequence[str]


@dataclass(frozen=True)
class Form:
    """A loaded model with its options, and what is measured of it.

    Attributes:
        label: its name in the results.
        loaded: the target and its tokenizer.
        contenders: plain decoding first.
        say: says a line about it.
    """

    label: str
    loaded: Loaded
    contenders: Sequence[Contender]
    say: Say


def run(
    plan: Plan,
    record: Record,
    *,
    progress: Progress = silent,
    say: Say = lambda line: None,
    load: Callable[[Model, Plan], Loaded] | None = None,
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
    todo = [_todo(plan, forms, record) for forms in plan.forms]
    bar, say = _Bar(plan, todo, progress), cache(say)  # a line once, though a model may be loaded several times
    for models, cells in zip(plan.forms, todo, strict=True):
        texts: Known = {}
        for part, some in _parts(plan, models, cells):
            _measure(part, models, some, record, bar, say, load or load_model, texts)  # which releases the models


def _measure(
    plan: Plan,
    models: Mapping[str, Model],
    cells: Sequence[Todo],
    record: Record,
    bar: _Bar,
    say: Say,
    load: Callable[[Model, Plan], Loaded],
    texts: Known,
) -> None:
    """Loads the forms of a model that are to be measured, and measures them.

    Args:
        texts: plain decoding's; those that are missing are added.
    """
    wanted = {label for cell in cells for label in cell.labels}
    first: dict[str | None, str] = {}  # form of each path
    for label, model in models.items():
        first.setdefault(model.path, label)
    with ExitStack() as ending:
        forms = []
        for label, model in models.items():
            if label in wanted:
                bar.show(f"loading {label}")
                loaded = load(model, plan)
                ending.callback(loading.close, loaded.target)
                peers = plan.peers if label == first[model.path] else ()
                forms.append(_form(plan, label, model, loaded, peers, say, record, ending))
        if plan.together:
            _check_tokens(plan, forms)
        for cell in cells:
            bar.begin(cell)
            rows = _cell(plan, [form for form in forms if form.label in cell.labels], cell, bar, texts)
            if rows:
                record.add([{"task": cell.task.name, **row} for row in rows])
            bar.end()


def _parts(plan: Plan, models: Mapping[str, Model], cells: Sequence[Todo]) -> Iterator[tuple[Plan, list[Todo]]]:
    """The cells of the forms of a model that are measured without loading it anew, each part with the plan for it."""
    engines = {plan.engine_of(each) for each in models.values()}
    for batches in [(each,) for each in plan.batches] if "llama.cpp" in engines else [tuple(plan.batches)]:
        yield replace(plan, batches=batches), [cell for cell in cells if cell.batch in batches]


def load_model(model: Model, plan: Plan) -> Loaded:
    """Loads a model as the plan says. GGUF files and OpenVINO have their own number of threads; torch's is global."""
    options = plan.arguments(model)
    if plan.engine_of(model) == "transformers" and plan.threads is not None:
        _set_torch_threads(plan.threads)
    branching = registry.branching(*(each.drafter for each in plan.configurations))
    return loading.load(model.path, sequences=max(plan.batches), branching=branching, **options)


def _todo(plan: Plan, forms: Iterable[str], record: Record) -> list[Todo]:
    """The cells of some forms that have not been measured."""
    cells = [
        Todo(task, float(temperature), batch, [])
        for task in plan.tasks
        for temperature in plan.temperatures
        for batch in plan.batches
    ]
    missing = [
        replace(
            cell,
            labels=[
                label for label in forms if not record.finished((cell.task.name, label, cell.temperature, cell.batch))
            ],
        )
        for cell in cells
    ]
    return [cell for cell in missing if cell.labels]


def _form(
    plan: Plan,
    label: str,
    model: Model,
    loaded: Loaded,
    peers: Sequence[Peer],
    say: Say,
    record: Record,
    ending: ExitStack,
) -> Form:
    """A loaded model with its contenders, which `ending` closes; its description is put into the record."""

    def tell(line: str) -> None:
        say(f"{label}: {line}")

    entry = Entry(loaded, model.path, plan.threads_of(model))
    contenders, refused = _entered(plan, entry, peers, tell, ending)
    before = record.conditions.get("targets", {}).get(label, {}).get("refused", {})
    refused = {name: before.get(name, why) for name, why in refused.items()}  # it may name the free memory
    given = plan.given(model)
    options = {"options": given} if given else {}
    record.describe("targets", label, {**_describe(loaded), **options, "refused": refused})
    info, most = loaded.target.info, max(plan.batches)
    of_batch = f"{label}, batch {most}"  # a GGUF file is loaded for each, with a cache and a context of its own
    record.describe("contexts", of_batch, {"tokens": info.context_length})
    if most > 1 and info.kv_cache:
        tell(info.kv_cache)
        chosen = info.kv_cache.partition(", since ")[0]  # the reason names the free memory, which changes
        record.describe("kv_cache", of_batch, {"chosen": chosen})
    return Form(label, loaded, contenders, tell)


def _entered(
    plan: Plan, entry: Entry, peers: Sequence[Peer], say: Say, ending: ExitStack
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders for a loaded model, plain decoding first; and the reasons of those that are not possible."""
    loaded, latency = entry.loaded, LatencyProfiles(entry.loaded.target.info)
    makers: dict[str, Callable[[], Contender]] = {}
    for each in (Configuration(PLAIN), *plan.configurations):
        drafter = (each.drafter, each.options, latency, each.acceptance)
        makers[each.name] = partial(Ours, each.name, loaded.target, loaded.tokenizer, *drafter)
    for peer in peers:
        makers[f"peer:{peer.label}"] = partial(peer.enter, f"peer:{peer.label}", entry)
    contenders, refused = list[Contender](), dict[str, str]()
    for name, make in makers.items():
        try:
            contenders.append(make())
        except LeapaheadError as error:  # also of a draft model that is not the target's, or does not fit beside it
            refused[name] = str(error)
            say(f"{name} is left out: {error}")
        else:
            ending.callback(contenders[-1].close)
    return contenders, refused


def _cell(plan: Plan, forms: Sequence[Form], cell: Todo, bar: _Bar, texts: Known) -> list[dict[str, Any]]:
    """The rows of a cell for each form; none if fewer prompts than the batch has texts fit every form's context."""
    task = cell.task
    shortest = min(forms, key=lambda form: form.loaded.target.info.context_length)
    prompts = encoded(task, shortest.loaded, plan.max_new_tokens)
    if len(prompts) < len(task.prompts):
        shortest.say(
            f"{task.name}: {len(task.prompts) - len(prompts)} of {len(task.prompts)} prompts left out: with "
            f"{plan.max_new_tokens} new tokens they do not fit the context of "
            f"{shortest.loaded.target.info.context_length}"
        )
    if len(prompts) < cell.batch:
        if prompts:  # fewer texts would be decoded together than the rows say
            shortest.say(
                f"{task.name}: batch {cell.batch} is left out, since the task has too few prompts ({len(prompts)}); "
                "give more"
            )
        return []
    expected = predicted(task, shortest.loaded)
    setting = Setting(cell.temperature, cell.batch, plan.max_new_tokens, seed=plan.seed, predictions=expected)
    settings = [replace(setting, eos_token_ids=form.loaded.eos_token_ids) for form in forms]
    sides = [
        Side(
            _able(form, prompts, own, task),
            tie_on(form.loaded.target),
            own,
            form.loaded.tokenizer,
            texts.setdefault((form.label, cell.temperature, str(prompts)), {}),
        )
        for form, own in zip(forms, settings, strict=True)
    ]
    rounds = plan.rounds_of(task, cell.batch)
    found = measure_sides(sides, prompts, rounds=rounds, seed=plan.seed, progress=bar.step)
    rows = [{"target": form.label, **row} for form, rows in zip(forms, found, strict=True) for row in rows]
    return beside(rows, plan.seed)


def _check_tokens(plan: Plan, forms: Sequence[Form]) -> None:
    """Refuses models that read a prompt as other tokens than the first one does.

    Raises:
        LeapaheadError: there is one.
    """
    for task in plan.tasks:
        some = replace(task, prompts=task.prompts[:1])
        read = {form.label: found for form in forms if (found := encoded(some, form.loaded, plan.max_new_tokens))}
        for label, tokens in read.items():
            if tokens != next(iter(read.values())):
                raise LeapaheadError(
                    f"{label} reads the prompts of {task.name} as other tokens than {next(iter(read))}, so that they "
                    "cannot be measured together; measure them one after the other"
                )


def _able(form: Form, prompts: Sequence[list[int]], setting: Setting, task: Task) -> list[Contender]:
    """The contenders that can run a cell."""
    able = []
    for each in form.contenders:
        reason = each.refusal(prompts, setting)
        if setting.max_new_tokens == 1 and not isinstance(each, Ours):
            reason = "the only token of a text comes from its prefill, which is not timed"
        if reason:
            where = f"{task.name}, temperature {setting.temperature:g}, batch {setting.batch}"
            form.say(f"{where}: {each.name} is left out: {reason}")
        else:
            able.append(each)
    return able


def _describe(loaded: Loaded) -> dict[str, Any]:
    """The description of a loaded target, for the conditions."""
    info = loaded.target.info
    digest = loaded.target.weights_digest() if isinstance(loaded.target, IdentifiesWeights) else ""
    return {
        "name": info.name,
        **({"weights": digest} if digest else {}),  # a bench is not resumed with others of the same name
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


class _Bar:
    """Counts passes; a cell that ends early counts as complete."""

    def __init__(self, plan: Plan, todo: Sequence[Sequence[Todo]], progress: Progress) -> None:
        self._progress = progress
        contenders = len({PLAIN, *(each.name for each in plan.configurations)})
        path = dict(zip(plan.labels, (model.path for model in plan.models), strict=True))
        self._sizes = [
            (len(cell.labels) * contenders + len(plan.peers) * len({path[label] for label in cell.labels}))
            * passes(len(cell.task.prompts), cell.batch, plan.rounds_of(cell.task, cell.batch))
            for cells in todo
            for cell in cells
        ]
        self._done, self._cells, self._within = 0, 0, 0
        self._what = ""

    def show(self, what: str) -> None:
        self._progress(what, self._done + self._within, sum(self._sizes))

    def begin(self, cell: Todo) -> None:
        labels = " and ".join(cell.labels)
        self._what = f"{labels}, {cell.task.name}, temperature {cell.temperature:g}, batch {cell.batch}"
        self._within = 0
        self.show(self._what)

    def step(self, name: str) -> None:
        self._within = min(self._within + 1, self._sizes[self._cells])
        self.show(f"{self._what}: {name}")

    def end(self) -> None:
        self._done += self._sizes[self._cells]
        self._cells, self._within = self._cells + 1, 0
        self.show(self._what)
