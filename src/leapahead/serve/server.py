"""Runs the application under uvicorn: timeouts of connections, errors of HTTP itself, and an orderly end.

SIGTERM, SIGINT ──> /health is 503, no further requests ──> running ones end, or their time is over ──> exit 0
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from leapahead.core.errors import BadParameter
from leapahead.serve import logs
from leapahead.serve.errors import ApiError
from leapahead.serve.settings import Limits
from leapahead.serve.worker import Worker

LAST_SECONDS = 2  # that cancelled requests have for their last words
# Under Windows, SO_REUSEADDR lets a second program listen at the same port.
EXCLUSIVE = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
TAKEN = (errno.EADDRINUSE,) if os.name == "posix" else (errno.EADDRINUSE, errno.EACCES)
MOST_HEADERS = 64 * 1024  # bytes of a request's headers, and of its URL, together


class Parser(HttpRequestParser):
    """Reads requests, those that offer another protocol as well, as Java's client offers HTTP/2 with every one.

    Nobody has to accept that, but httptools takes what follows the headers for the other protocol. So these headers are
    read once more without the offer.

    Args:
        protocol: whose requests they are.
    """

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does, for pipelined requests

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except HttpParserUpgrade as offer:
            headers = [b": ".join(pair) for pair in self._protocol.headers if pair[0] != b"upgrade"]
            version = self.get_http_version().encode()
            first = b"%s %s HTTP/%s" % (self.get_method(), self._protocol.url, version)
            self._protocol.parser = Parser(self._protocol)
            self._protocol.parser.feed_data(b"\r\n".join([first, *headers, b"", data[offer.args[0] :]]))


class Protocol(HttpToolsProtocol):
    """A connection that must not take long for the headers of a request, which must not be long either, nor for reading
    the answer.

    Args:
        header_seconds, send_seconds: see `Limits`.
    """

    def __init__(self, *args: Any, header_seconds: float, send_seconds: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = Parser(self)
        self._header_seconds, self._send_seconds = header_seconds, send_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._heading, self._head_bytes = True, 0  # whether headers are due; bytes of them so far
        self._writing: asyncio.TimerHandle | None = None  # while the client does not read fast enough

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        self._expect()
        if self._heading:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MOST_HEADERS and not self.transport.is_closing():
            self.send_400_response("The headers of the request are too long.")
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._stop_writing()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_HEADERS:
            raise ValueError("the headers of the request are too long")  # which the parser reports as invalid
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        self._heading, self._head_bytes = False, 0
        if not self.parser.should_upgrade():  # see `Parser`
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._heading = True
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._stop_writing()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP with an error object."""
        error = ApiError(400, f"{msg.rstrip('.')}: the connection is closed", code="invalid_http")
        body = json.dumps(error.body()).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _expect(self) -> None:
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._timer = self.loop.call_later(self._header_seconds, self._close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expect_reading(self) -> None:
        """Drops a client that has read nothing when the time is over: its texts would hold cache entries for ever."""
        self._stop_writing()
        before = self.transport.get_write_buffer_size()

        def check() -> None:
            if self.transport.get_write_buffer_size() < before:
                self._expect_reading()
            else:
                self.transport.abort()

        self._writing = self.loop.call_later(self._send_seconds, check)

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _close(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server(uvicorn.Server):
    """A server that ends in order.

    Args:
        app: see `app.make`.
        worker: of the application.
        limits: see there.
    """

    def __init__(self, app: Any, worker: Worker, limits: Limits) -> None:
        seconds = {"header_seconds": limits.header_seconds, "send_seconds": limits.send_seconds}
        protocol: Any = partial(Protocol, **seconds)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=LAST_SECONDS + 1,
            )
        )
        self._worker, self._limits = worker, limits
        self._ends: float | None = None

    def end(self) -> None:
        """Takes no further requests, and stops when the running ones are over, or their time is."""
        self._ends = monotonic() + self._limits.shutdown_seconds
        self._worker.draining = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal is a request to end, another one an order."""
        if self._ends is None:
            self.end()
        else:
            self._ends = 0.0

    async def on_tick(self, counter: int) -> bool:
        if self._ends is not None:
            if self._worker.pending and monotonic() > self._ends:
                logs.event("shutdown_cancels", texts=self._worker.pending)
                self._worker.stop()
                return True
            if not self._worker.pending:
                return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's. Clients that do not read are dropped before it cancels their requests, with tracebacks."""
        asyncio.get_running_loop().call_later(LAST_SECONDS, self._drop)
        await super().shutdown(sockets)

    def _drop(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def bound(host: str, port: int) -> socket.socket:
    """A socket of that address, before the model is loaded. Nothing listens yet, so that clients are not kept waiting.

    Raises:
        BadParameter: the address is not this machine's, or in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, EXCLUSIVE, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        if getattr(error, "errno", None) in TAKEN:
            raise _in_use(host, port) from None
        reason = getattr(error, "strerror", None) or str(error)
        raise BadParameter(f"host={host!r} and port={port} are not possible: {reason}; choose others") from None
    return found


def _in_use(host: str, port: int) -> BadParameter:
    return BadParameter(f"port={port} of {host} is in use by another program; end that one, or choose another port")


def address(listening: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: Any, worker: Worker, limits: Limits, listening: socket.socket) -> None:
    """Serves until a signal ends it.

    Raises:
        BadParameter: another program has begun to listen there since the socket was bound.
    """
    try:
        listening.listen()
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        raise _in_use(*listening.getsockname()[:2]) from None
    logs.event("listening", url=address(listening))
    Server(app, worker, limits).run(sockets=[listening])
    logs.event("stopped")
