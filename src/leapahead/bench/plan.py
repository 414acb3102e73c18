"""What a bench is to measure, and the conditions that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leapahead.bench.cell import groups_of
from leapahead.bench.conditions import conditions
from leapahead.bench.contender import Configuration
from leapahead.bench.peers import Peer
from leapahead.bench.tasks import Task
from leapahead.core.errors import BadParameter
from leapahead.models import loading

LEAST_PASSES = 4  # of every contender over the batches of a task, since few make few samples of the speed-up
THREADS = "n_threads"  # the argument of GGUF files and OpenVINO models


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that is measured.

    Attributes:
        path: hub name, folder or GGUF file; None for the bundled model.
        options: arguments of `loading.load` for this model alone, which replace those of the plan.
        spelled: the options as they were given, for the name in the results.
    """

    path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    spelled: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        tasks: see `bench.tasks.read`.
        models: measured one after the other, but those of one path, which differ in their options, together.
        configurations: of drafters; plain decoding is always measured.
        peers: other implementations, measured on the targets that they can run, and of the forms of one path on the
            first only.
        temperatures, batches: all combinations are measured, but those of a batch and a task that has fewer prompts.
        rounds: measured rounds, after a warm-up; see `rounds_of`.
        max_new_tokens: of each text.
        seed: of the order, of the sampling and of the bootstrap.
        data: origin of the prompts, for the conditions.
        dtype: of models of Transformers.
        device: of models that are not GGUF files.
        threads: of torch, llama.cpp and OpenVINO; None for their defaults.
        exact: load the models in exact mode.
        together: measure all models as forms of one are, which they may be in other types or under other engines.
        options: other arguments of `loading.load`, for all models.

    Raises:
        BadParameter: a model, a drafter or a peer is given twice, or a model's engine lacks an option.
    """

    tasks: Sequence[Task]
    models: Sequence[Model] = (Model(),)
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
    together: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [configuration.name for configuration in self.configurations] + [peer.label for peer in self.peers]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadParameter(f"{twice} was given twice; give each once")
        same = [(model.path, dict(model.options)) for model in self.models]
        again = next((at for at, each in enumerate(same) if same.count(each) > 1), None)
        if again is not None:
            what = f"the model {self.labels[again]} was given twice"
            raise BadParameter(f"{what}; give each model once, or with other options")
        for model in self.models:
            self._check(model)

    def _check(self, model: Model) -> None:
        """Refuses options that the model's engine does not have, before anything is loaded."""
        given = self.arguments(model)
        kind = self.engine_of(model)
        if kind == "transformers" and (threads := model.options.get(THREADS)) is not None:
            raise BadParameter(
                f"{THREADS}={threads} for {_short(model.path)!r} alone is not possible, since PyTorch has one number "
                f"of threads for all models; give threads={threads} for all of them"
            )
        try:
            loading.check(model.path, **given)
        except BadParameter as error:
            known = loading.OPTIONS_OF[kind]
            common = [name for name in self.options if name in loading.ENGINE_OPTIONS and name not in model.options]
            if len(self.models) > 1 and any(name not in known for name in common):
                raise BadParameter(f"{error}; -m 'MODEL(OPTION)' gives an option to one model alone") from None
            raise

    @property
    def labels(self) -> list[str]:
        """The models' names in the results: the last part of a path, where that is unique, and their own options."""
        short = {model.path: _short(model.path) for model in self.models}
        names = list(short.values())
        bases = {path: name if path is None or names.count(name) == 1 else path for path, name in short.items()}
        return [bases[model.path] + (f"({model.spelled})" if model.spelled else "") for model in self.models]

    @property
    def forms(self) -> list[dict[str, Model]]:
        """The models by their names, those of one path together."""
        if self.together:
            return [dict(zip(self.labels, self.models, strict=True))]
        found: dict[str | None, dict[str, Model]] = {}
        for label, model in zip(self.labels, self.models, strict=True):
            found.setdefault(model.path, {})[label] = model
        return list(found.values())

    def engine_of(self, model: Model) -> str:
        """The engine that a model is loaded with."""
        return loading.engine_of(model.path, self.given(model).get("engine", "auto"))

    def arguments(self, model: Model) -> dict[str, Any]:
        """The arguments of `loading.load` for a model, without its path. The number of torch's threads is global."""
        common = {**self.options, "device": self.device, "exact": self.exact}
        if self.engine_of(model) == "transformers":
            common["dtype"] = self.dtype
        elif self.threads is not None:
            common[THREADS] = self.threads
        return {**common, **model.options}

    def given(self, model: Model) -> dict[str, Any]:
        """The options of a model that were given, for the conditions."""
        return {**self.options, **model.options}

    def threads_of(self, model: Model) -> int | None:
        """The number of threads of a model; None for the default of its engine."""
        threads: int | None = model.options.get(THREADS, self.threads)
        return threads

    def rounds_of(self, task: Task, batch: int) -> int:
        """The rounds of a cell: of batches as many more as give `LEAST_PASSES` passes over the task's groups."""
        groups = len(groups_of(task.prompts, batch))
        return self.rounds if batch == 1 else max(self.rounds, -(-LEAST_PASSES // groups))

    def conditions(self, date: str) -> dict[str, Any]:
        """The conditions of the bench; those of the targets are added when they are loaded."""
        return {
            "date": date,
            **conditions(device=self.device),
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
            **({"together": True} if self.together else {}),
            **({"options": dict(self.options)} if self.options else {}),
            "figures": "speed-up: median over the rounds of the ratio to plain decoding in the same round, tokens per "
            "second without prefill, after a warm-up; 95 % percentile bootstrap over rounds and prompts. Only the "
            "first turn of conversations. Counters are of one pass over the prompts, forwards of all passes.",
        }


def _short(path: str | None) -> str:
    if path is None:
        return loading.BUNDLED
    return Path(path).name if Path(path).exists() else path
