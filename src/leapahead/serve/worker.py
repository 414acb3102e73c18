"""Brings requests to the engine and their outputs back: admission, queue, deadlines, cancelling, drafter caches.

`AsyncLLM` has the one thread that drives the engine. All methods here are called on the event loop, so that what they
count needs no lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from leapahead.api import LLM
from leapahead.asynchronous import AsyncLLM
from leapahead.core.errors import BadLogits, BadParameter, LeapaheadError, counted
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.text import Tokenizer
from leapahead.drafters import cache_sections
from leapahead.drafters.cache import DrafterCache
from leapahead.engine.output import TokenLogprobs
from leapahead.engine.request import Handle, Request
from leapahead.engine.waiting import check, over, wake_up
from leapahead.inputs import Options
from leapahead.results import Piece, Result, Writer
from leapahead.serve import logs
from leapahead.serve.errors import ApiError
from leapahead.serve.metrics import Metrics
from leapahead.serve.scoring import Given, check_prompts
from leapahead.serve.settings import Settings

RETRY_AFTER = 1  # seconds, what a client is told that finds the queue full
NO_KEY = ""  # the owner of requests without a key


@dataclass(frozen=True)
class Job:
    """What a client asked for, ready for the engine.

    Attributes:
        prompts: token ids of each prompt.
        options: of `LLM.generate`, for all of them.
        owner: id of the client's key.
        deadline_seconds: see `Limits.request_seconds`; None for no limit.
        scored: number of alternatives of the prompts' tokens that are reported; None where their log-probabilities
            are not wanted.
        tokenizer: gives the texts; None for the model's own.
        form: the parameter that asks for a grammar; None where there is none.
        began: when the request came, in seconds of `time.perf_counter`.
    """

    prompts: list[list[int]]
    options: Options
    owner: str
    deadline_seconds: float | None = None
    scored: int | None = None
    tokenizer: Tokenizer | None = None
    form: str | None = None
    began: float = field(default_factory=perf_counter)

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.options.get("n", 1)

    @property
    def banning(self) -> list[str]:
        """The parameters by which tokens are banned."""
        named = [name for name in ("bad_words", "logit_bias") if self.options.get(name)]
        return named if self.form is None else [self.form, *named]

    @property
    def length(self) -> int:
        """Greatest length of a text; 0 where nothing is to be decoded."""
        return self.options["max_new_tokens"]


@dataclass(eq=False)
class Batch:
    """The texts of one request.

    Attributes:
        handles: of all texts, prompt by prompt.
        prompt_tokens: of all prompts, each counted once.
        job: what the client asked for.
        seconds: after which it is cancelled; None for never.
        timer: runs until then.
        is_late: whether it has ended.
    """

    handles: list[Handle]
    prompt_tokens: int
    job: Job
    seconds: float | None = None
    timer: asyncio.TimerHandle | None = None
    is_late: bool = False

    @property
    def stats(self) -> Stats:
        """The sums of all texts."""
        return sum((handle.stats for handle in self.handles), Stats())

    def reused_tokens(self, samples: int) -> int:
        """Tokens of prompts that were in the cache; of each prompt's first sample, since the others share its own.

        0 where log-probabilities of prompts were asked for: the request itself has read them before.
        """
        return sum(max(handle.stats.reused_tokens, 0) for handle in self.handles[::samples] if self.job.scored is None)


class Worker:
    """The queue of a server.

    Args:
        llm: the model.
        settings: see there.

    Attributes:
        pending: texts that are waiting, decoded, or being answered.
        draining: whether no further requests are taken, since the server is about to stop.
        total: the sums of all requests that are over.
    """

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self.llm, self.settings, self.limits = llm, settings, settings.limits
        self.pending, self.draining, self.total = 0, False, Stats()
        self._caches: dict[str, DrafterCache] = {}
        self._live: list[Batch] = []
        self._stopped = False
        engine = llm.llm.engine
        self.metrics = Metrics(
            settings.names[0],
            running=lambda: len(engine.lengths()),
            waiting=lambda: max(0, self.pending - len(engine.lengths())),
            cache_usage=lambda: cache_usage(llm.llm),
            preemptions=lambda: engine.preemption.count,
        )

    # Drafter caches

    def open_caches(self, owners: Sequence[str]) -> None:
        """Loads the drafter cache of each owner, so that a damaged file is refused at the start."""
        for owner in owners:
            self._cache(owner)

    def save_caches(self) -> None:
        """Saves those that have a file. If one cannot be written, that is logged, and the others are saved."""
        found = {id(cache): cache for cache in (self.llm.llm.drafter_cache, *self._caches.values()) if cache}
        for cache in found.values():
            if cache.path is None or not cache.vocab_size:
                continue
            try:
                logs.event("drafter_cache_saved", file=str(cache.save()))
            except LeapaheadError as error:
                logs.event("drafter_cache_not_saved", level=logging.ERROR, file=str(cache.path), reason=str(error))

    def _cache(self, owner: str) -> DrafterCache | None:
        """What the requests of an owner learn from each other; None where nothing is kept."""
        common = self.llm.llm.drafter_cache
        if common is None or owner == NO_KEY or self.settings.share_drafter_cache:
            return common
        if owner not in self._caches:
            path = common.path and common.path.with_name(f"{common.path.stem}-{owner}{common.path.suffix}")
            cache = cache_sections.given(path or True)
            assert cache is not None
            cache.belong(lambda: common.tokenizer, common.vocab_size)
            self._caches[owner] = cache
        return self._caches[owner]

    # Requests

    @contextmanager
    def admitted(self, sequences: int) -> Iterator[None]:
        """Counts a request's texts while they are waiting or decoded.

        Raises:
            ApiError: 400 if they are too many for one request, 429 if the queue is full, 503 if the server stops.
        """
        most = self.llm.llm.engine.max_batch + self.limits.queue
        if sequences > most:
            message = f"{sequences} texts (prompts times n) are more than this server's {most}; send several requests"
            raise ApiError(400, message, "n", "invalid_value")
        if self.draining:
            raise ApiError(503, "the server is about to stop; try again later", code="shutting_down")
        if self.pending + sequences > most:
            raise ApiError(
                429,
                f"{counted(self.pending, 'text')} decoded or waiting already; try again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER)},
            )
        self.pending += sequences
        try:
            yield
        finally:
            self.pending -= sequences

    async def score(self, job: Job) -> list[list[TokenLogprobs]]:
        """Log-probabilities of each prompt's tokens. The first token's one says nothing.

        Raises:
            ApiError: see `scoring.check_prompts`.
        """
        check_prompts(job.prompts, self.llm.llm.target.info)
        engine, (changed, notify) = self.llm.llm.engine, wake_up()
        drafter = await asyncio.to_thread(engine.drafter, Given)
        batch = self._batch(job, changed)
        try:
            for prompt in job.prompts:
                stop = StopParams(max_new_tokens=len(prompt))  # with a token behind it, since the last is not drafted
                request = Request(
                    prompt[:1], drafter, stop=stop, prediction=prompt[1:], logprobs=job.scored, owner=job.owner
                )
                await self._add(batch, request, [request.sampling], notify)
            await self._ended(changed, batch)
            return [
                [TokenLogprobs(prompt[0], 0.0, ()), *handle.logprobs[: len(prompt) - 1]]
                for prompt, handle in zip(job.prompts, batch.handles, strict=True)
            ]
        finally:
            self._cancel(batch)

    def _batch(self, job: Job, changed: asyncio.Event) -> Batch:
        """What a job becomes. `changed` is set once the time of the request is over."""
        limits = [seconds for seconds in (job.deadline_seconds, self.limits.request_seconds) if seconds is not None]
        batch = Batch([], sum(map(len, job.prompts)), job, min(limits, default=None))
        self._live.append(batch)

        def end() -> None:
            batch.is_late = True
            self._interrupt(batch)  # a stream whose client reads slowly may never come to wait
            changed.set()

        if batch.seconds is not None:  # one timer for all waiting: a token costs none of its own
            left = job.began + batch.seconds - perf_counter()
            batch.timer = asyncio.get_running_loop().call_later(left, end)
        return batch

    async def _submit(self, job: Job, stream: bool, changed: asyncio.Event, notify: Callable[[], None]) -> Batch:
        batch = self._batch(job, changed)
        try:
            requests = await asyncio.to_thread(self._requests, job, stream) if job.length else []
            for request, sampling in requests:
                await self._add(batch, request, sampling, notify)
        except BaseException:
            self._end(batch, job)
            raise
        return batch

    async def _add(
        self, batch: Batch, request: Request, sampling: list[SamplingParams], notify: Callable[[], None]
    ) -> None:
        self._check_time(batch)  # of what is late, nothing is decoded
        batch.handles += await self.llm.submit(request, sampling, notify)
        self._check_time(batch)

    def _requests(self, job: Job, stream: bool) -> list[tuple[Request, list[SamplingParams]]]:
        cache = self._cache(job.owner)
        found = []
        for request, sampling in self.llm.llm.requests(list(job.prompts), job.options, stream):
            own = replace(
                request,
                drafter_cache=cache,
                owner=job.owner,
                ahead=self.limits.unread,
                on_step=self.metrics.observe,
            )
            found.append((own, sampling))
        return found

    async def whole(self, job: Job) -> tuple[Batch, list[Result]]:
        """Decodes all texts to their ends. Cancelling the task cancels them."""
        changed, notify = wake_up()
        batch = await self._submit(job, False, changed, notify)
        try:
            await self._ended(changed, batch)
            if not job.length:
                return batch, [_empty(job, index) for index in range(job.sequences)]
            # Many tokens are turned into text, during which other requests go on.
            texts = await asyncio.to_thread(lambda: [self._writer(job).result(handle) for handle in batch.handles])
            return batch, texts
        finally:
            self._end(batch, job)

    async def pieces(self, job: Job) -> AsyncGenerator[tuple[Batch, int, Piece | None], None]:
        """Decodes all texts and gives their pieces as they come, each with the number of its text.

        The first item has no piece; it comes when the request has been taken. Closing the iterator cancels the texts.
        """
        changed, notify = wake_up()
        batch = await self._submit(job, True, changed, notify)
        writers = [self._writer(job) for _ in batch.handles]
        engine, going = self.llm.llm.engine, list(range(len(batch.handles)))
        try:
            yield batch, 0, None
            for index in range(job.sequences if not job.length else 0):
                yield batch, index, Piece("", [], 0, (), "length", _empty(job, index))
            while going:
                changed.clear()
                for index in list(going):
                    handle = batch.handles[index]
                    over = handle.done  # before it is polled, lest its last output come in between
                    while (output := engine.poll(handle)) is not None:
                        yield batch, index, writers[index].piece(handle, output)
                    if over:
                        self._check(batch, handle)
                        going.remove(index)
                if going:
                    await self._wait(changed, batch)
        finally:
            self._end(batch, job)

    def _writer(self, job: Job) -> Writer:
        return self.llm.llm.writer(job.options, job.tokenizer)

    async def _ended(self, changed: asyncio.Event, batch: Batch) -> None:
        """Waits for the ends of all texts, or for one that has failed."""
        while not over(batch.handles):
            await self._wait(changed, batch)
            changed.clear()
        for handle in batch.handles:
            self._check(batch, handle)

    async def _wait(self, changed: asyncio.Event, batch: Batch) -> None:
        """Waits for news of the engine."""
        if not batch.is_late:
            await changed.wait()
        if batch.is_late:
            self._check_time(batch)

    def _check_time(self, batch: Batch) -> None:
        """Raises what has cancelled a request, also while its texts were not submitted yet."""
        if batch.is_late:
            message = f"the request took longer than its {batch.seconds:g} seconds"
            raise ApiError(504, message, code="deadline", headers={"x-should-retry": "false"})  # by OpenAI's clients
        if self._stopped:
            raise ApiError(503, "the server has stopped before the text was complete", code="shutting_down")

    def _check(self, batch: Batch, handle: Handle) -> None:
        """Raises what ended a text before it was complete."""
        if handle.finish_reason == "cancelled":
            self._check_time(batch)
        try:
            check(handle)
        except BadParameter as error:  # a grammar that became too complex
            raise ApiError(400, str(error), batch.job.form, "invalid_value") from error
        except BadLogits as error:
            if not (error.banned and (banning := batch.job.banning)):
                raise  # of the model itself
            message = f"{' and '.join(banning)} leave no token that can follow in a text; allow more"
            raise ApiError(400, message, banning[0], "invalid_value") from error

    def _end(self, batch: Batch, job: Job) -> None:
        """Cancels what is not over, and counts the request."""
        self._cancel(batch)
        self.total += batch.stats
        now, samples = perf_counter(), job.options.get("n", 1)
        for index, handle in enumerate(batch.handles):
            self.metrics.finished(handle, job.length, job.began, now)
            if index % samples == 0 and handle.stats.prompt_tokens:
                cached = handle.stats.reused_tokens if job.scored is None else 0
                self.metrics.read(handle.stats.prompt_tokens, cached, samples)

    def _cancel(self, batch: Batch) -> None:
        self._live.remove(batch)
        if batch.timer is not None:
            batch.timer.cancel()
        self._interrupt(batch)

    def _interrupt(self, batch: Batch) -> None:
        self.llm.llm.engine.cancel(*batch.handles, wait=False)

    # The end

    async def close(self) -> None:
        """Saves the drafter caches and closes the model."""
        await asyncio.to_thread(self.save_caches)
        await self.llm.close()

    def stop(self) -> None:
        """Cancels everything: the time that running requests were given is over."""
        self._stopped = self.draining = True
        for batch in self._live:
            self._interrupt(batch)


def _empty(job: Job, index: int) -> Result:
    """A text of no tokens."""
    prompt = job.prompts[index // job.options.get("n", 1)]
    return Result("", [], list(prompt), [], "length", None, 0, Stats())


def cache_usage(llm: LLM) -> float:
    """The used part of the KV cache, from 0 to 1; of as many contexts as are decoded together where it is unlimited."""
    info, lengths = llm.target.info, llm.engine.lengths()
    return min(1.0, sum(lengths) / (info.cache_tokens or info.context_length * llm.engine.max_batch))
