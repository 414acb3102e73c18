"""Tensor parallelism: each device has a part of every weight, and all of them compute every forward together.

    devices     a part of the heads and of the weights each, as Transformers divides them, and the cache of these heads
    a forward   runs on every device at the same time; their layers add up what the others have computed
    everything  else is done by the process that decodes: it drafts, chooses, verifies and commits

Published as tensor model parallelism (Shoeybi et al., 1909.08053). Every process calls its own target in the same order
and with the same tokens, so that their forwards fit together; what this needs is sent by the messages of `link`.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from leapahead.core.errors import LeapaheadError, Refused, first_line
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import (
    CHAIN,
    HIDDEN,
    LOGITS,
    NOTHING,
    TOP_K,
    TREE,
    Capture,
    Session,
    Target,
    TargetInfo,
    require,
)
from leapahead.models.choices import Choices
from leapahead.models.parallel.device import Close, Command, Commit, Device, Fork, Open
from leapahead.models.parallel.followed import FollowedTarget
from leapahead.models.parallel.link import TIMEOUT, Disconnected, Link

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}  # of torch.distributed, by the type of device
LOOPBACK = ("lo", "lo0")  # the network interface of a machine to itself, under Linux and macOS
ONE = "torch.distributed is in use in this process already, and Transformers divides weights over all of its processes"


@contextmanager
def connected(store: Store, rank: int, size: int, device: str, is_local: bool) -> Iterator[None]:
    """Connects the devices of a model, which is loaded within the block; see `end`.

    Args:
        store: where the processes find each other.
        rank, size: of this process, and the number of processes.
        device: of this process.
        is_local: whether all are on this machine; then CPUs are connected by its loopback interface alone.

    Raises:
        Refused: this process has such connections already, or Transformers would load the model elsewhere.
        LeapaheadError: they cannot be connected.
    """
    if distributed.is_initialized():
        raise Refused(f"{ONE}; close the other LLM with tensor_parallel=True, or leave out tensor_parallel here")
    where, usual = torch.device(device), torch._C._get_accelerator().type
    if where.type != usual or usual not in BACKENDS:
        raise Refused(
            f"tensor_parallel=True is not possible on {device}: on this machine Transformers divides weights over "
            f"devices of type {usual}; name those in devices, or leave out tensor_parallel"
        )
    given = {"LOCAL_RANK": str(where.index or 0)}  # by which Transformers finds the device of this process
    if where.type == "cpu" and is_local:
        loopback = [name for _, name in socket.if_nameindex() if name in LOOPBACK]
        given |= dict.fromkeys(("GLOO_SOCKET_IFNAME",), loopback[0]) if loopback else {}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        _connect(store, rank, size, where)
        yield
    except BaseException:
        end()
        raise
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _connect(store: Store, rank: int, size: int, device: torch.device) -> None:
    try:
        distributed.init_process_group(
            BACKENDS[device.type],
            store=PrefixStore("weights", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        raise LeapaheadError(
            f"{size} processes cannot be connected for tensor_parallel: {first_line(error)}; leave it out"
        ) from error


def end() -> None:
    """Ends the connections of `connected`, if there are any."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


@dataclass(frozen=True)
class Limit:
    """Limits the KV cache, so that it is full on all devices at once."""

    tokens: int

    def run(self, device: Device) -> None:
        target: Any = device.target  # of Transformers; no other has weights that are divided
        target.executor.cache.limit = self.tokens


@dataclass(frozen=True)
class Forward:
    """One forward over whole trees; see `Target.step`.

    Attributes:
        numbers: of the sessions.
        trees: tokens and parents of each.
    """

    numbers: tuple[int, ...]
    trees: tuple[tuple[list[int], list[int]], ...]
    num_computed: tuple[int, ...] | None
    capture: Capture

    def run(self, device: Device) -> None:
        sessions = [device.sessions[number] for number in self.numbers]
        trees = [TokenTree(*each) for each in self.trees]
        device.target.step(sessions, trees, self.num_computed, self.capture)


@dataclass(frozen=True)
class Called:
    """The same in the process that decodes, which gets the choices. It is never sent."""

    sessions: list[Session]
    trees: Sequence[TokenTree]
    num_computed: Sequence[int] | None
    capture: Capture

    def run(self, device: Device) -> list[Choices]:
        return device.target.step(self.sessions, self.trees, self.num_computed, self.capture)


@dataclass(frozen=True)
class Gather:
    """Puts the parts of a weight together, in the process that decodes."""

    name: str
    is_kept: bool

    def run(self, device: Device) -> Any:
        target: Any = device.target
        weight: Any = getattr(getattr(target.model, self.name)(), "weight", None)
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return whole if self.is_kept else None


class TensorSession:
    """One sequence of a `TensorParallelTarget`: the session of this process's target, which the others follow."""

    def __init__(self, target: TensorParallelTarget, number: int) -> None:
        self.target, self.number = target, number
        self.own = target.here.sessions[number]
        self.tokens, self.sampler = self.own.tokens, self.own.sampler

    @property
    def unread(self) -> int:
        return self.own.unread

    @property
    def replay(self) -> int:
        return self.own.replay

    def commit(self, verdict: Verdict) -> None:
        commit = Commit(self.number, tuple(verdict.path), tuple(verdict.tokens))
        with interrupts_held():  # else an interrupt may come before the others are told
            self.own.commit(verdict)
            for rank in range(1, self.target.link.size):
                self.target.tell(rank, commit)

    def close(self) -> None:
        with interrupts_held():
            for rank in range(self.target.link.size):
                self.target.tell(rank, Close(self.number))


class TensorParallelTarget(FollowedTarget):
    """A target whose weights are divided over devices; see the module and `FollowedTarget`.

    Everything that the target of one device can do is possible, but for embeddings that are added to the model, what
    runs a part of its layers, and exact mode. Its forwards run operation by operation.

    Args:
        target: made in every process at the same time.
        link, end, threads: see `FollowedTarget`.
    """

    patience = timedelta(seconds=5)  # the others may wait for this process in the middle of a forward

    def __init__(
        self,
        target: Target,
        link: Link,
        end: Callable[[float], None] = lambda patience: None,
        threads: int | None = None,
    ) -> None:
        super().__init__(target, link, end, threads)
        if self._cache_tokens:
            self._everywhere([Limit(self._cache_tokens)] * link.size)
            self.info = replace(self.info, cache_tokens=self._cache_tokens)

    def _information(self, info: TargetInfo) -> TargetInfo:
        reason = "it is an encoder-decoder model" if info.decoder is not None else ""
        reason = "exact mode computes on one device" if info.exact else reason
        if reason:
            raise Refused(f"the weights of {info.name} cannot be divided, since {reason}; leave out tensor_parallel")
        return replace(
            info,
            capabilities=info.capabilities & {CHAIN, TREE, TOP_K, LOGITS, HIDDEN},
            fingerprint=f"{info.fingerprint} divided among {self.link.size} devices",
        )

    def _comparable(self, identity: tuple[Any, ...]) -> tuple[Any, ...]:
        return identity[:-1]  # without the digest, since each process has its own part of the weights

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> TensorSession:
        """See `Target.open`."""
        require(self.info, capture.needs, "this capture")
        number, given = next(self._numbers), tuple(int(token) for token in tokens)
        return self._opened(lambda own: Open(number, given, own, capture, reserve, owner), number, params)

    def fork(self, session: TensorSession, params: SamplingParams) -> TensorSession:
        number = next(self._numbers)
        return self._opened(lambda own: Fork(session.number, number, own), number, params)

    def _opened(
        self, command: Callable[[SamplingParams], Command], number: int, params: SamplingParams
    ) -> TensorSession:
        """A session, which is opened here before the others are told to, since what is refused is refused here.

        Nothing is computed. The others choose nothing, so that they need no more than the usual parameters.
        """
        with interrupts_held():
            self.here.run(command(params))
            for rank in range(1, self.link.size):
                self.tell(rank, command(SamplingParams()))
        return TensorSession(self, number)

    def step(
        self,
        sessions: Sequence[TensorSession],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        capture: Capture = NOTHING,
    ) -> list[Choices]:
        self._check_step(sessions, capture)
        own = Called([session.own for session in sessions], trees, num_computed, capture)
        numbers = tuple(session.number for session in sessions)
        given = tuple((tree.token_list, tree.parent_list) for tree in trees)
        theirs = Forward(numbers, given, None if num_computed is None else tuple(num_computed), capture)
        found: list[Choices] = self._everywhere([own, *[theirs] * (self.link.size - 1)])[0]
        return found

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        target: Any = self.here.target
        found: torch.device = target.device
        return found

    def whole_weight(self, name: str) -> Any:
        """A weight of the model, for heads that share it: [vocab, hidden_size] on the device of this process.

        Args:
            name: the method of the model that gives its layer, as "get_input_embeddings".
        """
        with self.lock:
            return self._everywhere([Gather(name, rank == 0) for rank in range(self.link.size)])[0]

    def _everywhere(self, commands: Sequence[Command]) -> list[Any]:
        with interrupts_held():
            return super()._everywhere(commands)

    def _cause(self, errors: list[BaseException]) -> BaseException:
        """Where another process has ended in the middle of a forward, what is known of that, rather than that the
        forward lost its connections."""
        first, *others = errors
        if isinstance(first, LeapaheadError) or not isinstance(first, RuntimeError) or not others:
            return first
        cause = next((each for each in others if not isinstance(each, Disconnected)), others[0])
        cause.__cause__ = first
        return cause


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Within the block, which lasts for one forward, Ctrl-C waits: others would wait for the rest of the forward."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *received: held.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
