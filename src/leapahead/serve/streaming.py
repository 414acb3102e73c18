"""Server-sent events, and what ends the work for a client that has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from leapahead.serve import logs
from leapahead.serve.errors import ApiError, of

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
as_json = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` makes an encoder for every call
GONE = 499  # the status in the log where the client has closed the connection


def event(model: BaseModel) -> str:
    """An event with this object."""
    return f"data: {model.model_dump_json()}\n\n"


def error_event(body: dict[str, Any]) -> str:
    """An event with this error object."""
    return f"data: {json.dumps(body)}\n\n"


class TextEvent:
    """Writes the events of chunks that differ in their text alone. It is the same JSON as `event` gives.

    Args:
        model: such a chunk, with the text `MARK`.
    """

    MARK = "\0"

    def __init__(self, model: BaseModel) -> None:
        self._before, _, self._behind = event(model).rpartition(json.dumps(self.MARK))

    def of(self, text: str) -> str:
        """The event of this text."""
        return f"{self._before}{as_json(text)}{self._behind}"


class EventStream(StreamingResponse):
    """A stream of events. However it ends, the generator is closed and the resources are released.

    What is done for every event takes a processor from the model's forward, so it is little: the events go to the
    server past the middlewares, which change the beginning of a response alone.

    Args:
        events: gives them as text. An exception becomes a last event with an error object.
        resources: released at the end.
        request_id: for the log.
        ending: what comes behind all events.
        write_error: see `Answer`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        resources: AsyncExitStack,
        request_id: str,
        ending: str = DONE,
        write_error: Callable[[dict[str, Any]], str] = error_event,
    ) -> None:
        self._events, self._resources, self._request_id, self._ending = events, resources, request_id, ending
        self._write_error = write_error
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(Request(scope, receive), self._send_all(scope["state"]["send"]))
        except ClientGone:
            pass
        finally:  # in this order, lest the garbage collector closes them at once
            await self._events.aclose()
            await self._resources.aclose()

    async def _send_all(self, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        except Exception as error:
            known = of(error)
            log_fault(known, error, self._request_id)
            event = self._write_error(known.body())
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": self._ending.encode(), "more_body": False})


def log_fault(known: ApiError, error: BaseException, request_id: str) -> None:
    """Writes the traceback of what is not the client's fault."""
    if known.status_code == 500:
        logs.event("fault", level=40, error=error, request_id=request_id)


class ClientGone(Exception):
    """The client has closed the connection."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled if the client closes the connection.

    Raises:
        ClientGone: it has.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
