"""`AsyncLLM`: an `LLM` for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Self, Unpack, overload
from weakref import finalize

from leapahead.api import LLM
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.engine.driver import Driver
from leapahead.engine.request import Handle, Request
from leapahead.engine.waiting import check, in_thread, of_this_task, over, wake_up
from leapahead.inputs import OneText, Options, Prompt, Prompts, is_single
from leapahead.results import Piece, Result


class AsyncLLM:
    """An `LLM` for asyncio: tasks await their texts, which are decoded together in a thread of its own.

    The thread ends, and frees the model if nothing else refers to it, when the object is closed or deleted.

    Args:
        model: an `LLM`, or what `LLM` takes as its model, which is loaded at once.
        options: of `LLM`, where it is not made yet.

    Attributes:
        llm: the `LLM`.

    Raises:
        LeapaheadError: as of `LLM`.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        if isinstance(model, LLM) and options:
            raise BadParameter(f"{', '.join(options)} belong to the LLM, which is made already; give them to LLM(...)")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._driver = Driver(self.llm.engine)
        finalize(self, self._driver.stop).atexit = False  # the thread would keep the engine and its model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is running, ends the thread and releases the caches. The end of the program does the same."""
        await in_thread(self.llm.close)
        await in_thread(self._driver.join)

    @overload
    async def generate(self, prompt: Prompt, **options: Unpack[OneText]) -> Result: ...

    @overload
    async def generate(self, prompt: Prompts, **options: Unpack[OneText]) -> list[Result]: ...

    @overload
    async def generate(self, prompt: Prompt, *, n: int, **options: Unpack[OneText]) -> list[Result]: ...

    @overload
    async def generate(self, prompt: Prompts, *, n: int, **options: Unpack[OneText]) -> list[list[Result]]: ...

    async def generate(self, prompt: Any, **options: Unpack[Options]) -> Any:
        """As `LLM.generate`, with its errors and its arguments, except `progress`.

        Cancelling the task cancels its requests.
        """
        single, llm = is_single(prompt), self.llm
        requests = await in_thread(llm.requests, [prompt] if single else list(prompt), options)
        changed, notify = wake_up()
        groups: list[list[Handle]] = []
        try:
            for request, sampling in requests:
                groups.append(await self.submit(request, sampling, notify))
            of_this_task(handles := [handle for group in groups for handle in group])
            while not over(handles):
                await changed.wait()
                changed.clear()
        finally:
            llm.engine.cancel(*(handle for group in groups for handle in group), wait=False)
        return await in_thread(llm._results, groups, options, single)  # many tokens; other tasks go on meanwhile

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Piece, None]:
        """As `LLM.stream`, asynchronously. Cancelling the task, or closing the generator, cancels the request."""
        llm = self.llm
        request = await in_thread(llm._streamed, prompt, options)
        writer, (changed, notify) = llm.writer(options), wake_up()
        (handle,) = await self.submit(request, [request.sampling], notify)
        try:
            while True:
                of_this_task([handle])
                changed.clear()
                over = handle.done  # before it is polled, lest the last output come in between
                if (output := llm.engine.poll(handle)) is not None:
                    yield writer.piece(handle, output)
                elif over:
                    check(handle)
                    return
                else:
                    await changed.wait()
        finally:
            llm.engine.cancel(handle, wait=False)

    async def submit(
        self, request: Request, sampling: Sequence[SamplingParams], notify: Callable[[], None]
    ) -> list[Handle]:
        """As `Engine.submit_samples`; a thread of this object drives the engine."""
        engine = self.llm.engine
        if engine.is_stepping:
            raise LeapaheadError("a criterion, processor or callback cannot wait for a request of its own engine")
        await in_thread(engine.prepare, request.drafter)  # it may measure; a task cancelled meanwhile is gone
        handles = engine.submit_samples(request, sampling, notify)
        self._driver.start()
        return handles
