"""What the tests share: runs, drafters that are right or wrong on purpose, and Hypothesis strategies for trees.

The one question of most tests is `assert_same_text`: does a drafter give, token for token, the text of plain decoding?
"""

from __future__ import annotations

import errno
import gc
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st

from leapahead import Engine, Request
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.drafters.base import Drafter, PerSequence, SequenceDrafter
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.plain import Plain
from leapahead.engine.request import Handle
from leapahead.models.base import Target
from leapahead.planner.acceptance import AcceptanceTable
from leapahead.planner.draft import Forward, Proposal, SequenceView, Step
from leapahead.planner.latency import LatencyProfile
from leapahead.planner.profile import LatencyProfiles

PROMPT = (1, 2, 3, 1, 2)
GREEDY = SamplingParams()

AnyDrafter = Drafter | SequenceDrafter | type[Drafter] | type[SequenceDrafter] | str


def mostly_slow(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of a test of which all but a few are slow; a value that is a tuple is several parameters."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in fast else pytest.mark.slow
        )
        for value in values
    ]


def is_freed(make: Callable[[], Any], attribute: str) -> bool:
    """Whether that of an object goes with the object, so that no cycle keeps it until Python looks for those."""
    make()  # the imports of the first one may leave frames behind that refer to it
    gc.disable()
    try:
        owner = make()
        kept = weakref.ref(attrgetter(attribute)(owner))
        del owner
        return kept() is None
    finally:
        gc.enable()


def close_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Lets a folder be one that may not be entered. For root, who may enter all, permissions do not."""

    def refusing(real: Callable[..., bool]) -> Callable[..., bool]:
        def refuse(path: Path, **options: Any) -> bool:
            if folder in path.parents:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, **options)

        return refuse

    for name in ("exists", "is_dir", "is_file"):
        monkeypatch.setattr(Path, name, refusing(getattr(Path, name)))
    monkeypatch.setattr(os, "access", lambda path, mode: folder not in (Path(path), *Path(path).parents))


# ---------------------------------------------------------------------------------------------------------- runs


class Spelling:
    """As much of a tokenizer as decoding needs: the text of each token, given by a function."""

    def __init__(self, text: Callable[[int], str]) -> None:
        self.text = text

    def __len__(self) -> int:
        return 1 << 30

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())  # for fingerprints

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(self.text, tokens))


def with_gaps() -> Any:
    """A tokenizer of Transformers with the tokens a (0), b (1) and <x> (9)."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<x>": 9}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words)


class FixedLatency(LatencyProfiles):
    """One latency profile for any number of sequences; nothing is measured, stored or corrected.

    Args:
        target: of the forwards.
        seconds: rows -> seconds of a forward.
    """

    def __init__(self, target: Target, seconds: Mapping[int, float]) -> None:
        super().__init__(target.info)
        self.fixed = LatencyProfile(seconds, fixed=True)

    def prepare(self, target: Target) -> bool:
        return False

    def measure(self, target: Target) -> None:
        pass

    def profile(self, sequences: int) -> LatencyProfile:
        return self.fixed

    def known(self, sequences: int) -> LatencyProfile:
        return self.fixed

    def observe(self, forward: Forward) -> None:
        pass


@dataclass
class Run:
    """A finished decoding."""

    handle: Handle
    steps: list[Step]

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return self.handle.tokens

    @property
    def stats(self) -> Stats:
        return self.handle.stats

    @property
    def finish(self) -> tuple[str | None, int | str | None]:
        return self.handle.finish_reason, self.handle.stop_reason


def attached(engine: Engine, drafter: AnyDrafter | None) -> Drafter:
    """A drafter for the engine; one made for a single sequence serves only that."""
    if isinstance(drafter, SequenceDrafter):
        return engine.drafter(PerSequence(lambda: drafter))
    return engine.drafter(Plain if drafter is None else drafter)


def run(
    target: Target,
    drafter: AnyDrafter | None = None,
    prompt: Sequence[int] = PROMPT,
    params: SamplingParams = GREEDY,
    stop: StopParams | None = None,
    text: Callable[[int], str] | None = None,
    drafter_cache: DrafterCache | None = None,
    prediction: Sequence[int] = (),
    acceptance: AcceptanceTable | None = None,
    latency: LatencyProfiles | None = None,
    prefill_chunk: int | None = None,
) -> Run:
    """Decodes one text to its end; plainly if no drafter is given, and 24 new tokens unless `stop` says otherwise."""
    spelling: Any = Spelling(text) if text is not None else None
    engine = Engine(target, tokenizer=spelling, acceptance=acceptance, latency=latency, prefill_chunk=prefill_chunk)
    steps: list[Step] = []
    request = Request(
        list(prompt),
        attached(engine, drafter),
        params,
        stop or StopParams(max_new_tokens=24),
        prediction,
        drafter_cache,
        on_step=steps.append,
    )
    handle = engine.submit(request)
    engine.run([handle])
    assert handle.tokens == [token for step in steps for token in step.tokens]  # what is kept is what was emitted
    return Run(handle, steps)


def same_text(target: Target, drafter: AnyDrafter, prompt: Sequence[int] = PROMPT, **options: Any) -> bool:
    """Whether `drafter` gives plain decoding's text, ended for the same reason."""
    plain, drafted = run(target, None, prompt, **options), run(target, drafter, prompt, **options)
    return (plain.tokens, plain.finish) == (drafted.tokens, drafted.finish)


def assert_same_text(target: Target, drafter: AnyDrafter, prompt: Sequence[int] = PROMPT, **options: Any) -> Run:
    """As `same_text`, showing both texts when it fails; returns the drafted run."""
    plain, drafted = run(target, None, prompt, **options), run(target, drafter, prompt, **options)
    assert (drafted.tokens, drafted.finish) == (plain.tokens, plain.finish)
    return drafted


def full_text(target: Target, prompt: Sequence[int] = PROMPT, **options: Any) -> list[int]:
    """Plain decoding's tokens with those before them that the text begins with: what an oracle must know."""
    begin = prompt if target.info.decoder is None else target.info.decoder.start
    return [*begin, *run(target, None, prompt, **options).tokens]


# ------------------------------------------------------------------------------------------------------ drafters


def fit(tree: TokenTree, budget: Budget) -> TokenTree:
    """The part of `tree` that a budget allows: its first nodes, not too deep, above its first leaves."""
    tree = pruned(tree, (np.arange(len(tree)) <= budget.nodes) & (tree.depths <= budget.depth))
    return pruned(tree, tree.ancestor_mask[tree.leaves[: budget.leaves]].any(axis=0))


def pruned(tree: TokenTree, keep: Sequence[bool] | np.ndarray) -> TokenTree:
    """The tree without the nodes where `keep` is false, and without everything below them."""
    dropped = ~np.array(keep, dtype=np.bool_)
    dropped[0] = False
    kept = ~(tree.ancestor_mask & dropped).any(axis=1)
    index = np.cumsum(kept) - 1
    parents = tree.parents[kept]
    parents[1:] = index[parents[1:]]
    return TokenTree(tree.tokens[kept], parents)


class Scripted(SequenceDrafter):
    """Drafts whatever `draft(sequence, budget)` returns."""

    name: ClassVar[str] = "scripted"

    def __init__(self, draft: Callable[[SequenceView, Budget], TokenTree]) -> None:
        self.draft = draft

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        return Proposal(self.draft(sequence, budget))


class Empty(SequenceDrafter):
    """Never has an idea."""

    name: ClassVar[str] = "empty"

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        return Proposal(TokenTree.root(sequence.root))


class Oracle(SequenceDrafter):
    """Knows the text (prompt included) and drafts its next `depth` tokens: always accepted."""

    name: ClassVar[str] = "oracle"

    def __init__(self, text: Sequence[int], depth: int = 4) -> None:
        self.text, self.depth = list(text), depth

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        at = len(sequence.tokens)
        return Proposal(fit(TokenTree.chain(sequence.root, self.text[at : at + self.depth]), budget))


class RandomTrees(SequenceDrafter):
    """Trees of random shape and random tokens: some nodes are right by luck."""

    name: ClassVar[str] = "random"

    def __init__(self, seed: int = 0, nodes: int = 10, depth: int = 5) -> None:
        self.rng, self.nodes, self.depth = np.random.default_rng(seed), nodes, depth

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        nodes, depth = min(self.nodes, budget.nodes), min(self.depth, budget.depth)
        builder = TreeBuilder(sequence.root, Budget(nodes, depth, budget.leaves))
        for _ in range(nodes):
            builder.add(int(self.rng.integers(len(builder))), int(self.rng.integers(sequence.vocab_size)))
        return Proposal(builder.build())


class Scattered(SequenceDrafter):
    """The right path, its nodes far apart among random ones, so that no node's slot is its depth."""

    name: ClassVar[str] = "scattered"

    def __init__(self, text: Sequence[int], seed: int = 0, depth: int = 4) -> None:
        self.text, self.rng, self.depth = list(text), np.random.default_rng(seed), depth

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        at = len(sequence.tokens)
        builder, parent = TreeBuilder(sequence.root, Budget(depth=self.depth)), 0
        for right in self.text[at : at + self.depth]:
            for _ in range(2):
                builder.add(int(self.rng.integers(len(builder))), int(self.rng.integers(sequence.vocab_size)))
            node = builder.add(parent, right)
            assert node is not None
            parent = node
        return Proposal(fit(builder.build(), budget))


class NoisyChain(SequenceDrafter):
    """The right text as a chain of 1 to 5 tokens, a token in three wrong."""

    name: ClassVar[str] = "noisy_chain"

    def __init__(self, text: Sequence[int], seed: int = 0) -> None:
        self.text, self.rng = list(text), np.random.default_rng(seed)

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        at = len(sequence.tokens)
        right = self.text[at : at + min(int(self.rng.integers(1, 6)), budget.depth)]
        drafted = [t if self.rng.random() < 2 / 3 else int(self.rng.integers(sequence.vocab_size)) for t in right]
        return Proposal(TokenTree.chain(sequence.root, drafted))


def _graph(root: int, *nodes: tuple[int, int]) -> TokenTree:
    """A tree of (parent, token) pairs, duplicates allowed."""
    return TokenTree(np.array([root, *(token for _, token in nodes)]), np.array([-1, *(parent for parent, _ in nodes)]))


def _repeats(root: int, right: list[int], vocab: int) -> TokenTree:
    return TokenTree.chain(root, [root] * 6)


def _deep_chain(root: int, right: list[int], vocab: int) -> TokenTree:
    return TokenTree.chain(root, right[:2] + [(t + 1) % vocab for t in right[2:3]] + right * 6)


def _shifted(root: int, right: list[int], vocab: int) -> TokenTree:
    return TokenTree.chain(root, right[1:])


def _baits(root: int, right: list[int], vocab: int) -> TokenTree:
    """At every depth first a wrong sibling that carries the right future, then the right one."""
    nodes: list[tuple[int, int]] = []
    parent = 0
    for depth, token in enumerate(right):
        nodes.append((parent, (token + 1) % vocab))
        bait = len(nodes)
        for later in right[depth + 1 : depth + 3]:
            nodes.append((bait, later))
            bait = len(nodes)
        nodes.append((parent, token))
        parent = len(nodes)
    return _graph(root, *nodes)


def _duplicates(root: int, right: list[int], vocab: int) -> TokenTree:
    """The right token twice, and again below; only the second copy goes on with the right text."""
    a, b, *_ = [*right, 0, 0]
    wrong = (a + 1) % vocab
    return _graph(root, (0, wrong), (0, a), (0, a), (0, wrong), (2, wrong), (3, b), (3, b), (2, b), (8, a))


def _wide(root: int, right: list[int], vocab: int) -> TokenTree:
    """Many tokens below the root (all of a small vocabulary), each followed by what follows only the right one."""
    tokens = [(right[0] + 20 - index) % vocab if right else index for index in range(min(vocab, 40))]
    return TokenTree.from_paths(root, [[token, *right[1:3]] for token in tokens])


ADVERSARIES = {
    "repeats": _repeats,
    "deep_chain": _deep_chain,
    "shifted": _shifted,
    "baits": _baits,
    "duplicates": _duplicates,
    "wide": _wide,
}


class Adversarial(SequenceDrafter):
    """Knows the text and drafts valid trees that are made to mislead, one kind of `ADVERSARIES`."""

    name: ClassVar[str] = "adversarial"

    def __init__(self, kind: str, text: Sequence[int]) -> None:
        self.kind, self.text = ADVERSARIES[kind], list(text)

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        at = len(sequence.tokens)
        return Proposal(fit(self.kind(sequence.root, self.text[at : at + 5], sequence.vocab_size), budget))


class Watched(Drafter):
    """Lets another drafter draft inside a smaller budget of nodes, and checks that it keeps to it."""

    name: ClassVar[str] = "watched"

    def __init__(self, inner: Drafter, nodes: int) -> None:
        self.inner, self.nodes, self.trees = inner, nodes, list[TokenTree]()

    def attach(self, host: Any) -> None:
        self.inner.attach(host)
        self.capture = self.inner.capture

    def prepare(self) -> None:
        self.inner.prepare()

    def begin(self, sequence: SequenceView) -> None:
        self.inner.begin(sequence)

    def read_prompt(self, sequence: SequenceView, rows: Any) -> None:
        self.inner.read_prompt(sequence, rows)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        budgets = [Budget(min(self.nodes, budget.nodes), budget.depth, budget.leaves) for budget in budgets]
        proposals = self.inner.propose(sequences, budgets)
        for proposal, budget in zip(proposals, budgets, strict=True):
            tree = proposal.tree
            assert len(tree) - 1 <= budget.nodes
            assert tree.depths.max() <= budget.depth
            assert len(tree.leaves) <= budget.leaves
            self.trees.append(tree)
        return proposals

    def observe(self, sequences: Sequence[SequenceView], steps: Sequence[Step]) -> None:
        self.inner.observe(sequences, steps)

    def finish(self, sequence: SequenceView) -> None:
        self.inner.finish(sequence)

    def close(self, sequence: SequenceView) -> None:
        self.inner.close(sequence)


def drafters_for(text: Sequence[int]) -> dict[str, Callable[[], SequenceDrafter]]:
    """Name -> factory of all the drafters above; `text` is what the oracles know."""
    return {
        "empty": Empty,
        "oracle": lambda: Oracle(text),
        "random": RandomTrees,
        "scattered": lambda: Scattered(text),
        **{kind: lambda kind=kind: Adversarial(kind, text) for kind in ADVERSARIES},
    }


# ---------------------------------------------------------------------------------------------------- strategies


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 16, vocab: int = 4, distinct: bool = False) -> TokenTree:
    """Random trees: any shape, few tokens, so that siblings are often equal (never if `distinct`)."""
    n = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, n)]
    tokens = [draw(st.integers(0, vocab - 1)) for _ in range(n)]
    tree = TokenTree(np.array(tokens), np.array(parents))
    if distinct:
        builder = TreeBuilder(tokens[0])
        for node in range(1, n):
            builder.add_path(tree.path_tokens(node))
        tree = builder.build()
    return tree


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """The drafted tokens above every node, sorted, one entry a node."""
    return sorted(tuple(tree.path_tokens(node)) for node in range(len(tree)))


def prefixes(paths: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """All beginnings of all paths, the empty one among them, sorted, each once."""
    return sorted({tuple(path[:n]) for path in paths for n in range(len(path) + 1)} | {()})
