"""Requests that give their part of a full KV cache to others, and go on later with the same text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import architectures
import gguf_models
import pytest
import torch
from helpers import attached, run

from leapahead import (
    LLM,
    CacheFull,
    Capture,
    Engine,
    Request,
    Result,
    SamplingParams,
    SequenceView,
    StopParams,
)
from leapahead.drafters.prompt_lookup import PromptLookup
from leapahead.engine import preemption
from leapahead.engine.request import Handle
from leapahead.grammar import Grammar
from leapahead.models.base import NOTHING
from leapahead.models.choices import PromptRows
from leapahead.models.prompt_entries import PromptEntries
from leapahead.models.toy import ToySession, ToyTarget
from leapahead.models.transformers.model import TransformersTarget

LENGTH = StopParams(max_new_tokens=40)


class SmallSession(ToySession):
    """One that can be closed and opened again."""

    room = 0
    target: SmallToy

    @property
    def unread(self) -> int:
        return len(self.tokens) - 1 - len(self.cache)

    def close(self) -> None:
        super().close()
        self._pending = []
        self.target.sessions[:] = [each for each in self.target.sessions if each is not self]


class SmallToy(ToyTarget):
    """A toy model whose sessions share a cache of so many tokens.

    Attributes:
        sessions: those that are open.
        most: so many were at once.
        full: whether the next step finds the cache full whatever is in it.
    """

    def __init__(self, cells: int, **options: Any) -> None:
        super().__init__(**options)
        self.info = replace(self.info, cache_tokens=cells)
        self.sessions: list[SmallSession] = []
        self.most, self.full = 0, False

    def _admit(self, session: Any, reserve: int) -> SmallSession:
        session.__class__, session.target, session.room = SmallSession, self, max(reserve, len(session.tokens))
        most, some = self.info.cache_tokens, (*self.sessions, session)
        wanted = sum(max(each.room, len(each.tokens)) for each in some)
        if len(session.tokens) > most or (self.sessions and wanted > most):
            raise CacheFull(f"{wanted} tokens in {most}")
        assert isinstance(session, SmallSession)
        self.sessions.append(session)
        self.most = max(self.most, len(self.sessions))
        return session

    def open(
        self, tokens: Any, params: Any, capture: Capture = NOTHING, reserve: int = 0, owner: str = ""
    ) -> SmallSession:
        return self._admit(super().open(tokens, params, capture), reserve)

    def fork(self, session: Any, params: Any) -> SmallSession:
        return self._admit(super().fork(session, params), session.room)

    def reserve(self, session: SmallSession, length: int) -> None:
        session.room = length

    def reopen(self, session: SmallSession, reserve: int, owner: str) -> None:
        assert session not in self.sessions
        self._admit(session, reserve)

    def prefill(self, session: Any, max_tokens: int) -> PromptRows | None:
        if len(session.tokens) == session.sampler.prompt_length:
            return super().prefill(session, max_tokens)
        start = len(session.cache)
        end = min(start + max_tokens, len(session.tokens) - 1)
        session.cache += [(position, session.tokens[position]) for position in range(start, end)]
        return None

    def step(self, sessions: Any, *given: Any, **options: Any) -> Any:
        assert all(session in self.sessions and not session.unread for session in sessions)
        if self.full or sum(len(each.tokens) for each in self.sessions) > self.info.cache_tokens:
            self.full = False
            raise CacheFull("a step finds the cache full")
        return super().step(sessions, *given, **options)


def prompt(index: int) -> list[int]:
    return [index % 12, 3, (5 * index) % 12, 1, *range(index % 5)]


def request(engine: Engine, index: int, drafter: Any = "prompt_lookup", **options: Any) -> Request:
    options = {"sampling": SamplingParams(temperature=index % 2, seed=index), "stop": LENGTH, **options}
    return Request(prompt(index), attached(engine, drafter), **options)


def alone(index: int, params: SamplingParams | None = None) -> list[int]:
    """Plain decoding's text of `request(engine, index)`."""
    params = params or SamplingParams(temperature=index % 2, seed=index)
    return run(ToyTarget(), None, prompt(index), params=params, stop=LENGTH).tokens


def watched(engine: Engine, handles: list[Handle]) -> Iterator[list[int]]:
    """Steps until all are over; after each step, how often each was preempted."""
    for _ in range(2000):
        if all(handle.done for handle in handles):
            return
        engine.step()
        yield [handle.stats.preemptions for handle in handles]
    raise AssertionError("they wait for each other")


# -------------------------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("drafter", ["plain", "prompt_lookup", "lookahead", "auto"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_texts_are_those_of_plain_decoding(drafter: str, chunk: int | None) -> None:
    """Six requests, and a cache for two."""
    target = SmallToy(100)
    engine = Engine(target, prefill_chunk=chunk)
    given: list[dict[str, Any]] = [
        {"sampling": SamplingParams(temperature=i % 2, seed=i, presence_penalty=i / 4, repetition_penalty=1 + i / 9)}
        for i in range(6)
    ]
    handles = [engine.submit(request(engine, i, drafter, logprobs=2, **given[i])) for i in range(6)]
    counts = list(watched(engine, handles))
    for index, handle in enumerate(handles):
        reference = Engine(ToyTarget())
        plain = reference.submit(request(reference, index, "plain", logprobs=2, **given[index]))
        reference.run([plain])
        assert (handle.tokens, handle.finish_reason) == (plain.tokens, "length")
        assert handle.logprobs == plain.logprobs
        assert handle.stats.committed == 40
    assert engine.preemption.count == sum(counts[-1]) >= 3
    assert counts[-1][0] == 0  # the oldest goes on
    assert max(counts[-1]) <= 5  # since the margin doubles
    assert target.most > 2
    assert target.sessions == []
    assert engine.preemption.waiting == []


def test_samples_of_a_prompt_are_preempted_one_by_one() -> None:
    engine = Engine(SmallToy(100))
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(5)]
    handles = engine.submit_samples(request(engine, 4), params)
    counts = list(watched(engine, handles))
    assert [handle.tokens for handle in handles] == [alone(4, each) for each in params]
    assert sum(counts[-1]) >= 2


def test_a_request_without_text_begins_anew() -> None:
    """Its drafter is shown the whole prompt once, also where a part of it had been read."""
    shown: list[tuple[SequenceView, int, int]] = []

    class Watching(PromptLookup):
        capture = Capture(top_k=2)
        finished = 0

        def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:
            shown.append((sequence, rows.start, rows.end))

        def finish(self, sequence: SequenceView) -> None:
            Watching.finished += 1

    target = SmallToy(150)
    engine = Engine(target, prefill_chunk=2)
    old = engine.submit(request(engine, 0, "plain"))
    while len(old.tokens) < 30:
        engine.step()
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2)]
    given = replace(request(engine, 1, Watching), tokens=[1, 2] * 25)
    young = engine.submit_samples(given, params)
    engine.step()
    target.full = True
    engine.step()
    before = len(shown)
    assert before >= 1
    assert (young[0].stats.preemptions, young[0].tokens) == (1, [])
    engine.run([old, *young])
    views = {each for each, _, _ in shown[before:]}
    assert len(views) == 2
    for view in views:
        rows = [(start, end) for each, start, end in shown if each is view]
        assert [start for start, _ in rows] == sorted({start for start, _ in rows})
        assert (rows[0][0], rows[-1][1]) == (0, 49)
    plain = [run(ToyTarget(), None, [1, 2] * 25, params=each, stop=LENGTH).tokens for each in params]
    assert [each.tokens for each in young] == plain
    assert Watching.finished == 2  # once for each text


def test_the_room_that_is_kept_doubles() -> None:
    engine = Engine(SmallToy(160))
    handle = engine.submit(replace(request(engine, 0), stop=StopParams(max_new_tokens=100)))
    found = []
    for handle.stats.preemptions in range(6):
        found.append(engine.preemption.reserve(handle, 10) - 10)
    assert found == [11, 22, 44, 88, 94, 94]  # 4 of the prompt and 100 are all that it may need


def test_a_request_is_admitted_where_the_open_ones_have_room_to_grow() -> None:
    engine = Engine(SmallToy(100))
    old = engine.submit(request(engine, 0, "plain", stop=StopParams(max_new_tokens=90)))
    while len(old.tokens) < 58:
        engine.step()
    large, small = ([1] * 25, [1] * 20)  # with 7 tokens more for each of the two
    handles = [engine.submit(replace(request(engine, 1), tokens=tokens)) for tokens in (large, small)]
    engine.step()
    assert not handles[0].opened
    engine.cancel(handles[0])
    engine.step()
    assert handles[1].opened


def test_preempted_ones_come_before_new_ones() -> None:
    engine = Engine(SmallToy(100))
    handles = [engine.submit(request(engine, index)) for index in range(3)]
    for _ in watched(engine, handles):
        if engine.preemption.waiting:
            break
    late = engine.submit(replace(request(engine, 0), tokens=[1], stop=StopParams(max_new_tokens=2)))
    while engine.preemption.waiting:
        assert not late.opened
        engine.step()
    engine.run([*handles, late])
    assert [handle.tokens for handle in handles] == [alone(index) for index in range(3)]


@pytest.mark.parametrize("wait", [True, False])
def test_a_preempted_request_can_be_cancelled(wait: bool) -> None:
    target = SmallToy(100)
    engine = Engine(target)
    handles = [engine.submit(request(engine, index)) for index in range(3)]
    for _ in watched(engine, handles):
        if engine.preemption.waiting:
            break
    gone = engine.preemption.waiting[0].handle
    assert gone.tokens
    engine.cancel(gone, wait=wait)
    engine.step()
    assert (gone.done, gone.finish_reason, engine.preemption.waiting) == (True, "cancelled", [])
    rest = [handle for handle in handles if handle is not gone]
    engine.run(rest)
    assert [handle.tokens for handle in rest] == [alone(handles.index(handle)) for handle in rest]
    assert not target.sessions


def test_closing_ends_preempted_requests() -> None:
    engine = Engine(SmallToy(100))
    handles = [engine.submit(request(engine, index)) for index in range(4)]
    for _ in watched(engine, handles):
        if engine.preemption.waiting:
            break
    engine.close()
    assert {handle.finish_reason for handle in handles if handle.done} <= {"cancelled", "length"}
    assert all(handle.done for handle in handles)


def test_a_request_that_fails_while_it_is_reopened_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SmallToy(100))
    monkeypatch.setattr(SmallToy, "reopen", lambda *_: 1 / 0)
    handles = [engine.submit(request(engine, index)) for index in range(3)]
    list(watched(engine, handles))
    failed = [handle for handle in handles if handle.stats.preemptions]
    assert failed
    for index, handle in enumerate(handles):
        if handle in failed:
            assert isinstance(handle.error, ZeroDivisionError)
        else:
            assert handle.tokens == alone(index)


def test_a_lone_request_that_does_not_fit_is_refused() -> None:
    engine = Engine(SmallToy(100))
    handle = engine.submit(replace(request(engine, 0), tokens=[1] * 101))
    with pytest.raises(CacheFull, match="tokens in 100"):
        engine.run([handle])
    assert engine.preemption.count == 0


@pytest.mark.parametrize(("kind", "name"), [(SmallSession, "close"), (SmallToy, "reopen")])
def test_an_interrupt_loses_no_request(kind: type[Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a session was closed or reopened; the next step goes on."""
    engine = Engine(SmallToy(100))
    handles = [engine.submit(request(engine, index)) for index in range(4)]
    original, interrupts = getattr(kind, name), count()

    def interrupted(*given: Any) -> None:
        original(*given)
        if engine.preemption.waiting and next(interrupts) % 2 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(kind, name, interrupted)
    for _ in range(2000):
        with suppress(KeyboardInterrupt):
            engine.step()
        if all(handle.done for handle in handles):
            break
    assert next(interrupts) > 1
    assert [handle.tokens for handle in handles] == [alone(index) for index in range(4)]


def test_what_cannot_be_reopened_reserves_all_that_it_may_need() -> None:
    target = SmallToy(100)
    target.info = replace(target.info, exact=True)
    engine = Engine(target)
    handles = [engine.submit(request(engine, index)) for index in range(4)]
    counts = list(watched(engine, handles))
    assert (target.most, sum(counts[-1])) == (2, 0)
    assert not preemption.reopens(ToyTarget())


def test_a_stream_that_waits_for_the_text_that_it_blocks_is_preempted() -> None:
    llm = LLM(SmallToy(100), drafter="plain")
    tokens: list[int] = []
    for piece in llm.stream(prompt(0), max_new_tokens=60):
        tokens += piece.tokens
        if len(tokens) in (5, 50):  # this one fits, and grows; that one does not fit
            found = llm.generate([prompt(1), prompt(2)], max_new_tokens=70)
            plain = [run(ToyTarget(), None, prompt(each), stop=StopParams(max_new_tokens=70)) for each in (1, 2)]
            assert [each.tokens for each in found] == [each.tokens for each in plain]
    assert tokens == run(ToyTarget(), None, prompt(0), stop=StopParams(max_new_tokens=60)).tokens
    assert llm.engine.preemption.count >= 2


# -------------------------------------------------------------------------------------------------- loaded models


def together(llm: LLM, given: list[tuple[Any, Any]]) -> list[Handle]:
    """Decodes requests with options of their own, all submitted before the first step."""
    handles = []
    for each, options in given:
        ((single, params),) = llm.requests([each], options)
        handles += llm.engine.submit_samples(single, params)
    llm.engine.run(handles)
    return handles


def streamed(llm: LLM, given: list[tuple[Any, Any]]) -> list[Result]:
    """Reads a stream of each in a thread of its own."""

    def one(each: tuple[Any, Any]) -> Result:
        pieces = list(llm.stream(each[0], **each[1]))
        result = pieces[-1].result
        assert result is not None
        assert [token for piece in pieces for token in piece.tokens] == result.tokens
        assert "".join(piece.text for piece in pieces) == result.text
        return result

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(one, given))


def assert_same(found: Sequence[Result | Handle], plain: Sequence[Result]) -> None:
    for one, other in zip(found, plain, strict=True):
        assert one.tokens == other.tokens
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.token == theirs.token
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "drafter",
    [
        {"drafter": "auto", "nodes": 8},
        pytest.param({"drafter": "plain"}, marks=SLOW),
        pytest.param({"drafter": "lookahead"}, marks=SLOW),
        # The nodes of an early exit, and of triforce, are in the rows of the target, which change.
        pytest.param({"drafter": "draft_model", "draft": "self:first=1", "nodes": 6, "depth": 2}, marks=SLOW),
        pytest.param({"drafter": "draft_model", "draft": "self:skip=1", "nodes": 6}, marks=SLOW),
        pytest.param({"drafter": "triforce", "shortest": 8, "budget": 64, "chunk": 4}, marks=SLOW),
    ],
)
def test_models_of_transformers(drafter: dict[str, Any]) -> None:
    model = architectures.BY_NAME["llama"].build()
    options: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"logprobs": 2, "presence_penalty": 0.4},
        {"temperature": 0.8, "seed": 7, "top_k": 20, "min_new_tokens": 20, "logit_bias": {9: 3.0}},
    ] * 2
    given = [([5 + i, 9, 11, 5 + i] * 2, {"max_new_tokens": 40, "ignore_eos": True, **options[i]}) for i in range(6)]
    with LLM(model, drafter="plain", max_batch=1) as llm:
        plain = [llm.generate(each, **more) for each, more in given]
    with LLM(model, cache_tokens=100, **drafter) as llm:
        found = together(llm, given)
        assert_same(found, plain)
        assert llm.engine.preemption.count >= 3
        if "draft" in drafter:
            assert all(each.stats.drafter["draft"]["forwards"] > each.stats.steps / 2 for each in found)
        if drafter["drafter"] == "triforce":  # which retrieves all: it is the model itself
            assert all(each.stats.accepted > 0.9 * each.stats.drafted > 20 for each in found)
        assert_same(streamed(llm, given), plain)


def test_entries_of_images_are_written_again() -> None:
    """Their tokens do not know what was read, so that no other request may take the entries."""
    model, found = architectures.BY_NAME["llama"].build(), []
    layers, ids = model.config.num_hidden_layers, list(range(3, 15))
    for cells in (None, 80):
        generator = torch.Generator().manual_seed(0)
        engine = Engine(TransformersTarget(model, cache_tokens=cells))
        handles = []
        for _ in range(4):  # the same tokens each, and other entries
            parts = torch.randn(layers, 2, 2, len(ids) - 3, 8, generator=generator).unbind()
            begin = PromptEntries({index: (keys, values) for index, (keys, values) in enumerate(parts)}, offset=-2)
            given = Request(ids, attached(engine, "prompt_lookup"), SamplingParams(), LENGTH, begin=begin)
            handles += engine.submit_samples(given, [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2)])
        engine.run(handles)
        found.append([handle.tokens for handle in handles])
    assert engine.preemption.count > 2
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) == 8


@pytest.mark.parametrize(
    ("drafter", "kept", "most"),
    [
        ("auto", 0, 3),
        *(pytest.param(name, kept, 6, marks=SLOW) for name in ("plain", "auto", "lookahead") for kept in (0, None)),
    ],
)
def test_gguf_files(drafter: str, kept: int | None, most: int) -> None:
    """Also where texts that leave the cells are kept in the machine's memory."""
    path, ids = gguf_models.bundled("f32"), {"ignore_eos": True, "max_new_tokens": 110}
    given: list[tuple[Any, dict[str, Any]]] = [
        ("def f(x):\n    return ", ids),
        ("import os\n", {**ids, "temperature": 1.0, "seed": 4, "repetition_penalty": 1.1}),
        ("for i in range(10):\n", {**ids, "stop": ["zzqx", "\n\n\n\n"], "temperature": 0.7, "seed": 5}),
        ("abab", {"grammar": Grammar.regex("(ab|ba|abc){60}"), "max_new_tokens": 110}),
        ("x = [1, 2, ", {**ids, "logprobs": 1}),
        ("class A:\n", {**ids, "temperature": 1.2, "seed": 8, "min_p": 0.05}),
    ]
    given = given[:most]
    with LLM(path, drafter="plain", n_threads=1, n_ctx=256) as llm:
        plain = [llm.generate(each, **more) for each, more in given]
    with LLM(path, drafter=drafter, n_threads=1, n_ctx=256, kept_tokens=kept) as llm:
        assert_same(together(llm, given), plain)
        assert llm.engine.preemption.count >= most // 3
        found = streamed(llm, given)
        assert_same(found, plain)
        assert [each.text for each in found] == [each.text for each in plain]


def test_a_stream_that_is_preempted_while_nobody_reads_it_is_opened_once() -> None:
    """It filled the batch when it began, so that it was still the first one of the queue."""
    llm = LLM(SmallToy(100), drafter="plain", max_batch=1)
    options: Any = {"ignore_eos": True, "temperature": 1.0}
    first = llm.stream([1, 2, 3], max_new_tokens=80, seed=1, **options)
    found: dict[str, list[int]] = {"first": list(next(first).tokens), "second": []}
    second = llm.stream([2, 2, 3], max_new_tokens=60, seed=2, **options)
    while len(found["second"]) < 20:
        found["second"] += next(second).tokens
    for piece in first:
        found["first"] += piece.tokens
    other = llm.generate([3, 2, 3], max_new_tokens=5, seed=3, **options)
    for piece in second:
        found["second"] += piece.tokens
    plain = LLM(ToyTarget(), drafter="plain")
    assert other.tokens == plain.generate([3, 2, 3], max_new_tokens=5, seed=3, **options).tokens
    assert found["first"] == plain.generate([1, 2, 3], max_new_tokens=80, seed=1, **options).tokens
    assert found["second"] == plain.generate([2, 2, 3], max_new_tokens=60, seed=2, **options).tokens
