"""Many requests at once: every text is that of the library alone, whatever joins, leaves and fails beside it."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from leapahead import LLM, AsyncLLM
from leapahead.core.stats import Stats
from leapahead.inputs import Options
from leapahead.serve.errors import ApiError
from leapahead.serve.settings import Limits, Settings
from leapahead.serve.worker import Job, Worker
from tests.serving import Letters, Running, SlowToy, serving, toy_llm

PROMPTS = [
    "the quick brown fox",
    "def add(a, b):",
    "1 2 3 4 1 2 3 4 1 2",
    "once upon a time there was",
    "abc abc abc abd",
]


def case(index: int) -> dict[str, Any]:
    """The parameters of a request, of many kinds."""
    rng = random.Random(index)
    found: dict[str, Any] = {"prompt": rng.choice(PROMPTS) + str(index % 7), "max_tokens": rng.choice([1, 5, 20, 60])}
    found["temperature"] = rng.choice([0, 0, 0.7, 1.0])
    if found["temperature"]:
        found["seed"] = index
    if rng.random() < 0.3:
        found["stop"] = rng.sample(["e", "th", "q!", "  ", "Z"], 2)
    if rng.random() < 0.3:
        found["n"] = rng.choice([2, 3])
    if rng.random() < 0.2:
        found["presence_penalty"] = 0.7
    if rng.random() < 0.2:
        found["prediction"] = {"type": "content", "content": "the fox jumps over"}
    return found


def alone(llm: LLM, given: dict[str, Any]) -> list[str]:
    options = dict(given)
    prompt, options["max_new_tokens"], samples = options.pop("prompt"), options.pop("max_tokens"), options.pop("n", 1)
    options.pop("prediction", None)  # never changes a text
    return [each.text for each in llm.generate(prompt, n=samples, **options)]


async def whole(client: openai.AsyncOpenAI, given: dict[str, Any]) -> tuple[list[str], int]:
    found = await client.completions.create(model="tiny", **_body(given))
    return [choice.text for choice in found.choices], found.usage.completion_tokens


async def streamed(client: openai.AsyncOpenAI, given: dict[str, Any]) -> tuple[list[str], int]:
    texts, tokens = [""] * given.get("n", 1), 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with await client.completions.create(model="tiny", **_body(given), **options) as stream:
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            tokens = chunk.usage.completion_tokens if chunk.usage else 0
    return texts, tokens


async def leave(running: Running, given: dict[str, Any], lines: int | None) -> None:
    """Asks for a stream, reads so many lines, and closes the connection; None: asks for a whole text and waits a bit.

    The socket is read directly: the openai client leaves the generators of a stream that is not read to its end to the
    garbage collector, which sometimes closes two of them at once, and that is an error of its own.
    """
    host, port = httpx.URL(running.url).host, httpx.URL(running.url).port
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps({**given, "model": "tiny", "stream": lines is not None}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        if lines is None:
            await asyncio.sleep(random.Random(len(body)).random() * 0.1)
            return
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        while await reader.readline() != b"\r\n":
            pass
        for _ in range(lines):
            assert await reader.readline()
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def _body(given: dict[str, Any]) -> dict[str, Any]:
    body = dict(given)
    extra = {name: body.pop(name) for name in ("prediction", "ignore_eos") if name in body}
    return {**body, "extra_body": extra}


async def crowd(running: Running, count: int, aborts: int) -> int:
    """Requests that come at random times, some of which leave before their end. Returns tokens of the others."""
    rng = random.Random(0)
    with LLM(SlowToy(), tokenizer=running.llm.tokenizer, drafter="plain") as plain:
        expected = [alone(plain, case(index)) for index in range(count)]
    total = 0
    async with running.asynchronous() as client:

        async def one(index: int) -> None:
            nonlocal total
            await asyncio.sleep(rng.random())
            make = whole if index % 2 else streamed
            texts, tokens = await make(client, case(index))
            assert texts == expected[index], case(index)
            total += tokens

        async def abort(index: int) -> None:
            given = {**case(index), "max_tokens": 500, "stop": None, "ignore_eos": True}
            await asyncio.sleep(rng.random())
            await leave(running, given, rng.randrange(12) if index % 2 else None)

        await asyncio.gather(*map(one, range(count)), *map(abort, range(aborts)))
    return total


def check_crowd(count: int, aborts: int, seconds: float) -> None:
    # The client has connected to all at once and may take long to send its last headers.
    limits = {"queue": 10_000, "header_seconds": 300.0}
    with serving(LLM(SlowToy(seconds), tokenizer=Letters()), limits) as running:
        total = asyncio.run(crowd(running, count, aborts))
        assert running.idle()
        assert running.metric("num_requests_running") == running.metric("num_requests_waiting") == 0
        assert running.metric("kv_cache_usage_perc") == 0
        assert running.metric("generation_tokens_total") >= total
        if not aborts:
            assert running.metric("generation_tokens_total") == total


def test_every_text_of_a_crowd_is_that_of_the_library() -> None:
    check_crowd(60, 30, 0.0005)


@pytest.mark.slow
def test_usage_adds_up_to_the_counters() -> None:
    check_crowd(20, 0, 0.0)


@pytest.mark.slow
def test_every_text_of_a_large_crowd() -> None:
    check_crowd(200, 1000, 0.0005)


@pytest.mark.slow
def test_the_bundled_model_with_others_beside_it() -> None:
    """Real caches: rows are shared, copied and freed."""
    prompts = ["def add(a, b):\n", "def add(a, c):\n", "1, 2, 3, 4,"]
    with LLM() as llm:
        expected = {
            (prompt, seed): llm.generate(
                prompt, max_new_tokens=16, temperature=0.0 if seed < 1 else 0.9, seed=seed
            ).text
            for prompt in prompts
            for seed in range(3)
        }

    async def all_of_them(running: Running) -> None:
        async with running.asynchronous() as client:

            async def one(prompt: str, seed: int) -> None:
                given = {"prompt": prompt, "max_tokens": 16, "temperature": 0 if seed < 1 else 0.9, "seed": seed}
                texts, _ = await (streamed if seed % 2 else whole)(client, given)
                assert texts == [expected[prompt, seed]]

            async def abort(prompt: str) -> None:
                await leave(running, {"prompt": prompt, "max_tokens": 500, "ignore_eos": True}, lines=9)

            await asyncio.gather(*(one(*key) for key in expected), *map(abort, prompts))

    with serving(LLM()) as running:
        asyncio.run(all_of_them(running))
        assert running.idle()
        assert not any(row.busy for row in running.llm.target.executor.cache.rows)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------ queue and time


def test_a_full_queue_is_answered_with_429() -> None:
    async def flood(running: Running) -> list[int]:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"prompt": "a", "max_tokens": 30, "ignore_eos": True}

            async def one() -> httpx.Response:
                return await client.post(f"{running.url}/v1/completions", json=body)

            found = await asyncio.gather(*(one() for _ in range(10)))
            refused = [each for each in found if each.status_code == 429]
            assert all(int(each.headers["retry-after"]) >= 1 for each in refused)
            assert all(each.json()["error"]["code"] == "queue_full" for each in refused)
            return sorted(each.status_code for each in found)

    with serving(toy_llm(0.002, max_batch=2), {"queue": 3}) as running:
        assert asyncio.run(flood(running)) == [200] * 5 + [429] * 5
        too_many = running.post("/v1/completions", {"prompt": "a", "n": 6})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")


def test_first_come_first_served() -> None:
    async def in_turn(running: Running) -> list[int]:
        done: list[int] = []
        async with running.asynchronous() as client:

            async def one(index: int) -> None:
                while len(done) + running.worker.pending < index:  # those before it have arrived
                    await asyncio.sleep(0.001)
                await whole(client, {"prompt": "a", "max_tokens": 40, "seed": 1})
                done.append(index)

            await asyncio.gather(*map(one, range(5)))
        return done

    with serving(toy_llm(0.002, max_batch=1)) as running:
        assert asyncio.run(in_turn(running)) == list(range(5))


def test_a_client_that_leaves_is_cancelled() -> None:
    """Before the answer, and in the middle of a stream."""
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
    with serving(toy_llm(0.01)) as running:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json=body, timeout=0.2)
        assert running.idle(2)
        with httpx.stream("POST", f"{running.url}/v1/completions", json={**body, "stream": True}) as stream:
            next(stream.iter_lines())
        assert running.idle(2)
        assert running.metric("request_success_total") == 2
        assert 'finished_reason="abort",model_name="tiny"} 2.0' in running.get("/metrics").text
        assert running.metric("generation_tokens_total") < 200


def test_a_client_that_does_not_read_is_not_decoded_for() -> None:
    """Its text stops a few outputs ahead of its reader, and others go on; then it gets the whole text."""
    settings = Settings(names=("tiny",), limits=Limits(unread=5))

    async def read() -> None:
        async with AsyncLLM(LLM(SlowToy(), tokenizer=Letters(), drafter="plain")) as llm:
            worker = Worker(llm, settings)
            options: Options = {"max_new_tokens": 60, "ignore_eos": True, "n": 1}
            pieces = worker.pieces(Job([[1, 2, 3]], options, ""))
            batch, _, _ = await anext(pieces)
            other = await worker.whole(Job([[4, 5]], options, ""))
            assert len(other[1][0].tokens) == 60
            await asyncio.sleep(0.05)
            assert len(batch.handles[0].tokens) == 5
            text = "".join([piece.text async for _, _, piece in pieces if piece is not None])
            assert text == llm.llm.generate([1, 2, 3], max_new_tokens=60, ignore_eos=True).text

    asyncio.run(read())


@pytest.mark.slow
def test_deadlines() -> None:
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "leapahead": {"deadline_seconds": 0.2}}
    with serving(toy_llm(0.01), {"request_seconds": 0.4}) as running:
        for seconds, given in ((0.2, body), (0.4, {**body, "leapahead": None})):
            began = time.monotonic()
            found = running.post("/v1/completions", given)
            assert (found.status_code, found.json()["error"]["code"]) == (504, "deadline")
            assert found.headers["x-should-retry"] == "false"
            assert f"{seconds:g} seconds" in found.json()["error"]["message"]
            assert seconds <= time.monotonic() - began < seconds + 2
            assert running.idle(1)
        began = time.monotonic()  # the time for the prompt's log-probabilities counts as well
        found = running.post("/v1/completions", {**body, "prompt": "a" * 12, "echo": True, "logprobs": 1})
        assert found.status_code == 504
        assert time.monotonic() - began < 0.3
        streamed_body = running.post("/v1/completions", {**body, "stream": True}).text
        assert '"code": "deadline"' in streamed_body
        assert running.idle(1)


def test_the_deadline_of_a_stream_that_is_read_slowly() -> None:
    """Its reader always finds the next output there, and so never waits."""
    settings = Settings(names=("tiny",), limits=Limits(unread=2))

    async def read() -> None:
        async with AsyncLLM(LLM(SlowToy(), tokenizer=Letters(), drafter="plain")) as llm:
            worker, options = Worker(llm, settings), Options(max_new_tokens=60, ignore_eos=True, n=1)
            async for piece in worker.pieces(Job([[1, 2, 3]], options, "", deadline_seconds=0.1)):
                found.append(piece)
                await asyncio.sleep(0.02)

    found: list[Any] = []
    with pytest.raises(ApiError, match=r"longer than its 0\.1 seconds"):
        asyncio.run(read())
    assert len(found) < 20


@pytest.mark.slow
def test_requests_join_while_others_are_decoded() -> None:
    """A short text that comes later is finished long before a long one."""

    async def both(running: Running) -> list[str]:
        done: list[str] = []
        async with running.asynchronous() as client:

            async def one(name: str, tokens: int, wait: float) -> None:
                await asyncio.sleep(wait)
                await whole(client, {"prompt": "a", "max_tokens": tokens, "ignore_eos": True})
                done.append(name)

            await asyncio.gather(one("long", 300, 0.0), one("short", 3, 0.1))
        return done

    with serving(LLM(SlowToy(0.003), tokenizer=Letters(), drafter="plain")) as running:
        assert asyncio.run(both(running)) == ["short", "long"]


@pytest.mark.slow
def test_a_client_that_never_reads_is_cancelled() -> None:
    """Its text fills the socket's buffers and stops; then the connection is closed and the cache entries are free."""
    body = json.dumps({"prompt": "a", "max_tokens": 900, "stream": True, "ignore_eos": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with serving(toy_llm(), {"send_seconds": 0.5, "unread": 2}) as running, socket.socket() as client:
        running.server.servers[0].sockets[0].setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
        )  # of connections, too
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", httpx.URL(running.url).port))
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        ends = time.monotonic() + 10
        while not running.metric("num_requests_running"):
            assert time.monotonic() < ends
        assert running.idle(20)
        assert 0 < running.metric("generation_tokens_total") < 900
        assert 'finished_reason="abort",model_name="tiny"} 1.0' in running.get("/metrics").text


@pytest.mark.slow
def test_a_client_that_never_reads_does_not_disturb_the_end(caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 900, "stream": True, "ignore_eos": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with socket.socket() as client, serving(toy_llm(), {"shutdown_seconds": 0.1}) as running:
        running.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", httpx.URL(running.url).port))
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.5)
        assert running.worker.pending == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_its_whole_text() -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 900, "stream": True, "ignore_eos": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with serving(toy_llm(), {"send_seconds": 0.5}) as running, socket.socket() as client:
        running.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", httpx.URL(running.url).port))
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        found, began = b"", time.monotonic()
        while piece := client.recv(4096):
            found += piece
            if time.monotonic() - began < 2:
                time.sleep(0.1)
        assert b"data: [DONE]" in found


class SlowToShow(Letters):
    """A tokenizer that takes long for the text of a single token, as for that of hundreds of thousands."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        if len(token_ids) == 1 and not skip_special_tokens:
            time.sleep(0.01)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    "given", [{"prompt_logprobs": 20}, {"logprobs": 20, "echo": True, "stream": True}], ids=["whole", "stream"]
)
def test_others_are_answered_while_log_probabilities_are_put_into_words(given: dict[str, Any]) -> None:
    llm = LLM(SlowToy(), tokenizer=SlowToShow(), drafter="plain")
    with serving(llm) as running, ThreadPoolExecutor() as pool:
        body = {"prompt": "the quick brown fox jumps over the lazy dog", "max_tokens": 40, **given}
        running.get("/health")
        answer = pool.submit(running.post, "/v1/completions", body)
        waits = []
        while not answer.done():
            began = time.perf_counter()
            assert running.get("/health").status_code == 200
            waits.append(time.perf_counter() - began)
        assert answer.result().status_code == 200
        assert max(waits) < 0.6  # the texts of all tokens take a second


def test_usage_in_every_chunk_of_many_texts_is_no_sum_of_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    summed, add = list[Stats](), Stats.__add__
    monkeypatch.setattr(Stats, "__add__", lambda one, other: summed.append(other) or add(one, other))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPTS, "max_tokens": 6, "stream": True, "stream_options": options, "ignore_eos": True}
    with serving(toy_llm()) as running:
        text = running.post("/v1/completions", body).text
        assert running.idle()
    usages = [json.loads(line[6:])["usage"] for line in text.splitlines() if line[:6] == "data: " and "usage" in line]
    assert usages[-1]["completion_tokens"] == 30
    assert len(usages) > 10
    assert len(summed) < 5 * len(PROMPTS)  # of the log and the metrics
