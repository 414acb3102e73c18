"""`python -m research serving`: leapahead's server beside llama.cpp's, on one GGUF file, under one client.

    workload    prompts                          what is asked for
    gsm8k       questions of GSM8K               /v1/completions, greedy
    chat        short tasks of Spec-Bench        /v1/chat/completions, temperature 1, a seed for each request
    edit        HumanEval's functions            /v1/completions, greedy, with `prediction` where the server knows it

Chats are sampled from the whole distribution: servers differ in what they do where a request leaves top-k, top-p and
min-p open.

A stand-in cannot edit code. So the prediction of an edit is the text that leapahead's server gives without drafts,
every tenth word of it replaced: a simulated edit, of which about nine tenths stay as they were. It comes from a server
of its own, so that the measured one has not seen the text. (llama.cpp's server may give other texts: greedy decoding
with rounded weights depends on the engine and on the requests beside it.)

All servers run all the time and take turns. So many clients as are concurrent send one request after the other. Every
pass has prompts of its own, so that nothing is known from an earlier one.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import httpx
import numpy as np

from leapahead.bench.conditions import conditions
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter, LeapaheadError
from research.command_parts import show
from research.edits import simulated

START_SECONDS = 120.0
CONTEXT = 1024  # tokens of each sequence
LONG = ("summarization", "rag")  # tasks of Spec-Bench with prompts of a thousand tokens
NAME = "model"
BESIDE = "leapahead, other options"
Question = tuple[str, dict[str, Any]]  # path and body of a request


@dataclass
class Server:
    """A server that runs.

    Attributes:
        name: of its row.
        url: where it is.
        extra: further members of each request.
        process_id: of the server.
    """

    name: str
    url: str
    extra: dict[str, Any]
    process_id: int


@dataclass
class Answer:
    """What a client saw of one request, in seconds from its sending.

    Attributes:
        tokens: by the server's own count.
        times: of each piece of the text.
        text: the whole.
    """

    tokens: int = 0
    times: list[float] = field(default_factory=list)
    text: str = ""


@contextmanager
def running(name: str, command: Sequence[str], port: int, extra: dict[str, Any]) -> Iterator[Server]:
    """A server from its start, when it answers /health, to its end."""
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:

        def last_words() -> str:
            log.seek(0)
            return " ".join(log.read().split()[-60:])

        try:
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() > until:
                    raise LeapaheadError(f"{name} did not start: {last_words()}")
                time.sleep(0.2)
            yield Server(name, url, extra, process.pid)
        except httpx.TransportError as error:
            if process.poll() is None:
                raise
            raise LeapaheadError(f"{name} has ended with {process.returncode}: {last_words()}") from error
        finally:
            process.terminate()


def served(name: str, model: Path, most: int, threads: int, options: Sequence[str]) -> AbstractContextManager[Server]:
    """Our server, for so many requests at a time."""
    port = free_port()
    command = [sys.executable, "-m", "leapahead", "serve", str(model), "--served-model-name", NAME, "--port", str(port)]
    return running(name, [*command, "--max-batch", str(most), "--threads", str(threads), *options], port, {})


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1.0).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def requests_of(workload: str, data: Path, tokens: int) -> list[Question]:
    """Path and body of each request of a workload; as many as there are prompts."""
    file = {"gsm8k": "gsm8k_test.jsonl", "chat": "spec_bench.jsonl", "edit": "humaneval.jsonl"}[workload]
    try:
        rows = [json.loads(line) for line in (data / file).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise BadParameter(f"the prompts {str(data / file)!r} cannot be read: {error.strerror}") from None
    if workload == "chat":
        rows = [row for row in rows if row["category"] not in LONG]
        random.Random(0).shuffle(rows)  # the file has them by category
    common = {"model": NAME, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens}
    found: list[Question] = []
    for index, row in enumerate(rows):
        if workload == "chat":
            messages = [{"role": "user", "content": row["turns"][0]}]
            sampled = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1 + index}
            found.append(("/v1/chat/completions", {**common, "messages": messages, **sampled}))
        else:
            prompt = row["question"] if workload == "gsm8k" else row["prompt"]
            found.append(("/v1/completions", {**common, "prompt": prompt, "temperature": 0.0, "ignore_eos": True}))
    return found


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Sends one request and reads its stream."""
    answer, began = Answer(), time.perf_counter()
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise LeapaheadError(f"{client.base_url}{path} answered {response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if usage := event.get("usage"):
                answer.tokens = usage["completion_tokens"]
            for choice in event["choices"]:
                if piece := choice.get("text") or choice.get("delta", {}).get("content"):
                    answer.times.append(time.perf_counter() - began)
                    answer.text += piece
    return answer


async def pass_of(server: Server, bodies: Sequence[Question], concurrent: int) -> dict[str, Any]:
    """All requests, so many at a time: tokens per second, latencies, and the texts."""
    answers, waiting = [Answer()] * len(bodies), list(enumerate(bodies))[::-1]
    limits = httpx.Limits(max_connections=concurrent, max_keepalive_connections=0)  # llama.cpp's server closes them
    async with httpx.AsyncClient(base_url=server.url, timeout=600.0, limits=limits) as client:

        async def one_client() -> None:
            while waiting:
                index, (path, body) = waiting.pop()
                answers[index] = await ask(client, path, {**body, **server.extra})

        began = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(concurrent)))
        seconds = time.perf_counter() - began
    between = [1e3 * gap for answer in answers for gap in np.diff(answer.times)]
    per_token = [
        1e3 * (answer.times[-1] - answer.times[0]) / (answer.tokens - 1)
        for answer in answers
        if answer.tokens > 1 and len(answer.times) > 1
    ]
    return {
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "first_ms": median(1e3 * answer.times[0] for answer in answers if answer.times),
        "token_ms": _quantiles(per_token),
        "piece_ms": _quantiles(between),
        "texts": [answer.text for answer in answers],
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the 95th percentile.

    Raises:
        BadParameter: there are no values, since every answer was so short that it came in one piece.
    """
    if not values:
        raise BadParameter("every answer came in one piece, so there are no times between pieces; raise --max-tokens")
    return {"p50": float(np.quantile(values, 0.5)), "p95": float(np.quantile(values, 0.95))}


def with_predictions(bodies: Sequence[Question], texts: Sequence[str]) -> list[Question]:
    """The requests with what the text will be, every tenth word changed."""
    found = []
    for (path, body), text in zip(bodies, texts, strict=True):
        found.append((path, {**body, "prediction": {"type": "content", "content": simulated(text)}}))
    return found


async def measured(
    ours: Sequence[Server],
    theirs: Server,
    plain: Server | None,
    questions: Iterator[list[Question]],
    workload: str,
    concurrent: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """A row for each server: the medians of its rounds, in which the servers take turns. The first round is a warm-up.

    Args:
        ours, theirs: the servers.
        plain: leapahead's server without drafts, which gives the texts of the predictions.
        questions: of each pass.
    """
    servers = [*ours, theirs]
    passes: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    for turn in range(rounds + 1):
        bodies = asked = next(questions)
        if plain is not None:
            asked = with_predictions(bodies, (await pass_of(plain, bodies, concurrent))["texts"])
        for server in servers if turn % 2 == 0 else servers[::-1]:
            found = await pass_of(server, bodies if server is theirs else asked, concurrent)
            if turn:
                passes[server.name].append(found)
    rows = []
    for name, done in passes.items():
        row: dict[str, Any] = {"workload": workload, "concurrent": concurrent, "server": name}
        for key in ("tokens_per_second", "first_ms"):
            row[key] = median(each[key] for each in done)
        for key in ("token_ms", "piece_ms"):
            row[key] = {p: median(each[key][p] for each in done) for p in ("p50", "p95")}
        pairs = zip(done, passes[theirs.name], strict=True)
        row["ratios"] = [each["tokens_per_second"] / other["tokens_per_second"] for each, other in pairs]
        rows.append(row)
    return rows


def in_passes(questions: Sequence[Question], count: int, passes: int, workload: str) -> Iterator[list[Question]]:
    """So many questions for each pass, each asked once: what a server has answered before it may know.

    Raises:
        BadParameter: there are not enough of them.
    """
    if count * passes > len(questions):
        raise BadParameter(
            f"{passes} passes of {count} requests need {count * passes} prompts, and there are {len(questions)} of "
            f"{workload}; give fewer --concurrent, --requests or --rounds"
        )
    return iter([list(questions[start : start + count]) for start in range(0, count * passes, count)])


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    ratios = row["ratios"]
    return [
        row["workload"],
        str(row["concurrent"]),
        row["server"],
        f"{row['tokens_per_second']:.1f}",
        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{row['first_ms']:.0f}",
        f"{row['token_ms']['p50']:.1f} / {row['token_ms']['p95']:.1f}",
        f"{row['piece_ms']['p50']:.1f} / {row['piece_ms']['p95']:.1f}",
    ]


COLUMNS = ("workload", "concurrent", "server", "tokens/s", "ratio", "first, ms", "a token, ms", "a piece, ms")


def compared(files: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a command that compares the two servers on a model.

    Args:
        files: that the data folder must have, for the help.
    """
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    folder = click.Path(exists=True, file_okay=False, path_type=Path)
    options = (
        click.argument("model", type=file),
        click.option("--llama-server", required=True, type=file, help="llama.cpp's server."),
        click.option("--data", required=True, type=folder, metavar="FOLDER", help=f"Folder of {files}."),
        click.option(
            "--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Threads of a server."
        ),
        click.option("--serve-option", "options", multiple=True, help="Option of `leapahead serve`; may be repeated."),
        click.option("--out", type=click.Path(path_type=Path), help="Write the figures as JSON."),
    )

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command(cls=Command)
@compared("gsm8k_test.jsonl, spec_bench.jsonl and humaneval.jsonl")
@click.option(
    "--concurrent",
    "levels",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1, 4),
    show_default=True,
    help="Requests at a time; may be repeated.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(("gsm8k", "chat", "edit")),
    default=("gsm8k", "chat", "edit"),
    show_default=True,
    help="A workload; may be repeated.",
)
@click.option(
    "--beside",
    multiple=True,
    metavar="OPTION",
    help="Measure another `leapahead serve` in the same turns, with these options more; may be repeated.",
)
@click.option(
    "--requests", "count", type=click.IntRange(min=1), default=8, show_default=True, help="Requests of a pass."
)
@click.option("--max-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens of an answer.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Passes that are counted.")
def main(
    model: Path,
    llama_server: Path,
    data: Path,
    levels: tuple[int, ...],
    workloads: tuple[str, ...],
    beside: tuple[str, ...],
    count: int,
    max_tokens: int,
    rounds: int,
    threads: int,
    options: tuple[str, ...],
    out: Path | None,
) -> None:
    """Measure leapahead's server beside llama.cpp's on a GGUF file: tokens per second and latencies."""
    most, port = max(levels), free_port()
    theirs = [str(llama_server), "-m", str(model), "--port", str(port), "-t", str(threads), "-np", str(most)]
    theirs += ["-c", str(CONTEXT * most), "--alias", NAME]
    passes = len(levels) * (rounds + 1)
    questions = {
        workload: in_passes(requests_of(workload, data, max_tokens), count, passes, workload) for workload in workloads
    }
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ours = [
            stack.enter_context(served(name, model, most, threads, given))
            for name, given in (("leapahead", options), (BESIDE, (*options, *beside)))[: 1 + bool(beside)]
        ]
        last = stack.enter_context(running("llama-server", theirs, port, {"cache_prompt": False}))
        undrafted = ("--drafter", "plain", *options)
        plain = {w: stack.enter_context(served(w, model, most, threads, undrafted)) for w in workloads if w == "edit"}
        for workload in workloads:
            for concurrent in levels:
                texts = plain.get(workload)
                rows += asyncio.run(measured(ours, last, texts, questions[workload], workload, concurrent, rounds))
                show(COLUMNS, [cells(row) for row in rows[-len(ours) - 1 :]])
    show(COLUMNS, [cells(row) for row in rows])
    if out is not None:
        found: dict[str, Any] = {"figure": "serving", "rows": rows}
        found["conditions"] = conditions(
            model=model.name,
            threads=threads,
            rounds=rounds,
            requests=count,
            max_tokens=max_tokens,
            options=list(options),
            beside=list(beside),
        )
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
