"""Peak memory of this process, and of the GPUs that torch uses, since a given moment."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

MIB = 1 << 20


class Peak:
    """The greatest memory in use since the object was made.

    On Linux the peak of the process is reset. Elsewhere it is the peak since the process began, so only a contender
    that needs more than all before it is measured correctly.
    """

    def __init__(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
        self._gpus = range(0)
        torch = sys.modules.get("torch")  # never imported for this
        if torch is not None and torch.cuda.is_initialized():
            self._gpus = range(torch.cuda.device_count())
            for gpu in self._gpus:
                torch.cuda.reset_peak_memory_stats(gpu)

    def mib(self) -> float | None:
        """MiB of this process, weights included; None where the system does not report it."""
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return _since_the_beginning()
        kib = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
        return round(kib * 1024 / MIB, 1) if kib is not None else _since_the_beginning()

    def gpu_mib(self) -> float | None:
        """MiB that torch has allocated on its GPUs together; None where it uses none."""
        if not self._gpus:
            return None
        cuda = sys.modules["torch"].cuda
        most: int = sum(map(cuda.max_memory_allocated, self._gpus))
        return round(most / MIB, 1)


def _since_the_beginning() -> float | None:
    if sys.platform == "win32":
        return None
    from resource import RUSAGE_SELF, getrusage

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return round(getrusage(RUSAGE_SELF).ru_maxrss * unit / MIB, 1)
