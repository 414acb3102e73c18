"""`python -m research vllm-drafting`: microseconds that the vLLM adapter takes for a request and step, without vLLM.

The requests are pieces of Python's own source code, and the "target" is the text itself: it accepts what is drafted
rightly. Time passes as in a forward of 20 ms and 0.2 ms for each drafted token, so that planning is real. All that the
adapter does in a step is counted, the selection of top-k tokens included; beginning a request is not.
"""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import numpy as np

from leapahead.cli.command import Command
from leapahead.integrations.vllm.adapter import Adapter
from leapahead.integrations.vllm.batch import Batch, Request
from leapahead.integrations.vllm.options import Options
from leapahead.models import loading
from leapahead.models.base import CHAIN, TOP_K, TargetInfo
from research.command_parts import show

MOST, WARM_UP = 12, 40
PLAIN_SECONDS, ROW_SECONDS = 20e-3, 0.2e-3


class Clock:
    """The time, and what simulated forwards have added to it."""

    def __init__(self) -> None:
        self.added = 0.0

    def __call__(self) -> float:
        return perf_counter() + self.added


def texts(count: int, length: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """int32 [count, length]: tokens of the standard library."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(loading.bundled())
    found: list[int] = []
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        found += tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False)
        if len(found) >= count * length:
            break
    return np.array(found[: count * length], dtype=np.int32).reshape(count, length)


def microseconds(sources: str, requests: int, context: int, steps: int, vocab_size: int = 4096) -> tuple[float, float]:
    """The median time of a request and step; and the tokens that a step commits for a request."""
    clock, longest = Clock(), context + (steps + WARM_UP) * (MOST + 1)
    info = TargetInfo("simulated", vocab_size, longest + 1, 2.0**-7, frozenset({CHAIN, TOP_K}), "")
    adapter = Adapter(info, MOST, Options(sources=sources), clock=clock)
    tokens = texts(requests, longest)
    generator = np.random.default_rng(0)
    logits = generator.normal(size=((MOST + 1) * requests, vocab_size)).astype(np.float32)
    names = [f"r{index}" for index in range(requests)]
    lengths = np.full(requests, context, dtype=np.int64)
    new, verified = [tokens[row, context - 1 : context].tolist() for row in range(requests)], [0] * requests
    times, committed = [], 0
    for step in range(WARM_UP + steps):
        rows = requests + sum(verified)
        batch = Batch(names, new, lengths, tokens, set(names), lambda name: Request(), verified, rows, logits[:rows])
        began = perf_counter()
        drafts = adapter.step(batch)
        if step >= WARM_UP:
            times.append((perf_counter() - began) / requests)
        clock.added += PLAIN_SECONDS + ROW_SECONDS * (sum(map(len, drafts)))
        new, verified = [], [len(draft) for draft in drafts]
        for row, draft in enumerate(drafts):
            right = tokens[row, lengths[row] : lengths[row] + len(draft) + 1].tolist()
            accepted = next((at for at, token in enumerate(draft) if token != right[at]), len(draft))
            new.append(right[: accepted + 1])
            lengths[row] += accepted + 1
            committed += accepted + 1 if step >= WARM_UP else 0
    return 1e6 * median(times), committed / (steps * requests)


@click.command(cls=Command)
@click.option("--requests", type=click.IntRange(min=1), default=16, show_default=True, help="Requests of a batch.")
@click.option("--context", type=click.IntRange(min=2), default=4096, show_default=True, help="Tokens of a request.")
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True, help="Measured steps.")
def main(requests: int, context: int, steps: int) -> None:
    """Measure the time of drafting inside vLLM, without vLLM."""
    rows = []
    for sources in ("suffix", "prediction,suffix,recycling,siblings"):
        spent, tokens = microseconds(sources, requests, context, steps)
        rows.append((sources, f"{spent:.1f}", f"{tokens:.2f}"))
    show(["sources", "microseconds a request and step", "tokens a step"], rows)
