"""The engine: requests of several threads in one batch, each with the text that it has alone, whatever else fails."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import enumerate as enumerate_threads
from threading import get_ident
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers import GREEDY, PROMPT, Oracle, Scripted, attached, run

from leapahead import (
    LLM,
    AsyncLLM,
    BadLogits,
    BadParameter,
    Budget,
    CacheFull,
    Capture,
    ContextOverflow,
    Drafter,
    DraftError,
    Engine,
    LeapaheadError,
    Proposal,
    Request,
    SamplingParams,
    SequenceDrafter,
    SequenceView,
    StopParams,
    TokenTree,
)
from leapahead.core.verify import Verdict
from leapahead.drafters import registry
from leapahead.models.toy import ToySession, ToyTarget
from leapahead.planner.chunk import UNKNOWN

LENGTH = StopParams(max_new_tokens=20)
SAMPLED = SamplingParams(temperature=1.0, seed=5)


def prompt(index: int) -> list[int]:
    return [index % 12, 3, (5 * index) % 12, 1]


def request(engine: Engine, index: int = 0, drafter: Any = "prompt_lookup", **options: Any) -> Request:
    options = {"sampling": SamplingParams(temperature=index % 2, seed=index), "stop": LENGTH, **options}
    return Request(prompt(index), attached(engine, drafter), **options)


def alone(index: int, **options: Any) -> list[int]:
    """Plain decoding's text of `request(engine, index)`."""
    params = options.pop("params", SamplingParams(temperature=index % 2, seed=index))
    return run(ToyTarget(), None, prompt(index), params=params, stop=options.pop("stop", LENGTH), **options).tokens


class Limited(ToyTarget):
    """Has room for a few sessions only, and counts those that are open."""

    def __init__(self, rows: int, **options: Any) -> None:
        super().__init__(**options)
        self.rows, self.opened = rows, list[ToySession]()

    def _taken(self, session: ToySession) -> ToySession:
        if len(self.open_sessions) >= self.rows:
            raise CacheFull(f"all {self.rows} rows are taken")
        self.opened.append(session)
        return session

    @property
    def open_sessions(self) -> list[ToySession]:
        return [session for session in self.opened if not session.closed]

    def open(self, *given: Any, **options: Any) -> ToySession:
        session = Closing.of(super().open(*given, **options))
        return self._taken(session)

    def fork(self, *given: Any) -> ToySession:
        return self._taken(Closing.of(super().fork(*given)))


class Closing(ToySession):
    closed = False

    @classmethod
    def of(cls, session: ToySession) -> ToySession:
        session.__class__ = cls
        return session

    def close(self) -> None:
        super().close()
        self.closed = True


class Failing(SequenceDrafter):
    """Proposes, or observes, what raises, from its third step on."""

    name: ClassVar[str] = "failing"

    def __init__(self, when: str = "propose") -> None:
        self.when, self.steps = when, 0

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        self.steps += 1
        if self.steps == 3 and self.when == "propose":
            raise ZeroDivisionError("a bug of the drafter")
        if self.steps == 3 and self.when == "none":
            return None  # type: ignore[return-value]
        return Proposal(TokenTree.root(sequence.root))

    def observe(self, sequence: SequenceView, step: Any) -> None:
        if self.steps == 2 and self.when == "observe":
            raise ZeroDivisionError("a bug of the drafter")


@pytest.mark.slow
@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_requests_of_many_threads_have_their_own_texts(max_batch: int) -> None:
    target = Limited(8)
    engine = Engine(target, max_batch=max_batch)

    def decode(index: int) -> list[int]:
        handle = engine.submit(request(engine, index, ["prompt_lookup", "lookahead", "jacobi"][index % 3]))
        engine.run([handle])
        return handle.tokens

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(decode, range(24))) == [alone(index) for index in range(24)]
    assert not target.open_sessions


def test_the_default_drafter_is_kept_until_the_end_whatever_options_requests_have() -> None:
    """What it has learned is written when the LLM is closed. Of others, a bounded number is kept."""
    released: list[int] = []

    class Kept(Drafter):
        name: ClassVar[str] = "kept"

        def __init__(self, number: int = 0) -> None:
            self.number = number

        def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
            return [Proposal(TokenTree.root(sequence.root)) for sequence in sequences]

        def release(self) -> None:
            released.append(self.number)

    with LLM(ToyTarget(), drafter=Kept) as llm:
        for number in range(1, 40):
            llm.generate([1], max_new_tokens=1, drafter_options={"number": number})
        assert released == list(range(1, 9))
    assert released[8:] == [0, *range(9, 40)]


def test_a_drafter_that_fails_when_it_is_released_keeps_nothing_else_open() -> None:
    closed: list[str] = []

    class Full(SequenceDrafter):
        name: ClassVar[str] = "full"

        def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
            return Proposal(TokenTree.root(sequence.root))

    class Processes(ToyTarget):
        def close(self) -> None:
            closed.append("target")

    def fail() -> None:
        raise OSError("no space left on device")

    llm = LLM(Processes(), drafter=Full)
    llm.engine.drafter(Full).release = fail  # type: ignore[method-assign]
    llm.engine.drafter("plain").release = lambda: closed.append("drafter")  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space left"):
        llm.close()
    assert closed == ["drafter", "target"]


def test_one_forward_serves_all_running_requests() -> None:
    engine = Engine(ToyTarget())
    handles = [engine.submit(request(engine, index, "plain")) for index in range(4)]
    while any(handle.stats.steps == 0 for handle in handles):
        engine.step()
    before = [handle.stats.steps for handle in handles]
    assert len(engine.step()) == 4
    assert [handle.stats.steps for handle in handles] == [steps + 1 for steps in before]
    engine.run(handles)


def test_a_half_read_stream_beside_a_generate() -> None:
    """It is not stepped while nobody reads, takes no place in the batch, and goes on where it was."""
    engine = Engine(ToyTarget(), max_batch=1)
    stream = engine.submit(request(engine, 0, stream=True))
    first = engine.next(stream)
    assert first is not None
    other = engine.submit(request(engine, 1))
    engine.run([other])
    assert other.tokens == alone(1)
    assert len(stream.unread) <= 1
    rest = [token for output in engine.outputs(stream) for token in output.tokens]
    assert [*first.tokens, *rest] == alone(0)


def test_an_unread_stream_holds_one_output() -> None:
    engine = Engine(ToyTarget())
    stream = engine.submit(request(engine, 0, "plain", stream=True))
    for _ in range(10):
        engine.step()
    assert (len(stream.unread), stream.stats.steps) == (1, 1)
    engine.cancel(stream)


@pytest.mark.parametrize("when", ["propose", "observe", "none"])
@pytest.mark.parametrize("max_batch", [1, 8])
def test_a_drafter_that_fails_ends_its_own_request_only(when: str, max_batch: int) -> None:
    target = Limited(8)
    engine = Engine(target, max_batch=max_batch)
    good = [engine.submit(request(engine, index)) for index in range(3)]
    bad = engine.submit(request(engine, 3, Failing(when)))
    more = engine.submit(request(engine, 4))
    with pytest.raises((ZeroDivisionError, DraftError)):
        engine.run([bad])
    engine.run([*good, more])
    assert [handle.tokens for handle in [*good, more]] == [alone(index) for index in (0, 1, 2, 4)]
    assert not target.open_sessions


def chain_of(sequence: SequenceView, budget: Budget) -> TokenTree:
    return TokenTree.chain(sequence.root, [1])


def branches_of(sequence: SequenceView, budget: Budget) -> TokenTree:
    return TokenTree.from_paths(sequence.root, [[1], [2]])


def branches_within(sequence: SequenceView, budget: Budget) -> TokenTree:
    return TokenTree.from_paths(sequence.root, [[1], [2]], budget)


def long_of(sequence: SequenceView, budget: Budget) -> TokenTree:
    return TokenTree.chain(sequence.root, [1] * (budget.depth + 1))


@pytest.mark.parametrize(
    ("able", "replays", "draft", "says"),
    [
        ((), False, chain_of, "which takes no drafts; declare its needs.*use drafter='plain'"),
        (("chain",), False, branches_of, "drafts of one path only"),
        (("chain",), True, branches_of, "drafts of one path only"),
        (("chain",), True, branches_within, ""),
        (("chain",), False, long_of, r"beyond its budget of Budget\(.*leaves=1\)$"),
        (("chain", "tree"), False, branches_of, ""),
    ],
)
def test_a_draft_that_the_target_does_not_take_ends_its_own_request_only(
    able: tuple[str, ...], replays: bool, draft: Any, says: str
) -> None:
    """Refused before the forward, in which it would end the other requests or give wrong text."""
    target = Limited(8, capabilities=frozenset(able))
    target.info = replace(target.info, replays=replays)
    engine = Engine(target)
    good = engine.submit(request(engine, 0, "plain"))
    bad = engine.submit(request(engine, 1, Scripted(draft)))
    if says:
        with pytest.raises(DraftError, match=f"drafter 'scripted' drafted .*{says}"):
            engine.run([bad])
    engine.run([good] if says else [good, bad])
    assert good.tokens == alone(0)
    assert says or bad.tokens == alone(1)
    assert not target.open_sessions


def test_one_sequence_that_replays_may_branch() -> None:
    target = Limited(8, capabilities=frozenset({"chain"}))
    target.info = replace(target.info, replays=True)
    engine = Engine(target)
    handle = engine.submit(request(engine, 1, Scripted(branches_of)))
    engine.run([handle])
    assert handle.tokens == alone(1)


@pytest.mark.parametrize(
    "verdict",
    [
        None,
        Verdict((), (), 0),
        Verdict((0,), (1,), 100),
        Verdict((0, 2), (1, 2), 1),
        Verdict((0, 1), (2, 3), 1),
        Verdict((0,), (12,), 0),
        Verdict((1,), (1,), 0),
        Verdict((0,), (-5,), 0),
        Verdict((0,), (5.5,), 0),  # type: ignore[arg-type]
        Verdict((0,), ("a",), 0),  # type: ignore[arg-type]
        Verdict(None, None, 0),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_a_rule_of_a_drafter_commits_paths_of_its_draft_only(verdict: Any) -> None:
    class Judging(Oracle):
        def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
            return Proposal(TokenTree.chain(sequence.root, [1, 2]), judge=lambda choices: verdict)

    engine = Engine(ToyTarget())
    good = engine.submit(request(engine, 0))
    bad = engine.submit(request(engine, 1, Judging([])))
    with pytest.raises(DraftError, match=r"'oracle' judged its draft by .*, which is no path of it"):
        engine.run([bad])
    engine.run([good])
    assert good.tokens == alone(0)


def test_a_rule_of_a_drafter_may_give_numbers_of_numpy() -> None:
    class Judging(Oracle):
        def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
            verdict = Verdict(np.array([0, 1]), np.array([1, 2]), np.int64(1))  # type: ignore[arg-type]
            return Proposal(TokenTree.chain(sequence.root, [1]), judge=lambda choices: verdict)

    engine = Engine(ToyTarget())
    handle = engine.submit(request(engine, 1, Judging([])))
    engine.run([handle])
    assert [type(token) for token in handle.tokens] == [int] * len(handle.tokens)


@pytest.mark.parametrize("kind", [Oracle, Drafter])
def test_needs_that_are_no_set_are_refused(kind: type[Any]) -> None:
    class Careless(kind):  # type: ignore[misc]
        name: ClassVar[str] = "careless"
        needs = "chain"

        def __init__(self) -> None: ...

        def propose(self, *given: Any) -> Any: ...

    with pytest.raises(BadParameter, match=r"'careless' has needs='chain', which must be a set of names: frozenset"):
        Engine(ToyTarget()).drafter(Careless)


def broken_criterion(tokens: Sequence[int]) -> bool:
    if len(tokens) > 8:
        raise RuntimeError("the user's criterion failed")
    return False


def broken_processor(prefixes: Any, logits: Any) -> Any:
    if prefixes.shape[1] > 8:
        raise RuntimeError("the user's processor failed")
    return logits


def not_a_number(prefixes: Any, logits: Any) -> Any:
    return logits * np.nan if prefixes.shape[1] > 8 else logits


def broken_callback(step: Any) -> None:
    raise RuntimeError("the user's callback failed")


FAULTS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "criterion": ({"stop": StopParams(max_new_tokens=20, criteria=(broken_criterion,))}, RuntimeError),
    "processor": ({"sampling": SamplingParams(processors=(broken_processor,))}, RuntimeError),
    "nan": ({"sampling": SamplingParams(processors=(not_a_number,))}, BadLogits),
    "callback": ({"on_step": broken_callback}, RuntimeError),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_request_that_fails_leaves_the_others_as_they_are(fault: str) -> None:
    options, error = FAULTS[fault]
    target = Limited(8)
    engine = Engine(target)
    good = [engine.submit(request(engine, index)) for index in range(3)]
    bad = engine.submit(request(engine, 3, **options))
    with pytest.raises(error):
        engine.run([bad])
    engine.run(good)
    assert [handle.tokens for handle in good] == [alone(index) for index in range(3)]
    assert not target.open_sessions


def test_a_failed_forward_ends_its_batch_and_nothing_else() -> None:
    class Exhausted(Limited):
        broken = False

        def step(self, *given: Any, **options: Any) -> Any:
            if self.broken:
                raise LeapaheadError("out of memory")
            return super().step(*given, **options)

    target = Exhausted(8)
    engine = Engine(target)
    handle = engine.submit(request(engine, 0))
    engine.step()
    target.broken = True
    with pytest.raises(LeapaheadError, match="out of memory"):
        engine.run([handle])
    target.broken = False
    again = engine.submit(request(engine, 0))
    engine.run([again])
    assert again.tokens == alone(0)
    assert not target.open_sessions


def test_an_interrupt_leaves_the_other_requests_as_they_are() -> None:
    class Interrupted(Limited):
        interrupt = False

        def step(self, *given: Any, **options: Any) -> Any:
            if self.interrupt:
                self.interrupt = False
                raise KeyboardInterrupt
            return super().step(*given, **options)

    target = Interrupted(8)
    engine = Engine(target)
    other, mine = engine.submit(request(engine, 0)), engine.submit(request(engine, 1))
    engine.step()
    target.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        engine.run([mine])
    assert mine.finish_reason == "cancelled"
    engine.run([other])
    assert other.tokens == alone(0)
    assert not target.open_sessions


@pytest.mark.parametrize("where", ["open", "on_step", "close"])
def test_an_interrupt_at_any_moment_loses_nothing_of_the_other_requests(where: str) -> None:
    pending = [KeyboardInterrupt]

    def interrupt(*_: Any) -> None:
        if pending:
            raise pending.pop()

    class Interrupted(Limited):
        def open(self, tokens: Any, *given: Any, **options: Any) -> ToySession:
            if where == "open" and list(tokens) == prompt(1):
                interrupt()
            return super().open(tokens, *given, **options)

    class Closed(Failing):
        def finish(self, sequence: SequenceView) -> None:
            interrupt()

    target = Interrupted(8)
    engine = Engine(target)
    first = engine.submit(request(engine, 0))
    options = {"on_step": interrupt} if where == "on_step" else {}
    mine = engine.submit(request(engine, 1, Closed("") if where == "close" else "plain", **options))
    last = engine.submit(request(engine, 2))
    with pytest.raises(KeyboardInterrupt):
        engine.run([mine])
    assert mine.done
    engine.run([first, last])
    assert [first.tokens, last.tokens] == [alone(0), alone(2)]
    assert not target.open_sessions


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_notification_raises_ends_no_other_request(stream: bool) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    target = Limited(8)
    engine = Engine(target)
    mine, other = engine.submit(request(engine, 0, stream=stream, ahead=99), fails), engine.submit(request(engine, 1))
    engine.run([other])
    assert other.tokens == alone(1)
    with pytest.raises(ZeroDivisionError):
        engine.run([mine])
    assert not target.open_sessions


def test_who_waits_for_a_request_hears_of_its_end_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes when the request is over, and before `notify` was called."""
    engine, told = Engine(ToyTarget()), list[bool]()
    awaited = engine.submit(request(engine, 0), lambda: told.append(awaited.done))
    other = engine.submit(request(engine, 1))
    tell, pending = engine._changed.notify_all, [KeyboardInterrupt]

    def interrupted() -> None:
        tell()
        if awaited.done and pending:
            raise pending.pop()

    monkeypatch.setattr(engine._changed, "notify_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run([other])
    engine.run([awaited])
    engine.run([engine.submit(request(engine, 2))])
    assert told == [True]


def test_an_interrupted_start_of_another_request_is_repeated() -> None:
    pending = [KeyboardInterrupt]

    class Begins(Failing):
        def begin(self, sequence: SequenceView) -> None:
            if pending:
                raise pending.pop()

    target = Limited(8)
    engine = Engine(target)
    other, mine = engine.submit(request(engine, 0, Begins(""))), engine.submit(request(engine, 1))
    with pytest.raises(KeyboardInterrupt):
        engine.run([mine])
    engine.run([other])
    assert (other.tokens, mine.finish_reason) == (alone(0), "cancelled")
    assert not target.open_sessions


@pytest.mark.parametrize("when", ["finish", "close"])
def test_a_stream_may_be_closed_while_another_request_ends(when: str) -> None:
    """As the garbage collector does with one that was abandoned, in any thread and at any moment."""
    target = Limited(8)
    engine = Engine(target)
    stream = engine.outputs(engine.submit(request(engine, 0, stream=True)))
    next(stream)

    class Closes(Drafter):
        name: ClassVar[str] = "closes"

        def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
            return [Proposal(TokenTree.root(sequence.root)) for sequence in sequences]

        def finish(self, sequence: SequenceView) -> None:
            if when == "finish":
                stream.close()

        def close(self, sequence: SequenceView) -> None:
            if when == "close":
                stream.close()

    handle = engine.submit(request(engine, 1, Closes()))
    if when == "finish":
        engine.run([handle])
        assert handle.tokens == alone(1)
    else:
        engine.step()
        engine.cancel(handle)
    assert not target.open_sessions


@pytest.mark.parametrize("when", ["begin", "read_prompt", "none", "short", "finish", "close", "figures"])
def test_a_batch_drafter_that_fails_for_one_sequence_leaves_the_others_as_they_are(when: str) -> None:
    held = set[SequenceView]()

    class Bug(Drafter):
        name: ClassVar[str] = "bug"
        capture = Capture(top_k=2)

        def check(self, moment: str, sequence: SequenceView) -> None:
            if moment == when and sequence.tokens[:2] == [3, 3]:
                raise ZeroDivisionError("a bug of the drafter")

        def begin(self, sequence: SequenceView) -> None:
            held.add(sequence)
            self.check("begin", sequence)

        def read_prompt(self, sequence: SequenceView, rows: Any) -> None:
            self.check("read_prompt", sequence)

        def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> Any:
            proposals = [Proposal(TokenTree.root(sequence.root)) for sequence in sequences]
            bad = any(sequence.tokens[:2] == [3, 3] for sequence in sequences)
            return None if bad and when == "none" else proposals[1:] if bad and when == "short" else proposals

        def finish(self, sequence: SequenceView) -> None:
            self.check("finish", sequence)

        def close(self, sequence: SequenceView) -> None:
            held.discard(sequence)
            self.check("close", sequence)

        def figures(self, sequence: SequenceView) -> dict[str, Any]:
            self.check("figures", sequence)
            return {}

    target = Limited(8)
    engine = Engine(target)
    drafter = engine.drafter(Bug)
    good = [engine.submit(request(engine, index, drafter)) for index in range(3)]
    bad = engine.submit(Request([3, 3, 1], drafter, stop=LENGTH))
    with pytest.raises((ZeroDivisionError, DraftError)):
        engine.run([bad])
    engine.run(good)
    assert [handle.tokens for handle in good] == [alone(index) for index in range(3)]
    assert not target.open_sessions
    assert not held


def test_no_samples_are_no_requests() -> None:
    engine = Engine(Limited(8))
    assert engine.submit_samples(request(engine, 0), []) == []
    assert engine.step() == []


@pytest.mark.parametrize("samples", [1, 600])
def test_many_that_wait_are_cancelled_in_one_pass(samples: int) -> None:
    engine = Engine(ToyTarget(), max_batch=2)
    given = request(engine, 0)
    groups = [engine.submit_samples(given, [given.sampling] * samples) for _ in range(600 // samples)]
    engine.step()
    passes, retire = [], engine._retire
    engine._retire = lambda *handle: (passes.append(1), retire(*handle))  # type: ignore[assignment]
    engine.cancel(*(handle for group in groups for handle in group))
    assert all(handle.done for group in groups for handle in group)
    assert len(passes) <= 4


def test_a_step_does_not_look_at_all_requests_that_wait() -> None:
    looks = []

    class Watched(deque[Any]):
        def __iter__(self) -> Any:
            looks.append(1)
            return super().__iter__()

    engine = Engine(ToyTarget(), max_batch=1)
    engine._queue = Watched()
    handles = [engine.submit(request(engine, 0)) for _ in range(10)]
    engine.run(handles[:8])
    assert not looks
    engine.cancel(*handles[8:])
    assert looks
    assert [handle.finish_reason for handle in handles[7:]] == ["length", "cancelled", "cancelled"]


def test_a_sample_that_was_cancelled_while_its_prompt_waited_ends_when_it_is_queued() -> None:
    engine = Engine(ToyTarget(), max_batch=1)
    running = engine.submit(request(engine, 1))
    engine.step()
    first, second, third = engine.submit_samples(request(engine, 0), [GREEDY, SAMPLED, SAMPLED])
    engine.cancel(second, wait=False)
    engine.step()
    engine.cancel(first, wait=False)  # whose others are queued
    engine.step()
    assert (running.done, first.done, second.done, third.done) == (False, True, True, False)


def test_a_sample_can_be_cancelled_before_its_prompt_is_read() -> None:
    engine = Engine(Limited(8))
    first, second = engine.submit_samples(request(engine, 0), [GREEDY, SAMPLED])
    engine.cancel(second)
    engine.run([first])
    assert (first.tokens, second.tokens, second.finish_reason) == (alone(0, params=GREEDY), [], "cancelled")


def test_a_request_waits_for_streams_of_other_threads_only() -> None:
    """Beside a stream that the same thread reads it could wait for ever."""
    llm = LLM(Limited(1), drafter="plain")
    stream = llm.stream(prompt(0), max_new_tokens=20)
    next(stream)
    with pytest.raises(CacheFull, match="all 1 rows"):
        llm.generate(prompt(1), max_new_tokens=20)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.generate, prompt(1), max_new_tokens=20)
        while not waiting.running():
            pass
        assert sum(len(piece.tokens) for piece in stream) == 19
        assert waiting.result().tokens == alone(1, params=GREEDY)


def test_a_request_that_waits_for_ever_behind_one_that_does_not_is_refused() -> None:
    llm = LLM(Limited(1), drafter="plain")
    stream = llm.stream(prompt(0), max_new_tokens=20)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: llm.engine.submit(request(llm.engine, 1))).result()
        with pytest.raises(CacheFull, match="all 1 rows"):
            llm.generate(prompt(2), max_new_tokens=20)
    assert sum(len(piece.tokens) for piece in stream) == 19
    llm.engine.run([other])
    assert other.tokens == alone(1)


def test_a_request_waits_for_streams_of_other_tasks_only() -> None:
    """Awaited within the loop over a stream, another one could wait for ever."""

    async def main() -> None:
        async with AsyncLLM(Limited(1), drafter="plain") as llm:
            pieces = []
            async for piece in llm.stream(prompt(0), max_new_tokens=20):
                pieces.append(piece)
                if len(pieces) == 1:
                    other = asyncio.create_task(llm.generate(prompt(1), max_new_tokens=20))
                if len(pieces) == 2:
                    with pytest.raises(CacheFull, match="all 1 rows"):
                        await llm.generate(prompt(2), max_new_tokens=20)
                    with pytest.raises(CacheFull, match="all 1 rows"):
                        async for _ in llm.stream(prompt(2), max_new_tokens=20):
                            pass
            assert sum(len(piece.tokens) for piece in pieces) == 20
            assert (await other).tokens == alone(1, params=GREEDY)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_texts_of_an_awaited_call_are_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens take a while, during which the other tasks of the loop go on."""
    threads: list[int] = []

    async def main() -> Any:
        async with AsyncLLM(ToyTarget(), drafter="plain") as llm:
            made = llm.llm._results
            monkeypatch.setattr(llm.llm, "_results", lambda *given: threads.append(get_ident()) or made(*given))
            return await llm.generate([[1], [2]], max_new_tokens=3)

    assert [len(each.tokens) for each in asyncio.run(main())] == [3, 3]
    assert threads
    assert get_ident() not in threads


def test_an_awaited_call_whose_processor_has_no_next_item_ends_with_an_error() -> None:
    """A future of asyncio takes no StopIteration, and would stay pending."""

    async def main() -> None:
        async with AsyncLLM(ToyTarget(), drafter="plain") as llm:
            call = llm.generate([1], logits_processors=[lambda prefixes, logits: next(iter(()))])
            with pytest.raises(RuntimeError, match="StopIteration") as caught:
                await asyncio.wait_for(call, 5)
            assert isinstance(caught.value.__cause__, StopIteration)

    asyncio.run(main())


def test_a_closed_llm_ends_its_texts_with_an_error() -> None:
    llm = LLM(ToyTarget())
    stream = llm.stream(prompt(0))
    next(stream)

    def closing(tokens: Sequence[int]) -> bool:
        llm.close()
        return False

    with pytest.raises(LeapaheadError, match="the LLM was closed"):
        llm.generate(prompt(1), criteria=[closing])
    with pytest.raises(LeapaheadError, match="the LLM was closed"):
        list(stream)


def test_cancelling_releases_the_cache_between_steps() -> None:
    target = Limited(2)
    engine = Engine(target, max_batch=2)
    running, second, queued = (engine.submit(request(engine, index)) for index in range(3))
    engine.step()
    assert len(target.open_sessions) == 2
    engine.cancel(second)
    assert len(target.open_sessions) == 1
    engine.cancel(queued)
    engine.cancel(queued)  # twice is harmless
    engine.run([running])
    assert running.tokens == alone(0)
    assert [second.finish_reason, queued.finish_reason] == ["cancelled", "cancelled"]


def test_a_callback_may_cancel_its_own_request() -> None:
    target = Limited(2)
    engine = Engine(target)
    handle = engine.submit(request(engine, 0, on_step=lambda step: engine.cancel(handle)))
    engine.run([handle])
    assert (handle.finish_reason, handle.stats.steps) == ("cancelled", 1)
    assert not target.open_sessions


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"drafter": "auto"}, "drafter='auto' is not possible: it must be a drafter, which Engine.drafter gives"),
        ({"tokens": "abc"}, "tokens='abc' is not possible: it must be a sequence of token ids"),
        ({"tokens": [1.5, 2]}, "tokens has 1.5, which is no token id"),
        ({"tokens": [1, True]}, "tokens has True, which is no token id"),
        ({"prediction": "x"}, "prediction='x' is not possible"),
        ({"prediction": [1, "x"]}, "prediction has 'x', which is no token id"),
        ({"stream": True, "ahead": 0}, "ahead=0 is not possible"),
        ({"stream": "false"}, "stream='false' is not possible: it must be true or false"),
    ],
)
def test_what_a_request_cannot_have_is_named(given: dict[str, Any], says: str) -> None:
    drafter = Engine(ToyTarget()).drafter("plain")
    with pytest.raises(BadParameter, match=says):
        Request(**{"tokens": [1, 2], "drafter": drafter, **given})
    assert Request(np.array([1, 2]), drafter, prediction=(np.int64(3),)).tokens[0] == 1


def test_a_drafter_of_another_engine_is_refused() -> None:
    engine, drafter = Engine(ToyTarget()), registry.make("auto")
    assert engine.drafter(drafter) is engine.drafter(drafter) is drafter
    with pytest.raises(BadParameter, match="drafter 'auto' belongs to another engine; make one for each"):
        Engine(ToyTarget()).drafter(drafter)
    with pytest.raises(BadParameter, match="drafter 'auto' belongs to another engine; make one for each"):
        Engine(ToyTarget()).submit(Request([1], drafter))
    with pytest.raises(BadParameter, match=r"it must be a drafter, which Engine\.drafter gives"):
        Request([1], registry.make("auto"))


def test_a_criterion_cannot_wait_for_its_own_engine() -> None:
    """It would wait for itself: the request ends with an error that says so, and the others go on."""
    engine = Engine(ToyTarget())

    def nested(tokens: Sequence[int]) -> bool:
        engine.run([engine.submit(request(engine, 1))])
        return False

    stop = StopParams(max_new_tokens=20, criteria=(nested,))
    other, handle = engine.submit(request(engine, 2)), engine.submit(request(engine, 0, stop=stop))
    with pytest.raises(LeapaheadError, match="cannot wait for a request of its own engine"):
        engine.run([handle])
    engine.run([other])
    assert other.tokens == alone(2)


def test_what_does_not_fit_in_the_cache_waits() -> None:
    target = Limited(2)
    engine = Engine(target, max_batch=8)
    handles = [engine.submit(request(engine, index)) for index in range(6)]
    engine.run(handles)
    assert [handle.tokens for handle in handles] == [alone(index) for index in range(6)]
    full = Engine(Limited(0))
    with pytest.raises(CacheFull, match="all 0 rows"):  # nobody will ever leave
        full.run([full.submit(request(full, 0))])


@pytest.mark.parametrize("running", [1, 2, 5, 8])
def test_prompts_that_outnumber_the_running_requests_are_read_sooner(running: int) -> None:
    """Before a step, a chunk for each prompt that waits for each running request, and never more."""
    read: list[int] = []

    class Watching(ToyTarget):
        def prefill(self, session: ToySession, max_tokens: int) -> Any:
            before = session.unread
            rows = super().prefill(session, max_tokens)
            read.append(before - session.unread)
            return rows

    engine = Engine(Watching(vocab_size=8, context_length=2000), max_batch=16)
    drafter, stop = engine.drafter("plain"), StopParams(max_new_tokens=500)
    first = [engine.submit(Request([1, 2], drafter, stop=stop)) for _ in range(running)]
    while not all(each.stats.steps for each in first):
        engine.step()
    for _ in range(8):
        engine.submit(Request([1] * 401, drafter, stop=stop))
    read.clear()
    engine.step()
    assert sum(read) == UNKNOWN * max(1, 8 // running)
    engine.close()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_prompts_are_read_in_chunks_between_steps(chunk: int) -> None:
    chunks: list[tuple[int, int]] = []

    class Watching(ToyTarget):
        def prefill(self, session: ToySession, max_tokens: int) -> Any:
            before = session.unread
            rows = super().prefill(session, max_tokens)
            chunks.append((len(session.tokens), before - session.unread))
            return rows

    engine = Engine(Watching(), prefill_chunk=chunk)
    running = engine.submit(request(engine, 0, "plain"))
    while not running.stats.steps:
        engine.step()
    chunks.clear()
    long = engine.submit(Request([1, 2, 3] * 7, attached(engine, "recycling"), stop=LENGTH))
    short = engine.submit(Request([4, 5] * 5, attached(engine, "recycling"), stop=LENGTH))
    steps = running.stats.steps
    while long.stats.steps == 0 and not running.done:
        engine.step()
        assert running.stats.steps >= steps + 1 or running.done  # it never waits for more than one chunk
        steps = running.stats.steps
    assert all(count <= chunk for _, count in chunks)
    if chunk == 3:  # prompts take turns
        assert [length for length, _ in chunks[:4]] == [21, 10, 21, 10]
    engine.run([running, long, short])
    assert long.tokens == run(ToyTarget(), None, [1, 2, 3] * 7, stop=LENGTH).tokens
    assert short.tokens == run(ToyTarget(), None, [4, 5] * 5, stop=LENGTH).tokens


@pytest.mark.parametrize("max_batch", [2, 8])
@pytest.mark.parametrize("drafter", ["plain", "recycling"])
def test_samples_of_a_prompt_share_its_prefill(max_batch: int, drafter: str) -> None:
    target = ToyTarget()
    engine = Engine(target, max_batch=max_batch)
    sampling = [SamplingParams(temperature=1.0, seed=seed) for seed in range(5)]
    handles = engine.submit_samples(request(engine, 0, drafter), sampling)
    engine.run(handles)
    assert [handle.tokens for handle in handles] == [alone(0, params=params) for params in sampling]
    if max_batch == 8:
        assert [handle.stats.prefill_forwards for handle in handles] == [1, 0, 0, 0, 0]


def test_samples_survive_the_end_of_the_first() -> None:
    engine = Engine(ToyTarget())
    first, second = engine.submit_samples(request(engine, 0), [GREEDY, SAMPLED])
    engine.cancel(first)
    engine.run([second])
    assert second.tokens == alone(0, params=SAMPLED)


@pytest.mark.parametrize("drafter", ["plain", "prompt_lookup", "recycling"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_log_probabilities_are_those_of_the_unprocessed_logits(drafter: str, params: SamplingParams) -> None:
    target = ToyTarget()
    engine = Engine(target)
    handle = engine.submit(Request(PROMPT, attached(engine, drafter), params, LENGTH, logprobs=3))
    engine.run([handle])
    tokens = list(PROMPT)
    assert len(handle.logprobs) == len(handle.tokens)
    for token, entry in zip(handle.tokens, handle.logprobs, strict=True):
        logits = target.row(tuple(enumerate(tokens)))
        expected = logits - np.log(np.exp(logits).sum())
        assert (entry.token, entry.logprob) == (token, pytest.approx(expected[token]))
        assert [each for each, _ in entry.top] == np.argsort(-expected)[:3].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(expected)[::-1][:3].tolist())
        tokens.append(token)


def test_bad_requests_are_refused_where_they_are_submitted() -> None:
    engine = Engine(ToyTarget(context_length=8))
    for tokens, error in (([], BadParameter), ([99], BadParameter), ([1] * 8, ContextOverflow)):
        with pytest.raises(error):
            engine.submit(Request(tokens, attached(engine, "plain")))
    with pytest.raises(BadParameter, match="logprobs=-1"):
        Request([1], attached(engine, "plain"), logprobs=-1)
    for option in ("max_batch", "prefill_chunk"):
        with pytest.raises(BadParameter, match=f"{option}=0"):
            Engine(ToyTarget(), **{option: 0})
    engine.close()
    with pytest.raises(LeapaheadError, match="closed"):
        engine.submit(Request([1], attached(engine, "plain")))


def test_closing_ends_what_is_running() -> None:
    target = Limited(8)
    engine = Engine(target, max_batch=2)
    handles = [engine.submit(request(engine, index)) for index in range(4)]
    engine.step()
    engine.close()
    assert [handle.finish_reason for handle in handles] == ["cancelled"] * 4
    assert not target.open_sessions


def test_a_drafter_is_made_once_for_each_name_and_options() -> None:
    engine = Engine(ToyTarget())
    assert engine.drafter("lookahead", window=4) is engine.drafter("lookahead", window=4)
    assert engine.drafter("lookahead", window=4) is not engine.drafter("lookahead", window=5)


@pytest.mark.parametrize("threads", [8])
def test_threads_with_cancels_and_failures(threads: int) -> None:
    """50 requests a thread: every text that survives is its text alone, and all cache rows are free at the end."""
    target = Limited(8)
    engine = Engine(target, max_batch=4, prefill_chunk=2)
    texts = {index: alone(index) for index in range(12)}

    def work(thread: int) -> list[tuple[int, list[int]]]:
        rng, found = random.Random(thread), []
        for _ in range(50):
            index, fate = rng.randrange(12), rng.choice(["whole", "whole", "cancel", "stream", "fail"])
            drafter = rng.choice(["plain", "prompt_lookup", "recycling", "lookahead"])
            if fate == "fail":
                handle = engine.submit(request(engine, index, drafter, on_step=broken_callback))
                with pytest.raises(RuntimeError):
                    engine.run([handle])
                continue
            handle = engine.submit(request(engine, index, drafter, stream=fate != "whole"))
            if fate == "whole":
                engine.run([handle])
                found.append((index, handle.tokens))
            else:
                outputs, tokens = engine.outputs(handle), []
                for output in outputs:
                    tokens += output.tokens
                    if fate == "cancel" and rng.random() < 0.3:
                        break
                outputs.close()
                assert tokens == texts[index][: len(tokens)]
                if fate == "stream":
                    found.append((index, tokens))
        return found

    with ThreadPoolExecutor(threads) as pool:
        for found in pool.map(work, range(threads)):
            assert found
            for index, tokens in found:
                assert tokens == texts[index]
    assert not target.open_sessions


# ------------------------------------------------------------------------------------------------------- asyncio


def test_the_thread_of_asyncio_ends_before_the_interpreter() -> None:
    """Which would abort the process where it stops a thread in a native call. Nothing was closed here."""
    script = (
        "import asyncio, atexit, threading\n"
        "from leapahead import AsyncLLM\n"
        "from leapahead.models.toy import ToyTarget\n"
        "atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))\n"
        "llm = AsyncLLM(ToyTarget(), drafter='plain')\n"
        "async def main():\n"
        "    await llm.generate([1], max_new_tokens=2)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['MainThread']\n", "")


def threads() -> int:
    return sum(thread.name == "leapahead" for thread in enumerate_threads())


def soon(is_so: Callable[[], bool]) -> bool:
    """Whether it is so within a second."""
    end = time.monotonic() + 1
    while not is_so() and time.monotonic() < end:
        time.sleep(0.001)
    return is_so()


@pytest.mark.parametrize("where", ["criterion", "progress"])
def test_a_text_that_fails_ends_its_call_while_the_one_before_it_is_decoded(where: str) -> None:
    """Not only when that is complete."""
    lengths: list[int] = []

    def criterion(tokens: Sequence[int]) -> bool:
        if tokens[0] == 2:
            lengths.append(len(tokens))
            return False
        return where == "progress" or bool(1 // 0)

    def progress(done: int, total: int) -> None:
        assert where == "criterion" or 1 // 0

    target = Limited(4)
    with pytest.raises(ZeroDivisionError):
        LLM(target, drafter="plain").generate([[2], [1]], max_new_tokens=80, criteria=[criterion], progress=progress)
    assert len(lengths) < 10
    assert not target.open_sessions


def test_an_async_llm_that_is_dropped_ends_its_thread_and_frees_its_model() -> None:
    before = threads()
    llm = AsyncLLM(ToyTarget(), drafter="plain")
    asyncio.run(llm.generate([1], max_new_tokens=2))
    kept = weakref.ref(llm.llm.engine)
    assert threads() == before + 1
    del llm
    assert soon(lambda: threads() == before and kept() is None)


def test_threads_of_one_llm_do_not_gather() -> None:
    """Of an `AsyncLLM` for each request, which leaves the `LLM` as it is."""
    llm, before = LLM(ToyTarget(), drafter="plain"), threads()
    texts = [asyncio.run(AsyncLLM(llm).generate([1], max_new_tokens=5)).tokens for _ in range(10)]
    assert soon(lambda: threads() == before)
    assert texts == [llm.generate([1], max_new_tokens=5).tokens] * 10


def test_a_text_that_fails_is_not_kept_waiting_for_the_others_of_its_call() -> None:
    lengths: list[int] = []

    def fails(tokens: Sequence[int]) -> bool:
        if tokens[0] == 1:
            raise ZeroDivisionError
        lengths.append(len(tokens))
        time.sleep(0.001)
        return False

    async def main() -> None:
        async with AsyncLLM(ToyTarget(context_length=2000), drafter="plain") as llm:
            with pytest.raises(ZeroDivisionError):
                await llm.generate([[2], [1]], max_new_tokens=1500, criteria=[fails])
            assert max(lengths, default=0) < 1000

    asyncio.run(main())


def test_the_error_of_a_text_is_told_where_the_others_of_its_call_are_cancelled_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(tokens: Sequence[int]) -> bool:
        return tokens[0] == 1 and bool(1 // 0)

    async def main() -> None:
        async with AsyncLLM(ToyTarget(), drafter="plain") as llm:
            cancel = llm.llm.engine.cancel
            monkeypatch.setattr(llm.llm.engine, "cancel", lambda *handles, wait=True: cancel(*handles))
            with pytest.raises(ZeroDivisionError):
                await llm.generate([[2], [1]], max_new_tokens=1500, criteria=[fails])

    asyncio.run(main())


@pytest.mark.parametrize("where", ["criterion", "forward"])
def test_what_is_no_exception_ends_asyncio_requests_and_not_their_thread(where: str) -> None:
    """As of `sys.exit` in a criterion, or of a native module that panics: nothing waits for ever."""

    class Exits(ToyTarget):
        exits = False

        def step(self, *given: Any, **options: Any) -> Any:
            if self.exits:
                self.exits = False
                raise SystemExit
            return super().step(*given, **options)

    target = Exits()

    def exits(tokens: Sequence[int]) -> bool:
        if where == "criterion":
            raise SystemExit
        target.exits = True
        return False

    async def main() -> None:
        async with AsyncLLM(target, drafter="plain") as llm:
            one, other = llm.generate([1], max_new_tokens=40, criteria=[exits]), llm.generate([2], max_new_tokens=40)
            found = await asyncio.wait_for(asyncio.gather(one, other, return_exceptions=True), 10)
            assert isinstance(found[0], LeapaheadError)
            assert "SystemExit" in str(found[0])
            assert where == "forward" or len(found[1].tokens) == 40  # type: ignore[union-attr]
            assert (await llm.generate([3], max_new_tokens=3)).stats.committed == 3

    asyncio.run(main())


class Rooted(Drafter):
    """Drafts nothing, and is shown the prompt."""

    name: ClassVar[str] = "rooted"
    capture = Capture(top_k=1)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Proposal]:
        return [Proposal(TokenTree.root(sequence.root)) for sequence in sequences]


@pytest.mark.parametrize("where", ["capture_of", "begin", "read_prompt", "propose", "observe", "finish", "figures"])
def test_what_is_no_exception_in_a_drafter_ends_its_own_request(where: str) -> None:
    """As of a cancelled future of asyncio that a drafter waits for, in a request of several samples."""

    def cancelled(drafter: Rooted, first: Any, *others: Any) -> Any:
        if where != "propose" or any(sequence.tokens[0] == 7 for sequence in first):
            raise asyncio.CancelledError
        return Rooted.propose(drafter, first, *others)

    cancelling = type("Cancelling", (Rooted,), {where: cancelled})

    async def main() -> None:
        async with AsyncLLM(ToyTarget(), drafter="plain", max_batch=4) as llm:
            options: dict[str, Any] = {"drafter": cancelling, "max_new_tokens": 20}
            other = llm.generate([2, 1], **(options if where == "propose" else {"max_new_tokens": 90}))
            both = asyncio.gather(other, llm.generate([7, 2, 3], n=2, **options), return_exceptions=True)
            text, failed = await asyncio.wait_for(both, 10)
            assert not isinstance(text, BaseException)
            assert isinstance(failed, LeapaheadError)
            assert "CancelledError" in str(failed)

    asyncio.run(main())


def test_asyncio_tasks_share_a_batch() -> None:
    async def main() -> None:
        async with AsyncLLM(ToyTarget(), drafter="prompt_lookup") as llm:
            tasks = [llm.generate(prompt(index), max_new_tokens=20) for index in range(6)]
            results = await asyncio.gather(*tasks)
            expected = [alone(index, params=GREEDY) for index in range(6)]
            assert [result.tokens for result in results] == expected
            pieces = [piece async for piece in llm.stream(prompt(1), max_new_tokens=20)]
            assert [token for piece in pieces for token in piece.tokens] == expected[1]
            assert pieces[-1].result is not None
            samples = await llm.generate(prompt(2), max_new_tokens=20, n=3, temperature=1.0, seed=7)
            assert [each.seed for each in samples] == [7, 8, 9]
            assert [each.tokens for each in samples] == [
                alone(2, params=SamplingParams(temperature=1.0, seed=seed)) for seed in (7, 8, 9)
            ]

    asyncio.run(main())


def test_a_task_that_is_cancelled_at_once_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with AsyncLLM(Limited(4), drafter="plain") as llm:
            for _ in range(5):
                task = asyncio.ensure_future(llm.generate(prompt(0), max_new_tokens=10_000))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (await llm.generate(prompt(1), max_new_tokens=20)).tokens == alone(1, params=GREEDY)
            assert not llm.llm.target.open_sessions

    asyncio.run(main())


def test_a_criterion_cannot_await_its_own_engine() -> None:
    llm = AsyncLLM(ToyTarget(), drafter="plain")

    def nested(tokens: Sequence[int]) -> bool:
        asyncio.run(llm.generate(prompt(0), max_new_tokens=3))
        return False

    with pytest.raises(LeapaheadError, match="cannot wait for a request of its own engine"):
        asyncio.run(llm.generate(prompt(1), max_new_tokens=3, criteria=[nested]))
    asyncio.run(llm.close())


def test_a_cancelled_task_cancels_its_request() -> None:
    class Slow(Limited):
        def step(self, *given: Any, **options: Any) -> Any:
            import time

            time.sleep(0.01)
            return super().step(*given, **options)

    async def main() -> None:
        target = Slow(4)
        async with AsyncLLM(target, drafter="plain") as llm:
            task = asyncio.ensure_future(llm.generate(prompt(0), max_new_tokens=10_000))
            other = asyncio.ensure_future(llm.generate(prompt(1), max_new_tokens=20))
            while not target.open_sessions:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await other).tokens == alone(1, params=GREEDY)
            for _ in range(200):
                if not target.open_sessions:
                    break
                await asyncio.sleep(0.01)
            assert not target.open_sessions
            stream = llm.stream(prompt(2), max_new_tokens=10_000)
            await anext(stream)
            await stream.aclose()
        assert not target.open_sessions

    asyncio.run(main())


def test_errors_reach_the_task() -> None:
    async def main() -> None:
        async with AsyncLLM(ToyTarget(), drafter="plain") as llm:
            with pytest.raises(RuntimeError, match="criterion failed"):
                await llm.generate(prompt(0), criteria=[broken_criterion])
            with pytest.raises(BadParameter, match="the prompt is empty"):
                await llm.generate([])

    asyncio.run(main())
    with pytest.raises(BadParameter, match="max_batch"):
        AsyncLLM(LLM(ToyTarget(), drafter="plain"), max_batch=2)


def test_an_oracle_is_accepted_through_the_engine() -> None:
    text = [*prompt(0), *alone(0)]
    assert run(ToyTarget(), Oracle(text), prompt(0), stop=LENGTH).stats.acceptance_length > 3
