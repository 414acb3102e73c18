"""What every request passes: its id, its key, the limits of its body, its line in the log, and the last resort.

It is ASGI around the application, so that errors of routing and of the framework are answered and logged, too.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from time import perf_counter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leapahead.serve import errors, logs
from leapahead.serve.errors import ApiError
from leapahead.serve.keys import Keys
from leapahead.serve.settings import Limits
from leapahead.serve.streaming import GONE, ClientGone, log_fault

OPEN = ("/", "/health", "/ping", "/version", "/load", "/metrics", "/openapi.json")  # paths that need no key
PLAIN_ID = re.compile(r"[\w.:-]{1,64}")  # a client's own request id that is taken
DISCARDED = 8  # times the limit, what is still read of a body that is too large
CLOSE = {"Connection": "close"}


class Gate:
    """Wraps an application.

    Args:
        app: see above.
        keys: see there.
        limits: see there.
    """

    def __init__(self, app: ASGIApp, keys: Keys, limits: Limits) -> None:
        self._app, self._keys, self._limits = app, keys, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"], state["log"], state["owner"] = _request_id(headers), {}, ""
        state["send"] = send  # for parts of a body, which no middleware changes
        answering = Answering(send, state["request_id"])
        began = perf_counter()
        try:
            state["owner"] = self._owner(scope, headers)
            body = Body(receive, headers, self._limits)
            await body.check()
            method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server leaves out the body of HEAD
            await self._app({**scope, "method": method}, body.receive, answering.send)
        except ClientGone:
            answering.status = GONE
        except Exception as error:
            known = errors.of(error)
            log_fault(known, error, state["request_id"])
            if not answering.status:
                await known.response()(scope, receive, answering.send)
        finally:
            logs.event(
                "request",
                request_id=state["request_id"],
                method=scope["method"],
                path=scope["path"][:200],
                status=answering.status or GONE,
                seconds=round(perf_counter() - began, 4),
                client=(scope.get("client") or ("",))[0],
                **({"key": state["owner"]} if state["owner"] else {}),
                **state["log"],
            )

    def _owner(self, scope: Scope, headers: Headers) -> str:
        """The id of the client's key; "" where none is needed.

        Raises:
            ApiError: there is no key, or a wrong one.
        """
        if not self._keys or scope["path"] in OPEN:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not key and (key := headers.get("x-api-key", "")):  # of Anthropic's clients
            scheme = "bearer"
        owner = self._keys.find(key.strip()) if scheme.lower() == "bearer" else None
        if owner is None:
            what = "a wrong API key" if key else "no API key"
            raise ApiError(
                401,
                f"the request has {what}; send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return owner


def _request_id(headers: Headers) -> str:
    """The client's own, if it is plain; else a new one."""
    given = headers.get("x-request-id", "")
    return given if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex


class Answering:
    """Sends a response with the request's id.

    Attributes:
        status: of the response; 0 before it began.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._request_id, self.status = send, request_id, 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self._request_id
        await self._send(message)


class Body:
    """Reads a body within its limits.

    Args:
        receive: of ASGI.
        headers: of the request.
        limits: see there.
    """

    def __init__(self, receive: Receive, headers: Headers, limits: Limits) -> None:
        self._receive, self._most, self._seconds = receive, limits.body_bytes, limits.body_seconds
        self._ends = perf_counter() + limits.body_seconds
        self._read, self._complete = 0, False
        announced = headers.get("content-length", "")
        self._announced = int(announced) if announced.isdecimal() else 0

    async def check(self) -> None:
        """Refuses a body that is announced as too large."""
        if self._announced > self._most:
            await self._refuse()

    async def receive(self) -> Message:
        """As ASGI's, while the body lasts.

        Raises:
            ApiError: it is too large, or takes too long.
        """
        message = await self._next()
        if self._read > self._most:
            await self._refuse()
        return message

    async def _next(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._ends - perf_counter()))
        except TimeoutError:
            raise ApiError(
                408,
                f"the body of the request did not come within {self._seconds:g} seconds",
                code="body_timeout",
                headers=CLOSE,
            ) from None
        self._read += len(message.get("body", b""))
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def _refuse(self) -> None:
        """Reads on for a while, since most clients read no answer before they have sent everything."""
        size = max(self._announced, self._read)
        while not self._complete and max(self._announced, self._read) <= DISCARDED * self._most:
            await self._next()
        raise ApiError(
            413,
            f"the body of the request has {size} bytes or more and this server takes {self._most}; send less",
            code="body_too_large",
            headers=CLOSE,
        )
