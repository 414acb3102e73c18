"""How many tokens of prompts are read between two steps of running requests."""

from __future__ import annotations

from leapahead.planner.latency import LatencyProfile

# Tokens; the last where no latency profile is known. In smaller chunks than 64, a token of a long text takes twice as
# long in the attention of llama.cpp.
LARGEST, SMALLEST, UNKNOWN = 512, 64, 128
TOGETHER = 1024  # tokens of several prompts that are read before a step while no request is running
STEPS = 4.0  # a chunk may take as long as this many plain steps


def chunk_size(profile: LatencyProfile | None) -> int:
    """Prompt tokens of one chunk: as many as take about four plain steps, from 64 to 512."""
    if profile is None:
        return UNKNOWN
    size = LARGEST
    while size > SMALLEST and profile(size) > STEPS * profile(1):
        size //= 2
    return size


def step_tokens(chunk: int, reading: int, running: int) -> int:
    """Prompt tokens that are read before a step: a chunk for each prompt that waits for each running request.

    A step of few sequences takes nearly as long as one of many. So where many prompts come at once, the first of them
    wait a little for the others, instead of all for many steps of a few.

    Args:
        chunk: tokens of one.
        reading: prompts that are not read yet.
        running: requests that are decoded.
    """
    return chunk * max(1, reading // running) if running else TOGETHER
