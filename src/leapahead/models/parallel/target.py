"""A target on several devices, as the process that decodes sees it: each computes whole branches of every tree.

    split     every tree in one part for each device, with all ancestors, and the same root
    step      each device runs ONE forward over its parts; this process gathers the chosen tokens, once a step
    commit    a device commits as much of the accepted path as it has computed

A device lacks the keys and values of accepted tokens that another device has computed. Such tokens are the head of its
next part, as a chain above the root: they are computed again in a forward that it runs anyway, and only tokens are ever
sent. At most the accepted tokens of one step ride there.

    this device has committed   c0 c1 c2                accepted meanwhile   c3 c4, c5 is the root
    its next part               c2 ── c3 ── c4 ── c5 ─┬─ ...

Every device chooses after its own nodes, with the sampler of an ordinary session of its target. Where a grammar or a
reader of logits needs them here, they are gathered instead of the choices.

Only this process drafts, verifies and decides, so nothing must be equal on the devices but their models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count
from threading import RLock
from typing import Any

import numpy as np

from leapahead.core.bias import LogitBias
from leapahead.core.errors import CacheFull, LeapaheadError, Refused
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import IntArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, LOGITS, NOTHING, TOP_K, TREE, Capture, Cost, Target, TargetInfo, require
from leapahead.models.choices import Choices, FloatArray, PromptRows
from leapahead.models.parallel.device import Close, Command, Commit, Device, Forget, Fork, Found, Open, Part, Read, Step
from leapahead.models.parallel.link import Disconnected, Link
from leapahead.models.parallel.split import split
from leapahead.models.parallel.worker import DONE, FAILED, FULL, Reply, Stop

PATIENCE = timedelta(seconds=5)  # within which a process that is told to stop receives that
END = 5.0  # seconds that it may take to end then
INTERRUPTED = "it was interrupted in the middle of a step"


class Gathered(Choices):
    """The choices after the nodes of a tree, as they were made on several devices.

    Args:
        tree: the whole draft.
        sampler: of the session.
        chosen: of every node.
        top_k: tokens and logits of every node; None where none were captured.
    """

    def __init__(
        self, tree: TokenTree, sampler: Sampler, chosen: IntArray, top_k: tuple[IntArray, FloatArray] | None
    ) -> None:
        super().__init__(None, tree, sampler, chosen)
        self._best = top_k

    def _live(self) -> Any:
        raise Refused("only chosen tokens were gathered from the devices; ask for more in the Capture of the step")


class ParallelSession:
    """One sequence of a `ParallelTarget`.

    Attributes:
        held: for each device, how many of the tokens it has committed.
        places: for each device, where in its last part every node of the whole tree is.
        at_home: whether choices are made here, from gathered logits.
    """

    def __init__(
        self, target: ParallelTarget, number: int, tokens: list[int], params: SamplingParams, owner: str
    ) -> None:
        self.target, self.number, self.tokens, self.owner = target, number, tokens, owner
        self.sampler = Sampler(params, tokens, target.info.vocab_size)
        self.at_home = params.grammar is not None
        self.held = [len(tokens)] * target.link.size
        self.places: list[dict[int, int]] = [{} for _ in self.held]

    @property
    def unread(self) -> int:
        return self.target.device.sessions[self.number].unread

    @property
    def replay(self) -> int:
        return 0

    def missing(self, rank: int) -> list[int]:
        """The tokens above the root of a device's next part: its last committed one, then those that it lacks."""
        return self.tokens[self.held[rank] - 1 : -1]

    def part(self, rank: int, tree: TokenTree, nodes: Sequence[int], rows: Sequence[int], logits: bool) -> Part:
        """What a device computes of a tree.

        Args:
            rank: of the device.
            tree: the whole draft.
            nodes: that it computes.
            rows: those of them whose choices it gives.
            logits: see `Part`.
        """
        place = {node: at for at, node in enumerate(nodes)}
        parents = [-1, *(place[tree.parent_list[node]] for node in nodes[1:])]
        own = TokenTree.of_lists(
            [tree.token_list[node] for node in nodes], parents, [tree.depth_list[node] for node in nodes]
        )
        ahead = self.missing(rank)
        own = own.behind(ahead)
        self.places[rank] = {node: at + len(ahead) for node, at in place.items()}
        where = [self.places[rank][node] for node in rows]
        return Part(self.number, own.token_list, own.parent_list, where, logits)

    def commit(self, verdict: Verdict) -> None:
        self.tokens += verdict.tokens
        for rank, place in enumerate(self.places):
            own = [place[node] for node in verdict.path if node in place]
            path = (*range(own[0]), *own)  # what it lacked, and its part of the accepted path
            held = self.held[rank]
            self.target.tell(rank, Commit(self.number, path, tuple(self.tokens[held : held + len(path)])))
            self.held[rank] += len(path)
        self.sampler.committed()
        assert self.held[0] <= len(self.tokens)

    def close(self) -> None:
        for rank in range(len(self.held)):
            self.target.tell(rank, Close(self.number))


class ParallelTarget:
    """A target whose trees are divided over devices; see `leapahead.models.base.Target`.

    Drafted tokens cost as many rows as the largest part has, so `info.devices` tells the planner to measure forwards
    over branches. Hidden states and added embeddings are not available.

    Args:
        target: this process's own.
        link: to the other processes, each of which runs `worker.follow` with the same model.
        end: called when the target is closed, with the seconds that the other processes may take to end.
        threads: see `Device`.

    Raises:
        Refused: the target takes no token trees, or is of a kind that cannot be divided.
        LeapaheadError: another process could not load its model, or has another one.
    """

    has_threads = True  # of the connections, which a forked process shares with its parent

    def __init__(
        self,
        target: Target,
        link: Link,
        end: Callable[[float], None] = lambda patience: None,
        threads: int | None = None,
    ) -> None:
        self.device, self.link, self._end = Device(target, threads), link, end
        self._process = os.getpid()
        self.lock = RLock()
        self._numbers = count()
        self._news: list[list[Command]] = [[] for _ in range(link.size)]
        self._is_asking = False  # whether there may be answers that are not read
        self.info = self._information(target.info)
        self._compare()

    def _information(self, info: TargetInfo) -> TargetInfo:
        reason = ""
        if info.decoder is not None:
            reason = "it is an encoder-decoder model"
        elif info.exact:
            reason = "in exact mode every forward has the same number of rows"
        elif TREE not in info.capabilities:
            reason = "it takes no token trees, so there are no branches to divide"
        if reason:
            raise Refused(f"{info.name} cannot be divided over devices, since {reason}; leave out devices")
        return replace(
            info,
            capabilities=info.capabilities & {CHAIN, TREE, TOP_K, LOGITS},
            fingerprint=f"{info.fingerprint} on {self.link.size} devices",
            devices=self.link.size,
            reads_in_steps=0,
        )

    def _compare(self) -> None:
        """Waits until every process has loaded its model."""
        own = self.device.identity
        for rank in range(1, self.link.size):
            if (identity := self._answer(rank)) != own:
                raise LeapaheadError(
                    f"process {rank} has loaded another model than process 0: {_differences(own, identity)}; start all "
                    "processes with the same model, dtype and versions"
                )

    @property
    def model(self) -> Any:
        """The model of this process's own target, where that has one; its configuration tells what ends a text."""
        return getattr(self.device.target, "model", None)

    @property
    def max_leaves(self) -> int:
        return self.device.target.max_leaves

    @property
    def max_nodes(self) -> int:
        return self.device.target.max_nodes

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> ParallelSession:
        """See `Target.open`.

        Raises:
            Refused: there are logits processors other than a bias; they run in one process only.
        """
        require(self.info, capture.needs, "this capture")
        return self._open([int(token) for token in tokens], params, capture, reserve, owner, None)

    def fork(self, session: ParallelSession, params: SamplingParams) -> ParallelSession:
        return self._open(list(session.tokens), params, NOTHING, 0, session.owner, session)

    def _open(
        self,
        tokens: list[int],
        params: SamplingParams,
        capture: Capture,
        reserve: int,
        owner: str,
        source: ParallelSession | None,
    ) -> ParallelSession:
        """A session, by a fork of `source` on the devices that have all of its tokens."""
        if not all(isinstance(getattr(each, "processor", None), LogitBias) for each in params.processors):
            raise Refused("logits processors cannot be used with devices, as they run in one process; leave out one")
        number, plain = next(self._numbers), replace(params, grammar=None)
        commands: list[Command] = []
        for rank in range(self.link.size):
            if source is not None and source.held[rank] == len(tokens):
                commands.append(Fork(source.number, number, plain))
            else:
                own = capture if rank == 0 else NOTHING
                commands.append(Open(number, tuple(tokens), plain, replace(own, logits=False), reserve, owner))
        try:
            self._everywhere(commands)
        except BaseException:
            for rank in range(self.link.size):
                self.tell(rank, Close(number))
            raise
        return ParallelSession(self, number, tokens, params, owner)

    def prefill(self, session: ParallelSession, max_tokens: int) -> PromptRows | None:
        left = max(0, session.unread - max_tokens)
        rows: PromptRows | None = self._everywhere([Read(session.number, left, max_tokens)] * self.link.size)[0]
        return rows

    def step(
        self,
        sessions: Sequence[ParallelSession],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        capture: Capture = NOTHING,
    ) -> list[Choices]:
        require(self.info, capture.needs, "this capture")
        if num_computed is not None:
            raise Refused("a draft cannot grow on several devices; use one device for a draft model")
        if any(session.unread for session in sessions):
            raise LeapaheadError("a session whose prompt is not read cannot be stepped; call target.prefill first")
        ranks = range(self.link.size)
        parts: list[list[Part]] = [[] for _ in ranks]
        owned: list[list[list[int]]] = []  # for each session and device, the nodes whose choices it gives
        for session, tree in zip(sessions, trees, strict=True):
            divided = split(tree, [len(session.missing(rank)) for rank in ranks])
            seen: set[int] = set()
            owned.append([])
            for rank, nodes in enumerate(divided):
                rows = [node for node in nodes if node not in seen]
                seen.update(rows)
                owned[-1].append(rows)
                parts[rank].append(session.part(rank, tree, nodes, rows, capture.logits or session.at_home))
        steps: list[Command] = [Step(tuple(each), capture.top_k) for each in parts]
        found: list[list[Found]] = self._everywhere(steps)
        return [
            _joined(tree, session.sampler, rows, [each[at] for each in found])
            for at, (session, tree, rows) in enumerate(zip(sessions, trees, owned, strict=True))
        ]

    def cost(self, sessions: Sequence[ParallelSession], trees: Sequence[TokenTree]) -> Cost:
        """Of the whole trees, as the latency profile is of forwards that were divided in the same way."""
        own = [self.device.sessions[session.number] for session in sessions]
        return self.device.target.cost(own, trees)

    def tell(self, rank: int, command: Command) -> None:
        """Gives a device a command that has no answer; one of another process gets it with the next command."""
        if rank == 0:
            command.run(self.device)  # no computation: the number of threads is not changed for it
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
        answers, error, is_asking = [None], None, False
        try:
            answers = [self.device.run(commands[0])]
        except BaseException as own:
            error = own
        for rank in range(1, self.link.size):
            try:
                answers.append(self._answer(rank))
            except Exception as other:
                error = error or other
            except BaseException as interrupt:
                error, is_asking = error or interrupt, True
        self._is_asking = is_asking
        if error is not None:
            raise error
        return answers

    def _problem(self) -> str:
        """Why nothing can be computed any more; "" while all is well.

        An interrupt may have left answers, which would be taken for those to later commands.
        """
        if self._is_asking and not self.link.problem:
            self.link.problem = INTERRUPTED
        return self.link.problem

    def _answer(self, rank: int) -> Any:
        reply: Reply = self.link.receive(rank)
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
        return str(self.device.identity[-1])

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
        self.device.close()


def _joined(tree: TokenTree, sampler: Sampler, owned: Sequence[Sequence[int]], found: Sequence[Found]) -> Choices:
    """The choices of a whole tree.

    Args:
        owned: for each device, the nodes whose choices it gives.
        found: what each device gave, in the order of these nodes.
    """
    order = np.argsort([node for nodes in owned for node in nodes])
    logits = [each.logits for each in found if each.logits is not None]
    if logits:
        return Choices(np.concatenate(logits)[order], tree, sampler)
    chosen = np.array([token for each in found for token in each.chosen], dtype=np.int64)[order]
    best = [each.top_k for each in found if each.top_k is not None]
    if not best:
        return Gathered(tree, sampler, chosen, None)
    tokens, scores = (np.concatenate(some)[order] for some in zip(*best, strict=True))
    return Gathered(tree, sampler, chosen, (tokens, scores))


def _differences(own: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    names = ("vocabulary", "context length", "precision", "capabilities", "weights")
    return ", ".join(name for name, here, there in zip(names, own, other, strict=True) if here != there)
