"""`python -m research serving-memory`: memory of `leapahead serve` over thousands of mixed requests.

Whole answers and streams, several samples, seeds, stop strings, predictions, chats, and clients that leave, at random
times. After every part, when the server is idle, its resident memory and its KV cache usage are read.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import click
import httpx

from leapahead.bench.conditions import conditions
from leapahead.cli.command import Command
from leapahead.core.errors import LeapaheadError
from research.command_parts import show
from research.serving import NAME, Server, free_port, running

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "def",
    "add",
    "(",
    ")",
    ":",
    "return",
    "1",
    "2",
    "3",
    "once",
    "upon",
    "a",
    "time",
)
IDLE_SECONDS = 60.0


def question(rng: random.Random, seed: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request of any kind."""
    text = " ".join(rng.choices(WORDS, k=rng.choice([1, 8, 40, 120])))
    body: dict[str, Any] = {"model": NAME, "max_tokens": rng.choice([1, 8, 24, 64])}
    if rng.random() < 0.5:
        body |= {"temperature": rng.choice([0.7, 1.0]), "seed": seed}
    else:
        body["temperature"] = 0
    if rng.random() < 0.3:
        body["stop"] = rng.sample(["e", "th", "\n\n", "return", "Z"], 2)
    if rng.random() < 0.2:
        body["n"] = rng.choice([2, 3])
    if rng.random() < 0.2:
        body["prediction"] = {"type": "content", "content": " ".join(rng.choices(WORDS, k=20))}
    if rng.random() < 0.1:
        body["response_format"] = {"type": "json_object"}
    if rng.random() < 0.2:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {**body, "prompt": text}


async def ask(client: httpx.AsyncClient, rng: random.Random, seed: int, aborts: float) -> bool:
    """One request, which is left before its end with the probability `aborts`. Whether it was left."""
    path, body = question(rng, seed)
    leave = rng.random() < aborts
    if leave:
        body |= {"max_tokens": 400, "ignore_eos": True, "stop": None, "response_format": None}
    if rng.random() < 0.5:
        async with client.stream("POST", path, json={**body, "stream": True}) as response:
            await _checked(response)
            after = rng.randrange(6) if leave else -1
            async for _ in response.aiter_lines():
                after -= 1
                if after == -1:
                    break
    elif leave:
        try:
            await _checked(await client.post(path, json=body, timeout=rng.uniform(0.01, 0.3)))
            return False  # the answer came before
        except httpx.TimeoutException:  # also of the connection, where the machine is busy
            pass
    else:
        await _checked(await client.post(path, json=body))
    return leave


async def _checked(response: httpx.Response) -> None:
    if response.status_code != 200:
        raise LeapaheadError(f"the server answered {response.status_code}: {(await response.aread())!r}")


async def part(server: Server, rng: random.Random, first: int, count: int, concurrent: int, aborts: float) -> int:
    """So many requests, so many at a time. Returns how many were left before their end."""
    waiting, left = list(range(first, first + count)), 0
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as client:

        async def one_client() -> None:
            nonlocal left
            while waiting:
                found = await ask(client, rng, waiting.pop(), aborts)
                left += found

        await asyncio.gather(*(one_client() for _ in range(concurrent)))
        for _ in range(int(IDLE_SECONDS / 0.1)):
            if not sum(await metrics(client, "num_requests_running", "num_requests_waiting")):
                return left
            await asyncio.sleep(0.1)
    raise LeapaheadError(f"requests were still running {IDLE_SECONDS:g} seconds after the last answer")


async def metrics(client: httpx.AsyncClient, *names: str) -> list[float]:
    """The sum of all series of each of these names."""
    lines = (await client.get("/metrics")).text.splitlines()
    return [
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == f"vllm:{name}") for name in names
    ]


def resident(process_id: int) -> float:
    """Resident memory of a process in MB."""
    status = Path(f"/proc/{process_id}/status")
    try:
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
    except OSError:
        raise LeapaheadError("the resident memory of a process can be read on Linux only") from None
    return int(lines["VmRSS"].split()[0]) * 1024 / 1e6


async def _usage(server: Server) -> float:
    async with httpx.AsyncClient(base_url=server.url, timeout=30.0) as client:
        return (await metrics(client, "kv_cache_usage_perc"))[0]


@click.command(cls=Command)
@click.argument("model", required=False)
@click.option(
    "--requests", "count", type=click.IntRange(min=1), default=1000, show_default=True, help="Requests of a part."
)
@click.option(
    "--parts", type=click.IntRange(min=2), default=10, show_default=True, help="Memory is read after each part."
)
@click.option("--concurrent", type=click.IntRange(min=1), default=8, show_default=True, help="Requests at a time.")
@click.option(
    "--aborts",
    type=click.FloatRange(0, 1),
    default=0.1,
    show_default=True,
    help="Share of the clients that leave early.",
)
@click.option("--serve-option", "options", multiple=True, help="Option of `leapahead serve`; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(
    model: str | None,
    count: int,
    parts: int,
    concurrent: int,
    aborts: float,
    options: tuple[str, ...],
    out: Path | None,
) -> None:
    """Read the memory of leapahead's server after every thousand mixed requests, the bundled model's by default."""
    port, rng = free_port(), random.Random(0)
    command = [sys.executable, "-m", "leapahead", "serve", *([model] if model else []), "--served-model-name", NAME]
    command += ["--port", str(port), "--max-batch", str(concurrent), *options]
    rows: list[dict[str, Any]] = []
    with running("leapahead", command, port, {}) as server:
        for index in range(parts):
            left = asyncio.run(part(server, rng, index * count, count, concurrent, aborts))
            row = {"requests": (index + 1) * count, "left": left, "resident_mb": resident(server.process_id)}
            rows.append({**row, "kv_cache_usage": asyncio.run(_usage(server))})
            show(("requests", "left", "resident, MB", "of the first", "KV cache"), [cells(rows[-1], rows[0])])
    if out is not None:
        found: dict[str, Any] = {"figure": "serving-memory", "rows": rows}
        found["conditions"] = conditions(model=model or "bundled", concurrent=concurrent, aborts=aborts)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def cells(row: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """A line of the table."""
    ratio = row["resident_mb"] / first["resident_mb"]
    resident_mb, usage = f"{row['resident_mb']:.1f}", f"{row['kv_cache_usage']:g}"
    return [str(row["requests"]), str(row["left"]), resident_mb, f"{ratio:.3f}", usage]
