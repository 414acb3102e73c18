"""Jacobi decoding, prompt lookup, lookahead decoding and token recycling: what they draft, step by step."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import run

from leapahead import LLM, BadParameter, Budget, SamplingParams, StopParams
from leapahead.core.sampling import Sampler
from leapahead.drafters import registry
from leapahead.drafters.jacobi import Jacobi
from leapahead.drafters.lookahead import Lookahead
from leapahead.drafters.pool import NgramPool
from leapahead.drafters.prompt_lookup import PromptLookup
from leapahead.drafters.sources.recycling import GREEDY, SAMPLED, Recycling
from leapahead.drafters.window import Window
from leapahead.models.choices import Choices, PromptRows
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import SequenceView

VOCAB = 200


def view_of(tokens: Sequence[int], **sampling: Any) -> SequenceView:
    return SequenceView(Sampler(SamplingParams(**sampling), list(tokens), VOCAB))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"),
    [("jacobi", [275, 274, 221]), ("lookahead", [90, 119, 155]), ("prompt_lookup", [56, 112, 242])],
)
def test_steps_of_five_texts(name: str, steps: list[int]) -> None:
    """The numbers that these drafters have always needed; another number is another drafter."""
    llm = LLM(ToyTarget(), drafter=name)
    for temperature, expected in zip((0.0, 0.3, 1.0), steps, strict=True):
        options: dict[str, Any] = {"max_new_tokens": 60, "temperature": temperature}
        found = [llm.generate([1, 2, 3, seed], seed=seed, **options).stats.steps for seed in range(5)]
        assert sum(found) == expected


class Crowded(ToyTarget):
    """Has room for drafts in every third step only, as while other sequences read their prompts in steps."""

    steps = 0

    def step(self, *args: Any, **options: Any) -> list[Choices]:
        self.steps += 1
        self.max_nodes = 1 if self.steps % 3 else 64
        return super().step(*args, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", registry.ready())
def test_steps_without_room_for_drafts(name: str, temperature: float) -> None:
    """The drafter is not asked then, and observes a step of the root alone; the first one too."""
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 1}
    expected = LLM(ToyTarget(), drafter="plain").generate([1, 2, 3], **options).tokens
    result = LLM(Crowded(max_nodes=1), drafter=name).generate([1, 2, 3], **options)
    assert result.tokens == expected


# --------------------------------------------------------------------------------------------------- prompt lookup


@pytest.mark.parametrize(
    ("prompt", "options", "draft"),
    [
        ([1, 2, 3, 4, 1, 2], {"num_tokens": 3}, [3, 4, 1]),
        ([5, 6, 5, 6], {"num_tokens": 6}, [5, 6, 5, 6, 5, 6]),  # a match that reaches the end continues in the draft
        ([1, 7, 1, 8, 1, 8, 1, 9, 1], {"num_tokens": 1, "max_ngram": 1}, [8]),  # the most frequent continuation
        ([1, 7, 1, 8, 1], {"num_tokens": 1}, [8]),  # of equally frequent ones the latest
        ([1, 7, 1, 7, 1, 8, 1], {"num_tokens": 1, "max_matches": 1}, [8]),  # the latest match alone
        ([3, 1, 7, 4, 1, 8, 3, 1], {"num_tokens": 1}, [7]),  # the longest match first
        ([1, 2, 3], {}, []),
        ([1, 2, 3, 1], {"min_ngram": 2}, []),
    ],
)
def test_prompt_lookup(prompt: list[int], options: dict[str, Any], draft: list[int]) -> None:
    drafter, sequence = PromptLookup(**options), view_of(prompt)
    drafter.begin(sequence)
    tree = drafter.propose(sequence, Budget()).tree
    assert tree.tokens.tolist() == [prompt[-1], *draft]
    assert tree.parents.tolist() == list(range(-1, len(draft)))
    assert len(drafter.propose(sequence, Budget(nodes=2)).tree) <= 3
    assert len(drafter.propose(sequence, Budget(depth=1)).tree) <= 2


def test_the_figures_of_prompt_lookup_are_of_the_same_steps() -> None:
    drafter = PromptLookup()
    found = run(ToyTarget(), drafter, stop=StopParams(max_new_tokens=40))
    *steps, _ = found.steps  # drafters are not told of the last one
    hits = [step for step in steps if len(step.tree) > 1]
    accepted = sum(step.verdict.accepted for step in hits)
    assert drafter.figures()["accepted_per_hit"] == pytest.approx(accepted / len(hits), abs=1e-4)
    assert drafter.figures()["hit_rate"] == pytest.approx(len(hits) / len(steps), abs=1e-4)


def test_the_memory_of_prompt_lookup() -> None:
    """Most n-grams of a text occur once; of those that occur often, the latest occurrences are kept."""
    drafter, sequence = PromptLookup(), view_of(range(20_000))
    tracemalloc.start()
    try:
        drafter.begin(sequence)
        assert tracemalloc.get_traced_memory()[0] < 1_200 * 20_000
    finally:
        tracemalloc.stop()
    drafter, sequence = PromptLookup(num_tokens=1, max_ngram=1, max_matches=2), view_of([1, 7, 1, 7, 1, 8, 1, 9, 1])
    drafter.begin(sequence)
    assert drafter.propose(sequence, Budget()).tree.token_list == [1, 9]


def test_prompt_lookup_is_seed_aware() -> None:
    """When sampling, the logarithm of a continuation's share plus the noise of its position ranks it."""
    prompt, chosen = [1, 7, 1, 8, 1, 8, 1, 9, 1], set()
    for seed in range(30):
        drafter, sequence = PromptLookup(num_tokens=1, max_ngram=1), view_of(prompt, temperature=1.0, seed=seed)
        drafter.begin(sequence)
        tokens = np.array([8, 9, 7])
        scores = sequence.scores(len(prompt), tokens, np.log([0.5, 0.25, 0.25]))
        expected = int(tokens[np.argmax(scores)])
        assert drafter.propose(sequence, Budget()).tree.tokens.tolist() == [1, expected]
        chosen.add(expected)
    assert chosen == {7, 8, 9}


# ---------------------------------------------------------------------------------------------------------- Jacobi


def test_a_window_of_absurd_size_is_refused() -> None:
    """Also in ouroboros, whose draft model has one."""
    with pytest.raises(BadParameter, match="window=2097152 and ngram=2 are not possible together"):
        Window(2**21, 2)


def test_a_block_of_jacobi_beyond_the_budget_takes_no_memory() -> None:
    """A step drafts no more than its budget, and what is guessed beyond it would be replaced unseen."""
    sequence = SequenceView(Sampler(SamplingParams(), [3, 1, 4], 50))
    drafter = Jacobi(block=2**24)
    drafter.begin(sequence)
    assert len(drafter.propose(sequence, Budget(nodes=8, depth=5)).tree) == 6
    assert len(drafter._guesses) == 5


def test_the_guesses_of_jacobi_are_the_targets_last_choices() -> None:
    found = run(ToyTarget(), Jacobi(block=5), stop=StopParams(max_new_tokens=30))
    for before, after in pairwise(found.steps):
        chosen = [before.choices[node] for node in range(len(before.tokens), len(before.tree))]
        assert after.tree.tokens[1 : 1 + len(chosen)].tolist() == chosen[: len(after.tree) - 1]
        assert len(after.tree) <= 6
    shares = found.stats.drafter["right_after_iteration"]
    assert list(shares.values()) == sorted(shares.values())
    assert list(shares.values())[-1] == 1.0
    with pytest.raises(BadParameter, match="block=0 is not possible"):
        Jacobi(block=0)


# ------------------------------------------------------------------------------------------------------- lookahead


def test_the_window_fills_the_pool_and_slides() -> None:
    """W = 4, N = 4. The first window is a chain of W+N-3 tokens, in which the columns overlap."""
    drafter, prompt = Lookahead(4, 4, 100, prompt_ngrams=False), list(range(100, 160))
    first, second = run(ToyTarget(vocab_size=VOCAB), drafter, prompt, stop=StopParams(max_new_tokens=20)).steps[:2]
    tokens = first.tree.tokens.tolist()
    assert first.tree.parents.tolist() == list(range(-1, 5))
    new = [first.choices[node] for node in range(2, 6)]  # after each of the four columns
    for column in range(4):
        assert (tokens[column + 1], tokens[column + 2], new[column]) in drafter.pool.get(tokens[column])
    paths = [second.tree.path_tokens(node) for node in range(len(second.tree))]
    for column in range(4):  # moved on by one position
        assert [*tokens[2 : 3 + column], new[column]] in paths


def test_lookahead_drafts_the_tails_of_the_pool() -> None:
    drafter, prompt = Lookahead(2, 3, 3), [1, 2, 3, 1, 4, 5, 1]
    sequence = view_of(prompt)
    drafter.begin(sequence)
    proposal = drafter.propose(sequence, Budget())
    guesses = [node for node, source in enumerate(proposal.sources) if source == "guess"]
    assert [tuple(proposal.tree.path_tokens(node)) for node in guesses] == [(4,), (4, 5), (2,), (2, 3)]
    with pytest.raises(BadParameter, match="there is no preset 'prose'; there are code, text"):
        Lookahead(preset="prose")
    with pytest.raises(BadParameter, match="window=0 is not possible"):
        Lookahead(window=0)
    with pytest.raises(BadParameter, match=r"window=1000000, ngram=5 and guesses=7 are not possible.*4000028 rows"):
        Lookahead(window=10**6, ngram=5, guesses=7)


def test_a_pool_drops_the_least_recently_used() -> None:
    pool = NgramPool(ngram=2, guesses=2, capacity=3)
    for key, token in ((1, 10), (1, 11), (1, 12), (2, 20)):
        pool.add(key, (token,))
    assert pool.peek(1) == (12,)
    assert pool.get(1) == [(12,), (11,)]  # of one key the latest two; the key is used now
    pool.add(3, (30,))
    assert (pool.get(2), len(pool)) == ([], 3)
    pool.add(1, (11,))
    assert pool.get(1) == [(11,), (12,)]
    assert pool.figures()["lookups"] == 3
    with pytest.raises(BadParameter, match=r"ngram=1, guesses=2 and \w*capacity=3 is not possible"):
        NgramPool(1, 2, 3)


# ------------------------------------------------------------------------------------------------------- recycling


class CountedRows(PromptRows):
    """Records how many likeliest tokens are asked for."""

    def top_k(self, k: int) -> Any:
        self.k = k
        return super().top_k(k)


@pytest.mark.parametrize("k", [0, SAMPLED + 1])
def test_recycling_asks_the_target_for_as_many_tokens_as_it_keeps(k: int) -> None:
    """Targets that select the likeliest tokens of a prompt at once select no more than were asked for."""
    drafter = registry.make("recycling", k=k)
    run(ToyTarget(VOCAB), drafter, [1, 2, 3])
    assert drafter.capture.top_k == max(k, SAMPLED)


@pytest.mark.parametrize(("temperature", "k"), [(0.0, GREEDY), (1.0, SAMPLED)])
def test_recycling_reads_a_prompt_in_chunks(temperature: float, k: int) -> None:
    """The chunks give what the whole prompt gives, and no more tokens are selected than are kept."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 5, 40)
    logits = rng.normal(size=(40, VOCAB)).astype(np.float32)
    found = []
    for chunks in ([0, 39], [0, 7, 8, 39]):
        source, sequence = Recycling(), view_of(prompt.tolist(), temperature=temperature, seed=1)
        source.begin(sequence)
        for start, end in pairwise(chunks):
            rows = CountedRows(prompt[start:end], start, logits[start:end])
            source.read_prompt(sequence, rows)
            assert rows.k == k
        states = [tuple(prompt[end - 4 : end].tolist()) for end in range(4, 40)] + [(int(token),) for token in range(5)]
        found.append([source.candidates(state, 200) for state in states])
        for end, candidates in zip(range(4, 40), found[-1], strict=False):
            assert len(candidates) == k
            last = max(at for at in range(4, 40) if (prompt[at - 4 : at] == prompt[end - 4 : end]).all())
            assert candidates[0].token == logits[last - 1].argmax()
    assert found[0] == found[1]
