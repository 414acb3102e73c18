"""/v1/responses: the same texts as chats, in the form of OpenAI's Responses API."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import openai
import pydantic
import pytest

from leapahead.chat import TOOL_FORMATS, ToolChoice, reasoning_format
from leapahead.results import Piece
from leapahead.serve.formats import Reading
from leapahead.serve.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from leapahead.serve.responses import Responder
from leapahead.serve.responses_replies import Event
from leapahead.serve.responses_schema import ResponsesRequest
from leapahead.serve.worker import Job
from tests.serving import Running, calling_llm, check, serving

pytest.importorskip("llguidance")

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
QUESTION = "What is the weather in Paris?"
MEMBERS: dict[str, Any] = {"id": "resp_1", "created": 1, "model": "m"}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(calling_llm(), reasoning_parser="none") as found:
        yield found
        assert found.idle()


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.client()


def respond(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "input": QUESTION, "temperature": 0, "max_output_tokens": 40, **options}
    return client.responses.create(**given)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 3}], ids=["greedy", "sampled"])
def test_texts_are_those_of_chats(running: Running, client: openai.OpenAI, options: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}], **options}
    expected = running.post("/v1/chat/completions", {**chat, "max_tokens": 40}).json()
    text, usage = expected["choices"][0]["message"]["content"], expected["usage"]
    seed = {"extra_body": {"seed": options["seed"]}} if "seed" in options else {}
    given = {"instructions": "Be brief.", "temperature": options["temperature"], **seed}
    found = respond(client, **given)
    assert found.output_text == text
    assert re.fullmatch("resp_[0-9a-f]{32}", found.id)
    ended = expected["choices"][0]["finish_reason"]
    assert found.status == ("incomplete" if ended == "length" else "completed")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert found.usage.total_tokens == usage["total_tokens"]
    assert "".join(event.delta for event in respond(client, **given, stream=True) if hasattr(event, "delta")) == text


@pytest.mark.slow
def test_the_events_of_a_stream_make_the_response(client: openai.OpenAI) -> None:
    asked = ["message.output_text.logprobs"]
    events = list(respond(client, stream=True, include=asked, max_output_tokens=20))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    begun = ["created", "in_progress", "output_item.added", "content_part.added"]
    ended = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*begun, *["output_text.delta"] * deltas, *ended]
    whole, item = events[-1].response, events[-1].response.output[0]
    assert "".join(event.delta for event in events[4 : 4 + deltas]) == whole.output_text == events[-4].text
    assert {event.item_id for event in events[4:-2]} == {item.id}
    assert item.status == "incomplete"
    assert item == events[-2].item
    assert len(item.content[0].logprobs) == whole.usage.output_tokens == 20
    assert not events[0].response.output


def test_an_error_within_a_stream_is_an_event_of_its_own(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the members of `ResponseErrorEvent`, and those by which the official client raises it."""
    worker, pieces = running.worker, running.worker.pieces

    async def late(job: Job) -> AsyncIterator[Any]:
        """As where the time is over behind the first piece of text."""
        async for batch, index, piece in pieces(job):
            yield batch, index, piece
            if piece is not None and not batch.is_late:
                batch.is_late = True
                worker._interrupt(batch)

    monkeypatch.setattr(worker, "pieces", late)
    asked = {"input": QUESTION, "stream": True, "ignore_eos": True, "leapahead": {"deadline_seconds": 60}}
    before, name, data = running.post(PATH, asked).text.rstrip("\n").rsplit("\n", 2)
    assert name == "event: error"
    found = json.loads(data.removeprefix("data: "))
    own = {each: found.pop(each) for each in ("message", "code", "param")}
    assert own == {"message": "the request took longer than its 60 seconds", "code": "deadline", "param": None}
    assert found.pop("sequence_number") == len(re.findall("^event: ", before, flags=re.MULTILINE))
    assert found == {"type": "error", "error": {**own, "type": "timeout_error"}}


def test_a_stream_ends_with_its_last_event(running: Running) -> None:
    """Unlike that of chats, which a mark ends."""
    asked = {"input": QUESTION, "max_output_tokens": 2, "stream": True, "client_metadata": {"session": "a"}}
    text = running.post(PATH, asked).text
    names = re.findall("^event: (.*)$", text, flags=re.MULTILINE)
    assert [json.loads(line)["type"] for line in re.findall("^data: (.*)$", text, flags=re.MULTILINE)] == names
    assert text.endswith("\n\n")


def test_what_was_put_out_is_taken_as_input(client: openai.OpenAI) -> None:
    """The loop of an agent: a call, its result, an answer."""
    given: list[Any] = [{"role": "user", "content": QUESTION}]
    first = respond(client, input=given, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = first.output
    assert (call.type, call.name, call.status, first.status) == (
        "function_call",
        "get_weather",
        "completed",
        "completed",
    )
    assert set(json.loads(call.arguments)) == {"city"}
    given += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = respond(client, input=given, tools=[TOOL], tool_choice="none")
    assert second.output[0].type == "message"
    third = respond(client, input=[*given, *second.output, {"role": "user", "content": "And tomorrow?"}])
    assert third.output_text


def test_calls_in_a_stream(client: openai.OpenAI) -> None:
    named = {"type": "function", "name": "get_weather"}
    with client.responses.stream(
        model="tiny", input=QUESTION, temperature=0, tools=[TOOL], tool_choice=named
    ) as stream:
        events = list(stream)
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments == done.arguments == events[-1].response.output[0].arguments
    assert events[-1].type == "response.completed"


def test_answers_of_a_form(client: openai.OpenAI) -> None:
    class Weather(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=8)

    found = client.responses.parse(model="tiny", input=QUESTION, temperature=0, text_format=Weather)
    assert isinstance(found.output_parsed, Weather)
    assert isinstance(json.loads(respond(client, text={"format": {"type": "json_object"}}).output_text), dict)


def test_what_drafting_did_is_reported_on_request(client: openai.OpenAI) -> None:
    text = respond(client).output_text
    asked: Any = {"prediction": {"type": "content", "content": text}, "leapahead": {"stats": True}}
    found = respond(client, extra_body=asked)
    assert found.output_text == text
    assert found.leapahead["steps"] >= 1
    assert found.usage.output_tokens_details.accepted_prediction_tokens >= 0


CALL = '<tool_call>{"name": "clock", "arguments": {"a": 1}}</tool_call>'


def responded(pieces: Sequence[str]) -> tuple[list[Event], Any]:
    """The events of a text in these pieces, and the response of the last one."""
    reading = Reading(TOOL_FORMATS["hermes"], reasoning_format("qwen3"), ToolChoice("auto"), "")
    body = ResponsesRequest.model_validate({"input": "a", "stream": True})

    class Texts:
        bytes = None

        def ids(self, thought: str, add_special_tokens: bool) -> list[int]:
            return [*range(len(thought))]

    def usage() -> Usage:
        return Usage(
            prompt_tokens=1,
            completion_tokens=9,
            total_tokens=10,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=0, rejected_prediction_tokens=0
            ),
        )

    found = Responder(Texts(), body, body.chat(), reading, {})  # type: ignore[arg-type]
    events = found.opening(MEMBERS)
    for at, part in enumerate(pieces):
        ending = "stop" if at == len(pieces) - 1 else None
        events += found.chunk(MEMBERS, 0, Piece(part, [], 0, ((part, True),), ending))
    events.append(found.last({**MEMBERS, "usage": usage()}))
    return events, events[-1].response


def test_text_behind_a_call_in_the_same_step_begins_when_the_call_is_done() -> None:
    """A drafted step may commit the end of a call and the text behind it at once."""
    events, response = responded([CALL[:-20], f"{CALL[-20:]} Done.", " So."])
    call, message = response.output
    assert (call.arguments, message.content[0].text) == ('{"a": 1}', " Done. So.")
    done = [each for each in events if each.type == "response.output_item.done"]
    assert [each.item for each in done] == response.output
    kinds = [each.type for each in events]
    last = max(at for at, kind in enumerate(kinds) if kind == "response.function_call_arguments.delta")
    assert last < kinds.index("response.function_call_arguments.done")
    told = [each for each in events if each.type == "response.function_call_arguments.done"]
    assert [each.arguments for each in told] == ['{"a": 1}']


def test_reasoning_text_and_calls_become_items() -> None:
    """In small pieces, and whole."""
    text = f"<think>a < b</think>It is {CALL}{CALL}"
    for size in (3, len(text)):
        events, response = responded([text[start : start + size] for start in range(0, len(text), size)])
        thought, message, *calls = response.output
        assert [part.text for part in (*thought.content, *message.content)] == ["a < b", "It is"]
        assert [(each.name, each.arguments) for each in calls] == [("clock", '{"a": 1}')] * 2
        assert response.usage.output_tokens_details.reasoning_tokens == len("a < b")
        assert response.status == "completed"
        assert all(each.status == "completed" for each in response.output)
        assert [each.sequence_number for each in events] == list(range(len(events)))
        done = [each for each in events if each.type == "response.output_item.done"]
        assert [each.item for each in done] == response.output
        assert [each.output_index for each in done] == [0, 1, 2, 3]
        sent = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
        assert "".join(str(each) for each in sent) == "a < b"


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("a", [{"role": "user", "content": "a"}]),
        (
            [{"role": "developer", "content": [{"type": "input_text", "text": part} for part in "ab"]}],
            [{"role": "developer", "content": "a\nb"}],
        ),
        (
            [
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
                {"role": "assistant", "content": "y"},
                {"role": "assistant", "content": "z"},
            ],
            [
                {
                    "role": "assistant",
                    "reasoning_content": "t",
                    "content": "x",
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "1"},
                {"role": "assistant", "content": "y"},
                {"role": "assistant", "content": "z"},
            ],
        ),
        (
            [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"role": "assistant", "content": "x"},
                {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"},
                {"role": "assistant", "content": "y"},
            ],
            [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": call, "type": "function", "function": {"name": "f", "arguments": "{}"}} for call in "cd"
                    ],
                    "content": "x",
                },
                {"role": "assistant", "content": "y"},
            ],
        ),
    ],
)
def test_items_are_messages(items: Any, messages: Sequence[Any]) -> None:
    body = ResponsesRequest.model_validate({"input": items, "instructions": "be"})
    found = [message.model_dump(exclude_unset=True) for message in body.chat().messages]
    assert found == [{"role": "system", "content": "be"}, *messages]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "send the whole conversation as input"),
        ({"store": True}, "store", "keeps no answers"),
        ({"messages": []}, "messages", "use input"),
        ({"max_tokens": 1}, "max_tokens", "use max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens=1000000 is not possible"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input.0.type", "function_call_output"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input.0.content.0.type",
            "input_image",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "functions only"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "there are none"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
            "tool_choice",
            "'f'",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nope"}}}},
            "text.format",
            "cannot be compiled",
        ),
        ({"temperature": 101}, "temperature", "temperature=101"),
        ({"leapahead": {"spans": True}}, "leapahead.spans", "no parameter"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_not_possible_is_refused_by_its_name(
    running: Running, body: dict[str, Any], param: str, words: str
) -> None:
    check(running.post(PATH, {"input": QUESTION, **body}), 400, param, words)
