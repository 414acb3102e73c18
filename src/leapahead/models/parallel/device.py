"""What one process does on its device: commands on the sessions of an ordinary target, each with an answer.

The process that decodes runs the same commands on its own target as the others on theirs. Which tokens a device has
computed and which it lacks is the business of `target`; nothing here knows that there are other devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import IntArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import (
    Capture,
    HoldsResources,
    IdentifiesWeights,
    KeepsPrefixes,
    Session,
    Target,
    TargetInfo,
    read_prompt,
)
from leapahead.models.choices import Choices, FloatArray, PromptRows


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Meanwhile torch computes in so many threads, a number that other models of the process share; None: as it is."""
    if number is None:
        yield
        return
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)


class Device:
    """A target and its open sessions, by number.

    Args:
        target: that computes.
        threads: of torch's, in which it computes; None for as many as all others.
    """

    def __init__(self, target: Target, threads: int | None = None) -> None:
        self.target, self.threads = target, threads
        self.sessions: dict[int, Session] = {}

    @property
    def identity(self) -> tuple[Any, ...]:
        """What must be equal on all devices."""
        info: TargetInfo = self.target.info
        digest = self.target.weights_digest() if isinstance(self.target, IdentifiesWeights) else ""
        return info.vocab_size, info.context_length, info.precision, tuple(sorted(info.capabilities)), digest

    def run(self, command: Command) -> Any:
        """The answer of a command."""
        with torch_threads(self.threads):
            return command.run(self)

    def close(self) -> None:
        """See `HoldsResources`."""
        if isinstance(self.target, HoldsResources):
            self.target.close()


class Command(Protocol):
    """What a device is told to do."""

    def run(self, device: Device) -> Any: ...


@dataclass(frozen=True)
class Open:
    """Opens a session; see `Target.open`."""

    number: int
    tokens: tuple[int, ...]
    params: SamplingParams
    capture: Capture
    reserve: int
    owner: str

    def run(self, device: Device) -> None:
        device.sessions[self.number] = device.target.open(
            self.tokens, self.params, self.capture, self.reserve, self.owner
        )


@dataclass(frozen=True)
class Read:
    """Reads the prompt, `most` tokens in a forward, until `left` tokens of it are unread."""

    number: int
    left: int
    most: int

    def run(self, device: Device) -> PromptRows | None:
        session, rows = device.sessions[self.number], None
        while session.unread > self.left:
            rows = device.target.prefill(session, min(self.most, session.unread - self.left))
        return rows


@dataclass(frozen=True)
class Fork:
    """Opens a session with the same tokens; see `Target.fork`."""

    number: int
    new: int
    params: SamplingParams

    def run(self, device: Device) -> None:
        device.sessions[self.new] = device.target.fork(device.sessions[self.number], self.params)


@dataclass(frozen=True)
class Part:
    """One session's part of a step.

    Attributes:
        number: of the session.
        tokens, parents: of the tree, over the last token that this device has committed.
        rows: the nodes whose choices are wanted.
        logits: give the logits of these nodes, and choose nothing.
    """

    number: int
    tokens: list[int]
    parents: list[int]
    rows: list[int]
    logits: bool


@dataclass(frozen=True)
class Found:
    """What a step gave of one part, in the order of its `rows`.

    Attributes:
        chosen: the target's choices; -1 where no token can be chosen. Empty where logits are wanted.
        top_k: tokens and logits [rows, k] of the likeliest; None where none were captured.
        logits: [rows, vocab] on the host; None where they are not wanted.
    """

    chosen: list[int]
    top_k: tuple[IntArray, FloatArray] | None
    logits: Any


@dataclass(frozen=True)
class Step:
    """One forward over the parts of a step."""

    parts: tuple[Part, ...]
    top_k: int

    def run(self, device: Device) -> list[Found]:
        sessions = [device.sessions[part.number] for part in self.parts]
        for session in sessions:
            read_prompt(device.target, session)  # fewer of its tokens may have been in this device's cache
        trees = [TokenTree(part.tokens, part.parents) for part in self.parts]
        capture = Capture(top_k=self.top_k, logits=any(part.logits for part in self.parts))
        found = device.target.step(sessions, trees, capture=capture)
        return [_found(choices, part, self.top_k) for choices, part in zip(found, self.parts, strict=True)]


def _found(choices: Choices, part: Part, top_k: int) -> Found:
    if not part.rows:
        return Found([], None, None)
    if part.logits:
        return Found([], None, _host(choices.logits[part.rows]))
    best = None
    if top_k:
        tokens, logits = choices.top_k(top_k)
        best = tokens[part.rows], logits[part.rows]
    return Found([choices[row] for row in part.rows], best, None)


def _host(logits: Any) -> Any:
    """Logits in the host's memory, of a type that numpy has."""
    if isinstance(logits, torch.Tensor):
        return (logits if logits.dtype == torch.float64 else logits.float()).numpy(force=True)
    return np.array(logits)


@dataclass(frozen=True)
class Commit:
    """Makes a path of the last step's tree final; see `Session.commit`."""

    number: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]

    def run(self, device: Device) -> None:
        device.sessions[self.number].commit(Verdict(self.path, self.tokens, len(self.path) - 1))


@dataclass(frozen=True)
class Close:
    """Closes a session."""

    number: int

    def run(self, device: Device) -> None:
        if (session := device.sessions.pop(self.number, None)) is not None:
            session.close()


@dataclass(frozen=True)
class Forget:
    """Releases what is kept of closed sessions."""

    def run(self, device: Device) -> None:
        if isinstance(device.target, KeepsPrefixes):
            device.target.forget()
