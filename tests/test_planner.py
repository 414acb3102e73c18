"""What drafting costs, how likely a node is, and the tree that pays."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

import pytest
from helpers import begin

from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import Budget
from leapahead.drafters.base import Context
from leapahead.drafters.single import TokenRecycling
from leapahead.planner.source import Candidate, Source
from leapahead.engine.loop import Generation, decode
from leapahead.models.toy import ToyTarget
from leapahead.planner.acceptance import AcceptanceTable
from leapahead.planner.latency import CostCurve
from leapahead.planner.profile import Machine, machine_of
from leapahead.planner.sizing import worth
from leapahead.planner.tree_search import Growth


# ------------------------------------------------------------------------------------------------------------- trees


class Known(Source):
    """What it was told to say, by path."""

    name: ClassVar[str] = "known"

    def __init__(self, says: dict[tuple[int, ...], list[int]], name: str = "known") -> None:
        self.says = says
        self.label = name

    def root(self, context: Context) -> tuple[int, ...]:
        return ()

    def follow(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def candidates(self, state: tuple[int, ...], limit: int) -> list[Candidate]:
        tokens = self.says.get(state, [])[:limit]
        return [Candidate(token, -float(rank), (len(state),)) for rank, token in enumerate(tokens)]


def context() -> Context:
    return Context(Sampler(SamplingParams(), [1, 2], 50))


def growth(says: dict[tuple[int, ...], list[int]], chances: dict[Any, float], budget: Budget | None = None) -> Growth:
    table = AcceptanceTable({("known", "greedy", rank, depth): p for (rank, depth), p in chances.items()})
    return Growth(context(), [Known(says)], table, budget or Budget())


SAYS = {(): [3, 4], (3,): [5], (4,): [6], (3, 5): [7]}
CHANCES = {(0, 0): 0.6, (1, 0): 0.3, (0, 1): 0.5, (0, 2): 0.9}


def test_nodes_come_likeliest_first() -> None:
    tree = growth(SAYS, CHANCES)
    found = []
    while tree.next > 0:
        found.append(round(tree.next, 4))
        assert tree.take()
    assert found == [0.6, 0.3, 0.3, 0.27, 0.15]
    assert sorted(found, reverse=True) == found
    proposal = tree.proposal(4)
    assert proposal.tree.tokens.tolist()[:2] == [2, 3]
    assert set(proposal.sources[1:]) == {"known"}
    assert proposal.expected is not None
    assert proposal.expected[0] == 1.0


def test_a_budget_of_leaves_and_depth_is_kept() -> None:
    tree = growth(SAYS, CHANCES, Budget(nodes=10, depth=2, leaves=1))
    while tree.next > 0:
        tree.take()
    assert tree.proposal().tree.is_chain
    assert tree.proposal().tree.depths.max() == 2


def brute(chances: list[float], seconds: Callable[[int], float]) -> int:
    """The best number of nodes, of all."""
    rates = [(1 + sum(chances[:n])) / seconds(1 + n) for n in range(len(chances) + 1)]
    return max(range(len(rates)), key=lambda n: (round(rates[n], 12), -n))


@pytest.mark.parametrize(
    "seconds",
    [
        lambda n: 1.0,
        lambda n: 1 + 0.05 * (n - 1),
        lambda n: 1 + 0.5 * (n - 1),
        lambda n: 1.0 if n == 1 else 3.0 if n < 4 else 3.1,  # a step: few nodes do not pay, more may
        lambda n: 5.0 - 0.2 * n if 1 < n < 8 else 1.0 + 0.1 * n,
        lambda n: 10.0**n,
    ],
)
def test_the_tree_that_pays_is_the_best_of_all_sizes(seconds: Callable[[int], float]) -> None:
    chances = [0.6, 0.3, 0.3, 0.27, 0.15]
    kept = worth([growth(SAYS, CHANCES)], seconds, range(1, 20))
    assert kept == [1 + brute(chances, seconds)]


def test_a_batch_gets_the_likeliest_nodes_whosever_they_are() -> None:
    weak = {key: 0.9 * p for key, p in CHANCES.items()}
    both = [growth(SAYS, CHANCES), growth(SAYS, weak)]
    assert worth(both, lambda rows: 1.0 if rows <= 5 else 1e9, range(1, 20)) == [3, 2]
    padded = worth([growth(SAYS, CHANCES), growth(SAYS, weak)], lambda rows: float(rows), range(1, 20), padded=True)
    assert padded[0] == padded[1] or padded == [1, 1]


def test_the_plan_for_every_small_case() -> None:
    for steps in product([1.0, 1.3, 2.0], repeat=3):
        curve = [1.0]
        for step in steps:
            curve.append(curve[-1] * step)

        def seconds(n: int, curve: list[float] = curve) -> float:
            return curve[min(n, len(curve)) - 1] * (1.0 if n <= len(curve) else 1.5 ** (n - len(curve)))

        assert worth([growth(SAYS, CHANCES)], seconds, range(1, 20)) == [
            1 + brute([0.6, 0.3, 0.3, 0.27, 0.15], seconds)
        ]


def test_fixed_nodes_are_each_sequences_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch: one drafts a single node, one twelve, and one what pays, which is nothing."""
    target = ToyTarget(vocab_size=12, order=2)
    monkeypatch.setattr(Machine, "observed", lambda self, forward: None)
    for sequences in (1, 2, 3):
        machine_of(target).put(target, sequences, CostCurve({1: 1.0, **{2**n: 1e3 * 100.0**n for n in range(1, 7)}}))
    drafters = [TokenRecycling(nodes=1), TokenRecycling(nodes=12), TokenRecycling(nodes=0)]
    prompts = [[1, 2, 3, 1, 2], [4], [5]]
    batch = [begin(target, drafter, prompt) for drafter, prompt in zip(drafters, prompts, strict=True)]
    sizes: dict[Generation, set[int]] = {generation: set() for generation in batch}
    everyone = list(batch)
    for generation, step in decode(target, batch):
        sizes[generation].add(len(step.tree) - 1)
    one, twelve, none = (sizes[generation] for generation in everyone)
    assert max(one) == 1
    assert max(twelve) == 12
    assert none == {0}
