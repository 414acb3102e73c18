"""/v1/messages: the same texts as chats, in the form of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pydantic
import pytest

from leapahead.chat import TOOL_FORMATS, ToolChoice
from leapahead.results import Piece
from leapahead.serve.anthropic import NAMES, Responder, failed
from leapahead.serve.anthropic_schema import MessagesRequest
from leapahead.serve.errors import ApiError, of_chat
from leapahead.serve.formats import Reading
from tests.serving import Running, calling_llm, check, serving

pytest.importorskip("llguidance")

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL: Any = {
    "name": "get_weather",
    "description": "Today's weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
QUESTION = "What is the weather in Paris?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}  # which the newest client has no argument for


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(calling_llm(), reasoning_parser="none") as found:
        yield found
        assert found.idle()


@pytest.fixture(scope="module")
def client(running: Running) -> anthropic.Anthropic:
    return running.kept(anthropic.Anthropic(api_key="none", base_url=running.url, max_retries=0, timeout=60))


def test_text_behind_a_call_in_the_same_step_begins_when_the_call_is_done() -> None:
    """A drafted step may commit the end of a call and the text behind it at once."""
    call = '<tool_call>{"name": "clock", "arguments": {"a": 1}}</tool_call>'
    found = Responder(None, Reading(TOOL_FORMATS["hermes"], None, ToolChoice("auto"), ""))
    events: list[Any] = []
    for part in (call[:-20], f"{call[-20:]} Done.", " So."):
        events += found.chunk({}, 0, Piece(part, [], 0, ((part, True),)))
    ended = {each.index: at for at, each in enumerate(events) if each.type == "content_block_stop"}
    deltas = [(at, each) for at, each in enumerate(events) if each.type == "content_block_delta"]
    assert all(at < ended.get(each.index, len(events)) for at, each in deltas)
    assert "".join(each.delta["partial_json"] for _, each in deltas if each.index == 0) == '{"a": 1}'
    assert "".join(each.delta["text"] for _, each in deltas if each.index == 1) == " Done. So."


def respond(client: anthropic.Anthropic, **options: Any) -> Any:
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 40, "extra_body": GREEDY, **options}
    return client.messages.create(**given)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 3}], ids=["greedy", "sampled"])
def test_texts_are_those_of_chats(running: Running, client: anthropic.Anthropic, options: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, *ASKED], "max_tokens": 30, **options}
    expected = running.post("/v1/chat/completions", chat).json()
    found = respond(client, system="Be brief.", max_tokens=30, extra_body=options)
    assert [block.text for block in found.content] == [expected["choices"][0]["message"]["content"]]
    assert (found.stop_reason, found.stop_sequence, found.role, found.model) == (
        "max_tokens",
        None,
        "assistant",
        "tiny",
    )
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected["usage"]["prompt_tokens"]
    assert usage.output_tokens == 30
    counted = client.messages.count_tokens(model="tiny", system="Be brief.", messages=ASKED)
    assert counted.input_tokens == expected["usage"]["prompt_tokens"]
    with client.messages.stream(
        model="tiny",
        messages=ASKED,
        system=[{"type": "text", "text": "Be brief."}],
        max_tokens=30,
        extra_body=options,
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == found.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 30


def test_why_an_answer_ends(client: anthropic.Anthropic) -> None:
    whole = respond(client).content[0].text
    stop = whole[8:11]
    found = respond(client, stop_sequences=[stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == whole[: whole.index(stop)]
    found = respond(client, max_tokens=1_000_000)  # more than the context, which ends the answer if nothing else does
    context = found.usage.input_tokens + found.usage.cache_read_input_tokens + found.usage.output_tokens
    assert found.stop_reason == ("model_context_window_exceeded" if context == 2048 else "end_turn")


def test_the_last_answer_is_continued(client: anthropic.Anthropic) -> None:
    whole = respond(client).content[0].text
    begun: list[Any] = [*ASKED, {"role": "assistant", "content": whole[:9]}]
    found = respond(client, messages=begun, max_tokens=8).content[0].text
    assert whole[9:].startswith(found)


@pytest.mark.parametrize("choice", ["any", "tool"])
def test_calls(client: anthropic.Anthropic, choice: str) -> None:
    named: Any = {"type": choice, "disable_parallel_tool_use": True} | (
        {"name": "get_weather"} if choice == "tool" else {}
    )
    found = respond(client, tools=[TOOL], tool_choice=named, max_tokens=200)
    (call,) = found.content
    assert (found.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert list(call.input) == ["city"]
    with client.messages.stream(
        model="tiny", messages=ASKED, tools=[TOOL], tool_choice=named, max_tokens=200, extra_body=GREEDY
    ) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (streamed.content[0].input, streamed.stop_reason) == (call.input, "tool_use")  # type: ignore[union-attr]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "warm"}]}
    messages = [
        *ASKED,
        {"role": "assistant", "content": [block.model_dump() for block in found.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    assert respond(client, messages=messages, tools=[TOOL], tool_choice={"type": "none"}).content[0].type == "text"


def test_an_answer_that_ends_within_a_call(client: anthropic.Anthropic) -> None:
    found = respond(client, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=22)
    assert found.stop_reason == "max_tokens"
    assert [block.input for block in found.content] == [{}]


def test_what_a_conversation_is() -> None:
    """Blocks become the messages of a chat; results of tools stand where they are."""
    call = {
        "type": "tool_use",
        "id": "a",
        "name": "get_weather",
        "input": {"city": "Paris"},
        "caller": {"type": "direct"},
    }
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    text = {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "warm", "is_error": False}
    body = MessagesRequest.model_validate(
        {
            "max_tokens": 3,
            "system": [{"type": "text", "text": each} for each in ("x-anthropic-billing-header: cch=1;", "A", "B")],
            "messages": [
                {"role": "user", "content": [text, {"type": "text", "text": "Two."}]},
                {"role": "system", "content": "C"},
                {"role": "assistant", "content": [thinking, text, call]},
                {"role": "user", "content": [text, result, text]},
            ],
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            "context_management": {"edits": []},
            "metadata": {"user_id": "u"},
            "stream": True,
        }
    )
    found = body.chat()
    function = {"name": "get_weather", "arguments": json.dumps({"city": "Paris"})}
    given = [message.model_dump(exclude_unset=True) for message in found.messages]
    assert given == [
        {"role": "system", "content": "A\nB"},
        {"role": "user", "content": "One.\nTwo."},
        {"role": "system", "content": "C"},
        {
            "role": "assistant",
            "content": "One.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "user", "content": "One."},
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
        {"role": "user", "content": "One."},
    ]
    assert (found.chat_template_kwargs, found.reasoning_effort, found.user) == ({"enable_thinking": True}, "high", "u")
    assert found.response_format is not None


@pytest.mark.slow
def test_thinking(client: anthropic.Anthropic) -> None:
    """What the model writes up to the end of its reasoning is a block of its own."""
    with serving(calling_llm(), reasoning_parser="deepseek_r1") as reasoning:
        own = reasoning.kept(anthropic.Anthropic(api_key="none", base_url=reasoning.url, max_retries=0, timeout=60))
        found = respond(own, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in found.content] == ["thinking"]
        with own.messages.stream(
            model="tiny",
            messages=ASKED,
            max_tokens=40,
            extra_body=GREEDY,
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream:
            streamed = stream.get_final_message()
        assert streamed.content[0].thinking == found.content[0].thinking  # type: ignore[union-attr]
        assert respond(own, thinking={"type": "disabled"}).content[0].type == "text"


def test_a_form(client: anthropic.Anthropic) -> None:
    class Digit(pydantic.BaseModel):
        digit: int = pydantic.Field(ge=0, le=9)

    found = client.messages.parse(model="tiny", messages=ASKED, max_tokens=60, output_format=Digit, extra_body=GREEDY)
    assert found.parsed_output is not None
    assert 0 <= found.parsed_output.digit <= 9


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "max_tokens=null is not possible"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0 is not possible"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"stop": "x"}, "stop", "use stop_sequences"),
        ({"stop_sequences": list("abcdefghijklmnopqrstuvwxyz" * 9)}, "stop_sequences", "234 are more than"),
        ({"mcp_servers": []}, "mcp_servers", "not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "knows functions only"),
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools.0.type", "whose type is here 'custom'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice", "not among the tools"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "output_config.format",
            "cannot be compiled",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0.type",
            "content of type 'image'",
        ),
        ({"model": "no"}, "model", "there is no model 'no'"),
    ],
)
def test_what_is_refused(running: Running, more: dict[str, Any], param: str, words: str) -> None:
    found = running.post(PATH, {"messages": ASKED, "max_tokens": 4, **more})
    check(found, 404 if param == "model" else 400, param, words)
    assert found.json()["type"] == "error"


def test_keywords_that_no_grammar_enforces(client: anthropic.Anthropic) -> None:
    """Schemas made from types have them; a tool is refused for them with strict=true only."""
    schema = {"type": "object", "properties": {"a": {"type": "object", "propertyNames": {"type": "string"}}}}
    tool: Any = {"name": "f", "input_schema": {**schema, "required": ["a"], "additionalProperties": False}}
    assert respond(client, tools=[tool], tool_choice={"type": "any"}).content[0].name == "f"
    with pytest.raises(anthropic.BadRequestError, match="propertyNames"):
        respond(client, tools=[{**tool, "strict": True}], tool_choice={"type": "any"})


def test_keys(client: anthropic.Anthropic) -> None:
    with serving(calling_llm(), keys=("secret",)) as guarded:
        for given in ({"api_key": "secret"}, {"auth_token": "secret", "api_key": None}):
            own = guarded.kept(anthropic.Anthropic(base_url=guarded.url, max_retries=0, timeout=60, **given))
            assert respond(own, max_tokens=2).usage.output_tokens == 2
        with pytest.raises(anthropic.AuthenticationError, match="a wrong API key"):
            respond(guarded.kept(anthropic.Anthropic(api_key="no", base_url=guarded.url, max_retries=0)))


def test_an_error_within_a_stream(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    own = running.kept(anthropic.Anthropic(api_key="none", base_url=running.url, max_retries=0, timeout=60))
    step, steps = running.llm.engine.target.step, 0

    def failing(*given: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 3:
            raise RuntimeError("broken")
        return step(*given, **options)

    monkeypatch.setattr(running.llm.engine.target, "step", failing)
    with (
        pytest.raises(anthropic.APIStatusError, match="the server failed"),
        own.messages.stream(model="tiny", messages=ASKED, max_tokens=40) as stream,
    ):
        stream.until_done()


@pytest.mark.parametrize(
    ("message", "param", "told"),
    [
        ("the server is about to stop; try again later", None, "the server is about to stop; try again later"),
        ("tool_choice names the function 'stop'", "tool_choice", "tool_choice names the function 'stop'"),
        ("stop=5 is not possible", "stop", "stop_sequences=5 is not possible"),
        ("the parameter 'stop' is missing", "stop", "the parameter 'stop_sequences' is missing"),
        ("response_format.schema is none", "response_format.schema", "output_config.format.schema is none"),
    ],
)
def test_errors_of_chats_have_this_paths_names(message: str, param: str | None, told: str) -> None:
    """In a stream, too. Words of a message that are no names stay."""
    with pytest.raises(ApiError) as raised, of_chat(NAMES):
        raise ApiError(400, message, param)
    assert raised.value.detail == told
    streamed = json.loads(failed(ApiError(400, message, param).body()).split("data: ")[1])["error"]
    assert (streamed["message"], streamed["param"]) == (told, raised.value.param)
