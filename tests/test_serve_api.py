"""The API as the official client sees it: completions, chats, streams, and the parameters of each."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, cast

import httpx
import openai
import pytest
from helpers import with_gaps

from leapahead import LLM, TokenLogprobs
from leapahead.models.toy import ToyTarget
from leapahead.serve.logprobs import Places, places
from leapahead.serve.prompts import Texts
from leapahead.serve.replies import CompletionChoice, CompletionReply
from leapahead.serve.streaming import TextEvent
from leapahead.serve.tokenization import TokenizeMessages
from tests.serving import NO_TLS, PARTS_TEMPLATE, Letters, Running, serving, toy_llm

PROMPT = "def add(a, b):\n"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """What the server's texts are compared with."""
    with LLM() as found:
        yield found


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(LLM(), names=("tiny", "other")) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.client()


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(
        **{"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **options}
    )


def answer(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **options}
    return client.chat.completions.create(**given)


# ------------------------------------------------------------------------------------------------------------- texts


def test_a_completion(client: openai.OpenAI, llm: LLM) -> None:
    found = complete(client, extra_body={"ignore_eos": True})
    alone = llm.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
    assert (found.id[:5], found.object, found.model) == ("cmpl-", "text_completion", "tiny")
    assert found.system_fingerprint.startswith("leapahead-")
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason, choice.index) == (alone.text, "length", 0)
    assert choice.logprobs is None
    assert choice.prompt_logprobs is None
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(alone.prompt_tokens), 12)
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_an_answer(client: openai.OpenAI, llm: LLM) -> None:
    found = answer(client)
    alone = llm.generate(MESSAGES, max_new_tokens=12)
    assert (found.id[:9], found.object) == ("chatcmpl-", "chat.completion")
    assert (found.choices[0].message.role, found.choices[0].message.content) == ("assistant", alone.text)
    assert found.choices[0].finish_reason == alone.finish_reason
    assert found.usage.prompt_tokens == len(alone.prompt_tokens)


def test_openai_s_defaults(client: openai.OpenAI, llm: LLM) -> None:
    """16 tokens, temperature 1."""
    found = client.completions.create(model="tiny", prompt=PROMPT, seed=5)
    assert found.choices[0].text == llm.generate(PROMPT, max_new_tokens=16, temperature=1.0, seed=5).text
    short: Any = {"stop": ["a", "e", "i", "o"]}  # an answer may be as long as the context
    assert client.chat.completions.create(model="tiny", messages=MESSAGES, **short).usage.completion_tokens > 0


SAMPLED: dict[str, dict[str, Any]] = {
    "seed": {},
    "filters": {"top_p": 0.8, "extra_body": {"top_k": 40, "min_p": 0.01}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}},
    "bias": {"logit_bias": {"10": 5, "300": -100}},
    "bad words": {"extra_body": {"bad_words": ["the", "a"], "min_tokens": 10}},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_text_is_that_of_the_library(client: openai.OpenAI, llm: LLM, name: str) -> None:
    given = dict(SAMPLED[name])
    found = complete(client, temperature=0.9, seed=11, max_tokens=24, **given)
    options: dict[str, Any] = {**given.pop("extra_body", {}), **given}
    if "min_tokens" in options:
        options["min_new_tokens"] = options.pop("min_tokens")
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
    assert found.choices[0].text == llm.generate(PROMPT, max_new_tokens=24, temperature=0.9, seed=11, **options).text


def test_a_bias_bans_and_forces(client: openai.OpenAI, llm: LLM) -> None:
    first = llm.generate(PROMPT, max_new_tokens=1).tokens[0]
    banned = complete(client, max_tokens=1, logit_bias={str(first): -100})
    forced = complete(client, max_tokens=3, logit_bias={"300": 100})
    assert llm.tokenizer is not None
    assert banned.choices[0].text != llm.tokenizer.decode([first])
    assert forced.choices[0].text == llm.tokenizer.decode([300]) * 3


def test_several_samples(client: openai.OpenAI, llm: LLM) -> None:
    found = complete(client, n=3, temperature=1, seed=7, max_tokens=8)
    alone = llm.generate(PROMPT, n=3, temperature=1.0, seed=7, max_new_tokens=8)
    assert [choice.text for choice in found.choices] == [each.text for each in alone]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert found.usage.prompt_tokens == len(alone[0].prompt_tokens)
    assert found.usage.completion_tokens == sum(len(each.tokens) for each in alone)


def test_several_prompts_as_text_and_as_ids(client: openai.OpenAI, llm: LLM) -> None:
    texts = [PROMPT, "The capital of"]
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode(text) for text in texts]
    alone = [each.text for each in llm.generate(texts, max_new_tokens=6)]
    for prompt in (texts, ids):
        found = complete(client, prompt=prompt, max_tokens=6)
        assert [choice.text for choice in found.choices] == alone
    assert complete(client, prompt=ids[1], max_tokens=6).choices[0].text == alone[1]
    both = complete(client, prompt=texts, n=2, max_tokens=6, temperature=1, seed=3)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    expected = llm.generate(texts, n=2, max_new_tokens=6, temperature=1.0, seed=3)
    assert [choice.text for choice in both.choices] == [each.text for group in expected for each in group]


def test_stop_strings_and_stop_tokens(client: openai.OpenAI, llm: LLM) -> None:
    whole = llm.generate(PROMPT, max_new_tokens=24)
    stop = whole.text[10:13]
    found = complete(client, stop=[stop, "zzz"], max_tokens=24).choices[0]
    assert (found.text, found.finish_reason, found.stop_reason) == (whole.text.partition(stop)[0], "stop", stop)
    included = complete(client, stop=stop, max_tokens=24, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert included.text == whole.text.partition(stop)[0] + stop
    token = whole.tokens[4]
    by_token = complete(client, max_tokens=24, extra_body={"stop_token_ids": [token]})
    assert by_token.choices[0].stop_reason == token
    assert by_token.usage.completion_tokens == whole.tokens.index(token) + 1


def test_echo(client: openai.OpenAI, llm: LLM) -> None:
    text = llm.generate(PROMPT, max_new_tokens=12).text
    assert complete(client, echo=True).choices[0].text == PROMPT + text
    assert llm.tokenizer is not None
    assert complete(client, echo=True, prompt=llm.tokenizer.encode(PROMPT)).choices[0].text == PROMPT + text
    assert "".join(chunk.choices[0].text for chunk in complete(client, echo=True, stream=True)) == PROMPT + text


def test_the_roles_and_contents_of_messages(client: openai.OpenAI, llm: LLM, running: Running) -> None:
    parts: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "1 + 1?"}]},
    ]
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is\n1 + 1?"}]
    assert answer(client, messages=parts).choices[0].message.content == llm.generate(same, max_new_tokens=12).text
    found = running.post("/tokenize", {"messages": parts}).json()
    assert found["tokens"] == llm.generate(same, max_new_tokens=1).prompt_tokens
    without = running.post("/tokenize", {"messages": parts, "add_generation_prompt": False}).json()
    assert found["tokens"][: without["count"]] == without["tokens"]
    assert without["count"] < found["count"]


def test_a_template_that_reads_parts_only_shows_texts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", PARTS_TEMPLATE)
    texts, system = Texts(llm), {"role": "system", "content": "Be brief."}
    for content in ("Hello ", [{"type": "text", "text": "Hello "}]):
        given = TokenizeMessages(messages=cast(Any, [system, {"role": "user", "content": content}]))
        shown = "System: Be brief.<end_of_utterance>\nUser: Hello <end_of_utterance>\nAssistant:"
        assert texts.text(texts.chat_of_any_length(given)) == shown
    continued = TokenizeMessages(
        messages=cast(Any, [{"role": "assistant", "content": "Once "}]),
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert texts.text(texts.chat_of_any_length(continued)) == "Assistant: Once "


def test_tokens_behind_a_gap_of_the_ids_are_shown() -> None:
    texts = Texts(LLM(ToyTarget(), tokenizer=with_gaps()))
    assert (texts.text([0, 9, 11]), texts.token(9)) == ("a <x>", "<x>")


def test_what_a_tokenizer_was_made_with_is_told_where_that_is_enabled(llm: LLM, running: Running) -> None:
    found, tokenizer = Texts(llm).tokenizer_info(), cast(Any, llm.tokenizer)
    assert found["chat_template"] == tokenizer.chat_template
    assert (found["bos_token"], found["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert found["tokenizer_class"] == type(tokenizer).__name__
    assert found["added_tokens_decoder"]["0"] == tokenizer.eos_token
    assert "tiny" not in str(found)  # the folder
    with serving(toy_llm(), tokenizer_info=True) as toy:
        answered = httpx.get(f"{toy.url}/tokenizer_info", verify=NO_TLS).json()
    assert answered == {"tokenizer_class": "Letters", "chat_template": "letters", "eos_token": "\n"}
    assert httpx.get(f"{running.url}/tokenizer_info", verify=NO_TLS).status_code == 404


# ---------------------------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("text", ["", "a", '"\\\n\t\0\x7f', "ä€😀\u2028", "</script>"])
def test_events_of_text_are_those_of_the_schema(text: str) -> None:
    def reply(text: str) -> CompletionReply:
        return CompletionReply(id="\\u0000", created=1, model="m", choices=[CompletionChoice(index=2, text=text)])

    found = TextEvent(reply(TextEvent.MARK)).of(text)
    assert found.startswith("data: ")
    assert found.endswith("}\n\n")
    assert found.count("\n") == 2
    assert json.loads(found.removeprefix("data: ")) == reply(text).model_dump()


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "seed": 4, "n": 3}, {"stop": ["e"]}], ids=str)
def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI, options: Any) -> None:
    for make, text_of in (
        (complete, lambda choice: choice.text),
        (answer, lambda choice: choice.delta.content if hasattr(choice, "delta") else choice.message.content),
    ):
        whole = make(client, max_tokens=20, **options)
        chunks = list(make(client, max_tokens=20, stream=True, stream_options={"include_usage": True}, **options))
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        assert chunks[-1].choices == []
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)
        assert all(chunk.usage is None for chunk in chunks[:-1])
        for index, choice in enumerate(whole.choices):
            own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
            assert "".join(text_of(each) or "" for each in own) == text_of(choice)
            assert [each.finish_reason for each in own[:-1]] == [None] * (len(own) - 1)
            assert (own[-1].finish_reason, own[-1].stop_reason) == (choice.finish_reason, choice.stop_reason)


def test_the_first_chunk_of_a_chat_has_the_role(client: openai.OpenAI) -> None:
    chunks = list(answer(client, stream=True))
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert all(
        chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens for chunk in chunks
    )


def test_the_asynchronous_client(running: Running, llm: LLM) -> None:
    async def talk() -> list[str]:
        async with running.asynchronous() as client:
            streamed = [""] * 4

            async def one(index: int) -> None:
                stream = await client.completions.create(
                    model="tiny", prompt=PROMPT, max_tokens=10, seed=index, stream=True
                )
                async for chunk in stream:
                    streamed[index] += chunk.choices[0].text

            await asyncio.gather(*map(one, range(4)))
            return streamed

    alone = [llm.generate(PROMPT, max_new_tokens=10, temperature=1.0, seed=seed).text for seed in range(4)]
    assert asyncio.run(talk()) == alone


# ----------------------------------------------------------------------------------------------------------- logprobs


def test_logprobs_of_completions(client: openai.OpenAI, llm: LLM) -> None:
    alone = llm.generate(PROMPT, max_new_tokens=12, logprobs=3)
    found = complete(client, logprobs=3).choices[0].logprobs
    assert found.token_logprobs == pytest.approx([entry.logprob for entry in alone.logprobs], abs=1e-4)
    assert "".join(found.tokens) == alone.text
    assert found.text_offset == [sum(map(len, found.tokens[:index])) for index in range(12)]
    for entry, top in zip(alone.logprobs, found.top_logprobs, strict=True):
        assert list(top.values())[:3] == pytest.approx([logprob for _, logprob in entry.top], abs=1e-4)
    streamed = list(complete(client, logprobs=3, stream=True))
    for name in ("tokens", "text_offset"):
        joined = [each for chunk in streamed for each in getattr(chunk.choices[0].logprobs, name)]
        assert joined == getattr(found, name)
    assert [len(top) for top in complete(client, logprobs=0).choices[0].logprobs.top_logprobs] == [1] * 12


def text_and_offsets(found: Any) -> tuple[str, list[str], list[int]]:
    """Of a response, or of the chunks of a stream."""
    choices = found.choices if hasattr(found, "choices") else [chunk.choices[0] for chunk in found]
    logprobs = [choice.logprobs for choice in choices]
    tokens = [token for each in logprobs for token in each.tokens]
    return "".join(choice.text for choice in choices), tokens, [at for each in logprobs for at in each.text_offset]


ODD = "na\u00efve \U0001f600<|user|> 日本 <|assistant|>\n\U0001f600"
EMOJI = ("67", "223", "175", "256", "249", "225")  # "a", a space, and the four bytes of U+1F600
RANDOM = {"temperature": 9.0, "max_tokens": 60, "logit_bias": dict.fromkeys(EMOJI, 100)}
OFFSETS: dict[str, dict[str, Any]] = {
    "echoed text": {"echo": True, "prompt": ODD},
    "echoed ids": {"echo": True, "prompt": "ids"},
    "random": RANDOM,
    "random behind an echo": {**RANDOM, "echo": True, "prompt": ODD, "seed": 3},
    "stop string": {"stop": "some"},
    "stop string that stays": {"stop": "some", "extra_body": {"include_stop_str_in_output": True}},
    "end of text": {"max_tokens": 1, "logit_bias": {"0": 100}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFSETS)
def test_tokens_begin_at_their_offsets(client: openai.OpenAI, llm: LLM, name: str) -> None:
    """Also where a character has several tokens, special tokens add nothing, or a stop string ends the text."""
    assert llm.tokenizer is not None
    options = {"logprobs": 1, "prompt": PROMPT, "seed": 0, **OFFSETS[name]}
    if "stop" in options:
        options["stop"] = llm.generate(PROMPT, max_new_tokens=12, logprobs=0).text[5:-3]  # it has several tokens
    if options["prompt"] == "ids":
        options["prompt"] = llm.tokenizer.encode(ODD)[:-1]  # a part of a character ends it
    text, tokens, offsets = text_and_offsets(complete(client, **options))
    assert (text, tokens, offsets) == text_and_offsets(complete(client, stream=True, **options))
    assert offsets == sorted(offsets)
    assert all(0 <= at <= len(text) for at in offsets)
    for token, at in zip(tokens, offsets, strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert text.startswith(token, at) or token.startswith(text[at:])  # which a stop string has cut
    if "echo" in options:
        assert text.index("<|assistant|>") == offsets[tokens.index("<|assistant|>")]
    elif name == "end of text":
        assert (text, tokens, offsets) == ("", ["<|endoftext|>"], [0])


def test_places_in_a_text_that_is_not_that_of_the_tokens(llm: LLM) -> None:
    """The tokenizer may begin it with a token of its own, and compose characters."""
    assert llm.tokenizer is not None
    tokens = [0, *llm.tokenizer.encode("naïve café? 😀 Là!")]
    text = unicodedata.normalize("NFD", "naïve café? 😀 Là!")
    found = places(llm.tokenizer, lambda token: llm.tokenizer.decode([token]), tokens, text)
    assert (found[:2], found[-1]) == ([0, 0], len(text) - 1)
    assert found == sorted(found)


def test_places_behind_a_prompt_without_the_space_that_divides_them() -> None:
    class Stripping(Letters):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens).removeprefix(" ")

    tokenizer = Stripping()
    echo, *tokens = (tokenizer.encode(text)[0] for text in "a b")
    place = Places(tokenizer, lambda token: tokenizer.decode([token]), 1, [echo])
    found = place.take([TokenLogprobs(token, 0.0, ()) for token in tokens], " b", is_last=True)
    assert [at for _, at in found] == [1, 2]


def test_the_bytes_of_tokens(client: openai.OpenAI, llm: LLM) -> None:
    """Those of a character's tokens are the character; special tokens have their text."""
    assert llm.tokenizer is not None
    found = b""
    for token in llm.tokenizer.encode("\U0001f600<|user|>"):
        chosen = answer(client, max_tokens=1, logprobs=True, top_logprobs=2, logit_bias={str(token): 100})
        (entry,) = chosen.choices[0].logprobs.content
        found += bytes(entry.bytes)
        assert all(isinstance(other.bytes, list) for other in entry.top_logprobs)
    assert found.decode() == "\U0001f600<|user|>"


def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    found = answer(client, logprobs=True, top_logprobs=2)
    content = found.choices[0].logprobs.content
    assert len(content) == found.usage.completion_tokens
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)  # greedy: the likeliest
        assert entry.logprob <= 0
    streamed = [entry for chunk in answer(client, logprobs=True, stream=True) for entry in _entries(chunk)]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert answer(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_of_an_echoed_prompt(client: openai.OpenAI, llm: LLM) -> None:
    """Those that the tokens of a text have are those that they have in a prompt."""
    text = llm.generate(PROMPT, max_new_tokens=8, logprobs=2)
    prompt = [*text.prompt_tokens, *text.tokens]
    found = complete(client, prompt=prompt, echo=True, logprobs=2, max_tokens=4)
    logprobs = found.choices[0].logprobs
    assert len(logprobs.tokens) == len(prompt) + 4
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    begin = len(text.prompt_tokens)
    expected = pytest.approx([entry.logprob for entry in text.logprobs], abs=1e-3)
    assert logprobs.token_logprobs[begin : begin + 8] == expected
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs[1:])
    assert [len(top) for top in logprobs.top_logprobs[1:]] == pytest.approx([2.5] * (len(prompt) + 3), abs=0.5)
    assert found.choices[0].text[: len(PROMPT)] == PROMPT
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:at])) for at in range(len(logprobs.tokens))]
    alone = complete(client, prompt=prompt, echo=True, logprobs=2, max_tokens=0)
    assert alone.choices[0].logprobs.tokens == logprobs.tokens[: len(prompt)]
    assert (alone.choices[0].finish_reason, alone.usage.completion_tokens) == ("length", 0)
    streamed = list(complete(client, prompt=prompt, echo=True, logprobs=2, max_tokens=4, stream=True))
    assert [token for chunk in streamed for token in chunk.choices[0].logprobs.tokens] == logprobs.tokens
    one = complete(client, prompt=prompt[:1], echo=True, logprobs=1, max_tokens=1, n=2).choices
    assert [len(choice.logprobs.tokens) for choice in one] == [2, 2]


def test_a_text_of_no_tokens(client: openai.OpenAI) -> None:
    found = complete(client, max_tokens=0, n=2)
    assert [(choice.text, choice.finish_reason) for choice in found.choices] == [("", "length")] * 2
    chunks = list(complete(client, max_tokens=0, stream=True, echo=True))
    assert [chunk.choices[0].text for chunk in chunks] == [PROMPT, ""]


def test_a_text_ends_where_the_context_does(client: openai.OpenAI) -> None:
    found = complete(client, prompt=[5] * 2040, max_tokens=100, extra_body={"ignore_eos": True})
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (8, "length")


def _entries(chunk: Any) -> list[Any]:
    logprobs = chunk.choices[0].logprobs
    return [] if logprobs is None else logprobs.content


# --------------------------------------------------------------------------------------------------------- prediction


def test_predicted_outputs(client: openai.OpenAI, llm: LLM) -> None:
    whole = llm.generate(MESSAGES, max_new_tokens=40, ignore_eos=True)
    right = {"type": "content", "content": whole.text}
    options = {"max_tokens": 40, "extra_body": {"ignore_eos": True, "leapahead": {"stats": True}}}
    found = answer(client, prediction=right, **options)
    assert found.choices[0].message.content == whole.text
    details = found.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 5
    assert found.leapahead["accepted"] >= details.accepted_prediction_tokens
    assert found.leapahead["acceptance_length"] > 2
    assert found.leapahead["steps"] < 20
    parts = {"type": "content", "content": [{"type": "text", "text": "Something else."}]}
    wrong = answer(client, prediction=parts, **options)
    assert wrong.choices[0].message.content == whole.text
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens >= 0
    plain = answer(client, max_tokens=4)
    assert not hasattr(plain, "leapahead")


def test_what_drafting_did_at_the_end_of_a_stream(client: openai.OpenAI) -> None:
    *_, last = complete(client, stream=True, extra_body={"leapahead": {"stats": True}})
    assert last.choices == []
    assert last.usage is None
    assert last.leapahead["steps"] > 0


# --------------------------------------------------------------------------------------------------------- other paths


def test_models(client: openai.OpenAI, running: Running) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").max_model_len == 2048
    assert complete(client, model="other").model == "other"
    assert running.get("/v1/models/none").status_code == 404


def test_tokenize_and_detokenize(running: Running, llm: LLM) -> None:
    assert llm.tokenizer is not None
    found = running.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    assert found["tokens"] == llm.tokenizer.encode(PROMPT)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 2048
    assert len(found["token_strs"]) == found["count"]
    assert running.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
    assert running.post("/tokenize", {"prompt": "", "add_special_tokens": None}).json()["tokens"] == []
    assert running.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_health_and_the_id_of_a_request(running: Running) -> None:
    found = running.get("/health", headers={"X-Request-Id": "my-own.id"})
    assert (found.status_code, found.headers["x-request-id"]) == (200, "my-own.id")
    found = running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "abc"})
    assert found.json()["id"] == "cmpl-abc"
    assert len(running.get("/health", headers={"X-Request-Id": "no {good}"}).headers["x-request-id"]) == 32


def test_prefixes_are_reused_between_turns(client: openai.OpenAI) -> None:
    first = answer(
        client, messages=[*MESSAGES, {"role": "assistant", "content": "2"}, {"role": "user", "content": "+ 3?"}]
    )
    again = answer(
        client, messages=[*MESSAGES, {"role": "assistant", "content": "2"}, {"role": "user", "content": "+ 4?"}]
    )
    assert again.usage.prompt_tokens_details.cached_tokens > 0.7 * first.usage.prompt_tokens
