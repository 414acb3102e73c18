"""Tool calls and reasoning in the server, as the official client sees them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pydantic
import pytest
from helpers import mostly_slow

from leapahead import LLM
from leapahead.chat import TOOL_FORMATS, ToolChoice, json_grammar, parse, reasoning_format, tool_grammar
from leapahead.chat import tools as checked
from leapahead.core.errors import BadParameter
from leapahead.results import Piece
from leapahead.serve.chat import Chat
from leapahead.serve.formats import Reading
from leapahead.serve.messages import json_object
from leapahead.serve.schema import ChatRequest
from tests.serving import Running, calling_llm, check, serving, toy_llm

pytest.importorskip("llguidance")

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
CLOCK: Any = {
    "type": "function",
    "function": {"name": "clock", "description": "Time", "parameters": {}, "strict": True},
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


class Weather(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """What the server's texts are compared with."""
    with LLM() as found:
        yield found


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A model that calls tools."""
    with serving(calling_llm(), reasoning_parser="none") as found:
        yield found
        assert found.idle()


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A model that calls tools, and reasons where it is asked to."""
    with serving(calling_llm()) as found:
        yield found
        assert found.idle()


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.client()


def answer(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 80, **options}
    return client.chat.completions.create(**given)


def prompt(running: Running, **options: Any) -> list[int]:
    return list(running.post("/tokenize", {"messages": MESSAGES, **options}).json()["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "parallel"),
    [
        *(("required", False), ("auto", True)),
        *(("required", True), (NAMED, True), ("none", True), ("auto", False), ("none", False), (NAMED, False)),
    ],
    ids=str,
)
def test_calls_are_those_of_plain_decoding(
    running: Running, client: openai.OpenAI, llm: LLM, choice: Any, parallel: bool
) -> None:
    """Whole, and as a stream."""
    tools = checked([WEATHER, CLOCK])
    named = choice is NAMED
    asked = ToolChoice("required", "get_weather") if named else ToolChoice(choice)
    hermes = TOOL_FORMATS["hermes"]
    assert running.llm.tokenizer is not None
    grammar = tool_grammar(tools, asked, hermes, running.llm.tokenizer, parallel=parallel and not named)
    options: Any = {"temperature": 1, "seed": 4}
    alone = llm.generate(
        prompt(running, tools=[WEATHER, CLOCK]), max_new_tokens=80, grammar=grammar, drafter="plain", **options
    )
    expected = parse(alone.text, None if choice == "none" else hermes, forced=asked.mode == "required")
    given = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": parallel, **options}
    found = answer(client, **given).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in found.message.tool_calls or ()]
    assert calls == [(call.function.name, call.function.arguments) for call in expected.tool_calls]
    assert found.message.content == (expected.content or (None if calls else ""))
    if alone.finish_reason == "stop":
        assert found.finish_reason == ("tool_calls" if calls and not named else "stop")
    assert bool(calls) or choice in ("auto", "none")
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=80, **given) as stream:
        try:
            streamed = stream.get_final_completion().choices[0]
        except openai.LengthFinishReasonError as error:
            streamed = error.completion.choices[0]
    assert [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()] == calls
    assert streamed.finish_reason == found.finish_reason
    assert (streamed.message.content or "") == (found.message.content or "")


@pytest.mark.slow
def test_the_shape_of_streamed_calls(client: openai.OpenAI) -> None:
    chunks = list(answer(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", None)
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert (pieces[0].index, pieces[0].type, pieces[0].function.name) == (0, "function", "get_weather")
    assert re.fullmatch("call_[0-9a-f]{24}", pieces[0].id)
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert set(json.loads("".join(piece.function.arguments for piece in pieces))) == {"city", "unit"}
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "tool_calls"]
    assert not any(delta.content for delta in deltas)


@pytest.mark.parametrize("given", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters_takes_none(given: Any, client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "now", **given}}]
    (call,) = (
        answer(client, tools=tools, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    )
    assert json.loads(call.function.arguments) == {}


@pytest.mark.slow
def test_several_answers_with_calls(client: openai.OpenAI) -> None:
    given: Any = {"tools": [WEATHER], "tool_choice": NAMED, "n": 3, "temperature": 2, "seed": 1}
    found = answer(client, **given).choices
    parts: list[str] = ["", "", ""]
    for chunk in answer(client, stream=True, **given):
        for piece in chunk.choices[0].delta.tool_calls or ():
            parts[chunk.choices[0].index] += piece.function.arguments
    assert parts == [choice.message.tool_calls[0].function.arguments for choice in found]
    assert len({choice.message.tool_calls[0].id for choice in found}) == 3


def test_tools_of_the_official_client_and_asyncio(running: Running) -> None:
    async def one() -> Any:
        async with running.asynchronous() as found:
            given: Any = {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
            return await found.chat.completions.parse(
                model="tiny", messages=MESSAGES, parallel_tool_calls=False, max_tokens=60, temperature=0, **given
            )

    (call,) = asyncio.run(one()).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_the_messages_of_a_turn_with_a_tool(running: Running, client: openai.OpenAI) -> None:
    """The answer is sent back as the client gave it, with the tool's result."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    turn = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm", "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Sunny"}]},
    ]
    assert running.llm.tokenizer is not None
    text = running.llm.tokenizer.decode(prompt(running, messages=turn, tools=[CLOCK]))
    assert text == (
        '{"type": "function", "function": {"name": "clock", "description": "Time", "parameters": {}}}\n'
        f"<|user|>\n{MESSAGES[0]['content']}\n<|assistant|>\nhm\n<tool_call>get_weather Paris\n<|tool|>\nSunny\n"
        "<|assistant|>\n"
    )
    nulls = {"type": "function", "function": {"name": "clock", "description": None, "parameters": None, "strict": None}}
    text = running.llm.tokenizer.decode(prompt(running, tools=[nulls]))
    assert text.startswith('{"type": "function", "function": {"name": "clock"}}\n')
    first = answer(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).choices[0].message
    reply = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Rain"}
    again = answer(client, messages=[*MESSAGES, first.model_dump(), reply], tools=[WEATHER])
    assert again.choices[0].message.role == "assistant"


def sent_back(running: Running, message: Any) -> None:
    """Sends an answer back, as the client gives it and as its dumps; the chat is that of its content and calls."""
    called = [call.model_dump(include={"id", "type"}) for call in message.tool_calls or ()]
    for call, given in zip(called, message.tool_calls or (), strict=True):
        call["function"] = {"name": given.function.name, "arguments": given.function.arguments}
    plain = {"role": "assistant", "content": message.content, **({"tool_calls": called} if called else {})}
    ends = [{"role": "tool", "tool_call_id": call["id"], "content": "Rain"} for call in called] or MESSAGES
    expected = prompt(running, messages=[*MESSAGES, plain, *ends])
    for given in (message, message.model_dump(), message.to_dict(), message.model_dump(exclude_unset=True)):
        found = answer(running.client(), messages=[*MESSAGES, given, *ends], max_tokens=2)
        assert found.usage.prompt_tokens == len(expected)
        dumped = given if isinstance(given, dict) else given.to_dict()
        assert prompt(running, messages=[*MESSAGES, dumped, *ends]) == expected


def test_arguments_that_no_text_can_contain(running: Running) -> None:
    """Half of a surrogate pair, as a model may write it."""
    assert json_object(r'{"city": "\ud83d", "at": 1}') == {"city": "?", "at": 1}
    assert json_object('{"a":' * 5000 + "1" + "}" * 5000) is None
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": r'{"city": "\ud83d"}'}}
    tokens = prompt(running, messages=[*MESSAGES, {"role": "assistant", "tool_calls": [called]}])
    assert "f ?" in running.post("/detokenize", {"tokens": tokens}).json()["prompt"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own dumps
@pytest.mark.parametrize("asked", ["tools", "response_format", "neither"])
def test_chats_go_on_with_the_messages_of_the_official_client(
    running: Running, client: openai.OpenAI, asked: str
) -> None:
    """From `create`, `parse` and `stream`, and put together of a stream's deltas."""
    tools = {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required", "parallel_tool_calls": False}
    options: Any = {"tools": tools, "response_format": {"response_format": Weather}, "neither": {}}[asked]
    given: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 80 if options else 5}
    completions = client.chat.completions
    if asked != "response_format":
        sent_back(running, completions.create(**given, **options).choices[0].message)
    if options:  # what is cut is not parsed
        parsed = completions.parse(**given, **options).choices[0].message
        assert parsed.parsed or parsed.tool_calls[0].function.parsed_arguments
        sent_back(running, parsed)
        with completions.stream(**given, **options) as stream:
            sent_back(running, stream.get_final_completion().choices[0].message)
    if asked == "tools":
        calls: list[Any] = []
        for chunk in completions.create(stream=True, **given, **options):
            for piece in chunk.choices[0].delta.tool_calls or ():
                if piece.index == len(calls):
                    calls.append(piece.model_dump())
                else:
                    calls[piece.index]["function"]["arguments"] += piece.function.arguments
        put: Any = {"role": "assistant", "content": None, "tool_calls": calls}
        sent_back(running, openai.types.chat.chat_completion_message.ChatCompletionMessage.model_validate(put))


@pytest.mark.parametrize("cut", mostly_slow(range(1, 24), 1, 4, 12))
def test_a_forced_call_that_is_cut_has_no_content(client: openai.OpenAI, cut: int) -> None:
    given: Any = {"tools": [CLOCK], "tool_choice": "required", "max_tokens": cut}
    (found,) = answer(client, **given).choices
    assert not found.message.content
    chunks = [chunk.choices[0] for chunk in answer(client, stream=True, **given)]
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == found.finish_reason
    named = [call.function.name for call in found.message.tool_calls or ()]
    deltas = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    assert [piece.function.name for piece in deltas if piece.function.name] == named


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_are_those_that_the_chat_has(client: openai.OpenAI) -> None:
    """As if the request had the others not."""
    options: Any = {"parallel_tool_calls": False, "extra_body": {"return_token_ids": True}, "max_tokens": 40}
    for mode in ("auto", "required"):
        found = answer(client, tools=[WEATHER, CLOCK], tool_choice=allowed(mode, "clock"), **options)
        alone = answer(client, tools=[CLOCK], tool_choice=mode, **options)
        assert found.prompt_token_ids == alone.prompt_token_ids
        assert found.choices[0].token_ids == alone.choices[0].token_ids
    assert found.choices[0].message.tool_calls[0].function.name == "clock"


def test_logprobs_are_those_of_all_tokens(client: openai.OpenAI) -> None:
    given: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "logprobs": True}
    whole = answer(client, **given)
    tokens = [entry.token for entry in whole.choices[0].logprobs.content]
    assert len(tokens) == whole.usage.completion_tokens
    assert "".join(tokens).startswith("<tool_call>")
    chunks = list(answer(client, stream=True, **given))
    streamed = [entry.token for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content]
    assert streamed == tokens


@pytest.mark.slow
def test_reasoning(thinking: Running, llm: LLM) -> None:
    client = thinking.client()
    tokens = prompt(thinking, **THINKING)
    alone = llm.generate(tokens, max_new_tokens=30)
    found = answer(client, extra_body=THINKING, max_tokens=30).choices[0]
    assert found.message.reasoning_content == found.message.reasoning == alone.text
    assert (found.message.content, found.finish_reason) == (None, alone.finish_reason)
    deltas = [chunk.choices[0].delta for chunk in answer(client, extra_body=THINKING, max_tokens=30, stream=True)]
    assert "".join(delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")) == alone.text
    assert "".join(delta.reasoning for delta in deltas if hasattr(delta, "reasoning")) == alone.text
    assert not any(delta.content for delta in deltas)
    free = answer(client, max_tokens=30).choices[0].message
    assert not hasattr(free, "reasoning_content")
    assert free.content == llm.generate(prompt(thinking), max_new_tokens=30).text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_json_stands_behind_the_reasoning(thinking: Running, llm: LLM, seed: int) -> None:
    """The reasoning is free, and what stands behind it has the schema."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
    tokens = prompt(thinking, **THINKING)
    grammar = json_grammar(PARAMETERS, thinking.llm.tokenizer, reasoning_format("qwen3"), "<think>\n")
    options: Any = {"temperature": 1, "seed": seed, "max_tokens": 60}
    found = answer(thinking.client(), response_format=form, extra_body=THINKING, **options).choices[0]
    alone = llm.generate(tokens, max_new_tokens=60, grammar=grammar, drafter="plain", temperature=1, seed=seed)
    expected = parse(alone.text, None, reasoning_format("qwen3"), "<think>\n")
    assert (found.message.content, found.message.reasoning_content) == (expected.content, expected.reasoning_content)


def test_content_between_reasoning_and_calls() -> None:
    """A stream of small pieces, with spans; what is held back because it may be a marker is sent later."""
    call = '<tool_call>{"name": "clock", "arguments": {"a": 1}}</tool_call>'
    text = f"<think>a < b</think>It is {call}"
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "stream": True, "leapahead": {"spans": True}}
    )
    reading = Reading(TOOL_FORMATS["hermes"], reasoning_format("qwen3"), ToolChoice("auto"), "")
    chat: Any = Chat(None, body, reading, [1])  # type: ignore[arg-type]
    members = {"id": "a", "created": 1, "model": "m"}
    pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
    chunks = [
        chat.chunk(members, 0, Piece(part, [], 0, ((part, at % 2 == 0),), "stop" if at == len(pieces) - 1 else None))
        for at, part in enumerate(pieces)
    ]
    assert [] in chunks
    sent = [chunk for found in chunks for chunk in found]
    deltas = [chunk.choices[0].delta for chunk in sent]
    assert "".join(delta.reasoning_content or "" for delta in deltas) == "a < b"
    assert "".join(delta.content or "" for delta in deltas) == "It is"
    arguments = [piece.function.arguments for delta in deltas for piece in delta.tool_calls or ()]
    assert "".join(arguments) == '{"a": 1}'
    spans = [span for chunk in sent for span in chunk.leapahead.spans]
    assert "".join(span.text for span in spans if span.reasoning) == "a < b"
    assert "".join(span.text for span in spans if not span.reasoning) == "It is"
    assert sent[-1].choices[0].finish_reason == "tool_calls"


def test_each_chunk_has_one_call_at_most() -> None:
    """A step may end one call and begin another; clients read the first call of a chunk only."""
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "stream": True, "leapahead": {"spans": True}}
    )
    members = {"id": "a", "created": 1, "model": "m"}
    for parallel in (True, False):
        reading = Reading(TOOL_FORMATS["hermes"], None, ToolChoice("auto"), "", parallel=parallel)
        chat: Any = Chat(None, body, reading, [1])  # type: ignore[arg-type]
        sent = chat.chunk(members, 0, Piece(f"Hm {call}{call}", [], 0, ((f"Hm {call}{call}", True),), "stop"))
        deltas = [chunk.choices[0].delta for chunk in sent]
        assert [[piece.index for piece in delta.tool_calls] for delta in deltas] == ([[0], [1]] if parallel else [[0]])
        assert [delta.content for delta in deltas] == (["Hm", None] if parallel else ["Hm"])
        assert [chunk.choices[0].finish_reason for chunk in sent] == [None, "tool_calls"][-len(sent) :]
        assert [len(chunk.leapahead.spans) for chunk in sent] == [1, 0][: len(sent)]


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, THINKING], ids=["content", "reasoning"])
def test_spans_are_the_text_of_their_chunk(thinking: Running, extra: dict[str, Any]) -> None:
    client = thinking.client()
    asked = {**extra, "leapahead": {"spans": True, "stats": True}}
    drafted = 0
    for _ in range(2):  # what is repeated is drafted
        chunks = list(answer(client, extra_body=asked, stream=True))
    for chunk in chunks[1:-1]:
        delta = chunk.choices[0].delta
        spans = chunk.leapahead["spans"]
        assert "".join(span["text"] for span in spans if not span.get("reasoning")) == (delta.content or "")
        thought = "".join(span["text"] for span in spans if span.get("reasoning"))
        assert thought == getattr(delta, "reasoning_content", "")
        drafted += sum(span["drafted"] for span in spans)
    assert chunks[-1].leapahead["accepted"] or not drafted


def test_spans_of_completions_say_what_was_drafted() -> None:
    """The drafter of the toy drafts always, and its prompt has the text already."""
    asked: Any = {"leapahead": {"spans": True, "stats": True}, "ignore_eos": True}
    with serving(toy_llm()) as toy:
        client = toy.client().completions
        text = client.create(model="tiny", prompt="abc", max_tokens=40, temperature=0).choices[0].text
        given: Any = {"model": "tiny", "prompt": f"abc{text}abc", "max_tokens": 40, "temperature": 0}
        found = list(client.create(**given, stream=True, extra_body=asked))
    spans = [span for chunk in found[:-1] for span in chunk.leapahead["spans"]]
    assert "".join(span["text"] for span in spans) == "".join(chunk.choices[0].text for chunk in found[:-1])
    drafted = sum(len(span["text"]) for span in spans if span["drafted"])  # a token is a character
    assert drafted == found[-1].leapahead["accepted"] > 0


WRONG_TOOLS: Sequence[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", ""),
    ({"tools": [WEATHER, WEATHER]}, "tools", "two functions"),
    ({"tools": [{"type": "custom"}]}, "tools.0.type", "custom"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "a b"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "always"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'"),
    ({"tools": [WEATHER], "tool_choice": allowed("auto", "f")}, "tool_choice", "'f', which is not among the tools"),
    ({"tool_choice": allowed("required", "f")}, "tool_choice", "there are none"),
    ({"tools": [WEATHER], "tool_choice": allowed("none", "get_weather")}, "tool_choice.allowed_tools.mode", "none"),
    ({"tools": [WEATHER], "structured_outputs": {"regex": "a"}}, "structured_outputs", "together with tools"),
    (
        {"tools": [WEATHER], "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
        "response_format",
        "Invalid type",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]},
        "tools",
        "Invalid type",
    ),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.tool_call_id", "missing"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages.0.tool_calls", ""),
    ({"leapahead": {"spans": True}}, "leapahead.spans", "stream=true"),
]


@pytest.mark.parametrize(("body", "param", "words"), WRONG_TOOLS, ids=lambda value: str(value)[:60])
def test_what_is_refused(running: Running, body: dict[str, Any], param: str, words: str) -> None:
    check(running.post(CHAT, {"messages": MESSAGES, "max_tokens": 20, **body}), 400, param, words)


@pytest.mark.slow
def test_patterns_that_no_grammar_can_enforce(running: Running) -> None:
    """As Zod's of an e-mail address; a tool is refused for them with strict=true only."""
    city = {"type": "string", "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z.]*@[a-z]+$", "maxLength": 8}
    schema = {**PARAMETERS, "properties": {**PARAMETERS["properties"], "city": city}}  # type: ignore[dict-item]
    for choice in ("auto", "required"):
        for strict, status in ((False, 200), (True, 400)):
            tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
            body = {"messages": MESSAGES, "tools": [tool], "tool_choice": choice, "max_tokens": 40}
            found = running.post(CHAT, body)
            assert found.status_code == status, found.text
            if status == 400:
                check(found, 400, "tools", "look-around")
            elif choice == "required":
                (call,) = found.json()["choices"][0]["message"]["tool_calls"][:1]
                assert len(json.loads(call["function"]["arguments"])["city"]) <= 8


def test_models_without_tools() -> None:
    with serving(LLM()) as plain:
        for choice in ("auto", "none", "required"):
            body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice}
            check(plain.post(CHAT, body), 400, "tools", "--tool-call-parser")
        tokenized = plain.post("/tokenize", {"messages": MESSAGES, "tools": [WEATHER]})
        check(tokenized, 400, "tools", "--tool-call-parser")
        parts = plain.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
        assert parts["tools"]["anyOf"] == [{"type": "array", "maxItems": 0}, {"type": "null"}]
        assert plain.post("/tokenize", {"messages": MESSAGES, "tools": []}).status_code == 200
        assert len(parts["response_format"]["anyOf"]) == 2


@pytest.mark.parametrize("name", ["--tool-call-parser", "--reasoning-parser"])
def test_the_options_of_the_command(leapahead: Any, name: str) -> None:
    result = leapahead("serve", name, "pythonic")
    assert result.exit_code == 2
    assert "pythonic" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_calls_or_a_form(running: Running, client: openai.OpenAI, llm: LLM, seed: int) -> None:
    """With tools and a form, an answer is calls or JSON of the form, as plain decoding under that grammar."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    hermes = TOOL_FORMATS["hermes"]
    assert running.llm.tokenizer is not None
    grammar = tool_grammar(checked([CLOCK]), ToolChoice("auto"), hermes, running.llm.tokenizer, form=schema)
    options: Any = {"temperature": 2, "seed": seed}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    found = answer(client, tools=[CLOCK], response_format=form, **options).choices[0]
    alone = llm.generate(prompt(running, tools=[CLOCK]), max_new_tokens=80, grammar=grammar, drafter="plain", **options)
    expected = parse(alone.text, hermes)
    assert len(found.message.tool_calls or ()) == len(expected.tool_calls)
    assert (found.message.content or "") == (expected.content or "")
    if alone.finish_reason == "stop" and not expected.tool_calls:
        assert list(json.loads(found.message.content)) == ["a"]
    required = answer(client, tools=[CLOCK], response_format=form, tool_choice="required", **options).choices[0]
    assert required.message.tool_calls


def test_a_form_where_calls_have_no_marker() -> None:
    with pytest.raises(BadParameter, match="no marker"):
        tool_grammar(
            checked([CLOCK]),
            ToolChoice("auto"),
            TOOL_FORMATS["llama3_json"],
            toy_llm().tokenizer,
            form={},  # type: ignore[arg-type]
        )
