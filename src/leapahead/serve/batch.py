"""Answers the requests of a file by the server's application, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

import httpx
from starlette.types import ASGIApp

from leapahead.serve.batch_lines import Asked, Result
from leapahead.serve.worker import Worker

Items = Generator[Asked | Result, None, None]
JSON = {"Content-Type": "application/json"}


class Ahead:
    """Takes items of an iterator, one at a time, in a thread of its own.

    The iterator may wait for standard input. Whoever awaits an item can be cancelled meanwhile, and the end of the
    process does not wait for the thread.

    Attributes:
        closed: whether no further item is given.
    """

    def __init__(self, items: Items) -> None:
        self._items, self._loop, self._lock = items, asyncio.get_running_loop(), asyncio.Lock()
        self.closed = False
        self._asked: SimpleQueue[asyncio.Future[Asked | Result | None] | None] = SimpleQueue()
        Thread(target=self._take, name="leapahead-requests", daemon=True).start()

    async def next(self) -> Asked | Result | None:
        """The next item; None at the end."""
        async with self._lock:
            if self.closed:
                return None
            future: asyncio.Future[Asked | Result | None] = self._loop.create_future()
            self._asked.put(future)
            return await future

    def close(self) -> None:
        """Lets the thread close the iterator and end, once it waits for nothing."""
        self.closed = True
        self._asked.put(None)

    def _take(self) -> None:
        while (future := self._asked.get()) is not None:
            item: Asked | Result | Exception | None
            try:
                item = next(self._items, None)
            except Exception as error:
                item = error
            with suppress(RuntimeError):  # the loop was closed, so nobody waits
                self._loop.call_soon_threadsafe(_deliver, future, item)
        self._items.close()


def _deliver(future: asyncio.Future[Asked | Result | None], item: Asked | Result | Exception | None) -> None:
    if future.done():  # cancelled
        return
    if isinstance(item, Exception):
        future.set_exception(item)
    else:
        future.set_result(item)


async def run(app: ASGIApp, worker: Worker, items: Items, width: int, write: Callable[[Result], None]) -> None:
    """Answers the requests, writes each result when it is there, and closes the model.

    Args:
        app, worker: see `app.make`.
        items: requests, and results of lines that are wrong.
        width: number of requests that are answered at a time.
        write: takes a result. What it raises ends the batch, and so does what the iterator raises.
    """
    ahead = Ahead(items)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://leapahead") as client:

        async def answer_all() -> None:
            while (item := await ahead.next()) is not None:
                result = item if isinstance(item, Result) else await _answer(client, item)
                if not ahead.closed:  # behind what could not be written whole, nothing may follow
                    write(result)

        tasks = [asyncio.create_task(answer_all()) for _ in range(width)]
        try:
            await asyncio.gather(*tasks)
        finally:
            ahead.close()
            await _cancel(tasks)
            await worker.close()


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels tasks until they are over: before Python 3.12, `asyncio.wait_for` may lose it, which requests wait in."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=0.1)


async def _answer(client: httpx.AsyncClient, asked: Asked) -> Result:
    content = json.dumps(asked.body, ensure_ascii=False).encode()
    found = await client.post(asked.url, content=content, headers=JSON)
    return asked.result(found.status_code, found.headers["x-request-id"], found.json())
