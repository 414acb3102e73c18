"""llama.cpp's log, which goes to the logger "leapahead.llama_cpp"; that is silent until it is given a handler.

llama.cpp has one log callback for the whole process. Ours replaces it when the first model is loaded through leapahead,
and stays: the reason of an error is in the log only. Importing leapahead changes nothing.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from functools import cache
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


def clear() -> None:
    """Drops the problems so far, before a call whose own are to be reported."""
    _log.problems.clear()


def reason() -> str:
    """The most specific of llama.cpp's last problems, for an error message."""
    for sign in ("error loading model", "failed", "error", ""):
        for line in _log.problems:
            if sign in line:
                return line.split(": ", 1)[-1] if sign == "error loading model" else line
    return "it gives no reason"
