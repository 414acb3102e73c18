"""The optimization, the same for all that is trained: warm-up and decay, checkpoints, an end by steps or clock.

Everything that a step depends on is in the checkpoint or a function of the step's number, so that a training of so
many steps that was interrupted and resumed ends with the same weights as one that was not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from leapahead.core.errors import BadParameter
from leapahead.models.transformers.memory import out_of_memory_in
from leapahead.training.batches import Order
from leapahead.training.optimizer import Optimizer
from leapahead.training.recipe import Found
from leapahead.training.settings import MOST_SEED, RunSettings
from leapahead.training.texts import Progress, Text, digest_of

MOST_GRADIENT = 1.0
WARM_UP = 0.03  # of the training
CHECKPOINT_SECONDS = 150.0
POINT = 10  # steps whose mean is a point of the curves
STATE, TEXTS = "state", "texts"  # of a checkpoint's metadata
OPTIMIZER = "optimizer."  # what the names of the optimizer's tensors begin with

Row = list[float]  # the loss, then the agreement at each depth


class Trainable(Protocol):
    """What the loop trains: the recipe of a head, or of a whole model.

    Attributes:
        AGREEMENT: what `Found.agreement` holds; empty for how often the likeliest token was the text's at each depth.
        module: the network, in float32.
    """

    AGREEMENT: tuple[str, ...]
    module: Any

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""

    @property
    def device(self) -> torch.device:
        """Where it is computed."""

    def loss(self, batch: Any, generator: torch.Generator | None = None) -> Found:
        """The loss of a batch; `generator` is of what is random in training, None for held-out texts."""


@dataclass
class State:
    """How far a training is.

    Attributes:
        step: optimizer steps that were taken.
        seconds: that they took.
        recent: the rows of the last steps, of which there is no point yet.
        points: the number of a step, then the mean of the rows of `POINT` steps up to it.
        held_out: the number of a step, then the row of the held-out texts after it.
    """

    step: int = 0
    seconds: float = 0.0
    recent: list[Row] = field(default_factory=list)
    points: list[Row] = field(default_factory=list)
    held_out: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Notes a step that was taken."""
        self.step += 1
        self.recent.append(row)
        if len(self.recent) == POINT:
            self.points.append([self.step, *(sum(column) / POINT for column in zip(*self.recent, strict=True))])
            self.recent = []

    @property
    def loss(self) -> float:
        """The mean of the last steps."""
        if self.recent:
            return sum(row[0] for row in self.recent) / len(self.recent)
        return self.points[-1][1] if self.points else math.nan


@dataclass(frozen=True)
class Watch:
    """What a training tells, and what tells it to stop.

    Attributes:
        progress: is called after every step.
        say: is called with a line after every checkpoint.
        interrupts: a context that gives a function, which says whether to end after the step such that the training
            can be resumed; see `leapahead.cli.screen.interrupts_between_steps`.
        clock: in seconds.
    """

    progress: Progress
    say: Callable[[str], None]
    interrupts: Callable[[], AbstractContextManager[Callable[[], bool]]] = lambda: nullcontext(lambda: False)
    clock: Callable[[], float] = perf_counter


class Training:
    """One training, from its checkpoint if there is one.

    Args:
        recipe: with the network.
        order: of the texts to train on.
        batches: makes the batch of some texts that `recipe` takes.
        settings: complete.
        checkpoint: the file.
        held_out: a batch on which the loss is measured at every checkpoint; None for none.

    Attributes:
        state: how far it is.

    Raises:
        BadParameter: the checkpoint is of another network or of other texts, or cannot be read.
    """

    def __init__(
        self,
        recipe: Trainable,
        order: Order,
        batches: Callable[[Sequence[Text]], Any],
        settings: RunSettings,
        checkpoint: Path,
        held_out: Any = None,
    ) -> None:
        self.recipe, self.order, self.batches, self.settings = recipe, order, batches, settings
        self.checkpoint, self.held_out = checkpoint, held_out
        self.parameters = recipe.parameters
        self.optimizer = Optimizer(settings.optimizer, self.parameters)
        self._texts = digest_of(order.texts)
        self.state = self._load() if checkpoint.exists() else State()

    @property
    def share(self) -> float:
        """How much of the training is done, from 0 to 1."""
        if self.settings.steps is not None:
            return self.state.step / self.settings.steps
        assert self.settings.minutes is not None, "the settings are complete"
        return self.state.seconds / (60 * self.settings.minutes)

    @property
    def is_done(self) -> bool:
        return self.share >= 1

    def run(self, watch: Watch) -> State:
        """Trains to the end, or until it is told to stop; writes a checkpoint then, and every few minutes.

        Raises:
            BadParameter: the loss is not a finite number, or a checkpoint cannot be written.
            LeapaheadError: the memory of the device is exhausted.
        """
        if self.is_done:
            return self.state
        self.recipe.module.train()
        started = watch.clock() - self.state.seconds
        saved = watch.clock()
        with self._memory(), watch.interrupts() as stop:
            while not self.is_done and not stop():
                self.state.add(self._step())
                now = watch.clock()
                self.state.seconds = now - started
                watch.progress(f"training, loss {self.state.loss:.3f}", *self._done())
                if now - saved >= CHECKPOINT_SECONDS:
                    self._save(watch.say)
                    saved = watch.clock()
            self._save(watch.say)
        return self.state

    def _memory(self) -> AbstractContextManager[None]:
        """A context in which exhausted memory is told with what helps, fewer texts in a forward."""
        size = self.order.size
        remedy = f"go on with --resume, batch={size // 2} and accumulate={2 * self.settings.accumulate}"
        if size == 1:
            remedy = "begin a new folder with fewer max_new_tokens or, for a head, a smaller draft_vocab"
        return out_of_memory_in("a training step", size, self.recipe.device, remedy)

    def _done(self) -> tuple[int, int]:
        """Steps or seconds that are done, and how many there are."""
        if self.settings.steps is not None:
            return self.state.step, self.settings.steps
        return int(self.state.seconds), int(60 * (self.settings.minutes or 0))

    def _rate(self) -> float:
        """The learning rate of the next step."""
        share = min(1.0, self.share + (0.5 / self.settings.steps if self.settings.steps else 0.0))
        falling = 1 - share if self.settings.schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * share)
        return self.settings.lr * min(1.0, share / WARM_UP) * falling

    def _step(self) -> Row:
        """One optimizer step; returns its row."""
        count, step, rate, device = self.settings.accumulate, self.state.step, self._rate(), self.recipe.device
        seed = (self.settings.seed * 1_000_003 + step) % MOST_SEED
        generator = torch.Generator().manual_seed(seed)
        rows: list[Tensor] = []
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)  # of dropout
            for number in range(step * count, (step + 1) * count):
                batch = self.batches(self.order[number])
                with autocast(device):
                    found = self.recipe.loss(batch, generator)
                if found.loss.requires_grad:  # a head may be able to propose none of the texts' tokens
                    (found.loss / count).backward()  # type: ignore[no-untyped-call]
                rows.append(torch.cat([found.loss.detach()[None], found.agreement]))
        row: Row = torch.stack(rows).mean(0).tolist()
        self._check_finite(row[0], f"the loss of step {step + 1}")
        nn.utils.clip_grad_norm_(self.parameters.values(), MOST_GRADIENT)
        self.optimizer.step(rate)
        return row

    def _check_finite(self, value: float, what: str) -> None:
        """Refuses a value that shows that the training has diverged."""
        if not math.isfinite(value):
            raise BadParameter(
                f"{what} is not a finite number; go on from the last checkpoint with --resume and a lower learning "
                f"rate than lr={self.settings.lr:g}"
            )

    # ------------------------------------------------------------------------------------------------ checkpoints

    @torch.no_grad()
    def _save(self, say: Callable[[str], None]) -> None:
        """Measures the held-out texts and writes the checkpoint, in one step."""
        state = self.state
        for name, each in self.parameters.items():
            self._check_finite(each.abs().max().item(), f"a weight of {name} after step {state.step}")
        line = f"step {state.step}, {state.seconds / 60:.1f} minutes: loss {state.loss:.3f}"
        if self.held_out is not None:
            self.recipe.module.eval()
            with autocast(self.recipe.device):
                found = self.recipe.loss(self.held_out)
            self.recipe.module.train()
            self._check_finite(found.loss.item(), f"the loss of the held-out texts after step {state.step}")
            state.held_out.append([state.step, found.loss.item(), *found.agreement.tolist()])
            right, names = [f"{each:.2f}" for each in state.held_out[-1][2:]], self.recipe.AGREEMENT
            told = map(" ".join, zip(names, right, strict=True)) if names else ["right at each depth", *right]
            line += f"; held-out texts: loss {state.held_out[-1][1]:.3f}, {(', ' if names else ' ').join(told)}"
        tensors = {name: each.detach() for name, each in self.parameters.items()}
        tensors |= {OPTIMIZER + name: each for name, each in self.optimizer.tensors().items()}
        part = self.checkpoint.with_suffix(".part")
        try:
            save_file(
                {name: each.cpu().contiguous() for name, each in tensors.items()},
                part,
                {STATE: json.dumps(asdict(state)), TEXTS: self._texts},
            )
            part.replace(self.checkpoint)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):  # half of it would fill the disk
                part.unlink()
            raise BadParameter(f"the checkpoint {self.checkpoint} cannot be written: {error}") from None
        say(line)

    def _load(self) -> State:
        """Fills the network and the optimizer."""
        try:
            with safe_open(self.checkpoint, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                state = State(**json.loads(file.metadata()[STATE]))
                if file.metadata()[TEXTS] != self._texts:  # held-out texts may be among those that it was trained on
                    raise ValueError("it was trained on other texts, which were changed or added to since")
            weights = {name: each for name, each in tensors.items() if not name.startswith(OPTIMIZER)}
            shapes, own = ({name: each.shape for name, each in some.items()} for some in (weights, self.parameters))
            if shapes != own:
                raise ValueError("its weights are those of another network")
            self.recipe.module.load_state_dict(weights, strict=False)
            self.optimizer.load(
                {name.removeprefix(OPTIMIZER): each for name, each in tensors.items() if name.startswith(OPTIMIZER)}
            )
        except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise BadParameter(
                f"the checkpoint {self.checkpoint} cannot be used: {error}; remove it, and --resume trains from the "
                "first step on"
            ) from None
        return state


def autocast(device: torch.device) -> Any:
    """A context in which matrix products are computed in bfloat16, where the processor has it."""
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_onednn = device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        has = has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.autocast(device.type, torch.bfloat16) if has else nullcontext()
