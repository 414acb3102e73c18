"""The engine: one scheduler of requests over one target, used by `LLM`, `check`, `bench` and `hf`.

    submit ──> queue ──> reading its prompt, a chunk per step ──> running ──> done
                 │             at most `max_batch` requests are stepped together
                 └── waits while the batch or the cache is full

Every `step()` reads at most one chunk of one prompt, and runs ONE target forward for all running requests, so a running
request never waits longer than for one chunk. The engine has no thread of its own: callers that wait for output drive
`step()`, one of them at a time, while the others sleep. Any thread may submit and cancel at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Condition, get_ident
from typing import Any

from leapahead.core.errors import CacheFull, LeapaheadError
from leapahead.core.parameters import whole
from leapahead.core.sampling import SamplingParams
from leapahead.core.text import Detokenizer, Tokenizer
from leapahead.drafters.base import Drafter, Host
from leapahead.engine.attached import AttachedDrafters
from leapahead.engine.loop import Running, step
from leapahead.engine.output import Output
from leapahead.engine.request import Handle, Request
from leapahead.models.base import Target, checked_prompt
from leapahead.models.choices import PromptRows
from leapahead.planner.acceptance import AcceptanceTable
from leapahead.planner.chunk import LARGEST, chunk_size
from leapahead.planner.profile import LatencyProfiles

SHORT = 16  # new tokens; the captured rows of a prompt cost more than they bring to a shorter text


class Engine:
    """Decodes requests together, each with exactly the text that it has alone.

    Args:
        target: the model.
        tokenizer: of the target, for stop strings.
        max_batch: greatest number of requests stepped together.
        prefill_chunk: greatest number of prompt tokens read between two steps of running requests. By default as many
            as take about four plain steps, by the latency profile.
        latency: how long forwards of the target take, where it is known already.
        acceptance: how often drafted tokens were accepted, where that is to be shared with other engines.
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
        self.target, self.tokenizer = target, tokenizer
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.latency = latency or LatencyProfiles(target.info)
        self.acceptance = acceptance or AcceptanceTable.with_priors()
        self._batch_size = 0  # of the step under way
        host = Host(target.info, self.latency, self.acceptance, tokenizer, target, running=lambda: self._batch_size)
        self._drafters = AttachedDrafters(target, host)
        self._queue: deque[Handle] = deque()
        self._samples: dict[Handle, list[Handle]] = {}  # first of several samples of a prompt -> the others
        self._prompt_rows: dict[Handle, list[PromptRows]] = {}  # captured for those others
        self._active: list[Running] = []
        self._changed = Condition()  # guards the queue, the handles and `_driving`; held for moments only
        self._driving = self._closed = False
        self._stepping: int | None = None  # the thread that is in `step`

    # Drafters

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

    # Requests

    def submit(self, request: Request, notify: Callable[[], None] | None = None) -> Handle:
        """Takes a request. Thread-safe; returns before anything is computed for it.

        Args:
            notify: called, from whichever thread drives the engine, when the handle has new output or is over.

        Raises:
            LeapaheadError: the prompt is empty, too long, or has a token outside the vocabulary; the engine is closed.
        """
        return self.submit_samples(request, [request.sampling], notify)[0]

    def submit_samples(
        self, request: Request, sampling: Sequence[SamplingParams], notify: Callable[[], None] | None = None
    ) -> list[Handle]:
        """Takes several samples of one prompt, each with its own parameters. The prompt is read once."""
        request = replace(request, tokens=checked_prompt(request.tokens, self.target.info))
        self.prepare(request.drafter)
        handles = [Handle(replace(request, sampling=params), notify=notify) for params in sampling]
        with self._changed:
            if self._closed:
                raise LeapaheadError("this engine is closed; make another one")
            self._queue.append(handles[0])
            if len(handles) > 1:
                self._samples[handles[0]] = handles[1:]
            self._changed.notify_all()
        return handles

    def cancel(self, handle: Handle, wait: bool = True) -> None:
        """Ends a request between two steps and releases its cache rows. Harmless if it is over.

        Args:
            wait: return when it has ended. Without, whichever thread drives the engine next ends it.
        """
        with self._changed:
            if handle.done:
                return
            handle.cancelled = True
            self._changed.notify_all()
        if not wait or self.is_stepping:  # the step that this is called from ends the request when it is over
            return
        while not handle.done:
            self._drive(self._retire)

    def close(self) -> None:
        """Cancels every request and takes no further ones."""
        with self._changed:
            self._closed = True
            handles = [*self._queue, *(each for some in self._samples.values() for each in some)]
            handles += [running.handle for running in self._active]
            self._changed.notify_all()
        for handle in handles:
            self.cancel(handle)

    def next(self, handle: Handle) -> Output | None:
        """Waits for the next output of a streamed request, driving the engine while nobody else does.

        Returns:
            None once the request is over and everything was read.

        Raises:
            Exception: what ended the request.
        """
        while not handle.unread and not handle.done:
            self._drive()
        output = self.poll(handle)
        if output is None and handle.error is not None:
            raise handle.error
        return output

    def poll(self, handle: Handle) -> Output | None:
        """The next unread output of a streamed request, if there is one. Does not wait and drives nothing."""
        with self._changed:
            if not handle.unread:
                return None
            self._changed.notify_all()  # it may be stepped again
            return handle.unread.popleft()

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
        try:
            for handle in handles:
                while not handle.done:
                    self._drive()
                if handle.error is not None:
                    raise handle.error
        finally:
            for handle in handles:
                self.cancel(handle)

    def run_forever(self) -> None:
        """Drives the engine until it is closed, for a thread of the caller's own."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_work())
                if self._closed:
                    return
            try:
                self._drive()
            except Exception as error:  # nobody else would hear of it
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends every request with this error."""
        with self.target.lock:
            for running in self._active:
                running.error = running.error or error
            self._retire()

    def _drive(self, action: Callable[[], object] | None = None) -> None:
        """One step (or another action), by this thread; or waits for that of the thread which is at it."""
        if self.is_stepping:
            raise LeapaheadError("a criterion, processor or callback cannot wait for a request of its own engine")
        with self._changed:
            if self._driving:
                self._changed.wait()
                return
            self._driving = True
        try:
            with self.target.lock:
                (action or self.step)()
        finally:
            with self._changed:
                self._driving = False
                self._changed.notify_all()

    # The step

    @property
    def is_stepping(self) -> bool:
        """Whether the calling thread is inside `step`, as criteria, processors and callbacks of requests are."""
        return self._stepping == get_ident()

    def step(self) -> list[tuple[Handle, Output]]:
        """At most one chunk of prefill, and one target forward for all running requests. Returns their outputs."""
        with self.target.lock:
            self._stepping = get_ident()
            try:
                self._retire()
                self._admit()
                self._prefill()
                outputs = self._decode()
            finally:
                self._stepping = None
                self._retire()
        return [(running.handle, output) for running, output in outputs]

    def _decode(self) -> list[tuple[Running, Output]]:
        ready = [each for each in self._active if not (each.finished or each.session.unread or each.handle.paused)]
        batch = ready[: self.max_batch]
        if len(ready) > len(batch):  # those left out come first next time
            self._active = [each for each in self._active if each not in batch] + batch
        if not batch:
            return []
        self._batch_size = len(batch)
        try:
            outputs = step(self.target, batch)
        except Exception as error:  # of the forward: it concerns the whole batch
            for running in batch:
                running.error = running.error or error
            return []
        with self._changed:
            for running, output in outputs:
                running.handle.add(output)
                if running.handle.request.stream and running.handle.notify is not None:
                    running.handle.notify()
        return outputs

    def _admit(self) -> None:
        """Opens sessions for queued requests, in order, while the batch and the cache have room."""
        while True:
            occupied = sum(not each.handle.paused for each in self._active)
            with self._changed:
                if not self._queue or occupied >= self.max_batch:
                    return
                handle = self._queue.popleft()
            if handle.cancelled:
                self._end(handle)
                continue
            try:
                self._open(handle)
            except CacheFull as error:
                if occupied:
                    with self._changed:
                        self._queue.appendleft(handle)  # it joins when another one has left
                    return
                self._end(handle, error)
            except Exception as error:
                self._end(handle, error)

    def _open(self, handle: Handle) -> None:
        request, new_tokens = handle.request, handle.request.stop.max_new_tokens
        capture = request.drafter.capture if new_tokens > SHORT else replace(request.drafter.capture, top_k=0)
        session = self.target.open(request.tokens, request.sampling, capture, len(request.tokens) + new_tokens)
        handle.stats.prompt_tokens = len(request.tokens)
        handle.stats.reused_tokens = len(request.tokens) - 1 - session.unread
        self._start(session, handle)
        if not session.unread:
            self._fork(self._active[-1])

    def _start(self, session: Any, handle: Handle) -> Running:
        try:
            text = Detokenizer(self.tokenizer).add if self.tokenizer is not None else None
            running = Running(self.target, session, handle, text)
        except BaseException:
            session.close()
            raise
        self._active.append(running)
        return running

    def _prefill(self) -> None:
        """Reads one chunk of one prompt; while no request is running, chunks of so many prompts as make a large one."""
        reading = [each for each in self._active if each.session.unread and not each.finished]
        alone = len(reading) == len(self._active)
        left = LARGEST
        while reading and left > 0:
            first = reading.pop(0)
            before = first.session.unread
            self._read(first, self._chunk(alone))
            left = left - (before - first.session.unread) if alone else 0
            if first.session.unread and len(self._active) > 1:  # prompts take turns
                self._active.remove(first)
                self._active.append(first)

    def _read(self, running: Running, max_tokens: int) -> None:
        """Reads one chunk of this prompt; starts the other samples once the whole is read."""
        try:
            rows = running.read_prompt(max_tokens)
        except Exception as error:
            running.error = error
            return
        if rows is not None and running.handle in self._samples:
            self._prompt_rows.setdefault(running.handle, []).append(rows)
        if not running.session.unread:
            self._fork(running)

    def _fork(self, first: Running) -> None:
        """The other samples of a prompt that has just been read; those for which there is no room are queued."""
        rows = self._prompt_rows.pop(first.handle, [])
        for handle in self._samples.pop(first.handle, []):
            if len(self._active) >= self.max_batch or handle.cancelled:
                with self._changed:
                    self._queue.append(handle)
                continue
            try:
                running = self._start(self.target.fork(first.session, handle.request.sampling), handle)
                handle.stats.prompt_tokens = len(handle.request.tokens)
                handle.stats.reused_tokens = len(handle.request.tokens) - 1
                for some in rows:
                    running.show_prompt(some)
            except CacheFull:
                with self._changed:
                    self._queue.append(handle)
            except Exception as error:
                self._end(handle, error)

    def _chunk(self, alone: bool) -> int:
        """Tokens of a chunk; `alone` where no request is running that would wait for it."""
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        return LARGEST if alone else chunk_size(self.latency.known(1))

    # The end of requests

    def _retire(self) -> None:
        """Ends what is finished, failed or cancelled, and releases its cache rows."""
        for running in [each for each in self._active if each.finished or each.handle.cancelled]:
            self._active.remove(running)
            try:
                running.close()
            except Exception as error:  # of the session
                running.error = running.error or error
            self._end(running.handle, running.error)
        with self._changed:
            cancelled = [handle for handle in self._queue if handle.cancelled]
            for handle in cancelled:
                self._queue.remove(handle)
        for handle in cancelled:
            self._end(handle)

    def _end(self, handle: Handle, error: BaseException | None = None) -> None:
        """The request is over. Other samples of its prompt, which waited for it, are queued."""
        self._prompt_rows.pop(handle, None)
        with self._changed:
            handle.error, handle.done = error, True
            if handle.cancelled and handle.finish_reason is None:
                handle.finish_reason = "cancelled"
            self._queue.extendleft(reversed(self._samples.pop(handle, [])))
            self._changed.notify_all()
        if handle.notify is not None:
            handle.notify()

    def _has_work(self) -> bool:
        return bool(self._queue) or any(each.handle.cancelled or not each.handle.paused for each in self._active)
