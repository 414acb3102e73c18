"""Moves what a model's loading has written to memory into huge pages, on Linux.

A forward of one token reads all weights once. OpenVINO lays them out anew in pages of 4 KiB, and each page costs an
address translation; a huge page of 2 MiB costs one for 512 of those. Linux 6.1 and later copies memory that is in use
into huge pages on request (MADV_COLLAPSE of madvise(2)), which changes neither its addresses nor its content. Only
memory that is there in all its pages is moved, so that none is added. The copies make loading longer.

Where Linux cannot do it, everything stays as it was. The logger "leapahead.huge_pages" tells how much was moved; it is
silent until it is given a handler.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt

log = logging.getLogger("leapahead.huge_pages")
log.addHandler(logging.NullHandler())

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MAPPINGS = Path("/proc/self/maps")
# Private, writable memory that belongs to no file, as a line of /proc/self/maps describes it: "begin-end rw-p ...".
ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\]|\[anon.*)?$", re.MULTILINE)
MADV_COLLAPSE = 25

Addresses = npt.NDArray[np.int64]


@contextmanager
def for_new_memory() -> Iterator[None]:
    """Around the loading of a model, with its first forward; after an error nothing is moved. Also as a decorator."""
    size = page_size()
    before = _written(size) if size else None
    yield
    if before is not None:
        _collapse(np.setdiff1d(_written(size), before), size)


def page_size() -> int:
    """Bytes of a huge page; 0 where this system has none, or its administrator wants none."""
    if sys.platform != "linux":
        return 0
    try:
        allowed = "[never]" not in (SETTINGS / "enabled").read_text()
        return int((SETTINGS / "hpage_pmd_size").read_text()) if allowed else 0
    except (OSError, ValueError):
        return 0


def _written(size: int) -> Addresses:
    """int64, rising: the places for huge pages in anonymous memory of which every page is in memory."""
    try:
        mappings = ANONYMOUS.findall(MAPPINGS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        mappings = []
    system, found = _system(), [np.zeros(0, np.int64)]
    for low, high in mappings:
        begin, end = -(-int(low, 16) // size) * size, int(high, 16) // size * size
        if begin < end:
            pages = np.zeros((end - begin) // mmap.PAGESIZE, np.uint8)
            if system.mincore(begin, end - begin, pages.ctypes.data) == 0:  # else unmapped meanwhile
                places = np.flatnonzero((pages & 1).reshape(-1, size // mmap.PAGESIZE).all(axis=1))
                found.append(begin + places * size)
    return np.concatenate(found)


def _collapse(places: Addresses, size: int) -> None:
    """Makes each of these places a huge page, as far as possible."""
    system, began, moved, failed = _system(), perf_counter(), 0, 0
    for place in places.tolist():
        if system.madvise(place, size, MADV_COLLAPSE) == 0:
            moved += 1
        elif (failed := ctypes.get_errno()) == errno.ENOMEM:  # none is free, and looking for one takes long
            break
    reason = f"; madvise: {errno.errorcode.get(failed, failed)}" if failed else ""
    seconds = perf_counter() - began
    log.debug("%d of %d MiB moved in %.2f s%s", moved * size >> 20, len(places) * size >> 20, seconds, reason)


def _system() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
