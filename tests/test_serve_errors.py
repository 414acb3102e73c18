"""Bad input and faults: OpenAI's error object with the right status, and the server goes on."""

from __future__ import annotations

import codecs
import gzip
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import openai
import pytest

from leapahead import LLM
from leapahead.core.errors import BadLogits
from leapahead.models.toy import ToyTarget
from leapahead.serve.schema import ChatRequest, CompletionRequest, Generation
from tests.serving import Letters, Running, SlowToy, check, serving, toy_llm

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    limits = {
        "body_bytes": 20_000,
        "body_seconds": 1.0,
        "header_seconds": 0.5,
        "samples": 8,
        "prompts": 4,
        "prompt_tokens": 500,
    }
    with serving(toy_llm(), {**limits, "max_tokens": 600, "stops": 4}) as found:
        yield found
        assert found.idle()


@pytest.fixture(autouse=True)
def _it_goes_on(running: Running) -> Iterator[None]:
    yield
    assert running.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"prompt": "a", "max_tokns": 3}, "max_tokns", "no parameter 'max_tokns'"),
    (COMPLETIONS, {"prompt": "a", "": 3}, "", "no parameter ''"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 1e-300}, "repetition_penalty", "0.01"),
    (COMPLETIONS, {"prompt": "a", "tools": []}, "tools", "not supported"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of", ""),
    (COMPLETIONS, {}, "prompt", "missing"),
    (COMPLETIONS, {"prompt": ""}, "prompt", ""),
    (COMPLETIONS, {"prompt": []}, "prompt", ""),
    (COMPLETIONS, {"prompt": [""]}, "prompt.0", ""),
    (COMPLETIONS, {"prompt": [[]]}, "prompt.0", ""),
    (COMPLETIONS, {"prompt": None}, "prompt", "prompt=null is not possible"),
    (CHAT, {"messages": [{"role": "tool", "content": None, "tool_call_id": "a"}]}, "messages.0.content", "=null is"),
    (CHAT, {"messages": USER, "structured_outputs": {"json": None}}, "structured_outputs", "structured_outputs has 0"),
    (COMPLETIONS, {"prompt": 3}, "prompt", "it must be text"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt.1", ""),
    (COMPLETIONS, {"prompt": [True]}, "prompt.0", ""),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt.0", ""),
    (COMPLETIONS, {"prompt": [-1]}, "prompt.0", ""),
    (COMPLETIONS, {"prompt": [5, 96]}, "prompt", "96"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt.0", ""),
    (COMPLETIONS, {"prompt": "a" * 501}, "prompt", "501"),
    (COMPLETIONS, {"prompt": "a" * 2000}, "prompt", "2000"),
    (COMPLETIONS, {"prompt": "a", "temperature": "1"}, "temperature", 'temperature="1" is'),
    (COMPLETIONS, {"prompt": "a", "temperature": True}, "temperature", ""),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", ""),
    (COMPLETIONS, {"prompt": "a", "temperature": 1e-9}, "temperature", ""),
    (COMPLETIONS, {"prompt": "a", "temperature": 10**400}, "temperature", ""),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", ""),
    (COMPLETIONS, {"prompt": "a", "top_p": 1.1}, "top_p", ""),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", ""),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", ""),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 601}, "max_tokens", "600"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**40}, "max_tokens", ""),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n", ""),
    (COMPLETIONS, {"prompt": "a", "n": 9}, "n", "9"),
    (COMPLETIONS, {"prompt": ["a"] * 5}, "prompt", "5"),
    (COMPLETIONS, {"prompt": [[1]] * 5}, "prompt", "5"),
    (COMPLETIONS, {"prompt": "a", "n": True}, "n", ""),
    (COMPLETIONS, {"prompt": "a", "seed": -1}, "seed", ""),
    (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed", ""),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "20"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", ""),
    (COMPLETIONS, {"prompt": "a", "stop": ["a", ""]}, "stop.1", ""),
    (COMPLETIONS, {"prompt": "a", "stop": list("abcde")}, "stop", "5"),
    (COMPLETIONS, {"prompt": "a", "stop": 3}, "stop", ""),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [96]}, "stop_token_ids", "96"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias.a", ""),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1", ""),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 1, "01": 2}}, "logit_bias", '="01" is not possible'),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"96": 1}}, "logit_bias", "96"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [1]}, "logit_bias", ""),
    (COMPLETIONS, {"prompt": "a", "bad_words": [" "]}, "bad_words.0", ""),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream", ""),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", ""),
    (COMPLETIONS, {"prompt": "a", "leapahead": {"deadline_seconds": 0.05}}, "leapahead.deadline_seconds", ""),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "Letters"),
    (COMPLETIONS, {"prompt": "a", "prediction": {"type": "content"}}, "prediction.content", "missing"),
    (COMPLETIONS, {"prompt": "a", "prediction": {"type": "content", "content": "b"}}, "prediction", "suffix"),
    (CHAT, {}, "messages", "missing"),
    (CHAT, {"messages": None}, "messages", ""),
    (CHAT, {"messages": "string"}, "messages", ""),
    (CHAT, {"messages": []}, "messages", ""),
    (CHAT, {"messages": [123]}, "messages.0", ""),
    (CHAT, {"messages": [{}]}, "messages.0.role", "missing"),
    (CHAT, {"messages": [{"role": 123}]}, "messages.0.role", ""),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages.0.role", "king"),
    (CHAT, {"messages": [{"role": "user", "content": 123}]}, "messages.0.content", ""),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content", ""),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages.0.content", ""),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "missing"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools.0.function", "missing"),
    (CHAT, {"messages": USER, "functions": []}, "functions", "use tools"),
    (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs", "logprobs=true"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens", ""),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
    (CHAT, {"messages": USER, "store": True}, "store", "keeps no answers"),
    (CHAT, {"messages": USER, "store": 0}, "store", "must be true or false"),
    (
        CHAT,
        {"messages": USER, "stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "",
    ),
    (COMPLETIONS, {"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort", "not supported"),
    (CHAT, {"messages": USER, "verbosity": "low"}, "verbosity", "not supported"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, "messages", "500"),
    ("/tokenize", {}, "prompt", "missing"),
    ("/tokenize", {"messages": []}, "messages", ""),
    ("/detokenize", {"tokens": [96]}, "tokens", "96"),
    ("/detokenize", {"tokens": ["a"]}, "tokens.0", ""),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), WRONG, ids=lambda value: str(value)[:60])
def test_bad_values_are_named(running: Running, path: str, body: Any, param: str | None, words: str) -> None:
    check(running.post(path, body), 400, param, words)


def test_chats_that_are_too_long_are_counted(running: Running) -> None:
    """Clients shorten them by their number of tokens. 500 are the server's limit, 1024 the model's context."""
    for length in (600, 2000):
        messages = [{"role": "user", "content": "a" * length}]
        check(running.post(CHAT, {"messages": messages}), 400, "messages")
        found = running.post("/tokenize", {"messages": messages}).json()
        assert found["count"] == len(found["tokens"]) > length
        assert found["max_model_len"] == 1024
        counted = running.post("/v1/messages/count_tokens", {"model": "tiny", "messages": messages}).json()
        assert counted["input_tokens"] == found["count"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_parts_that_are_no_text_are_refused_by_name(running: Running, kind: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    found = running.post(CHAT, {"messages": [{"role": "user", "content": content}]})
    check(found, 400, "messages.0.content.1.type", kind)


@pytest.mark.parametrize(("path", "model"), [(COMPLETIONS, CompletionRequest), (CHAT, ChatRequest)])
def test_a_null_is_a_parameter_that_is_not_given(running: Running, path: str, model: type[Generation]) -> None:
    """Of every parameter that has a default, as the schema says; others are refused."""
    fields = {name for name, field in model.model_fields.items() if not field.is_required()}
    given = {"seed": 0, **({"prompt": "a"} if path == COMPLETIONS else {"messages": USER, "max_tokens": 3})}
    found = running.post(path, {**dict.fromkeys((*fields, "suffix", "tools")), **given})
    assert found.json()["choices"][0] == running.post(path, given).json()["choices"][0]
    parts = running.get("/openapi.json").json()["components"]["schemas"][model.__name__]["properties"]
    assert all({"type": "null"} in parts[name]["anyOf"] for name in fields)
    assert running.post(path, {**given, "leapahead": {"stats": None, "spans": None}}).status_code == 200
    assert running.post(path, {**given, "unknown": None}).json()["choices"] == found.json()["choices"]
    (required,) = parts.keys() - fields
    check(running.post(path, {**given, required: None}), 400, required)


def said(running: Running, messages: Any) -> str:
    """The chat that the template writes."""
    tokens = running.post("/tokenize", {"messages": messages}).json()["tokens"]
    return str(running.post("/detokenize", {"tokens": tokens}).json()["prompt"])


CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": "a", "parsed": {"b": [1]}, "annotations": [{"type": "url_citation"}], "refusal": None}, "a"),
        ({"content": "a", "parsed": None, "annotations": None, "audio": None, "provider_specific_fields": None}, "a"),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "a", "refusal": "No."}, "a No."),
        ({"content": [{"type": "text", "text": "a", "id": None}, {"type": "refusal", "refusal": "No."}]}, "a No."),
        ({"tool_calls": [{**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": {}}}]}, ""),
        ({"tool_calls": [{**CALL, "index": None, "function": {**CALL["function"], "unknown": None}}]}, ""),
    ],
    ids=str,
)
def test_what_clients_add_to_answers(running: Running, message: dict[str, Any], content: str) -> None:
    """What repeats other fields is left out, what declines is content, on a line of its own (here a space)."""
    assert said(running, [*USER, {"role": "assistant", **message}]) == f"|user: Hi|assistant: {content}|assistant: "


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": "a", "unknown": 1}, "unknown"),
        ({"role": "assistant", "content": "a", "annotations": 1}, "annotations"),
        ({"role": "assistant", "content": "a", "tool_calls": [{**CALL, "index": "0"}]}, "tool_calls.0.index"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "content.0.refusal"),
        ({"role": "user", "content": "a", "parsed": 1}, "parsed"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "a"}]}, "content.0.type"),
    ],
    ids=str,
)
def test_what_answers_cannot_have(running: Running, message: dict[str, Any], param: str) -> None:
    check(running.post(CHAT, {"messages": [message]}), 400, f"messages.0.{param}")


def test_a_longer_context_is_named_where_there_can_be_one() -> None:
    """By the server's option."""
    for name, remedy in (("", "shorten it"), ("n_ctx", "shorten it, or load the model with a larger --ctx-size")):
        target = SlowToy(context_length=100)
        target.info = replace(target.info, length_option=name)
        with serving(toy_llm(target=target)) as found:
            error = found.post(COMPLETIONS, {"prompt": "a" * 100}).json()["error"]
        assert (error["code"], error["message"].split("; ")[1]) == ("context_length_exceeded", remedy)


def test_bytes_that_the_tokenizer_does_not_tell_are_null(running: Running) -> None:
    found = running.post(CHAT, {"messages": USER, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}).json()
    (entry,) = found["choices"][0]["logprobs"]["content"]
    assert entry["bytes"] is entry["top_logprobs"][0]["bytes"] is None


BODIES = {
    "no JSON": b"{",
    "nothing": b"",
    "binary": bytes(range(256)),
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "huge exponent": b'{"prompt": "a", "temperature": 1e999}',
    "huge number": b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}",
    "deep list": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "deep object": b'{"chat_template_kwargs": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "a list": b"[]",
    "a string": b'"prompt"',
    "null": b"null",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_requests(running: Running, path: str, name: str) -> None:
    found = running.post(path, content=BODIES[name], headers={"Content-Type": "application/json"})
    assert found.status_code == 400, found.text
    assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_a_byte_order_mark_is_no_part_of_a_body(running: Running) -> None:
    """Files that are written on Windows begin with one, `curl --data-binary @file` sends it."""
    body = codecs.BOM_UTF8 + b'{"prompt": "a", "max_tokens": 2}'
    found = running.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == 200, found.text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_a_body_in_another_encoding_is_told_so(running: Running, encoding: str) -> None:
    """PowerShell writes files in UTF-16."""
    body = '{"prompt": "a"}'.encode(encoding)
    found = running.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    check(found, 400, None, f"is encoded in {encoding.upper()}; send it in UTF-8")


def test_a_compressed_body_is_told_so(running: Running) -> None:
    body, headers = gzip.compress(b'{"prompt": "a"}'), {"Content-Type": "application/json"}
    found = running.post(COMPLETIONS, content=body, headers={**headers, "Content-Encoding": "gzip"})
    check(found, 415, None, "the content encoding 'gzip' is not possible; send the body uncompressed")
    found = running.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers={"Content-Encoding": "identity"})
    assert found.status_code == 200


def test_methods_paths_models_and_types(running: Running) -> None:
    check(running.get(COMPLETIONS), 405, None, "GET")
    assert running.get(COMPLETIONS).headers["allow"] == "POST"
    check(running.post("/health", {}), 405, None)
    for path in ("/v1/embeddings", "/v1/audio/speech", "/docs", "/redoc", "/v1/completions/", "/nothing"):
        check(running.post(path, {"input": "a"}), 404, None, path)
    check(running.post(COMPLETIONS, {"prompt": "a", "model": "gpt"}), 404, "model", "'tiny'")
    check(running.post(COMPLETIONS, {"prompt": "a", "model": ""}), 404, "model")
    check(running.post(COMPLETIONS, data={"prompt": "a"}), 415, None, "application/json")
    check(running.post(COMPLETIONS, content=b"{}"), 415, None)


def test_a_body_that_is_too_large(running: Running) -> None:
    check(running.post(COMPLETIONS, {"prompt": "a" * 10_000_000}), 413, None, "20000")

    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"a" * 1000

    found = running.post(COMPLETIONS, content=chunks(), headers={"Content-Type": "application/json"})
    check(found, 413, None)


def connected(running: Running, data: bytes) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=5)
    found.sendall(data)
    return found


def everything(connection: socket.socket) -> bytes:
    with connection:
        found = b""
        while data := connection.recv(1 << 16):
            found += data
        return found


@pytest.mark.slow
def test_headers_and_bodies_must_not_take_long(running: Running) -> None:
    """Connections that say nothing, half of the headers, or half of the body."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    silent, slow, half = (
        connected(running, data) for data in (b"", head, head + b'Content-Length: 100\r\n\r\n{"prompt": ')
    )
    began = time.monotonic()
    assert everything(silent) == b""
    assert everything(slow) == b""
    answer = everything(half)
    assert b" 408 " in answer
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "body_timeout"
    assert time.monotonic() - began < 4


@pytest.mark.slow
def test_a_body_that_comes_drop_by_drop(running: Running) -> None:
    """Every drop comes in time, and the whole does not."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    connection = connected(running, head)
    began = time.monotonic()
    answer = b""
    connection.settimeout(0.05)
    while not answer and time.monotonic() < began + 4:
        try:
            connection.sendall(b" ")
            answer = connection.recv(1 << 16)
        except TimeoutError:
            continue
    connection.close()
    assert b" 408 " in answer


def test_a_second_request_of_a_connection_must_not_take_long_either(running: Running) -> None:
    connection = connected(running, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    connection.sendall(b"GET /hea")
    began = time.monotonic()
    assert b"200" not in everything(connection)
    assert time.monotonic() - began < 4


def test_a_client_that_leaves_in_the_body(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with caplog.at_level("INFO"):
        connected(running, head + b"{").close()
        for _ in range(100):
            if caplog.records:
                break
            time.sleep(0.01)
    assert [record.members["status"] for record in caplog.records] == [499]  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_another_protocol_is_not_accepted(running: Running, chunked: bool) -> None:
    """Java's client makes one with every request: HTTP/2."""
    body = b'{"prompt": "a", "max_tokens": 2}'
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEA\r\nUpgrade: h2c"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n%s\r\nContent-Type: application/json\r\n%s\r\n\r\n"
    given = head % (offer, length) + (b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body)
    last = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    answer = everything(connected(running, given + given + last))
    assert (answer.count(b"HTTP/1.1 200 OK"), answer.count(b'"text":')) == (3, 2)
    assert b" 400 " in everything(connected(running, b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n"))


def test_what_is_not_http(running: Running) -> None:
    answer = everything(connected(running, b"\x16\x03\x01 hello\r\n\r\n"))
    assert b" 400 " in answer
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["without an end", "complete"])
def test_headers_must_not_be_long(running: Running, end: bytes) -> None:
    with connected(running, b"GET /health HTTP/1.1\r\nHost: a\r\nX: ") as connection:
        with suppress(OSError):  # the server may close before everything is sent
            for _ in range(70):
                connection.sendall(b"a" * 1024)
            connection.sendall(end)
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_http"


def test_long_bodies_are_no_headers(running: Running) -> None:
    """Several requests in one go, whose bodies together are longer than headers may be."""
    body = b'{"prompt": "a", "max_tokens": 1}' + b" " * 15_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "
    one = head + str(len(body)).encode() + b"\r\n\r\n" + body
    last = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    answer = everything(connected(running, 6 * one + last))
    assert answer.count(b"HTTP/1.1 200") == 7


# ------------------------------------------------------------------------------------------------------------- faults


def test_a_fault_of_the_engine(running: Running) -> None:
    """Of a whole answer and of a stream; nothing of it is told to the client."""
    target = running.llm.target
    assert isinstance(target, SlowToy)
    target.fail = RuntimeError("the secret reason")
    try:
        found = running.post(COMPLETIONS, {"prompt": "abc"})
        streamed = running.post(COMPLETIONS, {"prompt": "abc", "stream": True})
    finally:
        target.fail = None
    check(found, 500, None, "its log")
    assert "secret" not in found.text + streamed.text
    assert streamed.status_code == 200
    *_, error, done = [line for line in streamed.text.splitlines() if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert done == "data: [DONE]"
    target.fail = RuntimeError("again")
    try:
        with pytest.raises(openai.APIError, match="failed to answer"):
            list(running.client().completions.create(model="tiny", prompt="a", stream=True))
    finally:
        target.fail = None


def test_logits_without_a_choice(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    """NaN of the model is a fault of the server, whatever the request bans; every token banned is one of the client."""
    target, bans = running.llm.target, ({"bad_words": ["a"]}, {"logit_bias": {"5": -100}})
    assert isinstance(target, SlowToy)
    try:
        target.fail = BadLogits("all tokens are banned")
        target.fail.banned = True
        for given in bans:
            (param,) = given
            check(running.post(COMPLETIONS, {"prompt": "a", **given}), 400, param, f"{param} leave no token")
        target.fail, target.nan = None, True
        with caplog.at_level("ERROR"):
            for given in ({}, *bans):
                check(running.post(COMPLETIONS, {"prompt": "a", **given}), 500, None, "its log")
    finally:
        target.fail, target.nan = None, False
    assert ["position 1 are NaN" in str(record.exc_info) for record in caplog.records] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER}), ("/tokenize", {"prompt": "a"})]
)
def test_a_fault_of_the_tokenizer_is_in_the_log(path: str, body: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Letters):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise RuntimeError("the secret reason")

    with serving(LLM(SlowToy(), tokenizer=Failing(), drafter="plain")) as running, caplog.at_level("ERROR"):
        check(running.post(path, body), 500, None, "its log")
    assert ["the secret reason" in str(record.exc_info) for record in caplog.records] == [True]


def test_a_model_without_a_chat_template_or_a_tokenizer() -> None:
    class Plain(Letters):
        chat_template = None  # type: ignore[assignment]

        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            raise ValueError("no template")

    with serving(LLM(SlowToy(), tokenizer=Plain())) as running:
        check(running.post(CHAT, {"messages": USER}), 400, "messages", "chat template")
        assert running.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3}).status_code == 200
    with serving(LLM(ToyTarget(context_length=200))) as running:
        check(running.post(COMPLETIONS, {"prompt": "a"}), 400, "prompt", "token ids")
        check(running.post(CHAT, {"messages": USER}), 400, "messages", "tokenizer")
        check(running.post("/tokenize", {"prompt": "a"}), 400, "prompt", "tokenizer")
        found = running.post(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 3}).json()
        assert (found["choices"][0]["text"], found["usage"]["completion_tokens"]) == ("", 3)


def test_variables_of_the_chat_template(running: Running) -> None:
    body = {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}}
    tokens = running.post("/tokenize", body).json()["tokens"]
    assert running.post("/detokenize", {"tokens": tokens}).json()["prompt"].startswith("[enable_thinking=False]|user")
    assert running.post(CHAT, {**body, "max_tokens": 3}).json()["usage"]["prompt_tokens"] == len(tokens)
    for given, value in (({}, "low"), ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high")):
        asked = {"messages": USER, "reasoning_effort": "low", "max_tokens": 1, "return_token_ids": True, **given}
        tokens = running.post(CHAT, asked).json()["prompt_token_ids"]
        prompt = running.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert prompt.startswith(f"[reasoning_effort={value}]|user")
        counted = running.post("/tokenize", {"messages": USER, "reasoning_effort": "low", **given}).json()
        assert counted["tokens"] == tokens
    check(running.post(CHAT, {"messages": USER, "reasoning_effort": "some"}), 400, "reasoning_effort", "some")
