"""What an operator relies on: keys, drafter caches, metrics, logs, CORS, the schema, and an orderly end."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import gguf_models
import httpx
import numpy as np
import pytest
from helpers import mostly_slow
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from leapahead import LLM
from leapahead.cli.serve import is_loopback
from leapahead.cli.served import model_defaults
from leapahead.core.errors import BadParameter
from leapahead.engine.request import Handle
from leapahead.grammar import Grammars
from leapahead.models.toy import ToyTarget
from leapahead.serve import keys, server
from leapahead.serve.metrics import LABELS, SHORT, Metrics
from leapahead.serve.prompts import Texts
from leapahead.serve.settings import Limits, Settings
from tests.serving import NO_TLS, Letters, Running, SlowToy, serving, toy_llm

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 5}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --------------------------------------------------------------------------------------------------------------- keys


def test_requests_need_a_key() -> None:
    with serving(toy_llm(), keys=("one", "two")) as running:
        for key in ("one", "two"):
            assert running.post(COMPLETIONS, BODY, headers=bearer(key)).status_code == 200
            assert running.client(key).completions.create(model="tiny", prompt="a").choices
        for headers in ({}, bearer("three"), bearer("onetwo"), bearer("o"), {"Authorization": "Basic one"}):
            for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/nothing"):
                found = running.post(path, BODY, headers=headers)
                assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
                assert found.headers["www-authenticate"] == "Bearer"
        assert running.get("/v1/models").status_code == 401
        for path in ("/health", "/metrics", "/openapi.json"):
            assert running.get(path).status_code == 200


def test_where_keys_come_from(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeff# ours\n\n  second \nthird\n", encoding="utf-8")
    assert keys.given(["first"], file, "fourth, first") == ("first", "second", "third", "fourth")
    assert keys.given([], None, None) == keys.given([], None, " ") == ()
    for given in (["a b"], [""], ["é"]):
        with pytest.raises(BadParameter, match="visible ASCII"):
            keys.given(given, None, None)
    file.write_text("# none\n")
    with pytest.raises(BadParameter, match="has no key"):
        keys.given([], file, None)
    with pytest.raises(BadParameter, match="cannot be read"):
        keys.given([], tmp_path / "nothing", None)


@pytest.mark.slow
def test_drafter_caches_and_prefixes_of_keys_are_apart(tmp_path: Path) -> None:
    """What one key's texts teach is drafted for that key only, and survives a restart."""
    file = tmp_path / "drafts.npz"
    body = {"prompt": "def add(a, b): return", "max_tokens": 40, "temperature": 0, "leapahead": {"stats": True}}

    def accepted(running: Running, key: str) -> int:
        found = running.post(COMPLETIONS, body, headers=bearer(key) if key else {})
        return int(found.json()["leapahead"]["accepted"])

    with serving(toy_llm(drafter_cache=file), keys=("one", "two")) as running:
        fresh = accepted(running, "one")
        assert accepted(running, "one") > fresh
        assert accepted(running, "two") == fresh
    files = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".npz")
    names = [f"drafts-{keys.identity(key)}.npz" for key in ("one", "two")]
    assert files == sorted([*names, "drafts.npz"])
    with serving(toy_llm(drafter_cache=file), keys=("one", "three")) as running:
        assert accepted(running, "one") > fresh
        assert accepted(running, "three") == fresh
    with serving(toy_llm(), keys=("one", "two"), share_drafter_cache=True) as running:
        accepted(running, "one")
        assert accepted(running, "two") > fresh


def test_a_drafter_cache_that_cannot_be_written_is_one_error_of_the_log(tmp_path: Path) -> None:
    """The others are saved."""
    folder = tmp_path / "caches"
    folder.mkdir()
    with logged() as lines, serving(toy_llm(drafter_cache=folder / "drafts.npz"), keys=("one", "two")) as running:
        for key in ("one", "two"):
            assert running.post(COMPLETIONS, BODY, headers=bearer(key)).status_code == 200
        file = folder / f"drafts-{keys.identity('one')}.npz"
        file.mkdir()
    ends = {line["file"]: line for line in lines if line["event"].startswith("drafter_cache")}
    assert [line["event"] for line in ends.values()].count("drafter_cache_saved") == 2
    assert (ends[str(file)]["event"], ends[str(file)]["level"]) == ("drafter_cache_not_saved", "error")
    assert "cannot" in ends[str(file)]["reason"]


def test_cache_entries_of_prompts_are_shared_within_a_key() -> None:
    with serving(LLM(), keys=("one", "two")) as running:

        def cached(key: str) -> int:
            body = {"prompt": "def add(a, b):\n    return a + b\n\n" * 3, "max_tokens": 3}
            found = running.post(COMPLETIONS, body, headers=bearer(key)).json()
            return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("one") == 0
        assert cached("one") > 20
        assert cached("two") == 0
        assert cached("two") > 20


def test_a_prompt_that_is_scored_is_not_one_that_was_in_the_cache() -> None:
    """The request reads it twice, at first for the log-probabilities of its tokens."""
    with serving(LLM()) as running:
        for name, asked in (("echo", {"echo": True, "logprobs": 1}), ("more", {"prompt_logprobs": 0})):
            body = {"prompt": f"def {name}(a, b):\n    return a + b\n", "max_tokens": 2, **asked}
            usage = running.post(COMPLETIONS, body).json()["usage"]
            assert usage["prompt_tokens"] > 8
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert running.metric("prefix_cache_queries_total") > 16
        assert running.metric("prefix_cache_hits_total") == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "llama.cpp", "openvino"])
def test_every_target_keeps_the_entries_of_owners_apart(engine: str, request: pytest.FixtureRequest) -> None:
    """The owner is what opens a session; a fork has that of its first session."""
    from leapahead.core.sampling import SamplingParams
    from leapahead.models.base import read_prompt

    tokens, greedy = [5, 6, 7, 8, 9, 10, 11, 12, 13], SamplingParams()
    if engine != "transformers":
        pytest.importorskip({"llama.cpp": "llama_cpp", "openvino": "openvino"}[engine])
    target: Any = _loaded(engine, request).target

    def opened(owner: str) -> Any:
        session = target.open(tokens, greedy, owner=owner)
        unread.append(session.unread)
        if session.unread:
            read_prompt(target, session)
        return session

    unread: list[int] = []
    with target.lock:
        for _ in range(2):
            both = [opened(owner) for owner in ("a", "b")]
            for session in both:
                session.close()
        assert unread == [8, 8, 0, 0]
        one = opened("c")
        twin = target.fork(one, greedy)
        one.close()
        again = [opened(owner) for owner in ("d", "c")]
        assert unread[4:] == [8, 8, 0]
        for session in (twin, *again):
            session.close()


def _loaded(engine: str, request: pytest.FixtureRequest) -> LLM:
    if engine == "transformers":
        return LLM()
    folder = request.getfixturevalue("tmp_path")
    from click.testing import CliRunner

    from leapahead.cli import main
    from leapahead.models.loading import bundled

    if engine == "openvino":
        result = CliRunner().invoke(main, ["export-openvino", bundled(), str(folder / "tiny"), "--weights", "f32"])
        assert result.exit_code == 0, result.output
        return LLM(folder / "tiny")
    result = CliRunner().invoke(main, ["export-gguf", bundled(), str(folder / "tiny.gguf"), "--type", "f32"])
    assert result.exit_code == 0, result.output
    return LLM(folder / "tiny.gguf")


# --------------------------------------------------------------------------------------------------- metrics and logs

NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"),
    *("generation_tokens_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count"),
    *("e2e_request_latency_seconds_count", "request_success_total", "spec_decode_num_drafts_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("spec_decode_num_accepted_tokens_per_pos_total", "num_preemptions_total", "request_decode_time_seconds_count"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_sum", "request_params_n_sum"),
    "request_params_max_tokens_sum",
    *(f"request_{part}_time_seconds_count" for part in ("queue", "prefill", "inference")),
)


def test_metrics_have_vllm_s_names_and_add_up() -> None:
    with serving(toy_llm()) as running:
        text = running.get("/metrics").text
        for name in NAMES:
            assert re.search(rf"^vllm:{name}{{.*model_name=\"tiny\"", text, re.M), name
        found = [
            running.post(
                COMPLETIONS, {"prompt": "abc" * 5, "max_tokens": 30, "n": 2, "seed": 1, "leapahead": {"stats": True}}
            ).json()
            for _ in range(3)
        ]
        assert running.idle()
        usage = [each["usage"] for each in found]
        assert running.metric("prompt_tokens_total") == sum(each["prompt_tokens"] for each in usage)
        assert running.metric("generation_tokens_total") == sum(each["completion_tokens"] for each in usage)
        for ours, theirs in (("draft", "drafted"), ("accepted", "accepted")):
            total = sum(each["leapahead"][theirs] for each in found)
            assert running.metric(f"spec_decode_num_{ours}_tokens_total") == total
        accepted = running.metric("spec_decode_num_accepted_tokens_total")
        assert running.metric("spec_decode_num_accepted_tokens_per_pos_total") == accepted > 0
        assert running.metric("request_success_total") == running.metric("time_to_first_token_seconds_count") == 6
        assert running.metric("request_prompt_tokens_sum") == 2 * sum(each["prompt_tokens"] for each in usage)
        assert running.metric("request_generation_tokens_sum") == running.metric("generation_tokens_total")
        assert running.metric("request_params_max_tokens_sum") == 6 * 30
        assert (running.metric("request_params_n_sum"), running.metric("request_params_n_count")) == (6, 3)
        assert running.metric("request_decode_time_seconds_count") == 6
        assert running.metric("request_decode_time_seconds_sum") < running.metric("e2e_request_latency_seconds_sum")
        parts = [running.metric(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
        assert parts[1] + parts[2] == pytest.approx(running.metric("request_inference_time_seconds_sum"))
        assert min(parts) > 0
        assert sum(parts) <= running.metric("e2e_request_latency_seconds_sum")
        steps = sum(each["leapahead"]["steps"] for each in found)
        assert running.metric("inter_token_latency_seconds_count") == steps - 6


def test_preemptions_are_counted() -> None:
    count = 0
    metrics = Metrics("model", float, float, float, lambda: count)
    for count, expected in ((0, b" 0.0"), (3, b" 3.0"), (3, b" 3.0"), (4, b" 4.0")):
        (line,) = (each for each in metrics.text().splitlines() if each.startswith(b"vllm:num_preemptions_total{"))
        assert line.endswith(expected), count


def test_the_steps_of_a_long_text_are_counted_at_once() -> None:
    metrics = Metrics("model", float, float, float, int)
    gaps = [0.0005, 0.001, 0.002, 0.05, 0.06, 0.3, 9.0, 20.0] * 12_500
    handle = Handle(SimpleNamespace(), finish_reason="stop", times=[1.0, *(1.0 + np.cumsum(gaps))])
    began = time.process_time()
    metrics.finished(handle, 10, 0.5, 2.0)
    assert time.process_time() - began < 0.06  # about 0.01; more than 0.1 where each is counted alone
    expected, name = CollectorRegistry(), "vllm:inter_token_latency_seconds"
    text = "Between the tokens of one step of a text and those of the next."
    histogram = Histogram(name, text, LABELS, buckets=SHORT, registry=expected)
    for one, other in itertools.pairwise(handle.times):
        histogram.labels(model_name="model", engine="0").observe(other - one)
    lines, wanted = (
        [line for line in found.decode().splitlines() if "inter_token" in line and "_created" not in line]
        for found in (metrics.text(), generate_latest(expected))
    )
    numbers = [[float(line.rsplit(" ", 1)[1]) for line in some if line[0] != "#"] for some in (lines, wanted)]
    assert numbers[0] == pytest.approx(numbers[1])
    assert [line.rsplit(" ", 1)[0] for line in lines[2:]] == [line.rsplit(" ", 1)[0] for line in wanted[2:]]
    assert lines[:2] == wanted[:2]


@pytest.mark.slow
def test_gauges_while_requests_run() -> None:
    async def watch(running: Running) -> list[float]:
        async with running.asynchronous() as client:
            body: Any = {"model": "tiny", "prompt": "a", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
            tasks = [asyncio.create_task(client.completions.create(**body)) for _ in range(3)]
            await asyncio.sleep(0.3)
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            found = [await asyncio.to_thread(running.metric, name) for name in names]
            await asyncio.gather(*tasks)
            return found

    with serving(LLM(SlowToy(0.01), tokenizer=Letters(), drafter="plain", max_batch=2)) as running:
        executing, waiting, usage = asyncio.run(watch(running))
        assert (executing, waiting) == (2, 1)
        assert 0 < usage < 1


@contextmanager
def logged() -> Iterator[list[dict[str, Any]]]:
    """The lines that the server logs meanwhile."""
    from leapahead.serve import logs

    found: list[dict[str, Any]] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(logs.JsonLines().format(record)))

    handler = Lines()
    logs.logger.addHandler(handler)
    level = logs.logger.level
    logs.logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logs.logger.removeHandler(handler)
        logs.logger.setLevel(level)


def test_logs_have_no_prompts_unless_asked() -> None:
    labels = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), "somebody")
    secret = {"prompt": "my secret", "max_tokens": 5, "seed": 1, **labels}
    for asked in (False, True):
        llm = toy_llm()
        target: Any = llm.target
        with logged() as lines, serving(llm, keys=("key",), log_prompts=asked) as running:
            found = running.post(COMPLETIONS, secret, headers={**bearer("key"), "X-Request-Id": "one"})
            running.post(COMPLETIONS, {**secret, "stream": True}, headers=bearer("key"))
            running.post(COMPLETIONS, {**secret, "n": 0}, headers=bearer("key"))
            running.post("/nothing", {}, headers=bearer("wrong"))
            target.fail = RuntimeError("broken")
            running.post(COMPLETIONS, {"prompt": "b"}, headers=bearer("key"))
        requests = [line for line in lines if line["event"] == "request"]
        assert [line["status"] for line in requests] == [200, 200, 400, 401, 500]
        first = requests[0]
        assert (first["request_id"], first["key"], first["path"]) == ("one", keys.identity("key"), COMPLETIONS)
        assert first["completion_tokens"] == found.json()["usage"]["completion_tokens"]
        assert first.items() >= labels.items()
        assert ("my secret" in json.dumps(lines)) == asked
        assert '"key"' in json.dumps(first)
        assert "wrong" not in json.dumps(lines)
        (fault,) = [line for line in lines if line["event"] == "fault"]
        assert "broken" in fault["exception"]
        assert fault["request_id"] == requests[-1]["request_id"]
        if asked:
            text = found.json()["choices"][0]["text"]
            assert [line["texts"] for line in requests[:2]] == [[text], [text]]  # whole, and as a stream


def test_warnings_are_lines_of_the_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from leapahead.serve import logs

    for each in (logs.logger, logging.getLogger("uvicorn")):
        for name in ("handlers", "propagate", "level"):
            monkeypatch.setattr(each, name, getattr(each, name))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.set_up()
        warnings.warn("the draft model\nis too slow", stacklevel=1)
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["event"]) == ("warning", "warning")
    assert line["message"] == "the draft model is too slow"


def test_origins(tmp_path: Path) -> None:
    with serving(toy_llm(), cors=("https://a.example",), keys=("k",)) as running:
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        found = httpx.options(running.url + COMPLETIONS, headers=asked)
        assert found.headers["access-control-allow-origin"] == "https://a.example"
        found = running.post(COMPLETIONS, BODY, headers={"Origin": "https://a.example"})
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (401, "https://a.example")
        asked["Origin"] = "https://b.example"
        assert httpx.options(running.url + COMPLETIONS, headers=asked).status_code == 400
    with serving(toy_llm()) as running:
        found = running.post(COMPLETIONS, BODY, headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in found.headers


@pytest.mark.slow
def test_the_schema_is_complete_and_loads_nothing() -> None:
    with serving(toy_llm()) as running:
        schema = running.get("/openapi.json").json()
        assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(schema["paths"])
        assert set(schema["components"]["schemas"]) >= {"CompletionRequest", "ChatRequest", "ErrorReply"}
        statuses = {
            status for path in schema["paths"].values() for each in path.values() for status in each["responses"]
        }
        assert statuses == {"200", "400", "401", "404", "408", "413", "415", "429", "500", "503", "504"}
        for path in ("/docs", "/redoc"):
            assert running.get(path).status_code == 404


@pytest.mark.slow
def test_the_schema_does_not_delay_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = Event(), Event()

    def slow(*_: Any) -> None:
        begun.set()
        assert goes_on.wait(10)

    monkeypatch.setattr(Grammars, "compile", slow)
    with serving(toy_llm()) as running, ThreadPoolExecutor() as pool:
        schema = pool.submit(running.get, "/openapi.json")
        assert begun.wait(10)
        try:
            assert running.get("/health").status_code == 200
            other = pool.submit(running.get, "/openapi.json")
            assert not wait([schema, other], timeout=0.2).done  # nobody gets a part of it
        finally:
            goes_on.set()
        assert schema.result().json() == other.result().json()


def test_settings_are_checked() -> None:
    for name, value in (
        ("queue", -1),
        ("body_bytes", 0),
        ("header_seconds", float("nan")),
        ("request_seconds", 0),  # every request would take longer
        ("max_tokens", 0),
        ("unread", 0),
    ):
        with pytest.raises(BadParameter, match=name):
            Limits(**{name: value})
    assert Limits(shutdown_seconds=0).shutdown_seconds == 0
    for names in ((), ("",), ("a\nb",)):
        with pytest.raises(BadParameter, match="names="):
            Settings(names=names)
    for origin in ("example.org", "http://localhost:3000/", ""):  # of which none ever equals an Origin header
        with pytest.raises(BadParameter, match=f"cors={origin!r} is not possible"):
            Settings(names=("m",), cors=("*", origin))
    assert Settings(names=("m",), cors=("*", "null", "http://localhost:3000")).cors


# ------------------------------------------------------------------------------------------------------------ the end


def test_running_requests_end_before_the_server() -> None:
    """/health says so, further requests are refused, streams go to their end."""
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with serving(LLM(SlowToy(0.01), tokenizer=Letters(), drafter="plain")) as running:
        with httpx.stream("POST", running.url + COMPLETIONS, json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.server.end()
            assert running.get("/health").status_code == 503
            refused = running.post(COMPLETIONS, BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-4]
        running.thread.join(10)
        assert not running.thread.is_alive()


@pytest.mark.slow
def test_requests_that_take_too_long_are_cancelled_at_the_end() -> None:
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
    with serving(LLM(SlowToy(0.01), tokenizer=Letters(), drafter="plain"), {"shutdown_seconds": 0.2}) as running:

        async def talk() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=30) as client:
                url = running.url + COMPLETIONS
                tasks = [asyncio.create_task(client.post(url, json={**body, "stream": each})) for each in (False, True)]
                await asyncio.sleep(0.3)
                running.server.end()
                return await asyncio.gather(*tasks)

        began = time.monotonic()
        whole, stream = asyncio.run(talk())
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "shutting_down")
        assert "shutting_down" in stream.text
        running.thread.join(10)
        assert time.monotonic() - began < 8


@pytest.mark.parametrize("asked", [{}, {"stream": True}, {"echo": True, "logprobs": 0}])
def test_a_request_that_is_prepared_when_the_server_ends_is_answered(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts are not decoded any more, for which nobody would wait."""
    entered, go = Event(), Event()
    prompts = Texts.prompts

    def slow(self: Texts, *given: Any) -> Any:
        entered.set()
        go.wait(10)
        return prompts(self, *given)

    monkeypatch.setattr(Texts, "prompts", slow)
    with serving(toy_llm(), {"shutdown_seconds": 0.01}) as running, ThreadPoolExecutor(1) as client:
        answer = client.submit(running.post, COMPLETIONS, {"prompt": "abc", "max_tokens": 900, **asked})
        assert entered.wait(10)
        running.server.end()
        while not running.worker._stopped:
            time.sleep(0.01)
        go.set()
        found = answer.result(10)
        assert (found.status_code, found.json()["error"]["code"]) == (503, "shutting_down")
        assert running.worker.total.steps == 0


@contextmanager
def command(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`leapahead serve` in a process of its own, and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "leapahead", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if '"listening"' in line:
                break
        yield process, json.loads(line)["url"]
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has none")
@pytest.mark.parametrize(("before", "output"), [("SIG_DFL", ""), ("SIG_IGN", "went on\n")])
def test_a_terminal_that_is_closed_ends_the_server_as_sigterm_does(before: str, output: str) -> None:
    """SIGHUP remains ignored where nohup has set that. In a process of its own, since signals are the process's."""
    code = (
        "import signal\n"
        "from leapahead.cli.serve import ended_by_sigterm\n"
        f"signal.signal(signal.SIGHUP, signal.{before})\n"
        "with ended_by_sigterm():\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, output), done.stderr


@pytest.mark.parametrize(
    ("sig", "kind"), mostly_slow([(signal.SIGTERM, "GGUF"), (signal.SIGINT, "Transformers")], (signal.SIGTERM, "GGUF"))
)
def test_the_command(sig: signal.Signals, kind: str, tmp_path: Path) -> None:
    """A signal ends it with exit code 0 after the running stream has ended and the drafter cache was saved."""
    if kind == "GGUF":  # which starts in a quarter of the time
        pytest.importorskip("llama_cpp")
    model = () if kind == "Transformers" else (str(gguf_models.bundled("f32")),)
    defaults, greedy = (("--generation-config",), {}) if kind == "Transformers" else ((), {"temperature": 0})
    file = tmp_path / "drafts.npz"
    arguments = (
        *model,
        "--drafter-cache",
        str(file),
        "--served-model-name",
        "mine",
        "-d",
        "suffix",
        *defaults,
        "-o",
        "nodes=4",
    )
    with command(*arguments, LEAPAHEAD_API_KEY="secret") as (process, url):
        body = {"model": "mine", "prompt": "def add(a, b):", "max_tokens": 20, **greedy}
        assert httpx.post(url + COMPLETIONS, json=body, timeout=60).status_code == 401
        found = httpx.post(url + COMPLETIONS, json=body, headers=bearer("secret"), timeout=60)
        with LLM(*model) as llm:
            assert found.json()["choices"][0]["text"] == llm.generate("def add(a, b):", max_new_tokens=20).text
        long = {**body, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=long, headers=bearer("secret"), timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(sig)
            assert unavailable(url)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(20) == 0
        assert process.stderr is not None
        events = [json.loads(line)["event"] for line in process.stderr]
        assert events[:2] == ["request", "request"]  # and one for each look at /health
        assert set(events[2:-3]) == {"request"}
        assert events[-3:] == ["drafter_cache_saved", "drafter_cache_saved", "stopped"]
    assert file.exists()


def test_the_command_leaves_drafter_caches_to_the_server(
    leapahead: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that cannot be written is an error of the log, and not one of the command as well."""
    from leapahead.serve import logs

    file = tmp_path / "drafts.npz"
    monkeypatch.setattr(logs, "set_up", lambda: None)
    monkeypatch.setattr(server, "run", lambda *_: file.mkdir())
    found = leapahead("serve", "-d", "suffix", "--port", "0", "--drafter-cache", str(file))
    assert (found.exit_code, found.stderr) == (0, "")


def unavailable(url: str, seconds: float = 5.0) -> bool:
    """Whether /health says within so many seconds that the server is about to stop."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if httpx.get(f"{url}/health", timeout=10, verify=NO_TLS).status_code == 503:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "load",
    [
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)", id="python", marks=pytest.mark.slow),
        pytest.param(
            "threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()\n"
            "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",  # takes minutes
            id="native call",
        ),
        pytest.param(
            "try: os.kill(os.getpid(), signal.SIGTERM)\n    except BaseException: raise ImportError('torch') from None",
            id="another exception",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sigterm_before_the_server_listens(load: str, tmp_path: Path) -> None:
    """A supervisor may send it while the model is loaded: exit code 0 like later on, and one sentence."""
    script = tmp_path / "load.py"
    script.write_text(
        "import hashlib, os, signal, sys, threading, time\n"
        "from leapahead.__main__ import main\n"
        "import leapahead.models.loading\n"
        "import leapahead.cli.serve\n"
        "sys.modules['leapahead.cli.serve'].NATIVE_SECONDS = 0.2\n"
        f"def load(*_, **__):\n    {load}\n"
        "leapahead.models.loading.load = load\n"
        "main()\n"
    )
    command = [sys.executable, str(script), "serve", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "ended by SIGTERM, before the server was ready\n"


def test_what_the_command_refuses(leapahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(keys.ENVIRONMENT, raising=False)
    for arguments, words in (
        (("--host", "0.0.0.0"), "--no-auth"),
        (("--host", ""), "--host='' and --port=8000 are not possible"),
        (("--no-auth", "--api-key", "abc"), "--no-auth is not possible with an API key"),
        (("--default-max-tokens", "9", "--max-tokens", "8"), "--default-max-tokens=9 is not possible"),
        (("--host", "no.such.host.invalid", "--no-auth"), "--host='no.such.host.invalid'"),
        (("model", "--model", "other"), "given twice"),
        (("--max-queue", "-1"), "--max-queue"),
        (("--api-key", "a b"), "visible ASCII"),
        (("--max-batch", "0"), "'--max-batch': 0 is not in the range"),
        (("--served-model-name", "", "-m", "none"), "--served-model-name='' is not possible"),  # before the model
        (("--allowed-origin", "example.org", "-m", "none"), "--allowed-origin='example.org' is not possible"),
        (("--request-seconds", "0", "-m", "none"), "'--request-seconds': 0.0 is not in the range x>0"),
    ):
        result = leapahead("serve", *arguments)
        assert result.exit_code == 2, arguments
        assert words in result.stderr, (arguments, result.stderr)
        assert "Traceback" not in result.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = leapahead("serve", "--port", str(taken.getsockname()[1]))
        assert f"--port={taken.getsockname()[1]} of 127.0.0.1 is in use by another program" in result.stderr
    assert "/v1/completions" in leapahead("serve", "--help").stdout


def test_a_port_that_another_server_has_taken_during_the_load() -> None:
    """Two sockets may be bound to one port as long as none of them listens."""
    with server.bound("127.0.0.1", 0) as first, server.bound("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        application: Any = None
        with pytest.raises(BadParameter, match=f"port={first.getsockname()[1]} of 127.0.0.1 is in use"):
            server.run(application, application, Limits(), second)


@pytest.mark.parametrize(
    ("host", "is_alone"),
    [("127.0.0.1", True), ("127.1", True), ("LOCALHOST", True), ("::1", True), ("0.0.0.0", False)],
)
def test_loopback(host: str, is_alone: bool) -> None:
    with server.bound(host, 0) as listening:
        assert is_loopback(listening) == is_alone


@pytest.mark.parametrize(("do_sample", "temperature"), [(False, 0.0), (True, 0.7)])
def test_the_generation_config_of_a_model(do_sample: bool, temperature: float) -> None:
    with LLM() as llm:
        target: Any = llm.target
        target.model.generation_config = SimpleNamespace(
            do_sample=do_sample, temperature=0.7, repetition_penalty=1.5, top_k=None
        )
        assert model_defaults(llm) == {"temperature": temperature, "repetition_penalty": 1.5}


def test_addresses() -> None:
    with server.bound("127.0.0.1", 0) as one:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", server.address(one))
    with server.bound("::1", 0) as six:
        assert server.address(six).startswith("http://[::1]:")


def test_a_server_tells_that_chats_wait_for_each_other() -> None:
    """Where they reserve more than the KV cache has, unless the server bounds them."""
    cases: list[tuple[int, dict[str, Any], bool]] = [
        (3 * 1024, {}, True),
        (4 * 1024, {}, False),
        (0, {}, False),
        (3 * 1024, {"default_max_tokens": 100}, False),
        (3 * 1024, {"max_tokens": 100}, False),
    ]
    for cells, bounds, told in cases:
        target = SlowToy()
        target.info = replace(target.info, cache_tokens=cells)
        with logged() as lines, serving(toy_llm(target=target, max_batch=4), limits=bounds):
            pass
        found = [line["message"] for line in lines if line["event"] == "kv_cache_reserved"]
        assert len(found) == told
        assert all("3072, so fewer than --max-batch 4" in message for message in found)


@pytest.mark.slow
def test_chats_without_a_length_are_decoded_together(tmp_path: Path) -> None:
    """A GGUF file's KV cache has room for as many of them as are decoded together."""
    template = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    path = gguf_models.rewritten(gguf_models.bundled("f32"), tmp_path / "chat.gguf", template)
    llm = LLM(path, max_batch=2, drafter="plain")
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a word"}], "stream": True}
    with logged() as lines, serving(llm) as running:
        client = running.client()
        streams = [client.chat.completions.create(**chat, extra_body={"ignore_eos": True}) for _ in range(2)]
        for stream in streams:  # up to the first token of each
            next(chunk for chunk in stream if chunk.choices[0].delta.content)
        assert len(llm.engine.lengths()) == 2
        for stream in streams:
            stream.close()
    assert "kv_cache_reserved" not in [line["event"] for line in lines]


@pytest.mark.slow
def test_a_server_of_a_target_with_a_limited_cache() -> None:
    """A prompt that can never fit is refused; others are decoded."""
    from leapahead.models.loading import bundled

    with serving(LLM(bundled(), cache_tokens=64, drafter="plain")) as running:
        found = running.post(COMPLETIONS, {"prompt": "word " * 100, "max_tokens": 5})
        assert found.status_code == 400, found.text
        assert "cache" in found.json()["error"]["message"]
        for scored in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
            for prompt, status in (("word " * 100, 400), ([5] * 66, 400), ([5] * 65, 200)):
                found = running.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 0, **scored})
                assert found.status_code == status, found.text
                assert status == 200 or "the cache 64" in found.json()["error"]["message"]
        assert running.post(COMPLETIONS, {"prompt": "word", "max_tokens": 5}).status_code == 200
        assert running.metric("num_preemptions_total") == 0
        several = {"prompt": "word", "max_tokens": 40, "n": 4, "ignore_eos": True, "temperature": 1.0, "seed": 1}
        assert running.post(COMPLETIONS, several).json()["usage"]["completion_tokens"] == 160
        assert running.metric("num_preemptions_total") > 0
    assert ToyTarget().info.cache_tokens == 0
