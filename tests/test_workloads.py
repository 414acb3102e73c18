"""Random workloads on one engine, each text compared with plain decoding of its request alone.

A workload is a function of its seed: a toy target with random limits, drafters with random options, requests that
arrive, are cancelled, fail or are read slowly at random steps.
"""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from helpers import FixedLatency, RandomTrees, Spelling, attached, mostly_slow
from test_draft import Blurred
from test_engine import Limited

from leapahead import Drafter, Engine, LeapaheadError, Request, SamplingParams, StopParams
from leapahead.core.tree import UNLIMITED
from leapahead.drafters.cache import DrafterCache
from leapahead.engine.request import Handle
from leapahead.models.base import ALL, HIDDEN, TREE
from leapahead.models.toy import ToyTarget

ROWS = {1: 0.01, 4: 0.011, 64: 0.02}  # seconds of forwards
SPELLING: Any = Spelling(lambda token: "abc"[token % 3] * (token % 2 + 1))


class Broken(Exception):
    """Raised by criteria and processors."""


def prefers_last(tokens: Any, scores: Any) -> Any:
    """A processor whose scores depend on the whole prefix."""
    scores = scores.copy()
    for row, prefix in zip(scores, tokens.tolist(), strict=True):
        row[sum(prefix) % len(row)] += 2.0
    return scores


@dataclass
class Job:
    """A request, with what is expected of it.

    Attributes:
        fate: "whole", "slow" (a stream that is seldom read), "cancel" or "fail".
        texts: of plain decoding, one for each of `params`: tokens and how they end.
    """

    prompt: list[int]
    params: list[SamplingParams]
    stop: StopParams
    fate: str
    drafter: Drafter
    logprobs: int | None
    texts: list[Handle]
    prediction: list[int]
    handles: list[Handle] = field(default_factory=list)


def any_drafter(rng: random.Random, engine: Engine, sizes: dict[str, Any]) -> Drafter:
    draft = Blurred(rng.choice([0.0, 0.3, 2.0]), **sizes)
    nodes = rng.choice([1, 3, 8, 30])
    known: list[tuple[str, dict[str, Any]]] = [
        ("auto", {"nodes": nodes}),
        ("auto", {"sources": "ngram,suffix,recycling,siblings"}),
        ("auto", {"draft": draft, "nodes": nodes}),
        ("jacobi", {"block": nodes, "variant": rng.choice(["sliding", "pj", "pgj", "hgj"])}),
        ("prompt_lookup", {"num_tokens": nodes}),
        ("lookahead", {"window": rng.choice([1, 5]), "ngram": 3, "guesses": rng.choice([1, 4])}),
        ("recycling", {"nodes": nodes}),
        ("suffix", {"nodes": nodes}),
        ("prediction", {"nodes": nodes}),
        ("draft_model", {"draft": draft, "depth": rng.choice([1, 4]), "draft_window": rng.choice([0, 8])}),
        ("cascade", {"draft": draft, "nodes": nodes, "chain": rng.random() < 0.5}),
        ("ouroboros", {"draft": draft, "nodes": nodes}),
    ]
    name, options = rng.choice(known)
    try:
        return engine.drafter(name, **options)
    except LeapaheadError:  # the target takes chains only
        return attached(engine, RandomTrees(rng.randrange(100)))


def parameters(rng: random.Random, vocab: int, longest: int) -> SamplingParams:
    """Most options are off most of the time."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.3 else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]),
        seed=rng.randrange(2**64 - 4),
        top_k=sometimes(2, 0),
        top_p=sometimes(0.8, 1.0),
        min_p=sometimes(0.1, 0.0),
        repetition_penalty=sometimes(1.5, 1.0),
        frequency_penalty=sometimes(0.5, 0.0),
        bad_words=sometimes(tuple((rng.randrange(vocab), rng.randrange(vocab)) for _ in range(6)), ()),
        min_new_tokens=sometimes(min(5, longest), 0),
        eos_token_ids=(3 % vocab,),
        processors=sometimes((prefers_last,), ()),
    )


class Workload:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.vocab = rng.choice([4, 12, 60])
        sizes: dict[str, Any] = {"vocab_size": self.vocab, "order": rng.choice([1, 2, 3]), "seed": rng.randrange(1000)}
        context = rng.choice([UNLIMITED, 50])
        self.target = Limited(
            rng.choice([1, 2, 5, 100]),
            context_length=context,
            capabilities=ALL - {HIDDEN} - ({TREE} if rng.random() < 0.2 else set()),
            max_nodes=rng.choice([UNLIMITED, UNLIMITED, 3, 9]),
            max_leaves=rng.choice([UNLIMITED, UNLIMITED, 2]),
            **sizes,
        )
        alone = ToyTarget(context_length=context, **sizes)
        self.plain = Engine(alone, tokenizer=SPELLING, latency=FixedLatency(alone, ROWS))
        self.engine = Engine(
            self.target,
            tokenizer=SPELLING,
            max_batch=rng.choice([1, 2, 5, 16]),
            prefill_chunk=rng.choice([None, 1, 4]),
            latency=FixedLatency(self.target, ROWS),
        )
        self.drafters = [any_drafter(rng, self.engine, sizes) for _ in range(3)]
        self.cache = DrafterCache()
        self.cache.belong("workload", self.vocab)
        self.base = [rng.randrange(self.vocab) for _ in range(20)]

    def job(self, *fates: str) -> Job:
        rng = self.rng
        prompt = self.base[: rng.randrange(1, 20)] + [rng.randrange(self.vocab) for _ in range(rng.choice([0, 0, 5]))]
        longest = rng.choice([1, 4, 20, 40])
        stop: dict[str, Any] = {"max_new_tokens": longest}
        if rng.random() < 0.3:
            stop |= {"eos_token_ids": (3 % self.vocab,), "stop_strings": ("cab", "abba")}
        first = parameters(rng, self.vocab, longest)
        params = [SamplingParams(**{**vars(first), "seed": first.seed + i}) for i in range(rng.choice([1, 1, 1, 3]))]
        logprobs = rng.choice([None, None, 2])
        texts = []
        for each in params:
            request = Request(prompt, self.plain.drafter("plain"), each, StopParams(**stop), logprobs=logprobs)
            texts.append(self.plain.submit(request))
            try:
                self.plain.run(texts[-1:])
            except LeapaheadError:  # all tokens are banned
                assert texts[-1].error is not None
        fate = rng.choice(fates)
        if fate == "fail":
            stop["criteria"] = (self.failing(len(prompt) + rng.randrange(1, 12)),)
        prediction = [token if rng.random() < 0.9 else 0 for token in texts[0].tokens]
        drafter = rng.choice(self.drafters)
        return Job(prompt, params, StopParams(**stop), fate, drafter, logprobs, texts, prediction)

    @staticmethod
    def failing(length: int) -> Callable[[Any], bool]:
        def criterion(tokens: Any) -> bool:
            if len(tokens) >= length:
                raise Broken
            return False

        return criterion

    def submit(self, job: Job) -> None:
        request = Request(
            job.prompt,
            job.drafter,
            job.params[0],
            job.stop,
            job.prediction if job.drafter.takes_prediction else (),
            self.cache,
            job.logprobs,
            stream=job.fate == "slow",
            owner=self.rng.choice(["", "somebody"]),
        )
        notify = (lambda: None) if job.fate == "slow" else None  # another thread reads it
        job.handles = self.engine.submit_samples(request, job.params, notify)

    def run(self, jobs: list[Job]) -> None:
        rng, waiting = self.rng, list(jobs)
        for _ in range(5000):
            handles = [handle for job in jobs for handle in job.handles]
            if not waiting and all(handle.done for handle in handles):
                break
            if waiting and rng.random() < 0.2:
                self.submit(waiting.pop(0))
            self.engine.step()
            for job in jobs:
                for handle in job.handles:
                    if job.fate == "slow" and rng.random() < 0.4:
                        self.engine.poll(handle)
                    elif job.fate == "cancel" and rng.random() < 0.1:
                        self.engine.cancel(handle, wait=rng.random() < 0.5)
        self.engine.step()
        assert not self.target.open_sessions

    def check(self, job: Job, cut: type[BaseException] | None = None) -> int:
        """Compares the texts of a job; cancelled ones, and ones that failed by such an error, as far as they go.

        Returns:
            The number of tokens that were compared.
        """
        for handle, plain in zip(job.handles, job.texts, strict=True):
            assert handle.done
            assert handle.tokens == plain.tokens[: len(handle.tokens)]
            if handle.error is not None:
                assert isinstance(handle.error, (cut or Broken, type(plain.error)))
            elif handle.finish_reason != "cancelled":
                ends = [(len(each.tokens), each.finish_reason, each.stop_reason) for each in (handle, plain)]
                assert ends[0] == ends[1]
            for mine, theirs in zip(handle.logprobs, plain.logprobs, strict=False):
                assert mine.token == theirs.token
                np.testing.assert_allclose(mine.logprob, theirs.logprob)
        return sum(len(handle.tokens) for handle in job.handles)


@pytest.mark.parametrize("first", mostly_slow(range(0, 400, 8), 0))
def test_every_text_is_that_of_plain_decoding_alone(first: int) -> None:
    compared = 0
    for seed in range(first, first + 8):
        workload = Workload(seed)
        jobs = [workload.job("whole", "whole", "slow", "cancel", "fail") for _ in range(8)]
        workload.run(jobs)
        compared += sum(workload.check(job, Broken if job.fate == "fail" else None) for job in jobs)
    assert compared > 200


@cache
def interruptible(code: CodeType) -> frozenset[int]:
    """Where the interpreter looks for signals: behind calls and at the ends of loops.

    Not where an exception of that moment would be handled elsewhere than one of the next instruction.
    """
    table = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]

    def handlers(at: int) -> list[int]:
        return [entry.target for entry in table if entry.start <= at < entry.end]

    found, before = set[int](), None
    for each in dis.get_instructions(code):
        if before is not None and before.opname.startswith("CALL"):
            found |= {each.offset} if handlers(before.offset) == handlers(each.offset) else set()
        if "JUMP_BACKWARD" in each.opname:
            found |= {each.argval} if handlers(each.offset) == handlers(each.argval) else set()
        before = each
    return frozenset(found)


class Interrupt:
    """Raises KeyboardInterrupt at one of the moments at which a signal could, of those in this package.

    Attributes:
        moments: that were passed so far.
    """

    def __init__(self, at: int = -1) -> None:
        self.at, self.moments = at, 0

    def during(self, action: Callable[[], None]) -> None:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            action()
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "leapahead" not in frame.f_globals.get("__name__", ""):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in interruptible(frame.f_code):
            self.moments += 1
            if self.moments == self.at:
                raise KeyboardInterrupt
        return self._opcode


@pytest.mark.parametrize("seed", mostly_slow(range(30), 0))
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the moments are those of Python 3.11 and 3.12")
def test_an_interrupt_at_any_moment_changes_no_other_text(seed: int) -> None:
    """The interrupted call is cancelled; requests beside it have their texts, or an error; later ones their texts."""
    workload, counting = Workload(seed), Interrupt()
    first, beside, later = [workload.job("whole") for _ in range(3)]

    def wait(job: Job) -> None:
        with suppress(LeapaheadError):  # as of plain decoding, or interrupted: `check` tells
            workload.engine.run(job.handles)

    def decode(job: Job) -> None:
        workload.submit(job)
        wait(job)

    counting.during(lambda: decode(first))
    workload.check(first)
    interrupts = 0
    for _ in range(8):
        first.handles, interrupt = [], Interrupt(workload.rng.randrange(1, counting.moments))
        workload.submit(beside)
        with suppress(KeyboardInterrupt):
            interrupt.during(lambda: decode(first))
        wait(beside)
        decode(later)
        while workload.engine.lengths():  # an interrupted submit may have left a request that nobody waits for
            workload.engine.step()
        interrupts += interrupt.moments >= interrupt.at  # a later run may take fewer steps
        assert not workload.target.open_sessions
        for job in (first, beside) if first.handles else (beside,):
            workload.check(job, cut=LeapaheadError)
        workload.check(later)
    assert interrupts > 3
