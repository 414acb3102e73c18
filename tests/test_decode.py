"""The decoding loop: batches whose requests come and go, drafters that break their contract, and the counters."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers import (
    GREEDY,
    PROMPT,
    Adversarial,
    AnyDrafter,
    Empty,
    Oracle,
    RandomTrees,
    Scattered,
    Scripted,
    assert_same_text,
    attached,
    drafters_for,
    full_text,
    run,
)

from leapahead import (
    BadLogits,
    BadParameter,
    Budget,
    DraftError,
    Engine,
    LeapaheadError,
    Proposal,
    Refused,
    Request,
    SamplingParams,
    SequenceDrafter,
    SequenceView,
    Stats,
    Step,
    StopParams,
    TokenTree,
)
from leapahead.core.stats import PHASES, Tally
from leapahead.drafters.registry import make, ready
from leapahead.models.base import CHAIN, LOGITS, TREE, Session, Target, require
from leapahead.models.toy import ToySession, ToyTarget


class Counting(ToyTarget):
    """Counts forwards, rows in each, and the sessions that were opened and closed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.batches: list[int] = []
        self.nodes = 0
        self.opened: list[ToySession] = []
        self.closed: list[ToySession] = []

    def open(self, *given: Any, **options: Any) -> ToySession:
        session = super().open(*given, **options)
        self.opened.append(session)
        session.close = lambda: self.closed.append(session)  # type: ignore[method-assign]
        return session

    def step(self, sessions: Sequence[ToySession], trees: Sequence[TokenTree], *rest: Any, **more: Any) -> Any:
        assert len(sessions) > 0
        self.batches.append(len(sessions))
        self.nodes += sum(len(tree) for tree in trees)
        return super().step(sessions, trees, *rest, **more)


def test_a_drafter_that_cannot_begin_leaves_no_session_open() -> None:
    class Foreign(Empty):
        def begin(self, sequence: SequenceView) -> None:
            raise BadParameter("it has another vocabulary")

    target = Counting()
    with pytest.raises(BadParameter, match="another vocabulary"):
        run(target, Foreign())
    assert target.closed == target.opened != []


# ------------------------------------------------------------------------------------------------------- batches


def make_jobs(target: ToyTarget) -> list[dict[str, Any]]:
    """Ragged prompts and lengths, own seeds, parameters, stops and drafters."""
    rng = np.random.default_rng(0)
    jobs = []
    for i in range(9):
        prompt = rng.integers(0, target.info.vocab_size, int(rng.integers(1, 12))).tolist()
        params = SamplingParams(
            temperature=[0.0, 0.8, 1.3][i % 3], seed=i, repetition_penalty=[1.0, 1.2][i % 2], top_k=[0, 5][i // 5]
        )
        stop = StopParams(max_new_tokens=int(rng.integers(1, 25)), eos_token_ids=(i,) if i > 5 else ())
        text = full_text(target, prompt, params=params, stop=stop)
        drafter: SequenceDrafter = [Empty(), Oracle(text), RandomTrees(), Scattered(text)][i % 4]
        jobs.append({"prompt": prompt, "params": params, "stop": stop, "drafter": drafter, "text": text})
    return jobs


@pytest.mark.parametrize("at_once", [1, 2, 4, 9])
def test_requests_join_and_leave_and_every_text_is_its_own(at_once: int) -> None:
    """A waiting one joins as soon as one leaves; each must end with the text that it has alone."""
    target = Counting(vocab_size=12)
    jobs = make_jobs(target)
    for seen in (target.batches, target.opened, target.closed):
        seen.clear()
    engine = Engine(target, max_batch=at_once)
    handles = [
        engine.submit(Request(job["prompt"], attached(engine, job["drafter"]), job["params"], job["stop"]))
        for job in jobs
    ]
    engine.run(handles)
    assert [[*job["prompt"], *handle.tokens] for job, handle in zip(jobs, handles, strict=True)] == [
        job["text"] for job in jobs
    ]
    assert sorted(map(id, target.closed)) == sorted(map(id, target.opened))  # each once
    assert max(target.batches) == at_once


def test_steps_come_in_order_and_tell_what_was_committed() -> None:
    target = ToyTarget()
    for drafter in (Oracle(full_text(target)), None):
        text = list(PROMPT)
        for step in run(target, drafter).steps:
            assert step.position == len(text) - 1
            assert step.tree.tokens[0] == text[-1]
            accepted = step.tree.path_tokens(step.verdict.path[-1])[: len(step.tokens)]
            assert list(step.tokens[: step.verdict.accepted]) == accepted
            text += step.tokens


def test_a_finished_session_is_closed_at_once() -> None:
    target = Counting()
    engine = Engine(target)
    long = engine.submit(Request(PROMPT, attached(engine, None), stop=StopParams(max_new_tokens=24)))
    short = engine.submit(Request(PROMPT, attached(engine, None), stop=StopParams(max_new_tokens=2)))
    while not short.done:
        engine.step()
    assert target.closed == target.opened[1:]
    engine.run([long])
    assert len(target.closed) == 2


# ----------------------------------------------------------------------------------------------------- bad drafts


def draft_error(draft: Callable[[SequenceView, Budget], TokenTree], **options: Any) -> str:
    target = Counting(vocab_size=12, **options)
    with pytest.raises(DraftError, match="drafter 'scripted' drafted") as error:
        run(target, Scripted(draft))
    assert target.closed == target.opened
    assert target.batches == []  # refused before the forward
    return str(error.value)


def test_a_draft_over_another_root_is_refused() -> None:
    assert "over token 7, not 2" in draft_error(lambda sequence, budget: TokenTree.chain(7, [1]))


@pytest.mark.parametrize("token", [-1, 12, 1 << 40])
def test_a_draft_outside_the_vocabulary_is_refused(token: int) -> None:
    assert "outside the vocabulary of 12" in draft_error(lambda sequence, budget: TokenTree.chain(2, [1, token]))


def test_a_draft_beyond_the_end_of_the_text_is_refused() -> None:
    message = draft_error(lambda sequence, budget: TokenTree.chain(2, [1] * (budget.depth + 1)))
    assert "beyond its budget" in message
    assert "depth=23" in message


def test_a_draft_beyond_the_context_is_refused() -> None:
    message = draft_error(
        lambda sequence, budget: TokenTree.chain(2, [1] * (budget.depth + 1)), context_length=len(PROMPT) + 4
    )
    assert "depth=3" in message


def test_a_draft_with_too_many_leaves_is_refused() -> None:
    message = draft_error(lambda sequence, budget: TokenTree.from_paths(2, [[1], [2], [3]]), max_leaves=2)
    assert "leaves=2" in message


def test_the_last_token_is_not_drafted_for() -> None:
    """Where one token is left there is nothing to draft, and the drafter is not asked."""
    asked: list[int] = []

    def draft(sequence: SequenceView, budget: Budget) -> TokenTree:
        asked.append(budget.depth)
        return TokenTree.root(sequence.root)

    run(ToyTarget(), Scripted(draft), stop=StopParams(max_new_tokens=5))
    assert asked == [4, 3, 2, 1]


def test_the_errors_of_a_user_have_one_base() -> None:
    for error in (BadParameter, DraftError, Refused):
        assert issubclass(error, LeapaheadError)


# -------------------------------------------------------------------------------------------- what a drafter sees


def test_a_drafter_sees_the_text_grow_and_every_step_but_the_last() -> None:
    """`begin` once with the prompt, then propose and observe in turn; no lesson after the end."""
    log: list[tuple[str, int]] = []

    class Log(Empty):
        def begin(self, sequence: SequenceView) -> None:
            assert sequence.tokens == list(PROMPT)
            assert (sequence.prompt_length, sequence.vocab_size, sequence.sampled) == (len(PROMPT), 12, False)
            log.append(("begin", len(sequence.tokens)))

        def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
            log.append(("propose", len(sequence.tokens)))
            return super().propose(sequence, budget)

        def observe(self, sequence: SequenceView, step: Step) -> None:
            assert sequence.tokens[step.position + 1 :] == list(step.tokens)
            log.append(("observe", len(sequence.tokens)))

        def figures(self) -> dict[str, Any]:
            return {"calls": len(log)}

    done = run(ToyTarget(), Log(), stop=StopParams(max_new_tokens=3))
    n = len(PROMPT)
    assert log == [("begin", n), ("propose", n), ("observe", n + 1), ("propose", n + 1), ("observe", n + 2)]
    assert done.stats.drafter == {"calls": 5}


@pytest.mark.parametrize(
    ("needs", "has", "says"),
    [
        ({TREE}, {CHAIN}, "needs tree .*use drafter='plain', or one that drafts chains"),
        ({CHAIN}, set(), "needs chain .*cannot discard.*use drafter='plain'$"),
        ({LOGITS, TREE}, {CHAIN}, "needs logits and tree"),
        ({"hidden"}, {CHAIN, TREE, LOGITS}, "needs hidden .*does not give hidden states"),
    ],
)
def test_what_a_target_cannot_give_is_refused_by_name(needs: set[str], has: set[str], says: str) -> None:
    target = ToyTarget(capabilities=frozenset(has))
    with pytest.raises(Refused, match=says) as refusal:
        require(target.info, frozenset(needs), "drafter 'eager'")
    assert "'eager'" in str(refusal.value)
    assert target.info.name in str(refusal.value)
    require(target.info, frozenset(), "plain")
    require(target.info, frozenset(has), "modest")


def test_the_toy_is_a_target_and_refuses_bad_prompts() -> None:
    target = ToyTarget(vocab_size=5)
    assert isinstance(target, Target)
    assert isinstance(target.open([1], GREEDY), Session)
    with pytest.raises(BadParameter, match="prompt is empty"):
        target.open([], GREEDY)
    for token in (-1, 5):
        with pytest.raises(BadParameter, match="outside the vocabulary of 5"):
            target.open([1, token], GREEDY)


@pytest.mark.parametrize("name", ["curious", *ready()])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafted_prefix_from_which_nothing_can_be_chosen_harms_nobody(name: str, temperature: float) -> None:
    """As with a grammar: it bans every token after prefixes that the text never takes, but drafts do."""
    target = ToyTarget(vocab_size=6)
    prompt = [1, 3, 0, 5, 1, 3]

    def even_only(prefixes: Any, logits: Any) -> Any:
        lost = (prefixes[:, len(prompt) :] % 2 == 1).any(axis=1)
        return np.where(lost[:, None] | (np.arange(6) % 2 == 1), -np.inf, logits)

    class Curious(SequenceDrafter):
        """Drafts what the grammar forbids, and reads what would come then."""

        name: ClassVar[str] = "curious"

        def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
            return Proposal(TokenTree.from_paths(sequence.root, [[1, 2], [0, 3, 1], [2]], budget))

        def observe(self, sequence: SequenceView, step: Step) -> None:
            chosen = step.choices.of(range(len(step.tree)))
            assert chosen.max() < 6

    params = SamplingParams(temperature=temperature, seed=4, processors=(even_only,))
    drafter: AnyDrafter = Curious() if name == "curious" else make(name, **({"nodes": 9} if name == "auto" else {}))
    assert_same_text(target, drafter, prompt, params=params)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", [1, 3, 9])
def test_nothing_needs_to_follow_a_stop_that_was_drafted(depth: int, temperature: float) -> None:
    """A grammar bans every token after EOS; a drafted EOS is accepted, and nobody asks what would follow it."""
    target = ToyTarget(vocab_size=6)

    def nothing_after_eos(prefixes: Any, logits: Any) -> Any:
        return np.where((prefixes[:, len(PROMPT) :] == 5).any(axis=1)[:, None], -np.inf, logits)

    for seed in range(4):
        params = SamplingParams(temperature=temperature, seed=seed, processors=(nothing_after_eos,))
        for stop in [
            StopParams(max_new_tokens=40, eos_token_ids=(5,)),
            StopParams(max_new_tokens=40, stop_token_ids=(5,)),
            StopParams(max_new_tokens=40, stop_strings=("5",)),
        ]:
            text = full_text(target, params=params, stop=stop, text=str)
            assert_same_text(target, Oracle([*text, 1, 2, 3], depth), params=params, stop=stop, text=str)
        if text[-1] == 5 and len(text) - len(PROMPT) < 24:  # but if the text goes on
            with pytest.raises(BadLogits, match=f"position {len(text)} are NaN"):
                run(target, Oracle([*text, 1, 2, 3], depth), params=params)


# -------------------------------------------------------------------------------------------------------- counters


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", drafters_for(()))
def test_the_counters_agree(name: str, params: SamplingParams) -> None:
    target = Counting()
    text = full_text(target, params=params)
    target.batches, target.nodes = [], 0
    done = run(target, drafters_for(text)[name](), params=params)
    stats = done.stats
    assert stats.steps == len(target.batches) == len(done.steps)
    assert stats.nodes == target.nodes == stats.drafted + stats.steps
    assert stats.committed == len(done.tokens) == len(text) - len(PROMPT)
    last = done.steps[-1]  # the only one that may end in a drafted token, where the text was cut
    assert stats.accepted == stats.committed - stats.steps + (last.verdict.accepted == len(last.tokens))
    assert stats.accepted == stats.accepted_by.total() == stats.accepted_at.total()
    assert stats.drafted == stats.drafted_by.total()
    assert all(stats.accepted_by[source] <= stats.drafted_by[source] for source in stats.accepted_by)
    falling = [stats.accepted_at[depth] for depth in range(1, 30)]
    assert falling == sorted(falling, reverse=True)  # who reaches depth 3 has been at depth 2
    assert stats.acceptance_length == stats.committed / stats.steps >= 1
    assert 0 <= stats.acceptance_rate <= 1
    assert (stats.prompt_tokens, stats.prefill_forwards) == (len(PROMPT), 1)
    assert set(stats.seconds) == set(PHASES)
    assert all(seconds >= 0 for seconds in stats.seconds.values())
    assert stats.decode_seconds > 0
    assert stats.tokens_per_second > 0


def test_plain_decoding_is_one_token_a_step() -> None:
    stats = run(ToyTarget()).stats
    assert (stats.steps, stats.committed, stats.drafted, stats.acceptance_length) == (24, 24, 0, 1.0)


@pytest.mark.parametrize("length", range(1, 12))
def test_acceptance_length_of_a_perfect_drafter_at_the_length_limit(length: int) -> None:
    """Chains of 4 commit 5 tokens a step; the last step commits what is left."""
    target = ToyTarget()
    stats = run(target, Oracle(full_text(target)), stop=StopParams(max_new_tokens=length)).stats
    assert (stats.committed, stats.steps) == (length, -(-length // 5))


def test_each_source_is_counted_for_itself() -> None:
    target = ToyTarget()
    text = full_text(target)

    class TwoSources(Oracle):
        def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
            tree = super().propose(sequence, budget).tree
            return Proposal(tree, ("", *("odd" if node % 2 else "even" for node in range(1, len(tree)))))

    stats = run(target, TwoSources(text), stop=StopParams(max_new_tokens=15)).stats
    assert stats.drafted_by == stats.accepted_by == {"odd": 6, "even": 6}
    for one in (stats, stats + Stats()):  # `asdict` copies dictionaries from pairs, which a Counter would count
        copied = json.loads(json.dumps(asdict(one)))
        assert copied["drafted_by"] == copied["accepted_by"] == {"odd": 6, "even": 6}
        assert one.accepted_by["other"] == 0
        assert type(one.accepted_at) is type(pickle.loads(pickle.dumps(one)).accepted_at) is Tally


def test_a_batched_forward_is_a_step_of_each_and_sums_add_up() -> None:
    target = Counting()
    text = full_text(target)
    target.batches.clear()
    engine = Engine(target)
    jobs = ((Oracle(text), 10), (Adversarial("baits", text), 12))
    handles = [
        engine.submit(Request(PROMPT, attached(engine, drafter), stop=StopParams(max_new_tokens=length)))
        for drafter, length in jobs
    ]
    engine.run(handles)
    a, b = (handle.stats for handle in handles)
    total = a + b
    assert sum(target.batches) == a.steps + b.steps == total.steps
    assert (total.committed, total.prompt_tokens) == (22, 2 * len(PROMPT))
    assert total.accepted_by == {"oracle": a.accepted, "adversarial": b.accepted}
    assert total.decode_seconds == pytest.approx(a.decode_seconds + b.decode_seconds)
    assert total.as_dict()["committed"] == 22


def test_stats_are_summed_while_a_thread_adds_to_them() -> None:
    """As a stream with `continuous_usage_stats` does: a new depth or source would end an iteration with an error."""

    class Growing(Tally[int]):
        def items(self) -> Any:
            for pair in super().items():
                self[len(self) + 1] += 1
                yield pair

    for one, other in ((Growing({1: 2}), Tally()), (Tally(), Growing({1: 2}))):
        assert (Stats(accepted_at=one) + Stats(accepted_at=other)).accepted_at == {1: 2}


def test_no_steps_have_no_rates() -> None:
    stats = Stats()
    assert (stats.acceptance_length, stats.acceptance_rate, stats.nodes_per_step, stats.tokens_per_second) == (0,) * 4
