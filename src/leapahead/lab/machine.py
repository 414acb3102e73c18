"""What figures were measured on. Knows nothing of models."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu() -> str:
    """The processor's name and the number of its cores that the system shows."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    model = next((line.partition(":")[2].strip() for line in names if line.startswith("model name")), "")
    return f"{os.cpu_count()} cores of {model or platform.processor() or platform.machine()}"
