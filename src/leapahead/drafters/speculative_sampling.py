"""Speculative sampling: the draft is *sampled* from a smaller model and accepted by the rejection rule.

    draft forward over the root     q0 ─ draw ─> a, b      `width` draws per node, a number that is fixed beforehand
    draft forward over a and b      q1 ─ draw ─> c ...     `depth` levels, or fewer where the draft model is unsure
    target                          p at every node        accept with min(1, p / q), or sample the residual

Exact in distribution, not in text: under a seed the text differs from plain decoding's. The rules and their conditions
are in `leapahead.core.rejection`. All random numbers come from one generator per text, keyed by the seed and by a
number that no position has, so they are independent of the Gumbel noise that the target uses where nothing was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import is_left_out, one_of, whole, within
from leapahead.core.rejection import (
    RULES,
    Draws,
    FloatArray,
    Rule,
    draw_independent,
    draw_without_replacement,
    verify_draws,
)
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.core.verify import Verdict
from leapahead.drafters import draft_models
from leapahead.drafters.base import Drafter, Host, Probabilities, close_all
from leapahead.drafters.draft_models import DraftModel
from leapahead.drafters.draft_runner import Draft, DraftRunner, Path
from leapahead.models.base import CHAIN, LOGITS, TREE, Capture
from leapahead.models.choices import Choices
from leapahead.planner.draft import Proposal, SequenceView

GENERATOR_KEY = 1 << 63  # greater than every position


@dataclass
class Sampling:
    """What the drafter keeps of one sequence.

    Attributes:
        sequence: the sequence.
        rng: for all its draws and tests.
        runner: the draft model's, made when it is first needed.
        drawn: q of the last draft: node -> a row for each of its children, float64 [vocab].
    """

    sequence: SequenceView
    rng: np.random.Generator
    runner: DraftRunner | None = None
    drawn: dict[int, list[FloatArray]] = field(default_factory=dict)


class SpeculativeSampling(Drafter):
    """Speculative sampling (2211.17192, 2302.01318) and its trees: exact in distribution, another text than plain.

    Args:
        draft: the model that drafts, see `draft_model`; one, required.
        rule: for trees: "sequoia" (2402.12374, no token twice), "specinfer" (2305.09781) or "spectr" (2310.15141).
        depth: run never more than so many draft forwards in a step, which is the greatest length of a path.
        width: draw exactly so many tokens after every node; with 1, drafts are chains and the three rules are equal.
        nodes: never draft more than so many nodes in a step.
        unsure: draw nothing after a path where the draft model's likeliest token has less probability; 0 for never.
        draft_window: newest tokens that the draft model sees, see `draft_model`; 0 for all.
    """

    name: ClassVar[str] = "speculative_sampling"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN, LOGITS})
    same_text: ClassVar[bool] = False
    capture: Capture = Capture(logits=True)

    def __init__(
        self,
        draft: Any = None,
        rule: str = "sequoia",
        depth: int = 4,
        width: int = 1,
        nodes: int = 16,
        unsure: float = 0.0,
        draft_window: int = 0,
    ) -> None:
        if is_left_out(draft):
            raise BadParameter("the drafter 'speculative_sampling' needs draft=..., the smaller model")
        self.depth, self.width = whole("depth", depth, 1), whole("width", width, 1)
        self.nodes = whole("nodes", nodes, 1)
        if nodes < width:
            raise BadParameter(f"width={width}, nodes={nodes} is not possible: nodes must be at least width")
        self.rule, self.unsure = one_of("rule", rule, RULES), within("unsure", unsure, 0, 1, "a probability")
        self.draft_window = whole("draft_window", draft_window)
        self._drafts = draft_models.parsed(draft)
        if len(self._drafts) > 1:
            raise BadParameter("speculative_sampling takes one draft model; draft_model and auto take several")
        self._sequences: dict[SequenceView, Sampling] = {}

    def attach(self, host: Host) -> None:
        super().attach(host)
        self._model: DraftModel
        (self._model,) = host.draft_models.all(self._drafts, host.target, host.tokenizer)
        draft_models.check_window(self.draft_window, [self._model])

    def begin(self, sequence: SequenceView) -> None:
        key = np.array([sequence.params.seed, GENERATOR_KEY], dtype=np.uint64)
        self._sequences[sequence] = Sampling(sequence, np.random.Generator(np.random.Philox(key=key)))

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        """Level by level; each level is one draft forward for all sequences."""
        growing = [
            _Growing(self, self._ready(self._sequences[sequence]), budget)
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        with self._model.target.lock:
            while members := [each for each in growing if each.wanted]:
                for each in members:
                    each.runner.add(each.wanted)
                drafts, _ = DraftRunner.forward([each.runner for each in members])
                for each, draft in zip(members, drafts, strict=True):
                    if draft is None:
                        each.wanted = []
                    else:
                        each.draw(draft)
        for sequence, each in zip(sequences, growing, strict=True):
            self._sequences[sequence].drawn = each.qs
        return [each.proposal() for each in growing]

    def _ready(self, state: Sampling) -> Sampling:
        """With a draft-model runner that has read a further chunk of the prompt if it has not read all of it."""
        if state.runner is None:
            sequence = state.sequence
            state.runner = DraftRunner(
                self._model.target,
                sequence.tokens,
                sequence.params,
                sequence.owner,
                sequence.source,
                self.draft_window,
            )
        state.runner.commit()  # where its window is full, it is read again
        if not state.runner.opened or state.runner.reading:
            state.runner.read_ahead()
        return state

    def draft_probabilities(self, sequence: SequenceView, tree: TokenTree) -> Probabilities:
        drawn = self._sequences[sequence].drawn
        q = np.full(len(tree), np.nan)
        for node in range(1, len(tree)):
            if rows := drawn.get(int(tree.parents[node])):
                q[node] = rows[0][tree.tokens[node]]
        return {"draft": q}

    def close(self, sequence: SequenceView) -> None:
        if (state := self._sequences.get(sequence)) is not None:
            close_all(self._sequences, sequence, [] if state.runner is None else [state.runner.close])

    def figures(self, sequence: SequenceView) -> dict[str, Any]:
        if (state := self._sequences.get(sequence)) is None or (runner := state.runner) is None:
            return {}
        found = {"model": runner.target.info.name, "forwards": runner.forwards}
        return {"draft": found | ({"stopped": runner.failed} if runner.failed else {})}


class _Growing:
    """The draft of one sequence in the making.

    Attributes:
        wanted: paths of the next draft forward.
        qs: node -> q of each of its children.
    """

    def __init__(self, drafter: SpeculativeSampling, state: Sampling, budget: Budget) -> None:
        assert state.runner is not None
        self.drafter, self.sequence, self.runner, self.rng = drafter, state.sequence, state.runner, state.rng
        self.width = drafter.width if TREE in drafter.host.info.capabilities else 1
        self.room = min(drafter.nodes, budget.nodes)  # nodes that may still be drawn
        self.leaves = budget.leaves - 1  # branches that may still begin
        self.depth = min(drafter.depth, budget.depth)
        self.qs: dict[int, list[FloatArray]] = {}
        can_draft = self.runner.opened and not self.runner.reading and self.depth >= 1 and self.room >= 1
        self.wanted: list[Path] = [()] if can_draft else []
        self._builder = TreeBuilder(self.sequence.root)
        self._nodes: dict[Path, int] = {(): 0}
        self._chance: dict[Path, float] = {(): 1.0}
        self._children: dict[int, tuple[int, ...]] = {}

    def draw(self, draft: Draft) -> None:
        """Draws the children of the paths of a draft forward."""
        q = _processed(draft.choices, draft.nodes, self.sequence.vocab_size)
        rows = zip(draft.paths, draft.nodes, q, strict=True)
        wanted = set(self.wanted)
        below: list[Path] = []
        for path, at, row in sorted(rows, key=lambda each: -self._chance[each[0]]):
            # The number of draws must not depend on what is drawn here: see `leapahead.core.rejection`.
            count = min(self.width, self.room, self.leaves + 1)
            if path not in wanted or count < 1 or not row.any() or self._is_unsure(draft.choices, at, row):
                continue
            self.room -= count
            self.leaves -= count - 1
            node = self._nodes[path]
            pick = draw_without_replacement if self.drafter.rule == "sequoia" else draw_independent
            tokens = pick(row, count, self.rng)
            children = []
            for token in tokens:
                child = self._builder.add(node, token)
                assert child is not None  # the builder has no budget
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

    def _is_unsure(self, choices: Choices, node: int, row: FloatArray) -> bool:
        """Whether the draft model's likeliest token after a node has less probability than `unsure`.

        Greedily q is 1 at the choice, which tells nothing, so the distribution at temperature 1 is looked at.
        """
        if self.drafter.unsure and not self.sequence.sampled:
            row = np.exp(choices.log_distribution(node))
        return bool(row.max() < self.drafter.unsure)

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


def _processed(choices: Choices, nodes: Sequence[int], vocab_size: int) -> FloatArray:
    """q after each node of the draft model's tree, float64 [nodes, vocab_size], from which tokens are drawn.

    Tokens that the target does not have are not drawn. Where the draft model allows no other ones, q is 0.
    """
    q = choices.probabilities(nodes)
    if q.shape[1] > vocab_size:
        left = q[:, :vocab_size].sum(axis=1, keepdims=True)
        q = q[:, :vocab_size] / np.where(left > 0, left, 1.0)
    return np.pad(q, ((0, 0), (0, vocab_size - q.shape[1])))
