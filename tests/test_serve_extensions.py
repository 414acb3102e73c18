"""Parameters and paths that vLLM's and llama.cpp's servers have beside OpenAI's, as their own tests use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from leapahead import LLM, __version__
from leapahead.serve.prompts import left_open, marked
from tests.serving import Letters, Running, SlowToy, check, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "def add(a, b):\n"
BEGUN: Any = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, "}]
OPEN: Any = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(LLM(), {"logprobs": 4096}, names=("tiny",)) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.client()


def complete(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, **options}
    return client.completions.create(**given)


def answer(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "messages": BEGUN[:1], "temperature": 0, "max_tokens": 6, **options}
    return client.chat.completions.create(**given)


def ids_of(running: Running, **body: Any) -> list[int]:
    return list(running.post("/tokenize", body).json()["tokens"])


# --------------------------------------------------------------------------------------------------------- token ids


@pytest.mark.slow
def test_token_ids_of_completions(running: Running, client: openai.OpenAI) -> None:
    tokenizer = running.llm.tokenizer
    assert tokenizer is not None
    (choice,) = complete(client).choices
    assert (choice.token_ids, choice.prompt_token_ids) == (None, None)
    (choice,) = complete(client, extra_body={"return_token_ids": True}).choices
    assert choice.prompt_token_ids == tokenizer.encode(PROMPT)
    assert tokenizer.decode(choice.token_ids) == choice.text
    for echo in (False, True):
        stream = complete(
            client, echo=echo, logprobs=0, stream=True, n=2, extra_body={"return_token_ids": True, "seed": 3}
        )
        chunks = list(stream)
        for index in range(2):
            own = [each.choices[0] for each in chunks if each.choices[0].index == index]
            assert own[0].prompt_token_ids == choice.prompt_token_ids
            assert all(each.prompt_token_ids is None for each in own[1:])
            assert [token for each in own for token in each.token_ids] == choice.token_ids


def test_token_ids_of_chats(running: Running, client: openai.OpenAI) -> None:
    tokenizer = running.llm.tokenizer
    assert tokenizer is not None
    found = answer(client)
    assert (found.prompt_token_ids, found.choices[0].token_ids) == (None, None)
    found = answer(client, extra_body={"return_token_ids": True})
    assert found.prompt_token_ids == ids_of(running, messages=BEGUN[:1])
    text = tokenizer.decode(found.choices[0].token_ids, skip_special_tokens=True)
    assert text == found.choices[0].message.content
    first, *others = answer(client, stream=True, extra_body={"return_token_ids": True})
    assert first.prompt_token_ids == found.prompt_token_ids
    assert all("prompt_token_ids" not in each.model_dump() for each in others)
    assert [token for each in others for token in each.choices[0].token_ids] == found.choices[0].token_ids


@pytest.mark.slow
def test_token_ids_of_text_that_is_held_back() -> None:
    """While a stop string may be about to appear, tokens have no text yet."""
    with serving(LLM(drafter="plain"), names=("tiny",)) as running:
        client = running.client()
        text = complete(client, max_tokens=12).choices[0].text
        body: Any = {"max_tokens": 12, "stop": [f"{text[:20]}@"], "extra_body": {"return_token_ids": True}}
        (whole,) = complete(client, **body).choices
        chunks = [chunk.choices[0] for chunk in complete(client, stream=True, **body)]
        assert any(chunk.token_ids and not chunk.text for chunk in chunks)
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
        said = answer(client, max_tokens=12).choices[0].message.content
        (whole,) = answer(client, **{**body, "stop": [f"{said[:20]}@"]}).choices
        chunks = [chunk.choices[0] for chunk in answer(client, stream=True, **{**body, "stop": [f"{said[:20]}@"]})][1:]
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids


def test_tokens_as_token_ids(client: openai.OpenAI) -> None:
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = complete(client, logprobs=2, echo=True, extra_body=body).choices
    names = [f"token_id:{token}" for token in choice.prompt_token_ids + choice.token_ids]
    assert choice.logprobs.tokens == names
    assert [next(iter(top)) for top in choice.logprobs.top_logprobs[1:]] == names[1:]
    (plain,) = complete(client, logprobs=2, echo=True).choices
    assert choice.logprobs.text_offset == plain.logprobs.text_offset
    (choice,) = answer(client, logprobs=True, top_logprobs=1, extra_body=body).choices
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{token}" for token in choice.token_ids]
    assert choice.logprobs.content[0].top_logprobs[0].token == choice.logprobs.content[0].token


# --------------------------------------------------------------------------------------- log-probabilities of prompts


def test_log_probabilities_of_prompts(client: openai.OpenAI) -> None:
    """They are those of an echoed prompt."""
    options: Any = {"prompt": [PROMPT, "import os"], "max_tokens": 1, "logprobs": 1, "echo": True}
    found = complete(client, **options, extra_body={"prompt_logprobs": 3, "return_token_ids": True})
    for choice in found.choices:
        first, *others = choice.prompt_logprobs
        assert first is None
        assert len(choice.prompt_logprobs) == len(choice.prompt_token_ids)
        assert all(len(top) <= 2 for top in choice.logprobs.top_logprobs[1:])
        for place, entry in enumerate(others, start=1):
            own = entry[str(choice.prompt_token_ids[place])]
            assert next(iter(entry.values())) == own
            assert own["logprob"] == choice.logprobs.token_logprobs[place]
            assert own["decoded_token"] == choice.logprobs.tokens[place]
            ranks = [each["rank"] for each in entry.values()]
            assert sorted(rank for rank in ranks if rank is not None) == [1, 2, 3]
    assert complete(client).choices[0].prompt_logprobs is None


def test_log_probabilities_of_prompts_where_nothing_can_be_drafted() -> None:
    """As where a step has room for the last token of each sequence only, or the model takes no drafts (Mamba)."""
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    found = []
    for options in ({}, {"max_nodes": 1}, {"capabilities": frozenset({"logits"})}):
        with serving(LLM(SlowToy(**options), tokenizer=Letters(), drafter="plain")) as running:
            found.append(running.post(COMPLETIONS, body).json()["choices"][0]["prompt_logprobs"])
    assert found[0] == found[1] == found[2]


def test_log_probabilities_of_a_chat(running: Running, client: openai.OpenAI) -> None:
    found = answer(client, max_tokens=1, extra_body={"prompt_logprobs": -1, "top_logprobs": -1, "logprobs": True})
    assert running.llm.tokenizer is not None
    assert len(found.prompt_logprobs) == found.usage.prompt_tokens
    assert [len(entry) for entry in found.prompt_logprobs[1:3]] == [4096, 4096]
    assert len(found.choices[0].logprobs.content[0].top_logprobs) == 4096
    check(
        running.post(CHAT, {"messages": BEGUN, "prompt_logprobs": 1, "stream": True}), 400, "prompt_logprobs", "stream"
    )
    check(running.post(COMPLETIONS, {"prompt": "a", "logprobs": -1}), 400, "logprobs", "")


# ------------------------------------------------------------------------------------------------------------ prompts


def test_the_last_message_is_continued(running: Running, client: openai.OpenAI) -> None:
    found = answer(client, messages=BEGUN, extra_body={**OPEN, "return_token_ids": True})
    tokenizer = running.llm.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(found.prompt_token_ids)
    assert text.endswith("Count.\n<|assistant|>\nOne, two, ")
    alone = running.llm.generate(found.prompt_token_ids, max_new_tokens=6)
    assert found.choices[0].message.content == alone.text
    assert ids_of(running, messages=BEGUN, **OPEN) == found.prompt_token_ids
    echoed = answer(client, messages=BEGUN, extra_body={**OPEN, "echo": True})
    assert echoed.choices[0].message.content == "One, two, " + alone.text
    chunks = list(answer(client, messages=BEGUN, stream=True, extra_body={**OPEN, "echo": True}))
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == "One, two, " + alone.text
    assert (
        answer(client, extra_body={"echo": True}).choices[0].message.content
        == answer(client).choices[0].message.content
    )


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_what_cannot_be_continued(running: Running, path: str) -> None:
    body = {"messages": BEGUN, "continue_final_message": True}
    check(running.post(path, body), 400, "continue_final_message", "add_generation_prompt=false")


@pytest.mark.parametrize("content", ["", " \n", None])
def test_an_empty_message_is_continued(running: Running, content: str | None) -> None:
    """Where its text would begin."""
    messages = [BEGUN[0], {"role": "assistant", "content": content}]
    tokenizer = running.llm.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(ids_of(running, messages=messages, **OPEN))
    assert text.endswith("Count.\n<|assistant|>\n")


@pytest.mark.parametrize(
    ("text", "final", "expected"),
    [
        ("<u>a</u><a>{} </a>", "b ", "<u>a</u><a>b "),
        ("<u>b</u><a>{}</a>", " b ", "<u>b</u><a> b"),
        ("<a>b {}</a>", "b", "<a>b b"),
        ("<|im_start|>{}<|im_end|>", "im", "<|im_start|>im"),
        ("<a>{}</a>", "a", "<a>a"),
        ("<a>{} </a>", " ", "<a>"),
    ],
)
def test_where_a_message_is_left_open(text: str, final: str, expected: str) -> None:
    """Also where the message occurs in what the template writes behind it. A template may trim messages."""
    assert left_open(text.format(marked(final).rstrip()), final) == expected


def test_special_tokens_and_truncation(running: Running, client: openai.OpenAI) -> None:
    ids = ids_of(running, prompt=PROMPT)
    (choice,) = complete(client, extra_body={"truncate_prompt_tokens": 3, "return_token_ids": True}).choices
    assert choice.prompt_token_ids == ids[-3:]
    assert choice.text == running.llm.generate(ids[-3:], max_new_tokens=6).text
    (choice,) = complete(client, prompt=ids, echo=True, extra_body={"truncate_prompt_tokens": 2}).choices
    assert running.llm.tokenizer is not None
    assert choice.text.startswith(running.llm.tokenizer.decode(ids[-2:]))
    found = answer(client, extra_body={"truncate_prompt_tokens": 5, "add_special_tokens": True})
    assert found.usage.prompt_tokens == 5
    check(running.post(COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}), 400, "truncate_prompt_tokens", "")


# -------------------------------------------------------------------------------------------------- paths and the rest


def test_paths(running: Running) -> None:
    assert running.get("/version").json() == {"version": __version__}
    assert running.get("/ping").status_code == 200
    assert running.get("/load").json() == {"server_load": 0}
    head = httpx.head(f"{running.url}/health")
    assert (head.status_code, head.content, head.headers["content-type"]) == (200, b"", "application/json")
    assert httpx.head(f"{running.url}{CHAT}").status_code == 405
    assert running.get("/models").json() == running.get("/v1/models").json()
    assert running.get("/models/tiny").json()["id"] == "tiny"
    body = {"messages": BEGUN, "temperature": 0, "max_tokens": 4}
    texts = [running.post(path, body).json()["choices"] for path in (CHAT, "/chat/completions")]
    assert texts[0] == texts[1]
    for path in ("/v1/audio/speech", "/v1/embeddings", "/v1/rerank"):
        check(running.post(path, body), 404, None, "nothing at")


def test_tokens_as_the_vocabulary_writes_them(running: Running) -> None:
    found = running.post("/tokenize", {"prompt": "a b"}).json()
    assert found["token_strs"] is None
    found = running.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json()
    assert "".join(found["token_strs"]) == "a\u0120b"
    with serving(LLM(SlowToy(), tokenizer=Letters())) as letters:
        assert letters.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json()["token_strs"] == list(
            "a b"
        )


def test_the_tier_that_serves_is_named(running: Running, client: openai.OpenAI) -> None:
    """Whichever was asked for, if one was; whole and in every chunk."""
    for tier in ("auto", "default", "flex", "scale", "priority"):
        assert answer(client, service_tier=tier).service_tier == "default"
    options: Any = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert {chunk.service_tier for chunk in answer(client, service_tier="flex", **options)} == {"default"}
    assert "service_tier" not in running.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).json()
    check(running.post(COMPLETIONS, {"prompt": "a", "service_tier": "first"}), 400, "service_tier", "")


def test_what_is_written_to_the_log_only(running: Running, client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    labels = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), "me")
    found = complete(client, extra_body={"metadata": {"run": "7"}, **labels})
    assert found.choices[0].text == text
    check(running.post(COMPLETIONS, {"prompt": "a", "user": "a" * 257}), 400, "user", "")
    check(running.post(COMPLETIONS, {"prompt": "a", "metadata": {"a": 1}}), 400, "metadata.a", "")
