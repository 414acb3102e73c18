"""Speculative sampling: the draft is *sampled* from a smaller model, and accepted by the rejection rule.

    look at the root      q0 ─ draw ─> a, b          width draws a node; their number is settled before they are drawn
    look at a and b       q1 ─ draw ─> c ...         depth levels, or fewer where the draft is unsure
    target                p at every node            accept with min(1, p / q), or sample the residual

Exact in distribution, not in text: a seed gives another text than plain decoding with it. The rules, and what they
rest on, are in `rejection`. All randomness is of one generator, keyed by the seed and by a number that no position has,
so it is independent of the dice, which the target uses where nothing was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np

from leapahead.core.errors import BadParameter
from leapahead.core.rejection import (
    RULES,
    Draws,
    FloatArray,
    Rule,
    draw_independent,
    draw_without_replacement,
    verify_draws,
)
from leapahead.core.text import Tokenizer
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.core.verify import Verdict
from leapahead.drafters import draft_models
from leapahead.drafters.base import Ask, Context, Drafter, Proposal
from leapahead.drafters.draft_runner import Following, Path
from leapahead.models.base import CHAIN, LOGITS, TREE, Choices, Target

APART = 1 << 63  # of the key of the generator: no position is as large


class SpeculativeSampling(Drafter):
    """Speculative sampling (2211.17192, 2302.01318) and its trees: exact in distribution, another text than plain.

    Args:
        draft: the model that drafts, see `draft_model`.
        rule: for trees: "sequoia" (2402.12374, no token twice), "specinfer" (2305.09781) or "spectr" (2310.15141).
        depth: greatest length of a path.
        width: draws at every node that is looked at; 1 makes chains, and the three rules one.
        nodes: greatest number of nodes of a tree.
        unsure: look no further where the draft's likeliest token has less probability.
    """

    name: ClassVar[str] = "speculative_sampling"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN, LOGITS})
    same_text: ClassVar[bool] = False

    def __init__(
        self,
        draft: Any = None,
        rule: str = "sequoia",
        depth: int = 4,
        width: int = 1,
        nodes: int = 16,
        unsure: float = 0.0,
    ) -> None:
        if draft is None or draft == "":
            raise BadParameter("the drafter 'speculative_sampling' needs draft=..., the smaller model")
        if rule not in RULES:
            raise BadParameter(f"rule={rule!r} is not possible; there are {', '.join(RULES)}")
        if depth < 1 or width < 1 or nodes < width or not 0 <= unsure <= 1:
            raise BadParameter(
                f"depth={depth}, width={width}, nodes={nodes}, unsure={unsure} is not possible: depth and width must "
                "be at least 1, nodes at least width, and unsure a probability"
            )
        self.rule, self.depth, self.width, self.nodes, self.unsure = rule, depth, width, nodes, unsure
        self._drafts = draft_models.given(draft)
        if len(self._drafts) > 1:
            raise BadParameter("speculative_sampling takes one draft model; draft_model and auto take several")
        self._following: Following | None = None
        self._drawn: dict[int, list[FloatArray]] = {}

    def check_target(self, target: Target) -> None:
        (self._model,) = draft_models.resolved(self._drafts, target)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        draft_models.check(self._drafts, tokenizer)

    def begin(self, context: Context) -> None:
        self._vocab = context.vocab_size
        self._rng = np.random.Generator(np.random.Philox(key=np.array([context.params.seed, APART], dtype=np.uint64)))

    def propose(self, context: Context, budget: Budget) -> Proposal:
        raise NotImplementedError("drafts of a batch are looked up together, see `propose_together`")

    @classmethod
    def propose_together(cls, target: Target, asks: Sequence[Ask]) -> list[Proposal]:
        """Level by level; each level is one forward of a draft model for all sequences that share it."""
        growing = [_Growing(cast("SpeculativeSampling", ask.drafter)._follow(target, ask), ask, target) for ask in asks]
        while groups := _by_draft(growing):
            for members in groups:
                followings = [each.following for each in members]
                for each in members:
                    each.following.add(each.wanted)
                looks, _ = Following.look(followings)
                for each, look in zip(members, looks, strict=True):
                    if look is None:
                        each.wanted = []
                    else:
                        each.draw(look.paths, each.drafter.processed(look.choices, look.nodes))
        for each in growing:
            each.drafter._drawn = each.qs
        return [each.proposal() for each in growing]

    def _follow(self, target: Target, ask: Ask) -> SpeculativeSampling:
        """Begins to follow the text, if that has not begun."""
        if self._following is None:
            self.check_target(target)
            self._following = Following(self._model.target, ask.context.tokens, ask.context.params)
        return self

    def opinions(self, tree: TokenTree) -> dict[str, FloatArray]:
        q = np.full(len(tree), np.nan)
        for node in range(1, len(tree)):
            if rows := self._drawn.get(int(tree.parents[node])):
                q[node] = rows[0][tree.tokens[node]]
        return {"draft": q}

    def processed(self, choices: Choices, nodes: Sequence[int]) -> FloatArray:
        """q after each node, float64 [nodes, vocab of the target]: what is drawn from."""
        q = choices.probabilities(nodes)
        if q.shape[1] > self._vocab:  # what the target does not have is not drawn
            q = q[:, : self._vocab] / q[:, : self._vocab].sum(axis=1, keepdims=True)
        return np.pad(q, ((0, 0), (0, self._vocab - q.shape[1])))

    def close(self) -> None:
        if self._following is not None:
            self._following.close()

    def figures(self) -> dict[str, Any]:
        if self._following is None:
            return {}
        told = {"model": self._following.target.name, "forwards": self._following.forwards}
        return {"draft": told | ({"stopped": self._following.failed} if self._following.failed else {})}


class _Growing:
    """The draft of one sequence in the making.

    Attributes:
        wanted: places to look at next.
    """

    def __init__(self, drafter: SpeculativeSampling, ask: Ask, target: Target) -> None:
        assert drafter._following is not None
        self.drafter, self.following, self.rng = drafter, drafter._following, drafter._rng
        budget = ask.budget
        self.width = drafter.width if TREE in target.capabilities else 1
        self.room = min(drafter.nodes, budget.nodes)  # nodes that may still be drawn
        self.leaves = budget.leaves - 1  # branches that may still begin
        self.depth = min(drafter.depth, budget.depth)
        self._builder = TreeBuilder(ask.context.root)
        self._nodes: dict[Path, int] = {(): 0}
        self._chance: dict[Path, float] = {(): 1.0}
        self._children: dict[int, tuple[int, ...]] = {}
        self.qs: dict[int, list[FloatArray]] = {}
        self.wanted: list[Path] = [] if self.following.failed or self.depth < 1 or self.room < 1 else [()]

    def draw(self, paths: Sequence[Path], q: FloatArray) -> None:
        """The children of these places, drawn from q, float64 [paths, vocab]."""
        wanted = set(self.wanted)
        below: list[Path] = []
        for path, row in sorted(zip(paths, q, strict=True), key=lambda each: -self._chance[each[0]]):
            # How many are drawn depends on nothing that this draw shows: see `rejection`.
            count = min(self.width, self.room, self.leaves + 1)
            if path not in wanted or count < 1 or row.max() < self.drafter.unsure:
                continue
            self.room -= count
            self.leaves -= count - 1
            node = self._nodes[path]
            pick = draw_without_replacement if self.drafter.rule == "sequoia" else draw_independent
            tokens = pick(row, count, self.rng)
            children = []
            for token in tokens:
                child = self._builder.add(node, token)
                assert child is not None  # it has no budget
                children.append(child)
                further = (*path, token)
                if further not in self._nodes:
                    self._nodes[further] = child
                    self._chance[further] = self._chance[path] * float(row[token])
                    below.append(further)
            self._children[node] = tuple(children)
            self.qs[node] = [row] * len(children)
        deeper = [path for path in below if len(path) < self.depth]
        most = -(-self.room // self.width)  # nodes that can still have children
        self.wanted = sorted(deeper, key=self._chance.__getitem__, reverse=True)[:most]

    def proposal(self) -> Proposal:
        tree = self._builder.build()
        draws = Draws(tree, self._children, self.qs)
        expected = np.ones(len(tree))
        for path, node in self._nodes.items():
            expected[node] = self._chance[path]
        judge = partial(_judge, draws, RULES[self.drafter.rule], self.rng)
        return Proposal(tree, ("", *("draft",) * (len(tree) - 1)), expected, judge)


def _judge(draws: Draws, rule: Rule, rng: np.random.Generator, choices: Choices) -> Verdict:
    return verify_draws(draws, lambda node: choices.probabilities([node])[0], rng, rule)


def _by_draft(growing: Sequence[_Growing]) -> list[list[_Growing]]:
    """Those that want to look, by the model that they look with."""
    groups: dict[int, list[_Growing]] = {}
    for each in growing:
        if each.wanted:
            groups.setdefault(id(each.following.target), []).append(each)
    return list(groups.values())
