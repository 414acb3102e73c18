"""How much memory of the host is free."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from leapahead.core.processor import CONTAINER

UNKNOWN = 4 << 30  # bytes that are assumed to be free where the system tells nothing
# Of cgroup v2 and v1: the limit, what is used, and statistics with the files that are kept in memory.
LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (*(f"memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")), "total_inactive_file"),
)


def free_host_bytes() -> int:
    """Memory that can still be allocated. Where the system does not tell, half of what there is, or `UNKNOWN`."""
    if sys.platform == "win32":
        status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its size and the load, all memory, what is free, ...
        ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
        return int(status[2])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        return min(free, _free_in_container(free))
    except (OSError, StopIteration, ValueError):
        if not hasattr(os, "sysconf"):
            return UNKNOWN
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _free_in_container(unlimited: int) -> int:
    """What a container's memory limit leaves, which `/proc/meminfo` does not show; `unlimited` where there is none."""
    for *files, kept in LIMITS:
        try:
            limit, used, statistics = ((CONTAINER / name).read_text() for name in files)
            parts = dict(line.split() for line in statistics.splitlines())
            return max(int(limit) - int(used) + int(parts[kept]), 0)  # files that are kept in memory make room
        except (OSError, KeyError, ValueError):  # the limit "max" is none
            continue
    return unlimited
