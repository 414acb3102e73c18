"""The loop: batches whose sessions come and go, drafters that break their contract, and the accounts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, sleep
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers import (
    GREEDY,
    PROMPT,
    Adversarial,
    Empty,
    Oracle,
    RandomTrees,
    Scattered,
    Scripted,
    assert_same_text,
    begin,
    drafters_for,
    full_text,
    run,
)

from leapahead.core.errors import BadLogits, BadParameter, DraftError, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import PHASES, Stats
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import Context, Drafter, Proposal, Step
from leapahead.drafters.registry import factory, ready
from leapahead.engine.loop import Generation, decode
from leapahead.models.base import CHAIN, LOGITS, TREE, Choices, Session, Target, require
from leapahead.models.toy import ToySession, ToyTarget


class Counting(ToyTarget):
    """Counts forwards, rows in each, and how often each session was closed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.batches: list[int] = []
        self.nodes = 0
        self.opened: list[ToySession] = []
        self.closed: list[ToySession] = []

    def open(
        self, tokens: Sequence[int], params: SamplingParams, stats: Stats | None = None, **rest: Any
    ) -> ToySession:
        session = super().open(tokens, params, stats, **rest)
        self.opened.append(session)
        session.close = lambda: self.closed.append(session)  # type: ignore[method-assign]
        return session

    def step(self, sessions: Sequence[ToySession], trees: Sequence[TokenTree]) -> list[Choices]:
        assert len(sessions) > 0
        self.batches.append(len(sessions))
        self.nodes += sum(len(tree) for tree in trees)
        return super().step(sessions, trees)


def test_a_drafter_that_cannot_begin_leaves_no_session_open() -> None:
    class Foreign(Empty):
        def begin(self, context: Context) -> None:
            raise BadParameter("it is another vocabulary's")

    target = Counting()
    with pytest.raises(BadParameter, match="another vocabulary"):
        begin(target, Foreign())
    assert target.closed == target.opened != []


# ------------------------------------------------------------------------------------------------------- batches


def make_jobs(target: ToyTarget) -> list[dict[str, Any]]:
    """Ragged prompts and lengths, own seeds, parameters, stops and drafters."""
    rng = np.random.default_rng(0)
    jobs = []
    for i in range(9):
        prompt = rng.integers(0, target.vocab_size, int(rng.integers(1, 12))).tolist()
        params = SamplingParams(
            temperature=[0.0, 0.8, 1.3][i % 3], seed=i, repetition_penalty=[1.0, 1.2][i % 2], top_k=[0, 5][i // 5]
        )
        stop = StopParams(max_new_tokens=int(rng.integers(1, 25)), eos_token_ids=(i,) if i > 5 else ())
        text = full_text(target, prompt, params=params, stop=stop)
        make: Callable[[], Drafter] = [Empty, lambda t=text: Oracle(t), RandomTrees, lambda t=text: Scattered(t)][i % 4]
        jobs.append({"prompt": prompt, "params": params, "stop": stop, "make": make, "text": text})
    return jobs


def start(target: ToyTarget, job: dict[str, Any]) -> Generation:
    return begin(target, job["make"](), job["prompt"], params=job["params"], stop=job["stop"])


@pytest.mark.parametrize("at_once", [1, 2, 4, 9])
def test_sessions_join_and_leave_and_every_text_is_its_own(at_once: int) -> None:
    """A waiting one joins as soon as one leaves; each must end with the text that it has alone."""
    target = Counting(vocab_size=12)
    waiting = make_jobs(target)
    target.batches.clear()
    running: list[Generation] = []
    jobs: dict[Generation, dict[str, Any]] = {}
    emitted: dict[Generation, list[int]] = {}

    def join() -> None:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            generation = start(target, job)
            running.append(generation)
            jobs[generation], emitted[generation] = job, []

    join()
    for generation, step in decode(target, running):
        emitted[generation] += step.tokens
        if generation.finished:
            assert generation not in running
            join()
    assert waiting == running == []
    assert len(jobs) == 9
    for generation, job in jobs.items():
        assert [*job["prompt"], *emitted[generation]] == job["text"] == generation.session.tokens
        assert target.closed.count(generation.session) == 1
    assert max(target.batches) == at_once


def test_one_may_join_while_the_others_run() -> None:
    target = ToyTarget()
    jobs = make_jobs(target)
    generations = [start(target, jobs[3])]
    everyone = list(generations)
    for count, _ in enumerate(decode(target, generations)):
        if count < 5:
            everyone.append(start(target, jobs[count + 4]))
            generations.append(everyone[-1])
    assert [g.session.tokens for g in everyone] == [job["text"] for job in jobs[3:9]]


def test_a_batch_of_nothing_is_over_at_once() -> None:
    target = Counting()
    assert list(decode(target, [])) == []
    assert target.batches == []


def test_steps_come_in_order_and_say_what_was_committed() -> None:
    target = ToyTarget()
    generations = [begin(target, Oracle(full_text(target))), begin(target)]
    texts: dict[Generation, list[int]] = {g: list(PROMPT) for g in generations}
    for generation, step in decode(target, list(generations)):
        text = texts[generation]
        assert step.position == len(text) - 1
        assert step.tree.tokens[0] == text[-1]
        assert (
            list(step.tokens[: step.verdict.accepted])
            == step.tree.path_tokens(step.verdict.path[-1])[: len(step.tokens)]
        )
        text += step.tokens
        assert generation.session.tokens == text


# --------------------------------------------------------------------------------------------- sessions are closed


def test_an_abandoned_generator_closes_every_session() -> None:
    target = Counting()
    steps = decode(target, [begin(target), begin(target, stop=StopParams(max_new_tokens=1)), begin(target)])
    next(steps)
    assert target.closed == target.opened[1:2]  # the step ended it
    steps.close()
    assert sorted(map(id, target.closed)) == sorted(map(id, target.opened))  # each once


def test_an_error_closes_every_session() -> None:
    target = Counting()

    def draft(context: Context, budget: Budget) -> TokenTree:
        if len(context.tokens) > 8:
            raise ZeroDivisionError
        return TokenTree.root(context.root)

    with pytest.raises(ZeroDivisionError):
        list(decode(target, [begin(target), begin(target, Scripted(draft))]))
    assert target.closed == target.opened


def test_a_finished_session_is_closed_at_once_and_once() -> None:
    target = Counting()
    short = begin(target, stop=StopParams(max_new_tokens=2))
    for generation, _ in decode(target, [short, begin(target)]):
        assert (short.session in target.closed) == (short.finished)
        assert generation.session not in target.closed or generation.finished
    assert len(target.closed) == 2


# ----------------------------------------------------------------------------------------------------- bad drafts


def draft_error(draft: Callable[[Context, Budget], TokenTree], **options: Any) -> str:
    target = Counting(vocab_size=12, **options)
    with pytest.raises(DraftError, match="drafter 'scripted' drafted") as error:
        list(decode(target, [begin(target, Scripted(draft))]))
    assert target.closed == target.opened
    assert target.batches == []  # refused before the forward
    return str(error.value)


def test_a_draft_over_another_root_is_refused() -> None:
    assert "over token 7, not 2" in draft_error(lambda context, budget: TokenTree.chain(7, [1]))


@pytest.mark.parametrize("token", [-1, 12, 1 << 40])
def test_a_draft_outside_the_vocabulary_is_refused(token: int) -> None:
    assert "outside the vocabulary of 12" in draft_error(lambda context, budget: TokenTree.chain(2, [1, token]))


def test_a_draft_beyond_the_end_of_the_text_is_refused() -> None:
    message = draft_error(lambda context, budget: TokenTree.chain(2, [1] * (budget.depth + 1)))
    assert "beyond its budget" in message
    assert "depth=23" in message


def test_a_draft_beyond_the_context_is_refused() -> None:
    message = draft_error(
        lambda context, budget: TokenTree.chain(2, [1] * (budget.depth + 1)), context_length=len(PROMPT) + 4
    )
    assert "depth=3" in message


def test_a_draft_with_too_many_leaves_is_refused() -> None:
    message = draft_error(lambda context, budget: TokenTree.from_paths(2, [[1], [2], [3]]), max_leaves=2)
    assert "leaves=2" in message


def test_the_last_token_is_not_drafted_for() -> None:
    """Where one token is left there is nothing to draft, and the drafter is not asked."""
    asked: list[int] = []

    def draft(context: Context, budget: Budget) -> TokenTree:
        asked.append(budget.depth)
        return TokenTree.root(context.root)

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
        def begin(self, context: Context) -> None:
            assert context.tokens == list(PROMPT)
            assert (context.prompt_length, context.vocab_size, context.sampled) == (len(PROMPT), 12, False)
            log.append(("begin", len(context.tokens)))

        def propose(self, context: Context, budget: Budget) -> Proposal:
            log.append(("propose", len(context.tokens)))
            return super().propose(context, budget)

        def observe(self, context: Context, step: Step) -> None:
            assert context.tokens[step.position + 1 :] == list(step.tokens)
            log.append(("observe", len(context.tokens)))

        def figures(self) -> dict[str, Any]:
            return {"calls": len(log)}

    done = run(ToyTarget(), Log(), stop=StopParams(max_new_tokens=3))
    n = len(PROMPT)
    assert log == [("begin", n), ("propose", n), ("observe", n + 1), ("propose", n + 1), ("observe", n + 2)]
    assert done.generation.stats.drafter == {"calls": 5}


@pytest.mark.parametrize(
    ("needs", "has", "says"),
    [
        ({TREE}, {CHAIN}, "needs tree .*use drafter='plain', or one that drafts chains"),
        ({CHAIN}, set(), "needs chain .*cannot forget.*use drafter='plain'$"),
        ({LOGITS, TREE}, {CHAIN}, "needs logits and tree"),
        ({"hidden"}, {CHAIN, TREE, LOGITS}, "needs hidden"),
    ],
)
def test_what_a_target_cannot_give_is_refused_by_name(needs: set[str], has: set[str], says: str) -> None:
    target = ToyTarget(capabilities=frozenset(has))
    with pytest.raises(Refused, match=says) as refusal:
        require(target, frozenset(needs), "eager")
    assert "'eager'" in str(refusal.value)
    assert target.name in str(refusal.value)
    require(target, frozenset(), "plain")
    require(target, frozenset(has), "modest")


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

    class Curious(Drafter):
        """Drafts what the grammar forbids, and looks what would come then."""

        name: ClassVar[str] = "curious"

        def propose(self, context: Context, budget: Budget) -> Proposal:
            return Proposal(TokenTree.from_paths(context.root, [[1, 2], [0, 3, 1], [2]], budget))

        def observe(self, context: Context, step: Step) -> None:
            chosen = step.choices.of(range(len(step.tree)))
            assert chosen.max() < 6

    params = SamplingParams(temperature=temperature, seed=4, processors=(even_only,))
    drafter = Curious() if name == "curious" else factory(name, **({"nodes": 9} if name == "auto" else {}))()
    assert_same_text(target, drafter, prompt, params=params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", [1, 3, 9])
def test_nothing_needs_to_follow_a_stop_that_was_drafted(depth: int, temperature: float) -> None:
    """A grammar bans every token after EOS; a drafted EOS is accepted, and nobody asks what would follow it."""
    target = ToyTarget(vocab_size=6)

    def nothing_after_eos(prefixes: Any, logits: Any) -> Any:
        return np.where((prefixes[:, len(PROMPT) :] == 5).any(axis=1)[:, None], -np.inf, logits)

    for seed in range(8):
        params = SamplingParams(temperature=temperature, seed=seed, processors=(nothing_after_eos,))
        for stop in [
            StopParams(max_new_tokens=40, eos_token_ids=(5,)),
            StopParams(max_new_tokens=40, stop_token_ids=(5,)),
            StopParams(max_new_tokens=40, stop_strings=("5",)),
        ]:
            text = full_text(target, params=params, stop=stop, text=str)
            assert_same_text(target, Oracle([*text, 1, 2, 3], depth), params=params, stop=stop, text=str)
        generation = begin(target, Oracle([*text, 1, 2, 3], depth), params=params)  # but if the text goes on
        if text[-1] == 5 and len(text) - len(PROMPT) < 24:
            with pytest.raises(BadLogits, match=f"position {len(text)} are NaN"):
                list(decode(target, [generation]))


# -------------------------------------------------------------------------------------------------------- accounts


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", drafters_for(()))
def test_the_accounts_agree(name: str, params: SamplingParams) -> None:
    target = Counting()
    text = full_text(target, params=params)
    target.batches, target.nodes = [], 0
    done = run(target, drafters_for(text)[name](), params=params)
    stats = done.generation.stats
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
    stats = run(ToyTarget()).generation.stats
    assert (stats.steps, stats.committed, stats.drafted, stats.acceptance_length) == (24, 24, 0, 1.0)


@pytest.mark.parametrize("length", range(1, 12))
def test_acceptance_length_of_a_perfect_drafter_at_the_length_limit(length: int) -> None:
    """Chains of 4 commit 5 tokens a step; the last step commits what is left."""
    target = ToyTarget()
    stats = run(target, Oracle(full_text(target)), stop=StopParams(max_new_tokens=length)).generation.stats
    assert (stats.committed, stats.steps) == (length, -(-length // 5))


def test_each_source_is_counted_for_itself() -> None:
    target = ToyTarget()
    text = full_text(target)

    class TwoSources(Oracle):
        def propose(self, context: Context, budget: Budget) -> Proposal:
            tree = super().propose(context, budget).tree
            return Proposal(tree, ("", *("odd" if node % 2 else "even" for node in range(1, len(tree)))))

    stats = run(target, TwoSources(text), stop=StopParams(max_new_tokens=15)).generation.stats
    assert stats.drafted_by == stats.accepted_by == {"odd": 6, "even": 6}


def test_a_batched_forward_is_a_step_of_each_and_sums_add_up() -> None:
    target = Counting()
    a = begin(target, Oracle(full_text(target)), stop=StopParams(max_new_tokens=10))
    b = begin(target, Adversarial("baits", full_text(target)), stop=StopParams(max_new_tokens=12))
    target.batches.clear()
    list(decode(target, [a, b]))
    total = a.stats + b.stats
    assert sum(target.batches) == a.stats.steps + b.stats.steps == total.steps
    assert (total.committed, total.prompt_tokens) == (22, 2 * len(PROMPT))
    assert total.accepted_by == {"oracle": a.stats.accepted, "adversarial": b.stats.accepted}
    assert total.decode_seconds == pytest.approx(a.stats.decode_seconds + b.stats.decode_seconds)
    assert total.as_dict()["committed"] == 22


def test_time_between_steps_is_the_callers() -> None:
    """A slow reader of the generator does not make the engine look slow."""
    target = ToyTarget()
    generation, begun, slept = begin(target, stop=StopParams(max_new_tokens=4)), perf_counter(), 0.0
    for _ in decode(target, [generation]):
        before = perf_counter()
        sleep(0.01)
        slept += perf_counter() - before
    assert generation.stats.decode_seconds <= perf_counter() - begun - slept


def test_no_steps_have_no_rates() -> None:
    stats = Stats()
    assert (stats.acceptance_length, stats.acceptance_rate, stats.nodes_per_step, stats.tokens_per_second) == (0,) * 4
