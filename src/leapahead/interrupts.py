"""What signals do before and after the `leapahead` command runs. Imports the standard library only.

The imports take some tenths of a second, and so does the end of a process that has loaded torch. A KeyboardInterrupt in
either would end the process with a traceback, or become another exception. There is nothing to clean up, so the signal
ends the process at once. So does SIGTERM that of `leapahead serve`, which as the first process of a container would not
get it without a handler.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # what `signal` is made of, without its imports
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

STATUS = 130  # of a process that was interrupted, as shells report it


def end_process(number: int, frame: FrameType | None) -> None:
    """A handler of signals that ends the process, without the clean-up that Python does at its end."""
    try:
        os.write(2, b"interrupted\n")
    finally:  # standard error may be closed or full
        os._exit(STATUS)


def end_server(number: int, frame: FrameType | None) -> None:
    """A handler of SIGTERM for a server that is not there yet, or not any more: exit code 0, as in between."""
    try:
        os.write(2, b"ended by SIGTERM\n")
    finally:
        os._exit(0)


def ends_process() -> None:
    """From here on, Ctrl-C ends the process, and SIGTERM a server, unless whoever started it has chosen otherwise."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_process)
    if sys.argv[1:2] == ["serve"] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end_server)


def raises() -> bool:
    """From here on, Ctrl-C raises KeyboardInterrupt, as usual. Returns whether it ended the process before."""
    if signal.getsignal(signal.SIGINT) is not end_process:
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True
