"""The tree search and the tree sizes that pay, and what planned drafters make of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers import PROMPT, FixedLatency, run

from leapahead import Engine, Request
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree
from leapahead.models.base import CHAIN, TREE
from leapahead.models.toy import ToyTarget
from leapahead.planner.acceptance import AcceptanceTable
from leapahead.planner.compiled import acceptance_table, sizes_that_pay
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.latency import LatencyProfile
from leapahead.planner.profile import DraftingTime
from leapahead.planner.sizing import Ahead, StepPlan, best_sizes
from leapahead.planner.source import Candidate, Source
from leapahead.planner.tree_search import TreeSearch, exclusive

fixed = partial(LatencyProfile, fixed=True)

# ------------------------------------------------------------------------------------------------------------- trees


class Known(Source):
    """Candidates by path, given as a dictionary."""

    name: ClassVar[str] = "known"

    def __init__(self, by_path: dict[tuple[int, ...], list[int]]) -> None:
        self.by_path = by_path

    def root(self, sequence: SequenceView) -> tuple[int, ...]:
        return ()

    def follow(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def candidates(self, state: tuple[int, ...], limit: int) -> list[Candidate]:
        tokens = self.by_path.get(state, [])[:limit]
        return [Candidate(token, -float(rank), (len(state),)) for rank, token in enumerate(tokens)]


def search(chances: dict[Any, float], budget: Budget | None = None) -> TreeSearch:
    table = AcceptanceTable({("known", "greedy", rank, depth): p for (rank, depth), p in chances.items()})
    sequence = SequenceView(Sampler(SamplingParams(), [1, 2], 50))
    return TreeSearch(sequence, [Known(BY_PATH)], table, budget or Budget())


BY_PATH = {(): [3, 4], (3,): [5], (4,): [6], (3, 5): [7]}
CHANCES = {(0, 0): 0.6, (1, 0): 0.3, (0, 1): 0.5, (0, 2): 0.9}


def test_nodes_come_likeliest_first() -> None:
    tree = search(CHANCES)
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
    tree = search(CHANCES, Budget(nodes=10, depth=2, leaves=1))
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
    kept = best_sizes([search(CHANCES)], seconds, range(1, 20))
    assert kept == [1 + brute(chances, seconds)]


def test_a_batch_gets_the_likeliest_nodes_whosever_they_are() -> None:
    weak = {key: 0.9 * p for key, p in CHANCES.items()}
    both = [search(CHANCES), search(weak)]
    assert best_sizes(both, lambda rows: 1.0 if rows <= 5 else 1e9, range(1, 20)) == [3, 2]
    padded = best_sizes([search(CHANCES), search(weak)], lambda rows: float(rows), range(1, 20), padded=True)
    assert padded[0] == padded[1] or padded == [1, 1]


def test_sequences_that_draft_nothing_commit_a_token_each() -> None:
    """A node of 0.6 tokens that makes a step 1.3 times longer pays in a step of one token, not in one of four."""
    kept = []
    for others in (0, 3):
        plain = 1 + others
        seconds = partial(lambda plain, n: 1.3 if n > plain else 1.0, plain)
        kept.append(best_sizes([search(CHANCES)], seconds, [], sequences=plain))
    assert kept[0][0] > 1
    assert kept[1] == [1]


def test_a_chain_that_may_be_read_again_must_pay_for_it() -> None:
    """A node of 0.6 tokens: of ten steps four are followed by one with a replayed root, which costs half a row more."""

    def seconds(rows: int) -> float:
        return 0.5 + 0.5 * rows

    assert best_sizes([search(CHANCES)], seconds, [], ahead=Ahead([0])) == [2]
    assert best_sizes([search(CHANCES)], seconds, [], ahead=Ahead([0], replays=True)) == [1]


def test_replayed_tokens_take_rows() -> None:
    """Three rows are as cheap as one: two nodes fit beside a root, and none beside a root and two replayed tokens."""

    def seconds(rows: int) -> float:
        return 1.0 if rows <= 3 else 9.0

    assert [best_sizes([search(CHANCES)], seconds, [], ahead=Ahead([ahead])) for ahead in (0, 2)] == [[3], [1]]
    plan = StepPlan(3, False, fixed({1: 1.0}), DraftingTime(), replays=True, replay=(0, 2, 1))
    assert plan.rows({0: 4}) == 4 + 3 + 2
    assert plan._replace(padded=True).rows({0: 4}) == 3 * 4
    assert plan.ahead([0]) == Ahead([0], 3 + 2, 3, True)


def test_each_branch_takes_as_many_rows_as_the_longest() -> None:
    """The second child of the root is worth a row of its own, but not one of its own and three more."""

    def seconds(rows: int) -> float:
        return 1.0 + 0.25 * rows

    assert best_sizes([search(CHANCES)], seconds, range(1, 20)) == [4]
    assert best_sizes([search(CHANCES)], seconds, range(1, 20), ahead=Ahead([0], branches=True)) == [2]
    plan = StepPlan(1, True, fixed({1: 1.0}), DraftingTime(), replay=(2,), branches=True)
    tree = TokenTree.from_paths(1, [[2, 3, 4], [5]])
    assert plan.rows({0: 5}, [tree]) == 2 * (2 + 4)


def test_the_first_drafted_step_after_a_plain_one_pays_for_the_change() -> None:
    profile = fixed({1: 1.0, 2: 1.3, 3: 9.0})
    plans = [StepPlan(1, False, profile, DraftingTime(), resizing, replay=(0,)) for resizing in (0.0, 0.4)]
    assert [sizes_that_pay({0: search(CHANCES)}, plan, 0.0) for plan in plans] == [{0: 2}, {0: 1}]


@pytest.mark.parametrize(
    ("estimates", "factor"),
    [
        ([0.97, 0.1, 0.05, 0.03], 1.0),
        ([0.6, 0.5, 0.4, 0.01], 1.0),
        ([0.5, 0.2], 2.0),
        ([0.98, 0.98, 0.9], 1.0),
        ([0.2] * 20, 1.1),
        ([1e-3] * 20 + [0.999], 1.0),
        ([0.98] * 100, 1.0),
    ],
)
def test_of_candidates_that_exclude_each_other_sure_ones_remain_sure(estimates: list[float], factor: float) -> None:
    found = exclusive(estimates, factor)
    raised = np.minimum(np.array(estimates) * factor, 0.98)
    assert raised.sum() > 0.98
    assert sum(found) == pytest.approx(0.98, abs=0.005)
    odds = np.array(found) / (1 - np.array(found))
    assert odds / odds[0] == pytest.approx(raised / (1 - raised) / (raised[0] / (1 - raised[0])))


def test_candidates_that_leave_room_for_others_keep_their_estimates() -> None:
    assert exclusive([]) == []
    assert exclusive([0.5, 0.3, 0.1], 0.5) == [0.25, 0.15, 0.05]
    assert exclusive([0.999]) == [0.98]
    assert exclusive([0.97, 0.1])[0] > 0.93  # in proportion it would be 0.89


def test_the_gain_of_drafts_is_counted_in_plain_steps() -> None:
    drafting = DraftingTime()
    plan = StepPlan(1, False, fixed({1: 1.0, 2: 1.25, 3: 1.5}), drafting, replay=(0,))
    one = search(CHANCES)
    one.take_all(2)  # P: 0.6 and 0.3
    tree = one.proposal().tree
    assert plan.gain({0: one}, {0: 1}, [tree], 0.0) == 0.0
    assert plan.gain({0: one}, {0: 2}, [tree], 0.0) == pytest.approx(1.6 - 1.25 - drafting(1))
    assert plan.gain({0: one}, {0: 2}, [tree], 0.1) == pytest.approx(1.5 - 1.25 - drafting(1))
    assert plan.gain({0: one}, {0: 2}, [tree], 0.34) == 0.0  # too little to count
    pair = StepPlan(2, False, fixed({1: 1.0, 2: 1.2, 3: 1.2}), drafting, replay=(0, 0))
    assert pair.gain({0: one}, {0: 2}, [tree], 0.0) == pytest.approx(2.6 / 2 - (1.2 + drafting(1)) / 1.2)


def test_back_offs_grow_with_the_steps_in_which_no_draft_was_near_to_paying() -> None:
    plan = StepPlan(1, False, fixed({1: 1.0, 2: 1.7}), DraftingTime(), replay=(0,))
    assert [plan.longest_back_off(0.02, vain) for vain in (0, 31, 160, 9999)] == [2, 2, 10, 32]
    near, far = search(CHANCES), search({**CHANCES, (0, 0): 0.34, (1, 0): 0.1})
    assert [plan.is_near(some) for some in ([near], [far], [far, near])] == [True, False, True]
    near.take_all(2)
    assert plan.is_near([near])
    plan = plan._replace(profile=fixed({1: 1.0, 8: 1.2}, bucket=8))  # a later start costs more there
    assert plan.longest_back_off(0.1, 9999) == 5


def test_whether_a_draft_could_pay_if_it_were_right() -> None:
    def can_pay(seconds: dict[int, float], spent: float = 0.0, sequences: int = 1, padded: bool = False) -> bool:
        return StepPlan(sequences, padded, fixed(seconds), DraftingTime(), replay=(0,) * sequences).can_pay(spent)

    assert can_pay({1: 1.0, 2: 1.9})
    assert not can_pay({1: 1.0, 2: 2.1, 3: 3.2})
    assert not can_pay({1: 1.0, 2: 1.9, 3: 3.0}, spent=0.1)
    assert can_pay({1: 1.0, 2: 2.2, 16: 9.0})  # fifteen nodes, but no single one
    assert can_pay({4: 1.0, 5: 1.2}, sequences=4)
    assert not can_pay({4: 1.0, 5: 1.3, 8: 2.3}, sequences=4)
    assert not can_pay({4: 1.0, 5: 1.2, 8: 1.8}, sequences=4, padded=True)


def test_the_plan_for_every_small_case() -> None:
    for steps in product([1.0, 1.3, 2.0], repeat=3):
        curve = [1.0]
        for step in steps:
            curve.append(curve[-1] * step)

        def seconds(n: int, curve: list[float] = curve) -> float:
            return curve[min(n, len(curve)) - 1] * (1.0 if n <= len(curve) else 1.5 ** (n - len(curve)))

        assert best_sizes([search(CHANCES)], seconds, range(1, 20)) == [1 + brute([0.6, 0.3, 0.3, 0.27, 0.15], seconds)]


# -------------------------------------------------------------------------------------------------- planned drafters


def test_drafters_with_fixed_and_free_sizes_share_a_batch() -> None:
    """One drafts a single node, one twelve, and one as many as pay, which is none."""
    target = ToyTarget(vocab_size=12, order=2)
    engine = Engine(target, latency=FixedLatency(target, {1: 1.0, **{2**n: 1e3 * 100.0**n for n in range(1, 7)}}))
    sizes: dict[int, set[int]] = {1: set(), 12: set(), 0: set()}
    handles = []
    for nodes, prompt in zip(sizes, ([1, 2, 3, 1, 2], [4], [5]), strict=True):
        drafter = engine.drafter("recycling", nodes=nodes)

        def watch(step: Step, seen: set[int] = sizes[nodes]) -> None:
            seen.add(len(step.tree) - 1)

        handles.append(engine.submit(Request(prompt, drafter, stop=StopParams(max_new_tokens=24), on_step=watch)))
    engine.run(handles)
    assert max(sizes[1]) == 1
    assert max(sizes[12]) == 12
    assert sizes[0] == {0}


def test_the_plan_counts_all_sequences_of_the_forward() -> None:
    """The profile of the joint forward is read, whose other sequences draft nothing."""
    target = ToyTarget(vocab_size=12, order=2)
    asked: list[int] = []

    class Watched(FixedLatency):
        def profile(self, sequences: int) -> Any:
            asked.append(sequences)
            return super().profile(sequences)

    engine = Engine(target, latency=Watched(target, {1: 1.0, 64: 1.1}))
    drafters = [engine.drafter("suffix", nodes=0), engine.drafter("plain"), engine.drafter("plain")]
    stop = StopParams(max_new_tokens=12)
    engine.run([engine.submit(Request(list(PROMPT), drafter, stop=stop)) for drafter in drafters])
    assert 3 in asked


@pytest.mark.parametrize("table", [AcceptanceTable, acceptance_table])
def test_a_step_without_room_for_drafts_counts_no_candidate_as_wrong(table: Callable[[], AcceptanceTable]) -> None:
    """As while other requests read their prompts in steps: the drafter is not asked then, and only observes."""
    target, stop = ToyTarget(max_nodes=8), StopParams(max_new_tokens=24)
    engine = Engine(target, acceptance=table())
    handle = engine.submit(Request(list(PROMPT), engine.drafter("recycling", nodes=4), stop=stop))
    while not handle.stats.drafted:
        engine.step()
    target.max_nodes, known = 1, engine.acceptance.rows()
    assert known
    engine.step()
    assert engine.acceptance.rows() == known
    target.max_nodes = 8
    engine.run([handle])
    assert handle.tokens == run(target, stop=stop).tokens


def test_a_target_that_no_source_can_serve_is_reported_once_and_decodes_plainly() -> None:
    target = ToyTarget(capabilities=frozenset())
    engine = Engine(target)
    with pytest.warns(
        UserWarning, match="the drafter 'auto' cannot draft for this target, so it decodes plainly"
    ) as log:
        drafter = engine.drafter("auto")
    assert len(log) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = engine.submit(Request(list(PROMPT), drafter, stop=StopParams(max_new_tokens=8)))
        engine.run([handle])
    assert handle.tokens == run(target, stop=StopParams(max_new_tokens=8)).tokens
    assert set(handle.stats.drafter["left_out"]) == {"prediction", "grammar", "suffix", "recycling", "siblings"}


def test_a_source_that_the_target_cannot_serve_is_reported_by_name() -> None:
    target = ToyTarget(capabilities=frozenset({CHAIN, TREE}))
    left = run(target, "auto").stats.drafter["left_out"]
    assert set(left) == {"recycling", "siblings"}
    assert "top_k" in left["recycling"]
