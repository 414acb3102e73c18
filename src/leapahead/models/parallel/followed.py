"""A target that other processes compute for, as the process that decodes sees it; they follow its commands (`worker`).

    everywhere   a command that all devices run at the same time, and answer
    tell         a command without an answer, which another process gets with the next one of the first kind

Which commands these are is the business of the targets made of this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from threading import RLock
from typing import Any

from leapahead.core.errors import CacheFull, LeapaheadError
from leapahead.core.tree import TokenTree
from leapahead.models.base import Capture, Cost, Target, TargetInfo, require
from leapahead.models.choices import PromptRows
from leapahead.models.parallel.device import Command, Device, Forget, Read
from leapahead.models.parallel.link import Disconnected, Link
from leapahead.models.parallel.worker import DONE, FAILED, FULL, Reply, Stop

PATIENCE = timedelta(seconds=5)  # within which a process that is told to stop receives that
END = 5.0  # seconds that it may take to end then
INTERRUPTED = "it was interrupted in the middle of a step"


class FollowedTarget:
    """See the module, and `leapahead.models.base.Target`.

    Args:
        target: this process's own.
        link: to the other processes, each of which runs `worker.follow` with the same model.
        end: called when the target is closed, with the seconds that the other processes may take to end.
        threads: see `Device`.

    Raises:
        Refused: the target is of a kind that cannot be divided.
        LeapaheadError: another process could not load its model, or has another one.
    """

    patience: timedelta | None = None  # for the answers to a command that has failed here; None: as for others
    has_threads = True  # of the connections, which a forked process shares with its parent

    def __init__(
        self,
        target: Target,
        link: Link,
        end: Callable[[float], None] = lambda patience: None,
        threads: int | None = None,
    ) -> None:
        self.here, self.link, self._end = Device(target, threads), link, end
        self._process = os.getpid()
        self.lock = RLock()
        self._numbers = count()
        self._news: list[list[Command]] = [[] for _ in range(link.size)]
        self._is_asking = False  # whether there may be answers that are not read
        self.info = self._information(target.info)
        self._cache_tokens = self._compare()

    def _information(self, info: TargetInfo) -> TargetInfo:
        """What is known of the whole, by what is known of this process's target. Raises `Refused`."""
        raise NotImplementedError

    def _compare(self) -> int:
        """Waits until every process has loaded its model. Returns the tokens that the smallest KV cache holds."""
        own, least = self._comparable(self.here.identity), self.info.cache_tokens
        for rank in range(1, self.link.size):
            identity, cache_tokens = self._answer(rank)
            least = min(least, cache_tokens)
            if (other := self._comparable(identity)) != own:
                raise LeapaheadError(
                    f"process {rank} has loaded another model than process 0: {_differences(own, other)}; start all "
                    "processes with the same model, dtype and versions"
                )
        return least

    def _comparable(self, identity: tuple[Any, ...]) -> tuple[Any, ...]:
        """What must be equal in all processes, of `Device.identity`."""
        return identity

    @property
    def model(self) -> Any:
        """The model of this process's own target, where that has one; its configuration tells what ends a text."""
        return getattr(self.here.target, "model", None)

    @property
    def max_leaves(self) -> int:
        return self.here.target.max_leaves

    @property
    def max_nodes(self) -> int:
        return self.here.target.max_nodes

    def cost(self, sessions: Sequence[Any], trees: Sequence[TokenTree]) -> Cost:
        """Of the whole trees, as the latency profile is of forwards that were divided in the same way."""
        own = [self.here.sessions[session.number] for session in sessions]
        return self.here.target.cost(own, trees)

    def prefill(self, session: Any, max_tokens: int) -> PromptRows | None:
        left = max(0, session.unread - max_tokens)
        rows: PromptRows | None = self._everywhere([Read(session.number, left, max_tokens)] * self.link.size)[0]
        return rows

    def _check_step(self, sessions: Sequence[Any], capture: Capture) -> None:
        require(self.info, capture.needs, "this capture")
        if any(session.unread for session in sessions):
            raise LeapaheadError("a session whose prompt is not read cannot be stepped; call target.prefill first")

    def tell(self, rank: int, command: Command) -> None:
        """Gives a device a command that has no answer; one of another process gets it with the next command."""
        if rank == 0:
            command.run(self.here)  # no computation: the number of threads is not changed for it
        elif not self.link.problem:
            self._news[rank].append(command)

    def _everywhere(self, commands: Sequence[Command]) -> list[Any]:
        """Runs one command on each device, at the same time; returns their answers.

        Raises:
            Exception: what this device raises; else what another one reports, after all have answered.
        """
        if problem := self._problem():
            raise LeapaheadError(f"decoding on several devices has ended: {problem}; make a new LLM")
        self._is_asking = True
        for rank in range(1, self.link.size):
            news, self._news[rank] = self._news[rank], []
            self.link.send(rank, [*news, commands[rank]])
        answers, errors, is_asking = [None], list[BaseException](), False
        try:
            answers = [self.here.run(commands[0])]
        except BaseException as own:
            errors = [own]
        for rank in range(1, self.link.size):
            try:
                answers.append(self._answer(rank, self.patience if errors else None))
            except Exception as other:
                errors.append(other)
            except BaseException as interrupt:
                errors.append(interrupt)
                is_asking = True
        self._is_asking = is_asking
        if errors:
            raise self._cause(errors)
        return answers

    def _cause(self, errors: list[BaseException]) -> BaseException:
        """Which of the errors of one command is raised; that of this process is the first one, if it has one."""
        return errors[0]

    def _problem(self) -> str:
        """Why nothing can be computed any more; "" while all is well.

        An interrupt may have left answers, which would be taken for those to later commands.
        """
        if self._is_asking and not self.link.problem:
            self.link.problem = INTERRUPTED
        return self.link.problem

    def _answer(self, rank: int, timeout: timedelta | None = None) -> Any:
        reply: Reply = self.link.receive(rank, timeout)
        if reply.kind == FULL:
            raise CacheFull(reply.value)
        if reply.kind == FAILED:
            raise LeapaheadError(f"process {rank} of {self.link.size} failed: {reply.value}")
        assert reply.kind == DONE
        return reply.value

    def forget(self) -> None:
        """See `KeepsPrefixes`."""
        for rank in range(self.link.size):
            self.tell(rank, Forget())

    def weights_digest(self) -> str:
        """See `IdentifiesWeights`."""
        return str(self.here.identity[-1])

    def close(self) -> None:
        """See `HoldsResources`. A forked process does not end the other ones, which serve its parent."""
        if os.getpid() != self._process:
            return
        patience = 0.0 if self._problem() else END  # after a problem they cannot be told to stop
        if patience:
            for rank in range(1, self.link.size):
                with suppress(Disconnected):
                    self.link.send(rank, [Stop()], PATIENCE)
            self.link.problem = "the target was closed"
        self._end(patience)
        self.here.close()


def _differences(own: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    names = ("vocabulary", "context length", "precision", "capabilities", "weights")
    return ", ".join(name for name, here, there in zip(names, own, other, strict=False) if here != there)
