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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from leapahead.core.bias import LogitBias
from leapahead.core.errors import Refused
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import IntArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, LOGITS, NOTHING, TOP_K, TREE, Capture, TargetInfo, require
from leapahead.models.choices import Choices, FloatArray
from leapahead.models.parallel.device import Close, Command, Commit, Fork, Found, Open, Part, Step
from leapahead.models.parallel.followed import FollowedTarget
from leapahead.models.parallel.split import split


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
        return self.target.here.sessions[self.number].unread

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


class ParallelTarget(FollowedTarget):
    """A target whose trees are divided over devices; see `leapahead.models.base.Target`.

    Drafted tokens cost as many rows as the largest part has, so `info.devices` tells the planner to measure forwards
    over branches. Hidden states and added embeddings are not available, nor is a target without token trees.
    """

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

    def step(
        self,
        sessions: Sequence[ParallelSession],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        capture: Capture = NOTHING,
    ) -> list[Choices]:
        self._check_step(sessions, capture)
        if num_computed is not None:
            raise Refused("a draft cannot grow on several devices; use one device for a draft model")
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
