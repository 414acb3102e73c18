"""The engine: one scheduler of requests over one target, used by `LLM`, `check`, `bench` and `hf`.

    submit ──> queue ──> reading its prompt, a chunk per step ──> running ──> done
                 │             at most `max_batch` requests are stepped together
                 └── waits while the batch or the cache is full

Every `step()` reads at most one chunk of a prompt, and runs ONE target forward for all running requests, so a running
request never waits longer than for one chunk. Where the target can, that forward reads the chunk, too. The engine has
no thread of its own: callers that wait for output drive `step()`, one at a time. Any thread may submit and cancel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

from leapahead.core import openmp
from leapahead.core.errors import CacheFull, LeapaheadError
from leapahead.core.parameters import whole
from leapahead.core.sampling import SamplingParams
from leapahead.core.text import Tokenizer
from leapahead.drafters.base import Drafter, Host
from leapahead.engine.attached import AttachedDrafters
from leapahead.engine.loop import Running, step
from leapahead.engine.output import Output
from leapahead.engine.preemption import Preemption
from leapahead.engine.request import Handle, Request
from leapahead.engine.turn import Turn, of_request
from leapahead.engine.waiting import raise_error
from leapahead.models.base import KeepsPrefixes, Session, Target, checked_prompt
from leapahead.models.choices import PromptRows
from leapahead.models.encoder_decoder import opened
from leapahead.planner.acceptance import AcceptanceTable
from leapahead.planner.chunk import LARGEST, chunk_size, step_tokens
from leapahead.planner.compiled import acceptance_table
from leapahead.planner.profile import LatencyProfiles


class Engine:
    """Decodes requests together, each with exactly the text that it has alone.

    Args:
        target: the model.
        tokenizer: of the target, for stop strings.
        max_batch: greatest number of requests stepped together.
        prefill_chunk: greatest number of prompt tokens read between two steps; by default what takes four plain ones.
        latency, acceptance: the times of forwards and the counts of accepted drafts, shared with other engines; by
            default the profile that is stored for the target, and the priors of this package.
    """

    def __init__(
        self,
        target: Target,
        *,
        tokenizer: Tokenizer | None = None,
        max_batch: int = 8,
        prefill_chunk: int | None = None,
        latency: LatencyProfiles | None = None,
        acceptance: AcceptanceTable | None = None,
    ) -> None:
        whole("max_batch", max_batch, least=1)
        if prefill_chunk is not None:
            whole("prefill_chunk", prefill_chunk, least=1)
        self.target, self.tokenizer, self.max_batch, self.prefill_chunk = target, tokenizer, max_batch, prefill_chunk
        self.latency = latency or LatencyProfiles(target.info)
        self.acceptance = acceptance or acceptance_table()
        self._size = size = [0]  # of the batch under way; the engine itself would be kept in a cycle
        host = Host(target.info, self.latency, self.acceptance, tokenizer, target, running=lambda: size[0])
        self._drafters, self._queue, self._failures = AttachedDrafters(target, host), deque[Handle](), 0
        self._samples: dict[Handle, list[Handle]] = {}  # first of several samples of a prompt -> the others
        self._prompt_rows: dict[Handle, list[PromptRows]] = {}  # captured for those others
        self._turn, self._active, self._closed, self._leaving = Turn(target), list[Running](), False, False
        self._changed = self._turn.changed  # guards the queue and the handles; held for moments only
        self.preemption = Preemption(target, self._queue, self._turn)

    def drafter(self, drafter: str | type[Any] | Drafter, **options: Any) -> Drafter:
        """The drafter of that name (or class) with these options; one object for each, attached to the target.

        A `Drafter` object that belongs to no engine yet is attached as it is.

        Raises:
            LeapaheadError: there is no such drafter or option, or the target cannot serve it.
        """
        return self._drafters.get(drafter, **options)

    def prepare(self, drafter: Drafter) -> None:
        """What a drafter measures once, before its first request: the latency profile of the target, and of its own."""
        self._drafters.prepare(drafter)

    def lengths(self) -> list[int]:
        """Tokens of each request that has left the queue, prompt and text: about as many cache entries as it takes."""
        return [len(running.session.tokens) for running in list(self._active)]

    def submit(self, request: Request, notify: Callable[[], None] | None = None) -> Handle:
        """Takes a request. Thread-safe; returns before anything is computed for it.

        Args:
            notify: called, from whichever thread drives the engine, when the handle has new output or is over.

        Raises:
            LeapaheadError: no or too long a prompt, a token outside the vocabulary, another engine's drafter; closed.
        """
        return self.submit_samples(request, [request.sampling], notify)[0]

    def submit_samples(
        self, request: Request, sampling: Sequence[SamplingParams], notify: Callable[[], None] | None = None
    ) -> list[Handle]:
        """Takes several samples of one prompt, each with its own parameters. The prompt is read once."""
        request = replace(request, tokens=checked_prompt(request.tokens, self.target.info))
        self.prepare(request.drafter)
        handles = [Handle(request.sampled(params, self.target.info), notify=notify) for params in sampling]
        with self._changed:
            if self._closed:
                raise LeapaheadError("this engine, or the LLM that it belongs to, is closed; make another one")
            self._queue.extend(handles[:1])  # none of no samples
            if len(handles) > 1:
                self._samples[handles[0]] = handles[1:]
            self._changed.notify_all()
        return handles

    def cancel(self, *handles: Handle, wait: bool = True) -> None:
        """Ends requests between two steps and releases their cache rows. Harmless if they are over.

        Args:
            wait: return when they have ended. Without, whichever thread drives the engine next ends them.
        """
        openmp.release()  # every request ends here, and with it, perhaps, the driving of this thread
        with self._changed:
            for handle in (each for each in handles if not each.done):
                handle.cancelled = self._leaving = True
            self._changed.notify_all()
        # The step that this is called from, if it is, ends the requests when it is over.
        for handle in handles if wait else ():  # whichever comes first ends all that wait, in one pass of the queue
            while not (handle.done or self.is_stepping):
                self._turn.drive(partial(self._retire, handle))

    def close(self) -> None:
        """Cancels every request, takes no further ones, and releases what the target keeps of earlier prompts."""
        with self._changed:
            self._closed = True
            handles = [*self._queue, *(each for some in self._samples.values() for each in some)]
            handles += [running.handle for running in (*self._active, *self.preemption.waiting)]
            self._changed.notify_all()
        self.cancel(*handles)
        if isinstance(self.target, KeepsPrefixes) and not self.is_stepping:
            with self.target.lock:
                self.target.forget()
        self._drafters.release()

    def next(self, handle: Handle) -> Output | None:
        """Waits for the next output of a streamed request, driving the engine while nobody else does.

        Returns:
            None once the request is over and everything was read.

        Raises:
            Exception: what ended the request.
        """
        while not handle.unread and not handle.done:
            self._turn.drive(self.step)
        if (output := self.poll(handle)) is None and handle.error is not None:
            raise handle.error
        return output

    def poll(self, handle: Handle) -> Output | None:
        """The next unread output of a streamed request, if there is one. Does not wait and drives nothing."""
        if not handle.unread:
            return None
        handle.thread, output = get_ident(), handle.unread.popleft()
        if len(handle.unread) + 1 >= handle.request.ahead:  # it was not stepped, and may be again
            self._turn.tell()
        return output

    def outputs(self, handle: Handle) -> Iterator[Output]:
        """Every output of a streamed request. Closing the iterator cancels it."""
        try:
            while (output := self.next(handle)) is not None:
                yield output
        finally:
            self.cancel(handle)

    def run(self, handles: Sequence[Handle]) -> None:
        """Waits until all of these are over, driving the engine while nobody else does. Interrupted, it cancels them.

        Raises:
            Exception: what ended the first of them that failed; the others are cancelled then.
        """
        known = -1  # failures of all requests; thousands of handles are looked through after another one only
        try:
            for handle in handles:
                while not handle.done:
                    self._turn.drive(self.step)
                    if self._failures != known:
                        known = self._failures
                        raise_error(handles)
            raise_error(handles)
        finally:
            self.cancel(*handles)

    def run_forever(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Drives the engine until it is closed, or `ended` is true after a change, for a thread of the caller's own."""
        while True:
            with self._changed:
                if not self._has_work():
                    openmp.release()
                    self._changed.wait_for(lambda: self._closed or ended() or self._has_work())
                if self._closed or ended():
                    return
            try:
                self._turn.drive(self.step)
            except BaseException as error:  # nobody else would hear of it
                failure = of_request(error)
                for running in self._active:
                    running.error = running.error or failure

    @property
    def is_stepping(self) -> bool:
        """Whether the calling thread drives the engine, as callbacks of requests find it."""
        return self._turn.is_inside

    def step(self) -> list[tuple[Handle, Output]]:
        """At most one chunk of prefill, and one target forward for all running requests. Returns their outputs."""
        with self._turn.step():
            try:
                self._retire()
                self._admit()
                return [(running.handle, output) for running, output in self._decode(self._prefill())]
            finally:
                self._retire()

    def _decode(self, reads: dict[Running, int]) -> list[tuple[Running, Output]]:
        """One forward for the running requests, and for those tokens of prompts."""
        ready = [each for each in self._active if each.error is None and not (each.reading or each.handle.paused)]
        batch = ready[: self.max_batch]
        if len(ready) > len(batch):  # those left out come first next time
            self._active = [each for each in self._active if each not in batch] + batch
        if not batch and not reads:
            return []
        self._size[0] = max(len(batch), 1)
        self.latency.at(sum(len(each.session.tokens) for each in batch) // self._size[0])
        try:
            return step(self.target, [*batch, *reads], self.latency.clock, reads)
        except BaseException as error:  # of the forward: it concerns the whole batch
            self.preemption.failed(error, self._active, *batch, *reads)
            return []

    def _admit(self) -> None:
        """Opens sessions for queued requests, in order, while the batch and the cache have room.

        Preempted ones come first. A request leaves the queue when its session is open, so that an interrupt does not
        lose it.
        """
        if not self.preemption.reopen(self._active, self.max_batch):
            return
        while self._queue and sum(not each.handle.paused for each in self._active) < self.max_batch:
            with self._changed:
                while self._queue and self._is_known(self._queue[0]):
                    self._queue.popleft()
                if not self._queue:
                    return
                handle = self._queue[0]
            try:
                self._open(handle)
            except CacheFull as error:
                for each in self.preemption.stuck(handle, self._active):
                    self._end(each, error)
                if not handle.done:
                    return  # it joins when another one has left
            except BaseException as error:
                self._end(handle, of_request(error))

    def _is_known(self, handle: Handle) -> bool:
        """Whether a queued request is running already, or over."""
        if handle.cancelled:
            self._end(handle)
        return handle.done or any(each.handle is handle for each in (*self._active, *self.preemption.waiting))

    def _open(self, handle: Handle) -> None:
        request = handle.request
        self._prompt_rows.pop(handle, None)
        self.preemption.keep_room(self._active)
        reserve = self.preemption.reserve(handle, len(request.tokens))
        given = request.sampling, request.begin, request.prompt_capture(), reserve, request.owner
        running = self._start(opened(self.target, request.tokens, *given), handle)
        if not running.session.unread:
            self._fork(running)

    def _start(self, session: Session, handle: Handle, rows: Sequence[PromptRows] = ()) -> Running:
        """A request with its session. What its drafter raises ends it; `rows` of its prompt were captured before."""
        running = None
        try:
            running = Running(self.target, session, handle, self.tokenizer)
            handle.open(session.tokens, session.unread)
            running.begin(rows)
        except BaseException:
            (running or session).close()
            raise
        self._active.append(running)  # last: an interrupted start is repeated
        return running

    def _prefill(self) -> dict[Running, int]:
        """Reads one chunk of one prompt; while no request is running, chunks of so many prompts as make a large one.

        Returns:
            What the forward of the step is to read instead, where the target can: tokens of each of these prompts.
        """
        reads: dict[Running, int] = {}
        if not (reading := [each for each in self._active if each.reading and each.error is None]):
            return reads
        alone = not (running := len(self._active) - len(reading))  # no request is running that would wait
        most = self.prefill_chunk or (LARGEST if alone else chunk_size(self.latency.known(1)))
        left = step_tokens(most, 1 if self.prefill_chunk else len(reading), running)
        while reading and left > 0:
            unread, chunk = (first := reading.pop(0)).session.unread, min(left, most)
            # Other samples wait for the end of their prompt, not of a step.
            if first.reads_in_step and first.handle not in self._samples and (unread <= chunk or not alone):
                reads[first] = min(unread, chunk)
                left -= reads[first]
            else:
                self._read(first, most if alone else left)
                left -= unread - first.session.unread
            if unread > chunk and len(self._active) > 1:  # prompts take turns
                self._active = [*(each for each in self._active if each is not first), first]
        return reads

    def _read(self, running: Running, max_tokens: int) -> None:
        """Reads one chunk of this prompt; starts the other samples once the whole is read."""
        self.latency.interrupt()
        try:
            rows = running.read_prompt(max_tokens)
        except BaseException as error:
            self.preemption.failed(error, self._active, running)
            return
        if rows is not None and running.handle in self._samples:
            self._prompt_rows.setdefault(running.handle, []).append(rows)
        if not running.session.unread:
            self._fork(running)

    def _fork(self, first: Running) -> None:
        """The other samples of a prompt that has just been read; those for which there is no room are queued."""
        rows = self._prompt_rows.get(first.handle, [])
        for handle in self._samples.get(first.handle, []):
            if self._is_known(handle):
                continue
            try:
                if len(self._active) < self.max_batch:
                    self._start(self.target.fork(first.session, handle.request.sampling), handle, rows)
                    continue
            except CacheFull:
                pass
            except BaseException as error:
                self._end(handle, of_request(error))
                continue
            with self._changed:
                self._queue.append(handle)
        self._prompt_rows.pop(first.handle, None)
        self._samples.pop(first.handle, None)

    def _retire(self, handle: Handle | None = None) -> None:
        """Ends what is finished, failed or cancelled, and releases its cache rows; and this one, wherever it waits."""
        both = self._active, self.preemption.waiting
        while over := [each for some in both for each in some if each.finished or each.handle.cancelled]:
            for running in over:
                try:
                    running.close()
                except BaseException as error:  # of the session or the drafter
                    running.error = of_request(error, running.error)
                self._end(running.handle, running.error)
                both[running not in self._active].remove(running)  # last: an interrupted end is repeated
        while self._leaving:  # not in every step: thousands may wait
            with self._changed:  # again while there are any: an interrupt may leave some, and samples are queued
                self._leaving = bool(gone := [waiting for waiting in self._queue if waiting.cancelled])
                for each in gone:
                    self._end(each)
                    self._queue.remove(each)
        if handle is not None:
            self._end(handle)

    def _end(self, handle: Handle, error: BaseException | None = None) -> None:
        """The request is over. Other samples of its prompt, which waited for it, are queued."""
        self._prompt_rows.pop(handle, None)
        with self._changed:
            if not handle.done:
                handle.finish_reason = handle.finish_reason or ("cancelled" if handle.cancelled else None)
                self._queue.extendleft(reversed(samples := self._samples.pop(handle, [])))
                handle.error, handle.done, self._leaving = error, True, self._leaving or bool(samples)
            self._changed.notify_all()
        if not handle.told:  # an interrupted end is repeated, so that a waiting thread hears of it, once
            handle.told = True
            handle.wake()
        self._failures += handle.error is not None  # `notify` may have raised it

    def _has_work(self) -> bool:
        some = (*self._active, *self.preemption.waiting)
        return bool(self._queue) or any(each.handle.cancelled or not each.handle.paused for each in some)
