"""`python -m research serving-stall`: what running streams notice of a long prompt, beside llama.cpp's server.

Some clients read streams. After a while another one sends a prompt of some thousand tokens. Measured is the time
between two pieces of the running streams, before the long prompt came and from then until its first token.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

from leapahead.bench.conditions import conditions
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter, LeapaheadError
from research.command_parts import show
from research.serving import NAME, Server, ask, compared, free_port, requests_of, running

WARM_UP = 20  # pieces of each stream before the long prompt is sent
OPTIONS = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
COLUMNS = ("server", "running", "prompt", "before, ms", "meanwhile, ms", "longest, ms", "first token, s")


async def measured(server: Server, questions: list[dict[str, Any]], long: str, pieces: int) -> dict[str, Any]:
    """Gaps of the running streams, in milliseconds, and how long the prompt's first token took."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=600.0, limits=limits) as client:
        began, streams = time.perf_counter(), [list[float]() for _ in questions]

        async def stream(times: list[float], body: dict[str, Any]) -> None:
            async with client.stream("POST", "/v1/completions", json={**body, **server.extra}) as response:
                if response.status_code != 200:
                    raise LeapaheadError(f"{server.name} answered {response.status_code}: {await response.aread()!r}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                        times.append(time.perf_counter() - began)

        tasks = [asyncio.create_task(stream(*each)) for each in zip(streams, questions, strict=True)]
        while min(map(len, streams)) < WARM_UP and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        sent = time.perf_counter() - began
        common = {"model": NAME, "stream": True, "stream_options": {"include_usage": True}, **OPTIONS, **server.extra}
        try:
            answer = await ask(client, "/v1/completions", {**common, "prompt": long})
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        first = sent + answer.times[0]
    before = [gap for times in streams for at, gap in _gaps(times) if at < sent]
    meanwhile = [gap for times in streams for at, gap in _gaps(times) if sent <= at and at - gap / 1e3 < first]
    if any(times[-1] < first for times in streams):
        raise BadParameter(f"the streams ended before the long prompt was read; give more --max-tokens than {pieces}")
    return {"server": server.name, "before": before, "meanwhile": meanwhile, "first": answer.times[0]}


def _gaps(times: list[float]) -> list[tuple[float, float]]:
    """When each piece came, in seconds, and how long after the one before, in milliseconds."""
    return list(zip(times[1:], (1e3 * np.diff(times)).tolist(), strict=True))


def row_of(found: list[dict[str, Any]], streams: int, tokens: int) -> dict[str, Any]:
    """The figures of a server, of all rounds together."""
    before = [gap for each in found for gap in each["before"]]
    meanwhile = [gap for each in found for gap in each["meanwhile"]]
    return {
        "server": found[0]["server"],
        "running": streams,
        "prompt_tokens": tokens,
        "before_ms": {p: float(np.quantile(before, q)) for p, q in (("p50", 0.5), ("p95", 0.95))},
        "meanwhile_ms": {p: float(np.quantile(meanwhile, q)) for p, q in (("p50", 0.5), ("p95", 0.95))},
        "longest_ms": max(meanwhile),
        "first_seconds": float(np.median([each["first"] for each in found])),
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    return [
        row["server"],
        str(row["running"]),
        str(row["prompt_tokens"]),
        f"{row['before_ms']['p50']:.0f} / {row['before_ms']['p95']:.0f}",
        f"{row['meanwhile_ms']['p50']:.0f} / {row['meanwhile_ms']['p95']:.0f}",
        f"{row['longest_ms']:.0f}",
        f"{row['first_seconds']:.1f}",
    ]


@click.command(cls=Command)
@compared("gsm8k_test.jsonl")
@click.option("--running", "streams", type=click.IntRange(min=1), default=3, show_default=True, help="Streams.")
@click.option(
    "--prompt", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens of the long prompt."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=32), default=400, show_default=True, help="Tokens of each stream."
)
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Passes of each server.")
@click.option("--llama-option", "llama_options", multiple=True, help="Option of llama.cpp's server; may be repeated.")
def main(
    model: Path,
    llama_server: Path,
    data: Path,
    streams: int,
    prompt: int,
    max_tokens: int,
    rounds: int,
    threads: int,
    options: tuple[str, ...],
    llama_options: tuple[str, ...],
    out: Path | None,
) -> None:
    """Measure the inter-token latency of running streams while a long prompt enters, beside llama.cpp's server."""
    questions = [body for _, body in requests_of("gsm8k", data, max_tokens)]
    ports, slots, context = (free_port(), free_port()), streams + 1, 2 * (prompt + max_tokens + 512)
    ours = [sys.executable, "-m", "leapahead", "serve", str(model), "--served-model-name", NAME, *options]
    ours += ["--port", str(ports[0]), "--max-batch", str(slots), "--threads", str(threads), "-c", str(context)]
    theirs = [
        str(llama_server),
        "-m",
        str(model),
        "--port",
        str(ports[1]),
        "-t",
        str(threads),
        "-np",
        str(slots),
        "-kvu",
    ]
    theirs += ["-c", str(context), "--alias", NAME, *llama_options]
    rows = []
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running("leapahead", ours, ports[0], {})),
            stack.enter_context(running("llama-server", theirs, ports[1], {"cache_prompt": False})),
        ]
        found: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
        text, used = " ".join(str(body["prompt"]) for body in questions[100:]), 0
        for turn in range(rounds + 1):  # the first is a warm-up
            for server in servers:
                some, used = questions[used : used + streams], used + streams
                # Another beginning each time, so that nothing of it is in a cache.
                tokens = httpx.post(f"{servers[0].url}/tokenize", json={"prompt": f"{used} {text}"}).json()["tokens"]
                if len(tokens) < prompt:
                    most = f"all questions together have {len(tokens)} tokens"
                    raise BadParameter(f"--prompt {prompt} is not possible: {most}; give fewer")
                long = httpx.post(f"{servers[0].url}/detokenize", json={"tokens": tokens[:prompt]}).json()["prompt"]
                passed = asyncio.run(measured(server, some, long, max_tokens))
                if turn:
                    found[server.name].append(passed)
        rows = [row_of(each, streams, prompt) for each in found.values()]
    show(COLUMNS, [cells(row) for row in rows])
    if out is not None:
        report: dict[str, Any] = {"figure": "serving-stall", "rows": rows}
        report["conditions"] = conditions(
            model=model.name,
            threads=threads,
            rounds=rounds,
            max_tokens=max_tokens,
            options=list(options),
            llama_options=list(llama_options),
        )
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
