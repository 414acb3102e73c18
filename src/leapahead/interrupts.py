"""What Ctrl-C does before and after the `leapahead` command runs. Imports the standard library only.

The imports take some tenths of a second, and so does the end of a process that has loaded torch. A KeyboardInterrupt in
either would end the process with a traceback, or become another exception. There is nothing to clean up, so the signal
ends the process at once.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # what `signal` is made of, without its imports
import os

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


def ends_process() -> None:
    """From here on, Ctrl-C ends the process, unless whoever started it has chosen that it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_process)


def raises() -> bool:
    """From here on, Ctrl-C raises KeyboardInterrupt, as usual. Returns whether it ended the process before."""
    if signal.getsignal(signal.SIGINT) is not end_process:
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True
