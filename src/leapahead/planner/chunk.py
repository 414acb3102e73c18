"""The size of a prefill chunk that is read between two steps of running requests."""

from __future__ import annotations

from leapahead.planner.latency import LatencyProfile

# Tokens; the last where no latency profile is known. In smaller chunks than 64, a token of a long text takes twice as
# long in the attention of llama.cpp.
LARGEST, SMALLEST, UNKNOWN = 512, 64, 128
STEPS = 4.0  # a chunk may take as long as this many plain steps


def chunk_size(profile: LatencyProfile | None) -> int:
    """Prompt tokens of one chunk: as many as take about four plain steps, from 64 to 512."""
    if profile is None:
        return UNKNOWN
    size = LARGEST
    while size > SMALLEST and profile(size) > STEPS * profile(1):
        size //= 2
    return size
