"""Ouroboros: the draft model decodes with lookahead, phrases lengthen its drafts, and the target corrects them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers import GREEDY, FixedLatency, Run, assert_same_text, run
from test_draft import CHEAP, FLAT, WARM, Blurred, timed

from leapahead.core.errors import BadParameter
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import verify
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.drafters.ouroboros import Ouroboros
from leapahead.drafters.sources.guessed import GuessedSource
from leapahead.drafters.sources.past_phrases import PastPhrases, WarmPool
from leapahead.drafters.sources.phrases import Phrases
from leapahead.models.base import Cost
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Forward, Proposal, SequenceView, Step

STOP = StopParams(max_new_tokens=100)
SAMPLINGS = pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])


def forwards(done: Run) -> float:
    """Draft forwards per step."""
    return float(done.stats.drafter["draft"]["forwards"]) / len(done.steps)


@SAMPLINGS
def test_lookahead_finds_the_draft_models_own_draft_in_fewer_forwards(params: Any) -> None:
    """Without phrases in the draft, every step drafts the very tokens that the draft model alone drafts.

    When sampling, the search may prefer a draft model's second candidate to its first one; here there is no second one.
    """
    target, draft = ToyTarget(), Blurred(0.3)
    alone = run(target, DraftModelDrafter(draft, nodes=5, chain=True), params=params, stop=STOP)
    drafter = Ouroboros(draft, nodes=5, length=5, phrases=0, chain=True)
    found = assert_same_text(target, drafter, params=params, stop=STOP)
    if params is GREEDY:
        assert [step.tree.token_list for step in found.steps] == [step.tree.token_list for step in alone.steps]
    assert abs(found.stats.acceptance_length - alone.stats.acceptance_length) < 0.3
    assert forwards(found) < 0.8 * forwards(alone)


@SAMPLINGS
def test_phrases_go_on_behind_the_draft(params: Any) -> None:
    """Up to K of them, each as long as those of the pool, below the last token that the draft model drafted."""
    target = ToyTarget()
    drafter = Ouroboros(Blurred(0.2), nodes=12, length=3, phrases=3, ngram=4, chain=True)
    found = assert_same_text(target, drafter, params=params, stop=STOP)
    longer = [step for step in found.steps if len(step.tree) > 4]
    assert len(longer) > 5
    for step in longer:
        tree, sources = step.tree, step.proposal.sources
        assert set(sources[1:4]) == {"draft"}
        assert set(sources[4:]) == {"phrase"}
        assert tree.parent_list[1:5] == [0, 1, 2, 3]
        assert 3 < max(tree.depth_list) <= 3 + 3
        assert len(tree.leaf_list) <= 3
    assert found.stats.accepted_by["phrase"] > 0


def test_phrases_make_greedy_drafts_longer() -> None:
    target, draft = ToyTarget(), Blurred(0.1)
    chain = run(target, Ouroboros(draft, nodes=4, length=4, phrases=0, chain=True), stop=STOP)
    longer = run(target, Ouroboros(draft, nodes=13, length=4, chain=True), stop=STOP)
    assert longer.stats.acceptance_length > 1.2 * chain.stats.acceptance_length


class Chosen:
    """The target's choices after the nodes of a tree."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = np.array(tokens)

    def __getitem__(self, node: int) -> int:
        return int(self.tokens[node])

    def of(self, nodes: Sequence[int]) -> Any:
        return self.tokens[list(nodes)]


def test_the_targets_choices_over_rejected_tokens_enter_the_pool() -> None:
    """What it chose along a path, as a text of its own, and after each drafted token: 3 is rejected here."""
    pool, target = WarmPool(3, guesses=4, capacity=100), ToyTarget()
    view = SequenceView(target.open([5, 1], GREEDY).sampler)
    source = Phrases(pool, GuessedSource(timed(target), target, "draft", None), most=3)
    source.begin(view)
    assert len(pool) == 0
    view.tokens += [2, 9]
    tree, choices = TokenTree.chain(1, [2, 3, 4, 6]), Chosen(2, 9, 7, 6, 8)
    step = Step(Proposal(tree), choices, verify(tree, choices), 1, Forward(0.0, Cost(5, 1, 2)))  # type: ignore[arg-type]
    source.observe(view, step)
    behind = {(9, (7, 6)), (7, (6, 8))}
    corrected = {(3, (7, 6)), (4, (6, 8))}
    assert set(pool.ngrams()) == behind | corrected | {(5, (1, 2)), (1, (2, 9)), (2, (9, 7))}
    assert pool.known(5) == [(1, 2)]
    assert [each.token for each in source.candidates((), 8)] == [7], "after the last token, 9"
    assert [each.token for each in source.candidates((7,), 8)] == [6]
    assert source.candidates((7, 6), 8) == source.candidates((1,), 8) == []


def test_the_window_rides_where_its_rows_are_free_and_stays_away_where_they_are_dear() -> None:
    """By the draft model's latency profile, and by how often phrases are right."""
    target, stop = ToyTarget(), StopParams(max_new_tokens=100)
    guessed = []
    for seconds in ({1: 0.2, 128: 0.2}, {1: 0.2, 2: 0.6, 128: 40.0}):
        drafter = Ouroboros(timed(Blurred(0.2), seconds))
        found = assert_same_text(target, drafter, stop=stop, latency=FixedLatency(target, FLAT))
        guessed.append(found.stats.drafter["draft"]["guessed"])
    assert guessed[0] > 50
    assert guessed[1] == 0


def test_phrases_go_on_from_text_to_text() -> None:
    """Those of past texts come after the text's own, and a text that ends enters its own."""
    target, cache = ToyTarget(vocab_size=60), DrafterCache()
    counts = []
    for _ in range(2):
        drafter = Ouroboros(Blurred(0.2, vocab_size=60), nodes=12, length=3, chain=True)
        found = assert_same_text(target, drafter, stop=StopParams(max_new_tokens=40), drafter_cache=cache)
        counts.append((found.stats.acceptance_length, forwards(found)))
    assert counts[1][0] > counts[0][0]
    assert counts[1][1] < counts[0][1]
    pool, past = WarmPool(3, 2, 100), PastPhrases()
    past.enter([(1, (2, 3)), (1, (4, 5)), (1, (2, 2, 2))])
    pool.past = past
    assert pool.known(1) == [(4, 5), (2, 3)]
    pool.add(1, (6, 7))
    pool.add(1, (2, 3))
    assert pool.get(1) == [(2, 3), (6, 7)]
    assert (pool.peek(1), pool.peek(9)) == ((2, 3), None)


@pytest.mark.slow
@SAMPLINGS
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nodes": 9},
        {"length": 3},
        {"nodes": 12, "length": 4, "chain": True},
        {"window": 1, "ngram": 2, "guesses": 1, "nodes": 6},
        {"window": 9, "ngram": 5, "guesses": 7, "seed_aware": False},
    ],
    ids=str,
)
def test_the_text_is_that_of_plain_decoding(params: Any, share: float, options: dict[str, Any]) -> None:
    target, latency = ToyTarget(), FixedLatency(ToyTarget(), FLAT)
    drafter = Ouroboros(timed(Blurred(share), CHEAP), **options)
    assert_same_text(target, drafter, params=params, stop=StopParams(max_new_tokens=40), latency=latency)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 0}, "window=0 is not possible"),
        ({"ngram": 1}, "ngram=1 is not possible"),
        ({"guesses": 0}, "guesses=0 is not possible"),
        ({"phrases": -1}, "phrases=-1 is not possible"),
        ({"length": 1.5}, "length=1.5 is not possible"),
        ({"draft": [ToyTarget(), ToyTarget()]}, "takes one draft model; draft_model and cascade take several"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_impossible_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadParameter, match=says):
        Ouroboros(**{"draft": ToyTarget(), **options})
