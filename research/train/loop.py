"""The training loop: Muon and AdamW, warm-up, a plateau and a long decay, within a budget of time or steps."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F

from research.train.model import Shape, TinyLlama

EpochSource = Callable[[int], NDArray[np.uint16]]


@dataclass(frozen=True)
class Plan:
    """What one training run may spend and how fast it learns.

    Exactly one of ``minutes`` and ``steps`` bounds the run. With ``minutes`` the schedule follows the clock, so
    a run ends on time on a machine of any speed, at the price of not repeating bit for bit.
    """

    minutes: float | None = None
    steps: int | None = None
    batch_tokens: int = 8192
    matrix_lr: float = 5e-3
    other_lr: float = 4e-3
    warmup: float = 0.02
    decay: float = 0.5
    lengths: tuple[tuple[float, int], ...] = ((0.0, 512), (0.85, 2048))
    distill: float = 0.0
    compile: bool = True
    seed: int = 0
    checkpoint_seconds: float = 150.0

    def rate(self, progress: float) -> float:
        """Return the learning rate's factor at ``progress`` in ``0 .. 1``: up, flat, then linearly to zero."""
        return max(0.0, min(1.0, progress / self.warmup, (1.0 - progress) / self.decay))

    def length(self, progress: float) -> int:
        """Return the length of the training windows; most of the run is short because attention costs."""
        return [size for start, size in self.lengths if progress >= start][-1]


@dataclass
class State:
    """What a resumed run needs besides weights and optimizer state."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    offset: int = 0
    loss: float = math.nan
    done: bool = False
    losses: list[tuple[int, float]] = field(default_factory=list)
    unloop_steps: int = 0
    unloop_minutes: float = 0.0


class Reader:
    """Cuts packed epochs into batches, one epoch in memory at a time."""

    def __init__(self, source: EpochSource, state: State) -> None:
        self.source, self.state = source, state
        self.row = source(state.epoch)

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, ``[rows, length]`` each."""
        need = rows * length + 1
        if self.state.offset + need > len(self.row):
            self.state.epoch += 1
            self.state.offset = 0
            self.row = self.source(self.state.epoch)
        window = self.row[self.state.offset : self.state.offset + need]
        self.state.offset += need - 1
        ids = torch.from_numpy(window.astype(np.int64))
        return ids[:-1].view(rows, length), ids[1:].view(rows, length)


def make_optimizers(model: TinyLlama, plan: Plan) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for the embedding and the norms."""
    matrices = [w for name, w in model.named_parameters() if w.dim() == 2 and "embed" not in name]
    others = [w for name, w in model.named_parameters() if w.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=plan.matrix_lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=plan.other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def loss_function(model: TinyLlama, teacher: TinyLlama | None, share: float) -> Callable[..., Tensor]:
    """Return the loss on a batch: cross entropy, with ``share`` of it replaced by the KL from the teacher.

    The layers run in bfloat16 and the loss in float32.
    """

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs)
        flat = logits.float().flatten(0, 1)
        if teacher is None:
            return F.cross_entropy(flat, targets.flatten())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            goal = teacher(inputs)
        wanted = F.softmax(goal.float().flatten(0, 1), dim=-1)
        log_probs = F.log_softmax(flat, dim=-1)
        soft = -(wanted * log_probs).sum(-1).mean()
        return share * soft + (1.0 - share) * F.nll_loss(log_probs, targets.flatten())

    return loss


class Checkpoint:
    """The files a run resumes from; they live in a work folder and are never shipped."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.weights = folder / f"{name}.safetensors"
        self.optimizers = folder / f"{name}.optimizers.pt"
        self.state = folder / f"{name}.json"

    def exists(self) -> bool:
        """Whether there is a complete checkpoint; the state is written last."""
        return self.state.exists()

    def save(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], state: State) -> None:
        """Write all three files, each under a temporary name first."""
        parts: list[tuple[Path, Callable[[Path], Any]]] = [
            (self.weights, lambda path: save_model(model, str(path))),
            (self.optimizers, lambda path: torch.save([opt.state_dict() for opt in optimizers], path)),
            (self.state, lambda path: path.write_text(json.dumps(asdict(state)))),
        ]
        for path, write in parts:
            temporary = path.with_name(path.name + ".tmp")
            write(temporary)
            temporary.replace(path)

    def load(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> State:
        """Fill ``model`` and ``optimizers`` and return the state."""
        load_model(model, self.weights)
        for optimizer, saved in zip(optimizers, torch.load(self.optimizers, weights_only=True), strict=True):
            optimizer.load_state_dict(saved)
        return State(**json.loads(self.state.read_text()))


def train(
    name: str,
    shape: Shape,
    plan: Plan,
    source: EpochSource,
    work: Path,
    *,
    teacher: TinyLlama | None = None,
    resume: bool = False,
    console: Console | None = None,
) -> tuple[TinyLlama, State]:
    """Train one model and return it with its final state.

    With ``resume`` the run goes on from its last checkpoint; a ``plan`` with fewer minutes than before makes it
    decay sooner.
    """
    console = console or Console()
    torch.manual_seed(plan.seed)
    model = TinyLlama(shape)
    optimizers = make_optimizers(model, plan)
    checkpoint = Checkpoint(work, name)
    state = checkpoint.load(model, optimizers) if resume and checkpoint.exists() else State()
    if state.done:
        return model, state
    reader = Reader(source, state)
    loss_of = loss_function(model, teacher, plan.distill)
    if plan.compile:
        loss_of = torch.compile(loss_of, dynamic=False)
    console.print(f"{name}: {model.parameter_count():,} parameters, {len(reader.row):,} tokens an epoch")

    started = time.monotonic() - state.seconds
    saved = time.monotonic()
    with _Display(name, console) as display:
        while True:
            state.seconds = time.monotonic() - started
            progress = _progress(plan, state)
            if progress >= 1.0:
                break
            tokens, loss = _update(model, optimizers, loss_of, reader, plan, progress)
            state.step += 1
            state.tokens += tokens
            state.loss = loss if math.isnan(state.loss) else 0.95 * state.loss + 0.05 * loss
            now = time.monotonic()
            display.show(state, progress, tokens, now - started)
            if now - saved > plan.checkpoint_seconds:
                checkpoint.save(model, optimizers, state)
                saved = time.monotonic()
    state.done = True
    checkpoint.save(model, optimizers, state)
    return model, state


def _update(
    model: TinyLlama,
    optimizers: list[torch.optim.Optimizer],
    loss_of: Callable[..., Tensor],
    reader: Reader,
    plan: Plan,
    progress: float,
) -> tuple[int, float]:
    """One optimizer step; returns its tokens and its loss."""
    for optimizer, rate in zip(optimizers, (plan.matrix_lr, plan.other_lr), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * plan.rate(progress)
    length = plan.length(progress)
    inputs, targets = reader.batch(max(1, plan.batch_tokens // length), length)
    loss = loss_of(inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return inputs.numel(), loss.item()


class _Display:
    """A progress bar on a terminal, a line every 20 steps elsewhere."""

    def __init__(self, name: str, console: Console) -> None:
        self.name, self.console, self._logged = name, console, time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(
                "loss {task.fields[loss]:.3f}  {task.fields[speed]:.0f} tok/s  {task.fields[left]:.1f} min left"
            ),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task(name, total=1.0, loss=math.nan, speed=0.0, left=math.nan)

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, state: State, progress: float, tokens: int, seconds: float) -> None:
        """Shows the state after a step over so many tokens, so many seconds after the start."""
        left = seconds * (1 - progress) / max(progress, 1e-9) / 60
        self._bar.update(self._task, completed=progress, loss=state.loss, speed=state.tokens / seconds, left=left)
        if state.step % 20:
            return
        now = time.monotonic()
        pace, self._logged = 20 * tokens / (now - self._logged), now
        state.losses.append((state.step, round(state.loss, 4)))
        if not self.console.is_terminal:
            self.console.print(
                f"{self.name} step {state.step} {100 * progress:.1f}% loss {state.loss:.3f} {pace:.0f} tok/s "
                f"{left:.1f} min left"
            )


def _progress(plan: Plan, state: State) -> float:
    """Return the share of the budget that is spent."""
    if plan.minutes is not None:
        return state.seconds / (60.0 * plan.minutes)
    if plan.steps is not None:
        return state.step / plan.steps
    raise ValueError("a plan needs minutes or steps")
