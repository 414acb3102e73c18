"""The engine is broken on purpose, one way at a time, and the comparison with plain decoding must detect it.

Each mutation is harmless to plain decoding (a tree of one node), as such bugs are in life; what it breaks is the text
of a drafter. `differs` is the check: decode plainly and with drafters on the same target, compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers import GREEDY, AnyDrafter, RandomTrees, Scattered, full_text, same_text

import leapahead.engine.loop
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import BoolArray, IntArray, TokenTree
from leapahead.core.verify import Verdict, verify
from leapahead.drafters import registry
from leapahead.models.base import NOTHING, Capture
from leapahead.models.choices import Choices
from leapahead.models.toy import ToySession, ToyTarget
from leapahead.planner.acceptance import AcceptanceTable

SAMPLED = SamplingParams(temperature=1.0, seed=2)
STOP = StopParams(max_new_tokens=30)
PROMPTS = [(1, 2, 3, 1, 2), (4, 0), (5,), (3, 3, 1, 0, 2, 1, 3)]


def made_up(text: Sequence[int]) -> Iterable[AnyDrafter]:
    return [Scattered(text, seed=0), Scattered(text, seed=1, depth=7), RandomTrees(seed=2, nodes=20)]


def differs(
    target: ToyTarget,
    params: SamplingParams,
    drafters: Callable[[Sequence[int]], Iterable[AnyDrafter]] = made_up,
) -> bool:
    """Whether any drafter's text is not plain decoding's, on any of a few prompts; or the engine itself objects."""
    acceptance = AcceptanceTable.with_priors()  # learned over all texts
    for prompt in PROMPTS:
        text = full_text(target, prompt, params=params, stop=STOP)
        for drafter in drafters(text):
            try:
                if not same_text(target, drafter, prompt, params=params, stop=STOP, acceptance=acceptance):
                    return True
            except AssertionError:  # an invariant of the engine
                return True
    return False


# -------------------------------------------------------------------------------------------- broken targets


class Toy(ToyTarget):
    """The unbroken one, with what the mutations need: another session, another sampler, and ties if asked."""

    session: type[ToySession] = ToySession
    sampler: type[Sampler] = Sampler

    def __init__(self, ties: bool = False) -> None:
        super().__init__(vocab_size=9, order=3, sharpness=1.0)
        self.ties = ties

    def open(
        self, tokens: Sequence[int], params: SamplingParams, capture: Capture = NOTHING, *_: Any, **__: Any
    ) -> ToySession:
        session = self.session(self, list(tokens), params, capture)
        session.sampler = self.sampler(params, session.tokens, self.info.vocab_size)
        return session

    def row(self, seen: Any) -> Any:
        row = super().row(seen)
        return np.round(row) if self.ties else row


class MaskBySlot(Toy):
    """Full causal attention over slots: every node sees all earlier nodes."""

    def mask(self, tree: TokenTree) -> BoolArray:
        return np.tri(len(tree), dtype=np.bool_)


class MaskWithoutParent(Toy):
    """A node sees its grandparents but not its parent."""

    def mask(self, tree: TokenTree) -> BoolArray:
        mask = tree.ancestor_mask.copy()
        for node in range(1, len(tree)):
            mask[node, tree.parents[node]] = False
        return mask


class SiblingVisible(Toy):
    """A node also sees its parent's other child, if there is one."""

    def mask(self, tree: TokenTree) -> BoolArray:
        mask = tree.ancestor_mask.copy()
        for node in range(1, len(tree)):
            for sibling in range(1, node):
                mask[node, sibling] |= tree.parents[sibling] == tree.parents[node]
        return mask


class PositionsBySlot(Toy):
    """Positions count slots, not depth."""

    def positions(self, session: ToySession, tree: TokenTree) -> IntArray:
        return len(session.tokens) - 1 + np.arange(len(tree))


class Keeping(ToySession):
    """A session whose commit keeps what `kept(path)` says instead of the path."""

    tree: TokenTree

    def forward(self, tree: TokenTree, mask: BoolArray, positions: IntArray, num_computed: int = 0) -> Any:
        self.tree = tree
        return super().forward(tree, mask, positions, num_computed)

    def commit(self, verdict: Verdict) -> None:
        super().commit(Verdict(tuple(self.kept(verdict.path)), verdict.tokens, verdict.accepted))

    def kept(self, path: tuple[int, ...]) -> list[int]:
        raise NotImplementedError


class OffByOneCommit(Toy):
    """Keeps the slot behind each node of the path (the last one where there is none)."""

    class session(Keeping):
        def kept(self, path: tuple[int, ...]) -> list[int]:
            return [min(node + 1, len(self.tree) - 1) for node in path]


class FirstSlotsCommitted(Toy):
    """Keeps as many slots as the path is long, from the first: right for chains only."""

    class session(Keeping):
        def kept(self, path: tuple[int, ...]) -> list[int]:
            return list(range(len(path)))


class CommitOfTheWrongNode(Toy):
    """The right depth, another node: the last sibling's entry is kept."""

    class session(Keeping):
        def kept(self, path: tuple[int, ...]) -> list[int]:
            return [int(np.flatnonzero(self.tree.parents == self.tree.parents[node])[-1]) for node in path]


class NothingForgotten(Toy):
    """Rejected nodes stay in the cache behind the path."""

    class session(ToySession):
        def commit(self, verdict: Verdict) -> None:
            self.tokens += verdict.tokens
            self.cache += [self._pending[node] for node in verdict.path]
            self.cache += [entry for slot, entry in enumerate(self._pending) if slot not in verdict.path]
            self.sampler.committed()


class NoiseByNode(Toy):
    """The noise is keyed by seed and node index instead of the node's position."""

    class sampler(Sampler):
        def choose(self, logits: Any, tree: TokenTree, nodes: IntArray, *rest: Any) -> Any:
            noise = [self.noise.at(len(self.tokens) + node) for node in nodes.tolist()]  # type: ignore[union-attr]
            return (self.scores(logits, tree, nodes, *rest) + np.stack(noise)).argmax(-1)


class Eager(Toy):
    """All nodes are chosen at once, as a target on an accelerator does it."""

    def step(self, sessions: Sequence[ToySession], trees: Sequence[TokenTree], *rest: Any, **more: Any) -> Any:
        every = []
        for session, tree in zip(sessions, trees, strict=True):
            logits = self.logits(session, tree)
            chosen = session.sampler.choose(logits, tree, np.arange(len(tree)))
            every.append(Choices(logits, tree, session.sampler, chosen))
        return every


class NoiseInDrawOrder(Eager):
    """One stream of random numbers, drawn as nodes are chosen: right in distribution, but not this seed's text."""

    class sampler(Sampler):
        def choose(self, logits: Any, tree: TokenTree, nodes: IntArray, *rest: Any) -> Any:
            if not hasattr(self, "stream"):
                self.stream = np.random.default_rng(self.params.seed)
            scores = self.scores(logits, tree, nodes, *rest)
            return (scores + self.stream.gumbel(size=scores.shape)).argmax(-1)


class TiesReversedInTreeRows(Toy):
    """Of equal logits the highest id wins below the root."""

    class sampler(Sampler):
        def choose(self, logits: Any, tree: TokenTree, nodes: IntArray, *rest: Any) -> Any:
            scores = self.scores(logits, tree, nodes, *rest)
            last = scores.shape[-1] - 1 - scores[:, ::-1].argmax(-1)
            return np.where(nodes == 0, scores.argmax(-1), last)


class PathIgnored(Toy):
    """Penalties, bans and processors read the committed tokens only."""

    class sampler(Sampler):
        def unfiltered(self, logits: Any, tree: TokenTree, nodes: IntArray, *rest: Any) -> Any:
            return super().unfiltered(logits, TokenTree.root(int(tree.tokens[0])), np.zeros_like(nodes), *rest)


# ------------------------------------------------------------------------------------------ broken verifiers


def bonus_of_the_parent(tree: TokenTree, chosen: Any) -> Verdict:
    """The bonus token is what the target chose before the last accepted node."""
    v = verify(tree, chosen)
    return Verdict(v.path, (*v.tokens[:-1], int(chosen[v.path[-2:][0]])), v.accepted)


def bonus_of_the_last_node(tree: TokenTree, chosen: Any) -> Verdict:
    """The bonus token is what the target chose after the tree's last node."""
    v = verify(tree, chosen)
    return Verdict(v.path, (*v.tokens[:-1], int(chosen[len(tree) - 1])), v.accepted)


def one_draft_too_many(tree: TokenTree, chosen: Any) -> Verdict:
    """Accepts the first child of the last accepted node although it was not chosen."""
    v = verify(tree, chosen)
    below = np.flatnonzero(tree.parents == v.path[-1])
    if not len(below):
        return v
    child = int(below[0])
    return Verdict((*v.path, child), (*v.tokens[:-1], int(tree.tokens[child]), int(chosen[child])), v.accepted + 1)


def any_node_of_the_depth(tree: TokenTree, chosen: Any) -> Verdict:
    """Matches by depth and token, whoever the parent is."""
    path, tokens = [0], [int(chosen[0])]
    while True:
        found = np.flatnonzero((tree.depths == len(path)) & (tree.tokens == tokens[-1]))
        if not len(found):
            return Verdict(tuple(path), tuple(tokens), len(path) - 1)
        path.append(int(found[0]))
        tokens.append(int(chosen[path[-1]]))


# -------------------------------------------------------------------------------------------------- the tests


@dataclass(frozen=True)
class Mutation:
    """What is broken, under which parameters, and what it is to be compared with."""

    broken: type[Toy]
    params: SamplingParams
    unbroken: type[Toy] = Toy
    ties: bool = False


def user_processor(prefixes: Any, logits: Any) -> Any:
    return logits + np.sin(prefixes.sum(axis=1, keepdims=True) * np.arange(1, logits.shape[-1] + 1))


MUTATIONS = {
    "mask by slot": Mutation(MaskBySlot, GREEDY),
    "mask without the parent": Mutation(MaskWithoutParent, GREEDY),
    "a sibling visible": Mutation(SiblingVisible, GREEDY),
    "positions by slot": Mutation(PositionsBySlot, GREEDY),
    "commit off by one": Mutation(OffByOneCommit, GREEDY),
    "first slots committed": Mutation(FirstSlotsCommitted, GREEDY),
    "commit of the wrong node": Mutation(CommitOfTheWrongNode, GREEDY),
    "rejected nodes kept": Mutation(NothingForgotten, GREEDY),
    "mask by slot, sampled": Mutation(MaskBySlot, SAMPLED),
    "positions by slot, sampled": Mutation(PositionsBySlot, SAMPLED),
    "commit off by one, sampled": Mutation(OffByOneCommit, SAMPLED),
    "noise by node": Mutation(NoiseByNode, SAMPLED),
    "noise in draw order": Mutation(NoiseInDrawOrder, SAMPLED, unbroken=Eager),
    "ties reversed in tree rows": Mutation(TiesReversedInTreeRows, GREEDY, ties=True),
    "path ignored by the repetition penalty": Mutation(PathIgnored, SamplingParams(repetition_penalty=2.5)),
    "path ignored by the presence penalty": Mutation(PathIgnored, SamplingParams(presence_penalty=0.8)),
    "path ignored by the frequency penalty": Mutation(PathIgnored, SamplingParams(frequency_penalty=0.5)),
    "path ignored by bad words": Mutation(PathIgnored, SamplingParams(bad_words=((1, 2), (0, 3), (4, 4), (5, 0)))),
    "path ignored by min_new_tokens": Mutation(PathIgnored, SamplingParams(min_new_tokens=8, eos_token_ids=(0, 1))),
    "path ignored by a processor": Mutation(PathIgnored, SamplingParams(processors=(user_processor,))),
}


@cache
def right_differs(kind: type[Toy], ties: bool, params: SamplingParams) -> bool:
    return differs(kind(ties), params)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_target_is_caught_and_the_unbroken_one_is_not(mutation: Mutation) -> None:
    assert not right_differs(mutation.unbroken, mutation.ties, mutation.params)
    assert differs(mutation.broken(mutation.ties), mutation.params)


# Under penalties a text does not come back to what it said, so those that match what was said draft next to nothing.
REGISTERED = [
    pytest.param(mutation, name, marks=() if name == "auto" else pytest.mark.slow)
    for mutation in MUTATIONS
    for name in ("auto", "recycling", "ngram", "suffix")
    if name in ("auto", "recycling") or not mutation.startswith("path ignored")
]


def registered_differs(name: str, target: Toy, params: SamplingParams) -> bool:
    return differs(target, params, lambda text: [registry.make(name, nodes=nodes) for nodes in (16, 4)])


@cache
def unbroken_differs(name: str, kind: type[Toy], ties: bool, params: SamplingParams) -> bool:
    return registered_differs(name, kind(ties), params)


@pytest.mark.slow
@pytest.mark.parametrize(("mutation", "name"), REGISTERED)
def test_a_registered_drafter_catches_it_too(mutation: str, name: str) -> None:
    one = MUTATIONS[mutation]
    assert not unbroken_differs(name, one.unbroken, one.ties, one.params)
    assert registered_differs(name, one.broken(one.ties), one.params)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "broken", [bonus_of_the_parent, bonus_of_the_last_node, one_draft_too_many, any_node_of_the_depth]
)
def test_a_broken_verifier_is_caught(
    broken: Callable[[TokenTree, Any], Verdict], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not right_differs(Toy, False, params)
    monkeypatch.setattr(leapahead.engine.loop, "verify", broken)
    assert differs(Toy(), params)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_the_mutations_leave_plain_decoding_alone(mutation: Mutation) -> None:
    """So it is the drafted text that shows them. Only a stream of noise is another, equally good, plain text."""
    texts = [full_text(kind(mutation.ties), params=mutation.params) for kind in (mutation.broken, mutation.unbroken)]
    assert (texts[0] == texts[1]) == (mutation.broken is not NoiseInDrawOrder)
