"""What the system tells of the processor."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path

FEW = 4  # logical processors, each of which counts as a core where the system does not tell
MAC = ("hw.perflevel0.physicalcpu", "hw.physicalcpu")  # without Apple's slow cores, for which the others would wait
CORES = 0  # RelationProcessorCore of Windows
CONTAINER = Path("/sys/fs/cgroup")  # where a container of Linux sees its limits
# Of cgroup v2 and v1: microseconds of processors' time in each period, and the length of a period.
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def described() -> tuple[str, frozenset[str]]:
    """The processor's name and its extensions, as /proc/cpuinfo of Linux has them; empty where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    told = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    return told.get("model name", ""), frozenset(f"{told.get('flags', '')} {told.get('features', '')}".split())


def physical_cores() -> int:
    """The number of physical cores: a second thread on the same core slows matrix products down.

    Under Linux, of those cores that this process may use, and no more than a container's limit gives the time of. Where
    the system does not tell, half of the logical processors, if there are more than `FEW`.
    """
    logical = os.cpu_count() or 1
    ask = {"linux": _linux_cores, "win32": _windows_cores, "darwin": _mac_cores}.get(sys.platform, lambda: 0)
    try:
        told = ask()
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError):
        told = 0
    return told or (logical if logical <= FEW else logical // 2)


def _linux_cores() -> int:
    siblings = set()
    for cpu in sorted(os.sched_getaffinity(0)):
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(file.read_text() if file.is_file() else str(cpu))
    return min(len(siblings), _processors_in_container())


def _processors_in_container() -> int:
    """How many processors' time a container may take, rounded up; `sys.maxsize` where there is no limit."""
    for files in QUOTAS:
        try:
            quota, period = map(int, " ".join((CONTAINER / name).read_text() for name in files).split())
        except (OSError, ValueError):  # the quota "max" is none
            continue
        if quota > 0:  # -1 is none
            return math.ceil(quota / period)
    return sys.maxsize


def _mac_cores() -> int:
    for name in MAC:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return int(done.stdout)
    return 0


def _windows_cores() -> int:
    """Counts the records of GetLogicalProcessorInformationEx: the kind and the size in bytes, of 32 bits, and more."""
    call = ctypes.windll.kernel32.GetLogicalProcessorInformationEx  # type: ignore[attr-defined, unused-ignore]
    size = ctypes.c_uint32(0)
    call(CORES, None, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    if not call(CORES, buffer, ctypes.byref(size)):
        return 0
    records, place, found = buffer.raw[: size.value], 0, 0
    while place + 8 <= len(records):
        place += max(int.from_bytes(records[place + 4 : place + 8], "little"), 8)
        found += 1
    return found
