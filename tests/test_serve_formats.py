"""Tool calls in the server in the formats of Qwen3-Coder and DeepSeek, found by the chat template of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from templates import DEEPSEEK_V3, DEEPSEEK_V31, QWEN3_CODER

from leapahead import LLM
from leapahead.chat import TOOL_FORMATS, ToolChoice, parse, tool_grammar
from leapahead.chat import tools as checked
from tests.serving import Running, check, serving

pytest.importorskip("llguidance")

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"enum": [1, 2, 3]},
        "where": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
TEMPLATES = {"qwen3_coder": QWEN3_CODER, "deepseek_v3": DEEPSEEK_V3, "deepseek_v31": DEEPSEEK_V31}


@pytest.fixture(scope="module", params=TEMPLATES)
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    llm = LLM()
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TEMPLATES[request.param]  # type: ignore[attr-defined]
    with serving(llm, names=(request.param,)) as found:
        yield found
        assert found.idle()


@pytest.fixture(scope="module")
def name(running: Running) -> str:
    return str(running.get("/v1/models").json()["data"][0]["id"])


def streamed(chunks: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    """Content, calls and reason of a stream."""
    content, calls, reason = "", [], None
    for chunk in chunks:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for piece in choice.delta.tool_calls or ():
            if piece.id is not None:
                calls.append((piece.function.name, ""))
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.function.arguments)
        reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "parallel"), [("required", True), ("required", False), (NAMED, True), ("auto", True)], ids=str
)
def test_calls_are_those_of_plain_decoding(running: Running, name: str, choice: Any, parallel: bool) -> None:
    """Whole, and as a stream."""
    tools, format = checked([WEATHER]), TOOL_FORMATS[name]
    named = choice is NAMED
    asked = ToolChoice("required", "get_weather") if named else ToolChoice(choice)
    assert running.llm.tokenizer is not None
    grammar = tool_grammar(tools, asked, format, running.llm.tokenizer, parallel=parallel and not named)
    prompt = running.post("/tokenize", {"messages": MESSAGES, "tools": [WEATHER]}).json()["tokens"]
    options: Any = {"temperature": 1, "seed": 3}
    alone = running.llm.generate(prompt, max_new_tokens=160, grammar=grammar, drafter="plain", **options)
    expected = parse(alone.text, format, functions=tools)
    given = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 160, **options}
    create = running.client().chat.completions.create
    found = create(model=name, messages=MESSAGES, **given).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in found.message.tool_calls or ()]
    assert calls == [(call.function.name, call.function.arguments) for call in expected.tool_calls]
    assert found.message.content == (expected.content or (None if calls else ""))
    if found.finish_reason != "length":
        assert found.finish_reason == ("tool_calls" if calls and not named else "stop")
        for _, arguments in calls:
            jsonschema.validate(json.loads(arguments), PARAMETERS)
    if choice != "auto":
        assert calls
        assert parallel or len(calls) == 1
    content, same, reason = streamed(create(model=name, messages=MESSAGES, stream=True, **given))
    assert (content, same, reason) == (found.message.content or "", calls, found.finish_reason)


@pytest.mark.slow
def test_the_messages_of_a_turn_with_a_tool(running: Running, name: str) -> None:
    """The calls that were made are in the prompt as the model writes them, whatever the template takes."""
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        for index, arguments in enumerate(['{"city": "Paris", "days": 1}', '{"city": "Rome", "days": 2}'])
    ]
    turn = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "Sunny"},
    ]
    assert running.llm.tokenizer is not None
    tokens = running.post("/tokenize", {"messages": turn, "tools": [WEATHER]}).json()["tokens"]
    _, _, text = running.llm.tokenizer.decode(tokens).partition("<|assistant|>")
    message = parse(text.partition("<|end|>")[0].lstrip(), TOOL_FORMATS[name], functions=checked([WEATHER]))
    assert message.content is None
    found = [json.loads(call.function.arguments) for call in message.tool_calls]
    assert found == [json.loads(str(call["function"]["arguments"])) for call in calls]  # type: ignore[index]


@pytest.mark.slow
def test_what_is_refused(running: Running, name: str) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "no"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wrong}}
    check(running.post(CHAT, {"messages": MESSAGES, "tools": [tool]}), 400, "tools", "type")
    several = {"type": "function", "function": {"name": "f", "parameters": {"anyOf": [{"type": "object"}]}}}
    found = running.post(CHAT, {"messages": MESSAGES, "tools": [several], "max_tokens": 1, "tool_choice": "required"})
    if name == "qwen3_coder":
        check(found, 400, "tools", "'anyOf' at the top")
    else:
        assert found.status_code == 200


def test_a_client_of_streams_sees_no_marker(running: Running, name: str) -> None:
    format = TOOL_FORMATS[name]
    given: Any = {"model": name, "messages": MESSAGES, "tools": [WEATHER], "temperature": 1, "seed": 1}
    with running.client().chat.completions.stream(**given, tool_choice="required", parallel_tool_calls=False) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls
    assert not any(marker in str(final.message) for marker in format.markers)
