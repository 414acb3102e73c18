"""Draft models: they follow the text, draft what pays, and do not change the text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from architectures import BY_NAME
from helpers import GREEDY, FixedLatency, Run, assert_same_text, run

from leapahead import Engine, Request
from leapahead.core.errors import CacheFull, LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters import draft_runner
from leapahead.drafters.auto import Auto
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.drafters.draft_models import DraftModel
from leapahead.drafters.draft_runner import CHUNK, LONGEST_CHAIN, DraftRunner
from leapahead.drafters.speculative_sampling import SpeculativeSampling
from leapahead.models.base import ALL, HIDDEN, TREE, Target
from leapahead.models.choices import Choices
from leapahead.models.toy import ToyTarget
from leapahead.models.transformers.kv_cache import KVCache
from leapahead.models.transformers.model import TransformersTarget
from leapahead.planner.acceptance import AcceptanceTable
from leapahead.planner.draft import Step
from leapahead.planner.latency import LatencyProfile
from leapahead.planner.profile import LatencyProfiles

FLAT = {1: 1.0, 8: 1.02, 128: 1.2}
CHEAP = {1: 0.05, 8: 0.06, 128: 0.2}
DEAR = {1: 0.98, 8: 1.5, 128: 9.0}
WARM = SamplingParams(temperature=1.0, seed=3)


class Counting(ToyTarget):
    """Counts what it computes, and its open sessions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows = self.forwards = 0
        self.chunks: list[int] = []
        self.sessions: list[Any] = []

    def open(self, *args: Any, **options: Any) -> Any:
        self.sessions.append(super().open(*args, **options))
        return self.sessions[-1]

    def prefill(self, session: Any, max_tokens: int) -> Any:
        self.chunks.append(min(session.unread, max_tokens))
        return super().prefill(session, max_tokens)

    def step(self, sessions: Any, trees: Any, num_computed: Sequence[int] | None = None, **options: Any) -> Any:
        self.forwards += 1
        computed = num_computed or [0] * len(trees)
        self.rows += sum(len(tree) - first for tree, first in zip(trees, computed, strict=True))
        return super().step(sessions, trees, num_computed, **options)

    @property
    def closed(self) -> bool:
        return bool(self.sessions) and all(session.cache == [] for session in self.sessions)


class Blurred(ToyTarget):
    """The same table as a plain one, mixed with another one: a draft model that is often right."""

    def __init__(self, share: float = 0.4, **options: Any) -> None:
        super().__init__(**options)
        self.share, self.other = share, ToyTarget(**{**options, "seed": 99})

    def row(self, seen: Any) -> Any:
        return (1 - self.share) * super().row(seen) + self.share * self.other.row(seen)


def timed(draft: Target, seconds: dict[int, float] = CHEAP) -> DraftModel:
    """A draft model with a latency profile that stays as it is."""
    return DraftModel(draft, None, FixedLatency(draft, seconds))


def planned(target: Target, draft: Target, seconds: dict[int, float] = CHEAP, **options: Any) -> Run:
    """Decodes with draft forwards that are planned by fixed latency profiles."""
    latency = FixedLatency(target, FLAT)
    return run(target, DraftModelDrafter(timed(draft, seconds)), latency=latency, **options)


# ------------------------------------------------------------------------------------------------ following the text


def test_a_perfect_draft_is_accepted_whole_and_computes_each_token_once() -> None:
    draft = Counting()
    done = run(ToyTarget(), DraftModelDrafter(draft, nodes=4, depth=4, chain=True), stop=StopParams(max_new_tokens=60))
    assert [len(step.tokens) for step in done.steps] == [5] * 12
    # Every committed token goes through the draft model once, and nothing else does; the last few are never needed.
    assert draft.rows <= 60
    assert draft.forwards == 4 * 12
    assert draft.closed


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("share", "options"),
    [
        (0.0, {"nodes": 3, "depth": 3, "chain": True}),
        (0.3, {"nodes": 12, "depth": 3}),
        (0.3, {"nodes": 12, "depth": 2, "seed_aware": False}),
        (0.3, {"nodes": 7}),
        (0.3, {}),
        (1.0, {}),
    ],
    ids=str,
)
def test_the_text_is_that_of_plain_decoding(params: SamplingParams, share: float, options: dict[str, Any]) -> None:
    target, draft = ToyTarget(), Blurred(share)
    stop, latency = StopParams(max_new_tokens=50), FixedLatency(target, FLAT)
    assert_same_text(target, DraftModelDrafter(timed(draft), **options), params=params, stop=stop, latency=latency)


def test_only_what_is_new_goes_through_the_draft_model() -> None:
    """A tree that grows level by level is never computed again, whatever becomes of it."""
    draft = Counting(seed=5)
    done = run(ToyTarget(), DraftModelDrafter(draft, nodes=9, depth=3), stop=StopParams(max_new_tokens=40))
    steps = len(done.steps)
    assert draft.forwards <= 3 * steps
    assert draft.rows <= steps * (1 + 9 + 9) + 40


def test_sequences_of_a_batch_share_each_draft_forward() -> None:
    draft, target = Counting(), ToyTarget()
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    alone = [run(target, None, prompt).tokens for prompt in prompts]
    engine = Engine(target)
    drafter = engine.drafter("draft_model", draft=draft, nodes=3, depth=3, chain=True)
    stop = StopParams(max_new_tokens=24)
    handles = [engine.submit(Request(prompt, drafter, stop=stop)) for prompt in prompts]
    engine.run(handles)
    assert [handle.tokens for handle in handles] == alone
    steps = sum(handle.stats.steps for handle in handles)
    assert draft.forwards <= steps / 3 * 3 + 6, "a draft forward computes all sequences"
    assert draft.closed


def test_a_cancelled_request_releases_the_cache_of_its_draft_model() -> None:
    draft = Counting()
    engine = Engine(ToyTarget())
    drafter = engine.drafter("draft_model", draft=draft, nodes=3, depth=3)
    handle = engine.submit(Request([1, 2, 3], drafter, stop=StopParams(max_new_tokens=24)))
    while not draft.forwards:
        engine.step()
    assert not draft.closed
    engine.cancel(handle)
    assert draft.closed


class Interrupted(Counting):
    """The first close of its sessions raises."""

    def __init__(self, error: BaseException, **options: Any) -> None:
        super().__init__(**options)
        self.pending = [error]

    def open(self, *args: Any, **options: Any) -> Any:
        session = super().open(*args, **options)
        close = session.close

        def closing() -> None:
            if self.pending:
                raise self.pending.pop()
            close()

        session.close = closing
        return session


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LeapaheadError("lost")], ids=["interrupt", "error"])
@pytest.mark.parametrize("name", ["draft_model", "speculative_sampling"])
def test_what_a_close_raises_leaves_no_other_cache_taken_and_an_interrupted_one_is_repeated(
    name: str, error: BaseException
) -> None:
    first, second = Interrupted(error), Counting(seed=5)
    engine = Engine(ToyTarget())
    drafts = [first, second] if name == "draft_model" else first
    drafter: Any = engine.drafter(name, draft=drafts, nodes=4, depth=1)
    handle = engine.submit(Request([1, 2, 3], drafter, stop=StopParams(max_new_tokens=12)))
    with pytest.raises(type(error)):
        engine.run([handle])
    assert not first.pending
    assert first.closed == isinstance(error, KeyboardInterrupt)
    assert second.closed == (name == "draft_model")
    assert not drafter._sequences


def test_a_long_prompt_is_read_in_chunks_and_a_short_one_at_once() -> None:
    """Between two chunks the requests are stepped, plainly for those whose prompt is not read."""
    target, draft = ToyTarget(order=1), Counting(order=1)
    engine = Engine(target, latency=FixedLatency(target, FLAT))
    drafter = engine.drafter("draft_model", draft=draft, nodes=3, depth=3, chain=True)
    lengths: list[int] = []
    long = [index % 12 for index in range(3 * CHUNK + 100)]
    request = Request(long, drafter, stop=StopParams(max_new_tokens=40), on_step=lambda s: lengths.append(len(s.tree)))
    engine.run([handle := engine.submit(request)])
    assert draft.chunks == [CHUNK, CHUNK, CHUNK, 99]
    assert lengths[:3] == [1, 1, 1]
    assert lengths[3] == 4
    assert handle.tokens == run(target, None, long, stop=StopParams(max_new_tokens=40)).tokens
    draft.chunks.clear()
    engine.run([engine.submit(Request(long[:CHUNK], drafter, stop=StopParams(max_new_tokens=4)))])
    assert draft.chunks == [CHUNK - 1]


def test_a_runner_that_was_not_asked_for_long_catches_up() -> None:
    """Many missing tokens are computed and committed in chains, none of them twice."""
    draft = Counting()
    tokens = [1, 2, 3]
    runner = DraftRunner(draft, tokens)
    assert runner.read_ahead()
    tokens += [index % 12 for index in range(3 * LONGEST_CHAIN)]
    runner.add([()])
    drafts, forward = DraftRunner.forward([runner])
    assert not runner.failed
    assert drafts[0] is not None
    assert forward is not None
    assert draft.rows == len(tokens) - 2
    assert drafts[0].choices[drafts[0].nodes[0]] == int(draft.row(tuple(enumerate(tokens))).argmax())
    runner.close()
    assert draft.closed


def test_a_draft_model_with_a_short_context_stops_and_reports_it() -> None:
    draft = Counting(context_length=16)
    drafter = DraftModelDrafter(draft, nodes=3, depth=3, chain=True)
    done = assert_same_text(ToyTarget(), drafter, stop=StopParams(max_new_tokens=40))
    assert "context" in done.stats.drafter["draft"]["stopped"]
    assert done.stats.accepted > 0
    assert draft.closed


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("sizes", [(12, 9), (9, 12)], ids=["smaller", "larger"])
def test_one_vocabulary_may_be_the_beginning_of_the_other(params: SamplingParams, sizes: tuple[int, int]) -> None:
    target, draft = ToyTarget(vocab_size=sizes[0]), Counting(vocab_size=sizes[1])
    done = assert_same_text(target, DraftModelDrafter(draft, nodes=6, depth=2), params=params)
    stopped = done.stats.drafter["draft"].get("stopped", "")
    assert not stopped or ("outside the vocabulary of 9" in stopped and max(done.tokens) >= 9)
    assert done.stats.accepted > 0


@pytest.mark.parametrize("options", [{"nodes": 4}, {"nodes": 12, "depth": 3}, {}], ids=str)
def test_a_draft_model_that_takes_no_trees_is_given_one_path(options: dict[str, Any]) -> None:
    """Such as a recurrent one, for a target that takes trees."""

    class OnePath(Blurred):
        def step(self, sessions: Any, trees: Any, *args: Any, **more: Any) -> Any:
            assert all(tree.is_chain for tree in trees)
            return super().step(sessions, trees, *args, **more)

    target, draft = ToyTarget(), OnePath(capabilities=ALL - {HIDDEN, TREE})
    done = assert_same_text(target, DraftModelDrafter(timed(draft), **options), latency=FixedLatency(target, FLAT))
    assert done.stats.accepted > 0


def test_a_draft_model_that_fails_leaves_the_text_alone() -> None:
    class Failing(Counting):
        def step(self, *args: Any, **options: Any) -> list[Choices]:
            if self.forwards > 5:
                raise LeapaheadError("out of memory")
            return list(super().step(*args, **options))

    done = assert_same_text(ToyTarget(), DraftModelDrafter(Failing(), nodes=3, depth=3, chain=True))
    assert done.stats.drafter["draft"]["stopped"] == "out of memory"


class Crowded(Counting):
    """Its cache has no room while some of the calls of `name` are made, the first being number 0."""

    def __init__(self, name: str, full: range) -> None:
        super().__init__()
        self.calls, self.name, self.full = 0, name, full

    def _called(self, name: str) -> None:
        if name == self.name:
            self.calls += 1
            if self.calls - 1 in self.full:
                raise CacheFull("full")

    def open(self, *args: Any, **options: Any) -> Any:
        self._called("open")
        return super().open(*args, **options)

    def step(self, *args: Any, **options: Any) -> Any:
        self._called("step")
        return super().step(*args, **options)


@pytest.mark.parametrize("kind", [DraftModelDrafter, SpeculativeSampling])
@pytest.mark.parametrize("name", ["open", "step"])
def test_a_draft_model_whose_cache_is_full_for_a_while_drafts_again(name: str, kind: Any) -> None:
    draft = Crowded(name, range(4))
    done = assert_same_text(ToyTarget(), kind(draft, nodes=3, depth=3), stop=StopParams(max_new_tokens=60))
    assert "stopped" not in done.stats.drafter["draft"]
    assert draft.calls > 4
    assert done.stats.accepted > 20
    assert draft.closed


@pytest.mark.parametrize("kind", [DraftModelDrafter, SpeculativeSampling])
@pytest.mark.parametrize(
    ("name", "full"), [("open", range(1000)), ("step", range(1000)), ("step", range(1, 1000, 2))], ids=str
)
def test_a_draft_model_whose_cache_stays_full_is_seldom_tried(name: str, full: range, kind: Any) -> None:
    """The last one has room for the first forward of each step only."""
    draft = Crowded(name, full)
    done = assert_same_text(ToyTarget(), kind(draft, nodes=3, depth=3), stop=StopParams(max_new_tokens=200))
    assert done.stats.drafter["draft"]["stopped"] == "full"
    assert draft.calls <= 12 * full.step, "after 1, 2, 4, ..., 64, 64 tokens"


def test_no_draft_is_made_behind_an_earlier_token_where_the_last_has_no_room() -> None:
    draft, tokens = Counting(max_nodes=1), [1, 2, 3]
    runner = DraftRunner(draft, tokens)
    assert runner.read_ahead()
    for token, room, forwards in ((4, 1, 0), (5, 8, 1)):
        tokens.append(token)
        draft.max_nodes = room
        runner.add([()])
        DraftRunner.forward([runner])
        assert draft.forwards == forwards
        assert ("no room" in runner.failed) == (room == 1)


@pytest.fixture(scope="module")
def small() -> TransformersTarget:
    return TransformersTarget(BY_NAME["llama"].build(), hidden_states=False)


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_in_a_draft_forward_leaves_the_other_texts_alone(
    small: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model has computed a part of their trees in the same step, and discards it."""
    engine, stop, pending = Engine(ToyTarget()), StopParams(max_new_tokens=24), [True]
    drafter = engine.drafter("draft_model", draft=small, nodes=3, depth=3, chain=True)
    other, mine = (engine.submit(Request(prompt, drafter, stop=stop)) for prompt in ([4, 5], [1, 2, 3]))
    for _ in range(3):
        engine.step()
    step = small.step

    def behind_the_first(sessions: Any, trees: Any, num_computed: Any = None) -> list[Choices]:
        with monkeypatch.context() as patch:
            if len(sessions) == 2 and any(num_computed) and pending and pending.pop():
                patch.setattr(small.model, "forward", interrupted)
            return step(sessions, trees, num_computed)

    monkeypatch.setattr(small, "step", behind_the_first)
    with pytest.raises(KeyboardInterrupt):
        engine.run([mine])
    assert not pending
    engine.run([other])
    assert other.tokens == run(ToyTarget(), None, [4, 5], stop=stop).tokens
    assert "stopped" not in other.stats.drafter["draft"]


def test_tokens_whose_commit_was_interrupted_are_read_again_by_the_draft_model(
    small: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [1, 2, 3]
    runner = DraftRunner(small, tokens)
    assert runner.read_ahead()
    runner.add([(4, 5)])
    DraftRunner.forward([runner])
    tokens += [4, 6]
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.commit()
    assert runner.reading
    found = []
    for each in (runner, DraftRunner(small, tokens)):
        assert each.read_ahead()
        each.add([()])
        (draft,), _ = DraftRunner.forward([each])
        assert draft is not None
        found.append(draft.choices[draft.nodes[0]])
        each.close()
        small.forget()
    assert found[0] == found[1]


# -------------------------------------------------------------------------------------------------------- planning


def test_a_cheap_draft_model_that_is_right_is_used_often_and_a_dear_one_never() -> None:
    stop = StopParams(max_new_tokens=80)
    assert planned(ToyTarget(seed=4), Counting(seed=4), stop=stop).stats.acceptance_length > 5
    draft = Counting(seed=4)
    assert planned(ToyTarget(seed=4), draft, DEAR, stop=stop).stats.acceptance_length == 1.0
    assert draft.forwards <= 2, "now and then it is tested whether it pays by now"


def test_a_draft_model_that_is_never_right_is_soon_left_alone() -> None:
    target, draft = ToyTarget(vocab_size=50), Counting(vocab_size=50, seed=31)
    done = planned(target, draft, {1: 0.3, 8: 0.35}, stop=StopParams(max_new_tokens=300))
    assert draft.forwards < 0.2 * len(done.steps)


@pytest.mark.slow
def test_the_number_of_draft_forwards_follows_how_often_they_are_right() -> None:
    forwards = []
    for share in (0.6, 0.1):
        target, draft = ToyTarget(seed=4), Blurred(share, seed=4)
        done = planned(target, draft, {1: 0.15, 8: 0.2}, params=WARM, stop=StopParams(max_new_tokens=200))
        forwards.append(done.stats.drafter["draft"]["forwards"] / len(done.steps))
    assert forwards[0] < forwards[1]


@pytest.mark.parametrize(("others", "runs"), [(0.25, True), (0.01, False)])
def test_a_draft_forward_is_worth_what_its_first_few_candidates_add(others: float, runs: bool) -> None:
    """A third of a step, for a first candidate that is right three times in ten: the next three pay, or they do not."""
    priors: dict[Any, float] = {("draft, first choice", "greedy"): 0.3, ("draft", "greedy", 0): 0.3}
    priors |= {("draft", "greedy", rank): others for rank in (1, 2, 3)}
    draft = Counting()
    stop = StopParams(max_new_tokens=4)
    planned(ToyTarget(), draft, {1: 0.35, 8: 0.4}, stop=stop, acceptance=AcceptanceTable(priors))
    assert (draft.forwards > 0) == runs


@pytest.mark.slow
def test_seed_aware_drafting_makes_a_sampled_draft_better() -> None:
    def length(seed_aware: bool) -> float:
        target, draft = ToyTarget(vocab_size=40), Blurred(0.25, vocab_size=40)
        drafter = DraftModelDrafter(draft, nodes=4, depth=4, chain=True, seed_aware=seed_aware)
        return run(target, drafter, params=WARM, stop=StopParams(max_new_tokens=300)).stats.acceptance_length

    assert length(True) > 1.2 * length(False)


def test_several_draft_models_make_one_tree() -> None:
    drafts = [Blurred(0.5), Blurred(0.5, seed=0, order=2)]
    drafts[1].other = ToyTarget(seed=7)
    drafter = DraftModelDrafter(drafts, nodes=12, depth=4)
    done = assert_same_text(ToyTarget(), drafter, stop=StopParams(max_new_tokens=60))
    assert set(done.stats.drafted_by) == {"draft", "draft2"}
    assert done.stats.drafter["draft2"]["forwards"] > 0


def test_auto_takes_a_draft_model_among_its_sources() -> None:
    target, draft = ToyTarget(vocab_size=60), Blurred(0.2, vocab_size=60)
    latency, stop = FixedLatency(target, FLAT), StopParams(max_new_tokens=120)
    done = assert_same_text(target, Auto(draft=timed(draft)), params=WARM, stop=stop, latency=latency)
    assert done.stats.accepted_by["draft"] > 20
    assert done.stats.drafted_by["recycling"] + done.stats.drafted_by["suffix"] > 0


class Remeasured(FixedLatency):
    """A profile that `measure` replaces."""

    def __init__(self, target: Target, now: dict[int, float], measured: dict[int, float]) -> None:
        super().__init__(target, now)
        self.measured, self.times = FixedLatency(target, measured).fixed, 0

    def measure(self, target: Target) -> None:
        self.fixed, self.times = self.measured, self.times + 1


@pytest.mark.parametrize("now", [0.05, 2.0], ids=["faster", "slower"])
def test_a_draft_model_that_seems_slow_is_measured_again_beside_its_target(now: float) -> None:
    """The stored profiles may be of different times; both are measured again, once, before the first request."""
    target, draft = ToyTarget(), Counting()
    latency, own = Remeasured(target, FLAT, FLAT), Remeasured(draft, {1: 50.0, 8: 60.0}, {1: now, 8: 1.2 * now})
    engine = Engine(target, latency=latency)
    drafter = engine.drafter("draft_model", draft=DraftModel(draft, None, own))
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        engine.prepare(drafter)
    assert (own.times, latency.times) == (1, 1)

    def decode() -> Any:
        engine.run([handle := engine.submit(Request([1, 2, 3], drafter, stop=StopParams(max_new_tokens=24)))])
        return handle.stats

    if now < 1:
        assert decode().drafted > 0
    else:
        (warning,) = log
        assert re.search(r"takes 2000\.0 ms per token and the target toy.* 1000\.0 ms", str(warning.message))
        assert all(decode().drafted == 0 for _ in range(2))
        assert draft.forwards == 0
        assert decode().drafter["draft"]["stopped"] == "it is slower than the target", "and not at length again"
    assert (own.times, latency.times) == (1, 1)


class Busy(ToyTarget):
    """Takes a simulated time for each forward, and longer while it is busy.

    Args:
        clock: [seconds], moved on by each forward.
        seconds: of a forward.
    """

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__(vocab_size=30)
        self.clock, self.seconds, self.busy, self.forwards = clock, seconds, 1.0, 0
        self.latency = LatencyProfiles(self.info, clock=lambda: clock[0])
        self.latency.put(1, LatencyProfile({1: seconds, 128: 1.2 * seconds}))

    def step(self, *args: Any, **options: Any) -> Any:
        self.clock[0] += self.seconds * self.busy
        self.forwards += 1
        return super().step(*args, **options)


def test_a_fixed_number_of_draft_forwards_is_run_whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes twice as long as a plain step; only those are left out for which the text has no room."""
    clock, tokens = [0.0], 60
    target, draft = Busy(clock, 0.010), Busy(clock, 0.020)
    monkeypatch.setattr(draft_runner, "perf_counter", lambda: clock[0])
    steps: list[Step] = []
    stop = StopParams(max_new_tokens=tokens)
    engine = Engine(target, latency=target.latency)
    drafter = engine.drafter("draft_model", draft=DraftModel(draft, None, draft.latency), depth=3, chain=True)
    engine.run([handle := engine.submit(Request([1, 2, 3], drafter, stop=stop, on_step=steps.append))])
    left = [tokens - (step.position - 2) for step in steps]
    assert handle.stats.drafter["draft"]["forwards"] == sum(min(3, each - 1) for each in left)
    assert handle.stats.accepted > 30


def test_a_draft_model_that_was_slow_for_a_while_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    target, draft = Busy(clock, 0.010), Busy(clock, 0.006)
    monkeypatch.setattr(draft_runner, "perf_counter", lambda: clock[0])
    engine = Engine(target, latency=target.latency)
    drafter = engine.drafter("draft_model", draft=DraftModel(draft, None, draft.latency))

    def share(tokens: int, busy: float) -> float:
        """Draft forwards for each token."""
        draft.busy, before = busy, draft.forwards
        engine.run([engine.submit(Request([1, 2, 3], drafter, stop=StopParams(max_new_tokens=tokens)))])
        return (draft.forwards - before) / tokens

    assert share(20, busy=1.0) > 0.5
    share(20, busy=2.2)
    assert draft.latency.profile(1)(1) > target.latency.profile(1)(1)
    assert share(20, busy=2.2) < 0.1
    for _ in range(8):  # short texts, in none of which it is tried for its own sake
        share(20, busy=1.0)
    assert share(20, busy=1.0) > 0.5
