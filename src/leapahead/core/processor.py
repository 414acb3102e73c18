"""What Linux tells of the processor; nothing elsewhere."""

from __future__ import annotations

from pathlib import Path


def described() -> tuple[str, frozenset[str]]:
    """The processor's name and its extensions, as /proc/cpuinfo has them; empty where it does not tell them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    told = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    return told.get("model name", ""), frozenset(f"{told.get('flags', '')} {told.get('features', '')}".split())
