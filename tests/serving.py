"""Servers for tests: the real one, in a thread of its own, at a free port."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, Protocol, TypeVar

import httpx
import numpy as np
import openai

from leapahead import LLM
from leapahead.models.toy import ToyTarget
from leapahead.serve import app, server
from leapahead.serve.settings import Limits, Settings
from leapahead.serve.worker import Worker

# Servers of tests speak plain HTTP. Without this, httpx reads all certificates of the system for every client.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # id 0 is the end of text as well

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<|{{ message.role }}|>
{{ message.reasoning_content }}{{ message.content }}
{% for call in message.tool_calls %}<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}
{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


# As of SmolVLM: what a content says is read of its parts.
PARTS_TEMPLATE = """{% for message in messages %}{{ message['role'] | capitalize }}\
{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}{% for line in message['content'] %}\
{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""


class Letters:
    """A tokenizer with a token for each character."""

    eos_token_id = 0
    chat_template = "letters"

    def __len__(self) -> int:
        return len(ALPHABET)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [max(1, ALPHABET.find(character)) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(ALPHABET[token] for token in token_ids if token or not skip_special_tokens)

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        opening = "".join(f"[{name}={value}]" for name, value in sorted(variables.items()))
        lines = [f"{message['role']}: {message['content']}" for message in conversation]
        return "|".join([opening, *lines, "assistant: " if add_generation_prompt else ""])


class SlowToy(ToyTarget):
    """A toy whose forwards take a while.

    Args:
        seconds: of each.
        fail: forwards raise this, where it is set.
        nan: whether the logits are NaN.
    """

    def __init__(self, seconds: float = 0.0, **options: Any) -> None:
        super().__init__(**{"vocab_size": len(ALPHABET), "order": 2, "context_length": 1024, **options})
        self.seconds = seconds
        self.fail: Exception | None = None
        self.nan = False

    def logits(self, *given: Any) -> Any:
        return super().logits(*given) * (np.nan if self.nan else 1)

    def step(self, *given: Any, **options: Any) -> Any:
        time.sleep(self.seconds)
        if self.fail is not None:
            raise self.fail
        return super().step(*given, **options)


def calling_llm() -> LLM:
    """The bundled model with a chat template for tools and, with `enable_thinking`, for reasoning."""
    found = LLM()
    assert found.tokenizer is not None
    found.tokenizer.chat_template = TEMPLATE  # type: ignore[attr-defined]
    return found


def toy_llm(seconds: float = 0.0, **options: Any) -> LLM:
    """A toy with the tokenizer `Letters`. Its drafter drafts always, since time means nothing here."""
    target = options.pop("target", None) or SlowToy(seconds)
    return LLM(target, tokenizer=Letters(), **{"drafter": "suffix", "nodes": 4, **options})


class Closes(Protocol):
    """A client of a server."""

    def close(self) -> None: ...


Client = TypeVar("Client", bound=Closes)


@dataclass
class Running:
    """A server under test."""

    url: str
    llm: LLM
    worker: Worker
    server: server.Server
    thread: Thread
    clients: list[Closes] = field(default_factory=list)

    def kept(self, client: Client) -> Client:
        """A client that is closed with the server; the garbage collector may find its socket before the client."""
        self.clients.append(client)
        return client

    def client(self, key: str = "none") -> openai.OpenAI:
        return self.kept(openai.OpenAI(api_key=key, base_url=f"{self.url}/v1", max_retries=0, timeout=60))

    def asynchronous(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(api_key=key, base_url=f"{self.url}/v1", max_retries=0, timeout=120)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, verify=NO_TLS, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, verify=NO_TLS, **options)

    def metric(self, name: str) -> float:
        """The sum of all series of that name."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == f"vllm:{name}")

    def idle(self, seconds: float = 10.0) -> bool:
        """Whether nothing is left of any request before so many seconds have passed."""
        ends = time.monotonic() + seconds
        engine = self.llm.engine
        while self.worker.pending or engine.lengths():
            if time.monotonic() > ends:
                return False
            time.sleep(0.01)
        return True


@contextmanager
def serving(llm: LLM, limits: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """A running server; at the end it is ended in order."""
    chosen = Settings(**{"names": ("tiny",), **settings}, limits=Limits(**(limits or {})))
    application, worker = app.make(llm, chosen)
    listening = server.bound("127.0.0.1", 0)
    running = server.Server(application, worker, chosen.limits)
    thread = Thread(target=running.run, kwargs={"sockets": [listening]})
    with listening:
        thread.start()
        try:
            while not running.started:
                assert thread.is_alive()
                time.sleep(0.01)
            found = Running(server.address(listening), llm, worker, running, thread)
            yield found
            for client in found.clients:
                client.close()
        finally:
            running.end()
            thread.join(60)
            assert not thread.is_alive()


def check(found: httpx.Response, status: int, param: str | None = None, words: str = "") -> None:
    """Checks an error object."""
    assert found.status_code == status, found.text
    assert set(found.json()) == {"type", "error"}
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert words in error["message"], error
    assert "Traceback" not in found.text
    assert len(error["message"]) < 400
