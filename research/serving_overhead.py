"""`python -m research serving-overhead`: what a token of a stream costs in the server beyond `LLM.generate`.

The server runs in this process, on one copy of the model, and its client in another process, which reads from sockets
and no more. Another copy decodes the same texts with `LLM.generate`. Both take turns. Of the times, the first token's
is left out, with all that is done once for a request.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import click
import numpy as np

from leapahead import LLM
from leapahead.bench.conditions import conditions
from leapahead.cli.command import Command
from leapahead.core.errors import LeapaheadError
from leapahead.serve import app, server
from leapahead.serve.settings import Limits, Settings
from research.command_parts import show

PROMPT = "Once upon a time"
MARK = b"data: {"  # begins an event that has a text


@dataclass(frozen=True)
class Seen:
    """Several texts that were decoded together.

    Attributes:
        token_us: microseconds from one token to the next, of all texts together: from their first token to their last.
        cpu_us: of processor time, of the process that decodes.
        gaps_us: between the parts of one stream, as its client received them.
    """

    token_us: float
    cpu_us: float
    gaps_us: Sequence[float] = ()


async def stream(port: int, body: dict[str, Any]) -> list[float]:
    """Reads one stream. Returns when each part of it came."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    times, parts = [], []
    while part := await reader.read(1 << 16):
        times.append(time.perf_counter())
        parts.append(part)
    writer.close()
    if b" 200 " not in parts[0][:20] or b"[DONE]" not in parts[-1]:
        raise LeapaheadError(f"the server answered {b''.join(parts)[:200]!r}")
    return [came for came, part in zip(times, parts, strict=True) if MARK in part]


def streams(port: int, bodies: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Reads streams at the same time, in the client's process."""

    async def all_of_them() -> list[list[float]]:
        return await asyncio.gather(*(stream(port, body) for body in bodies))

    return asyncio.run(all_of_them())


def served(client: ProcessPoolExecutor, port: int, count: int, tokens: int) -> Seen:
    """So many streams at a time."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "stream": True}
    bodies = [{**body, "seed": seed} for seed in range(count)]
    began = time.process_time()
    times = client.submit(streams, port, bodies).result()
    cpu = time.process_time() - began
    gaps = [1e6 * float(gap) for each in times for gap in np.diff(each)]
    return Seen(_token_us(times, count * tokens), 1e6 * cpu / (count * tokens), gaps)


def generated(llm: LLM, count: int, tokens: int) -> Seen:
    """So many texts together, by `LLM.generate`."""
    times: list[list[float]] = [[] for _ in range(count)]
    began = time.process_time()
    options = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    handles = [
        handle
        for seed in range(count)
        for request, sampling in llm.requests([PROMPT], {**options, "seed": seed})  # type: ignore[typeddict-item]
        for handle in llm.engine.submit_samples(request, sampling)
    ]
    llm.engine.run(handles)
    cpu = time.process_time() - began
    times = [handle.times for handle in handles]
    return Seen(_token_us(times, count * tokens), 1e6 * cpu / (count * tokens))


def _token_us(times: Sequence[Sequence[float]], tokens: int) -> float:
    first, last = min(each[0] for each in times), max(each[-1] for each in times)
    return 1e6 * (last - first) / (tokens - len(times))


@contextmanager
def serving(llm: LLM) -> Iterator[int]:
    """A server of this process. Gives its port; closes the model at the end."""
    application, worker = app.make(llm, Settings(names=("model",)))
    with server.bound("127.0.0.1", 0) as listening:
        running = server.Server(application, worker, Limits())
        thread = Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not running.started:
                time.sleep(0.01)
            yield listening.getsockname()[1]
        finally:
            running.end()
            thread.join()


def measured(
    model: str | None, levels: Sequence[int], tokens: int, rounds: int, **options: Any
) -> list[dict[str, Any]]:
    """A row for each number of streams: medians, and the lowest and highest difference of a round.

    Args:
        model: see `LLM`.
        levels: numbers of streams.
        tokens: of each text.
        rounds: that are counted; one more is a warm-up.
        options: of `LLM`.
    """
    options |= {"max_batch": max(levels), "drafter_cache": False}
    spawned, rows = multiprocessing.get_context("spawn"), []
    with (
        LLM(model, **options) as alone,
        serving(LLM(model, **options)) as port,
        ProcessPoolExecutor(1, mp_context=spawned) as client,
    ):
        for count in levels:
            pairs = []
            for turn in range(rounds + 1):
                pair = generated(alone, count, tokens), served(client, port, count, tokens)
                pairs += [pair] if turn else []
            rows.append({"streams": count, **_row(pairs)})
    return rows


def _row(pairs: Sequence[tuple[Seen, Seen]]) -> dict[str, Any]:
    more = [stream.token_us - whole.token_us for whole, stream in pairs]
    gaps = np.concatenate([stream.gaps_us for _, stream in pairs])
    return {
        "generate_us": median(whole.token_us for whole, _ in pairs),
        "stream_us": median(stream.token_us for _, stream in pairs),
        "more_us": {"median": median(more), "low": min(more), "high": max(more)},
        "more_cpu_us": median(stream.cpu_us - whole.cpu_us for whole, stream in pairs),
        "gap_us": {"p50": float(np.quantile(gaps, 0.5)), "p95": float(np.quantile(gaps, 0.95))},
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    more, gap = row["more_us"], row["gap_us"]
    return [
        str(row["streams"]),
        f"{row['generate_us']:.0f}",
        f"{row['stream_us']:.0f}",
        f"{more['median']:.0f} ({more['low']:.0f} to {more['high']:.0f})",
        f"{row['more_cpu_us']:.0f}",
        f"{gap['p50']:.0f} / {gap['p95']:.0f}",
    ]


COLUMNS = ("streams", "generate, us", "stream, us", "more, us", "more CPU, us", "a piece, 50 / 95 %, us")


@click.command(cls=Command)
@click.argument("model", required=False)
@click.option(
    "--streams",
    "levels",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1, 4, 16),
    show_default=True,
    help="Texts at a time; may be repeated.",
)
@click.option("--max-tokens", type=click.IntRange(min=2), default=200, show_default=True, help="Tokens of a text.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds that are counted.")
@click.option("--drafter", default="auto", show_default=True, help="Drafter of server and LLM.")
@click.option("--ctx-size", type=click.IntRange(min=256), help="Tokens of each cache of a GGUF file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(
    model: str | None,
    levels: tuple[int, ...],
    max_tokens: int,
    rounds: int,
    drafter: str,
    ctx_size: int | None,
    out: Path | None,
) -> None:
    """Measure what a streamed token costs beyond `LLM.generate`, sampled texts, the bundled model's by default."""
    options = {} if ctx_size is None else {"n_ctx": ctx_size}
    rows = measured(model, levels, max_tokens, rounds, drafter=drafter, **options)
    show(COLUMNS, [cells(row) for row in rows])
    if out is not None:
        found: dict[str, Any] = {"figure": "serving-overhead", "rows": rows}
        found["conditions"] = conditions(
            model=Path(model or "bundled").name, rounds=rounds, max_tokens=max_tokens, drafter=drafter
        )
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
