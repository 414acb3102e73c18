"""What the tests share: runs, drafters that are right or wrong on purpose, and Hypothesis strategies for trees.

The one question of most tests is `assert_same_text`: does a drafter give, token for token, the text of plain decoding?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.drafters.base import Ask, Context, Drafter, Proposal, Step
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.plain import Plain
from leapahead.engine.loop import Generation, decode
from leapahead.models.base import Target

PROMPT = (1, 2, 3, 1, 2)
GREEDY = SamplingParams()

Text = Callable[[int], str]

# Examples are judged by what they show, not by how long a busy machine takes for them.
settings.register_profile("leapahead", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("leapahead")


# ---------------------------------------------------------------------------------------------------------- runs


@dataclass
class Run:
    """A finished decoding."""

    generation: Generation
    steps: list[Step]

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def finish(self) -> tuple[str | None, int | str | None]:
        return self.generation.stopper.finish_reason, self.generation.stopper.stop_reason


def begin(
    target: Target,
    drafter: Drafter | None = None,
    prompt: Sequence[int] = PROMPT,
    params: SamplingParams = GREEDY,
    stop: StopParams | None = None,
    text: Text | None = None,
    drafter_cache: DrafterCache | None = None,
    prediction: Sequence[int] = (),
) -> Generation:
    """A generation that has not made a step yet; 24 new tokens unless `stop` says otherwise."""
    stop = stop or StopParams(max_new_tokens=24)
    drafter = drafter or Plain()
    return Generation.begin(
        target, prompt, drafter, params, stop, text=text, drafter_cache=memory, prediction=prediction
    )


def run(target: Target, drafter: Drafter | None = None, prompt: Sequence[int] = PROMPT, **options: Any) -> Run:
    """Decodes one text to its end; plainly if no drafter is given. Options as for `begin`."""
    generation = begin(target, drafter, prompt, **options)
    done = Run(generation, [step for _, step in decode(target, [generation])])
    assert generation.session.tokens == [*prompt, *done.tokens]  # what is kept is what was emitted
    return done


def same_text(target: Target, drafter: Drafter, prompt: Sequence[int] = PROMPT, **options: Any) -> bool:
    """Whether `drafter` gives plain decoding's text, ended for the same reason."""
    plain, drafted = run(target, None, prompt, **options), run(target, drafter, prompt, **options)
    return (plain.tokens, plain.finish) == (drafted.tokens, drafted.finish)


def assert_same_text(target: Target, drafter: Drafter, prompt: Sequence[int] = PROMPT, **options: Any) -> Run:
    """As `same_text`, showing both texts when it fails; returns the drafted run."""
    plain, drafted = run(target, None, prompt, **options), run(target, drafter, prompt, **options)
    assert (drafted.tokens, drafted.finish) == (plain.tokens, plain.finish)
    return drafted


def full_text(target: Target, prompt: Sequence[int] = PROMPT, **options: Any) -> list[int]:
    """Plain decoding's tokens with the prompt before them: what an oracle must know."""
    return [*prompt, *run(target, None, prompt, **options).tokens]


# ------------------------------------------------------------------------------------------------------ drafters


def fit(tree: TokenTree, budget: Budget) -> TokenTree:
    """The part of `tree` that a budget allows: its first nodes, not too deep, above its first leaves."""
    tree, _ = tree.prune((np.arange(len(tree)) <= budget.nodes) & (tree.depths <= budget.depth))
    tree, _ = tree.prune(tree.ancestor_mask[tree.leaves[: budget.leaves]].any(axis=0))
    return tree


class Scripted(Drafter):
    """Drafts whatever `draft(context, budget)` returns."""

    name: ClassVar[str] = "scripted"

    def __init__(self, draft: Callable[[Context, Budget], TokenTree]) -> None:
        self.draft = draft

    def propose(self, context: Context, budget: Budget) -> Proposal:
        return Proposal(self.draft(context, budget))


class Empty(Drafter):
    """Never has an idea."""

    name: ClassVar[str] = "empty"

    def propose(self, context: Context, budget: Budget) -> Proposal:
        return Proposal(TokenTree.root(context.root))


class Oracle(Drafter):
    """Knows the text (prompt included) and drafts its next `depth` tokens: always accepted."""

    name: ClassVar[str] = "oracle"

    def __init__(self, text: Sequence[int], depth: int = 4) -> None:
        self.text, self.depth = list(text), depth

    def propose(self, context: Context, budget: Budget) -> Proposal:
        at = len(context.tokens)
        return Proposal(fit(TokenTree.chain(context.root, self.text[at : at + self.depth]), budget))


class RandomTrees(Drafter):
    """Trees of random shape and random tokens: some nodes are right by luck."""

    name: ClassVar[str] = "random"

    def __init__(self, seed: int = 0, nodes: int = 10, depth: int = 5) -> None:
        self.rng, self.nodes, self.depth = np.random.default_rng(seed), nodes, depth

    def propose(self, context: Context, budget: Budget) -> Proposal:
        nodes, depth = min(self.nodes, budget.nodes), min(self.depth, budget.depth)
        builder = TreeBuilder(context.root, Budget(nodes, depth, budget.leaves))
        for _ in range(nodes):
            builder.add(int(self.rng.integers(len(builder))), int(self.rng.integers(context.vocab_size)))
        return Proposal(builder.build())


class Scattered(Drafter):
    """The right path, its nodes far apart among random ones, so that no node's slot is its depth."""

    name: ClassVar[str] = "scattered"

    def __init__(self, text: Sequence[int], seed: int = 0, depth: int = 4) -> None:
        self.text, self.rng, self.depth = list(text), np.random.default_rng(seed), depth

    def propose(self, context: Context, budget: Budget) -> Proposal:
        at = len(context.tokens)
        builder, parent = TreeBuilder(context.root, Budget(depth=self.depth)), 0
        for right in self.text[at : at + self.depth]:
            for _ in range(2):
                builder.add(int(self.rng.integers(len(builder))), int(self.rng.integers(context.vocab_size)))
            node = builder.add(parent, right)
            assert node is not None
            parent = node
        return Proposal(fit(builder.build(), budget))


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
    """Every token below the root, each followed by what follows only the right one."""
    return TokenTree.from_paths(root, [[token, *right[1:3]] for token in reversed(range(vocab))])


ADVERSARIES = {
    "repeats": _repeats,
    "deep_chain": _deep_chain,
    "shifted": _shifted,
    "baits": _baits,
    "duplicates": _duplicates,
    "wide": _wide,
}


class Adversarial(Drafter):
    """Knows the text and drafts valid trees that are made to mislead, one kind of `ADVERSARIES`."""

    name: ClassVar[str] = "adversarial"

    def __init__(self, kind: str, text: Sequence[int]) -> None:
        self.kind, self.text = ADVERSARIES[kind], list(text)

    def propose(self, context: Context, budget: Budget) -> Proposal:
        at = len(context.tokens)
        return Proposal(fit(self.kind(context.root, self.text[at : at + 5], context.vocab_size), budget))


class Watched(Drafter):
    """Lets another drafter draft inside a smaller budget of nodes, and looks whether it keeps to it."""

    name: ClassVar[str] = "watched"

    def __init__(self, inner: Drafter, nodes: int) -> None:
        self.inner, self.nodes, self.trees = inner, nodes, list[TokenTree]()
        self.prompt_top_k = inner.prompt_top_k  # type: ignore[misc]

    def begin(self, context: Context) -> None:
        self.inner.begin(context)

    def propose(self, context: Context, budget: Budget) -> Proposal:
        raise AssertionError("it drafts together with those of its class")

    @classmethod
    def propose_together(cls, target: Target, asks: Sequence[Ask]) -> list[Proposal]:
        return [ask.drafter.watch(target, ask.context, ask.budget) for ask in asks]  # type: ignore[attr-defined]

    def watch(self, target: Target, context: Context, budget: Budget) -> Proposal:
        budget = Budget(min(self.nodes, budget.nodes), budget.depth, budget.leaves)
        (proposal,) = self.inner.propose_together(target, [Ask(self.inner, context, budget)])
        tree = proposal.tree
        assert len(tree) - 1 <= budget.nodes
        assert tree.depths.max() <= budget.depth
        assert len(tree.leaves) <= budget.leaves
        self.trees.append(tree)
        return proposal

    def observe(self, context: Context, step: Step) -> None:
        self.inner.observe(context, step)

    def finish(self, context: Context) -> None:
        self.inner.finish(context)


def drafters_for(text: Sequence[int]) -> dict[str, Callable[[], Drafter]]:
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
