"""The thread pools of OpenMP, of which each thread that computes has one of its own.

GNU's OpenMP lets a thread that waits for the others spin, unless there are more threads than processors: then all
sleep and are woken at every barrier, and a forward of a small model takes half as long again, or more. It counts the
threads of all pools. So a pool that a thread leaves behind (the main thread, which has loaded the model, or one that
has waited for its text) makes the forwards of every other thread slow. Threads end their pool when they have computed
for a while; the next computation makes a new one, in some tens of microseconds.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

SOFT = 1  # omp_pause_soft
_known: dict[str, ctypes.CDLL] = {}


def find() -> None:
    """Looks for the OpenMP libraries of the process. To be called when a library that computes was loaded."""
    if sys.platform != "linux":
        return
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for name in set(re.findall(r"/\S*/libgomp\S*", maps)) - _known.keys():
        try:
            library = ctypes.CDLL(name)
            library.omp_pause_resource_all.argtypes = [ctypes.c_int]
        except (OSError, AttributeError):  # replaced since it was loaded, or older than OpenMP 5
            continue
        _known[name] = library


def release() -> None:
    """Ends the pools of the calling thread. Harmless if it has none, and inside of a parallel region."""
    for library in list(_known.values()):
        library.omp_pause_resource_all(SOFT)
