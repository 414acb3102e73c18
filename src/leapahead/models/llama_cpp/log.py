"""llama.cpp's log, which goes to the logger "leapahead.llama_cpp"; that is silent until it is given a handler.

llama.cpp has one log callback for the whole process. Ours replaces it when the first model is loaded or
quantised through leapahead, and stays: the reason of an error is in the log only. Importing leapahead changes nothing.
"""

from __future__ import annotations

import ctypes
import logging
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

import llama_cpp as c

LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # of `enum ggml_log_level`

log = logging.getLogger("leapahead.llama_cpp")
log.addHandler(logging.NullHandler())


class _Log:
    """The receiver of llama.cpp's log, one for the process.

    Attributes:
        problems: the last warnings and errors.
    """

    def __init__(self) -> None:
        self.problems: deque[str] = deque(maxlen=50)
        self._level, self._line = logging.INFO, ""  # of a line that is not complete yet

    def receive(self, level: int, text: bytes, _: Any) -> None:
        if level in LEVELS:  # any other level continues the line before
            self._level = LEVELS[level]
        *lines, self._line = (self._line + text.decode("utf-8", "replace")).split("\n")
        for line in filter(str.strip, lines):
            log.log(self._level, "%s", line)
            if self._level >= logging.WARNING:
                self.problems.append(line.strip())


_log = _Log()
_callback = c.llama_log_callback(_log.receive)  # llama.cpp keeps a pointer to it


@cache
def install() -> None:
    """Takes llama.cpp's log, at the first call."""
    c.llama_log_set(_callback, ctypes.c_void_p(0))


@contextmanager
def watched(params: Any = None) -> Iterator[None]:
    """Around a call of llama.cpp whose problems are to be reported: `reason` tells nothing of those before.

    The call may log, and what the handler of a signal raises in a callback is lost. So what one raises within the block
    is raised at its end; the load of a model, whose parameters are given, ends early then.
    """
    _log.problems.clear()
    if current_thread() is not main_thread():  # in which no signal is handled
        yield
        return
    raised: list[BaseException] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        assert callable(handler), "only callable handlers are replaced"
        try:
            handler(number, frame)
        except BaseException as error:
            raised.append(error)

    goes_on = c.llama_progress_callback(lambda progress, data: not raised)
    if params is not None:
        params.progress_callback = goes_on
    try:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handle)
        yield
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
    if raised:
        raise raised[0]


def reason() -> str:
    """The most specific of llama.cpp's last problems, for an error message."""
    named = ("gguf_init", "error loading model")  # begin with the name of a function; the first is about the header
    for sign in (*named, "failed", "error", ""):
        for line in _log.problems:
            if sign in line:
                return line.split(": ", 1)[-1] if sign in named else line
    return "it gives no reason"
