"""What requests of /v1/responses consist of, and the chat that each of them is.

    instructions                          a message of the system, before all others
    message                               a message
    reasoning, message, function_call     of one answer, in any order: one message of the assistant
    function_call_output                  a message of a tool

What a response has put out may be given back as input. The server keeps no responses, so the whole conversation is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from leapahead.serve.forms import JsonObjectFormat, JsonSchema, TextFormat
from leapahead.serve.messages import (
    BOOLEAN,
    INTEGER,
    LIMIT,
    MOST_TOOLS,
    SEVERAL,
    FunctionParam,
    RefusalPart,
    Strict,
    Text,
    either,
    type_of,
)
from leapahead.serve.schema import (
    ChatRequest,
    Decoding,
    Effort,
    Reporting,
    Variables,
    bounded,
)

ITEMS = ("message", "reasoning", "function_call", "function_call_output")
LOGPROBS = "message.output_text.logprobs"
Status = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(Strict):
    """A part of a message's content."""

    type: Literal["input_text"]
    text: str


class OutputTextPart(Strict):
    """A part of an answer.

    Attributes:
        type: says so.
        text: of the part.
        annotations, logprobs: as a response has had them; not used.
    """

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _part(value: Any) -> str:
    given = type_of(value)
    return f"<{given}>" if given in ("output_text", "refusal") else "<input_text>"


Part = Annotated[
    Annotated[InputTextPart, Tag("<input_text>")]
    | Annotated[OutputTextPart, Tag("<output_text>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(_part),
]
PARTS = either("text, or a list of parts with text")


def _known(value: Any) -> Any:
    if value != "message":
        raise ValueError(f"it must be {', '.join(ITEMS[:-1])} or {ITEMS[-1]}")
    return value


class MessageItem(Strict):
    """A message of anybody but a tool.

    Attributes:
        type: says so, and may be left out.
        role: of who wrote it.
        content: a text, or parts with text, which are joined by newlines.
        id, status, phase: as a response has had them; not used.
    """

    type: Annotated[Literal["message"], BeforeValidator(_known)] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[list[Part], SEVERAL, Tag("<list>")], PARTS]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class SummaryPart(Strict):
    """A part of a summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningPart(Strict):
    """A part of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict):
    """What the model wrote before its answer.

    Attributes:
        type: says so.
        content: the reasoning, which the chat template gets.
        summary: of it, which the template gets where there is no content.
        id, status: as a response has had them; not used.
    """

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None
    summary: list[SummaryPart] | None = None
    id: str | None = None
    status: Status | None = None


class CallItem(Strict):
    """A call of a function that the model has made.

    Attributes:
        type: says so.
        call_id: by which its result names it.
        name: of the function.
        arguments: JSON text.
        id, status: as a response has had them; not used.
    """

    type: Literal["function_call"]
    call_id: str
    name: Text
    arguments: str
    id: str | None = None
    status: Status | None = None


class ResultItem(Strict):
    """What a function has returned.

    Attributes:
        type: says so.
        call_id: of the call.
        output: a text, or parts with text, which are joined by newlines.
        id, status: not used.
    """

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Annotated[str, Tag("<text>")] | Annotated[list[InputTextPart], SEVERAL, Tag("<list>")], PARTS]
    id: str | None = None
    status: Status | None = None


def _sort(value: Any) -> str:
    given = type_of(value)
    return f"<{given}>" if given in ITEMS else "<message>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[ResultItem, Tag("<function_call_output>")],
    Discriminator(_sort),
]


class FunctionTool(FunctionParam):
    """A function that the model may call. See `FunctionParam`."""

    type: Literal["function"]


class NamedFunctionTool(Strict):
    """A function that must be called, or may be."""

    type: Literal["function"]
    name: Text


class AllowedFunctionTools(Strict):
    """A choice among some of the tools.

    Attributes:
        type: says so.
        mode: whether one of them must be called.
        tools: that may be called.
    """

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionTool], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


def _choice(value: Any) -> str:
    return "<mode>" if isinstance(value, str) else "<allowed>" if type_of(value) == "allowed_tools" else "<named>"


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedFunctionTool, Tag("<named>")]
    | Annotated[AllowedFunctionTools, Tag("<allowed>")],
    Discriminator(_choice),
]


class SchemaFormat(JsonSchema):
    """JSON of a schema. See `JsonSchema`."""

    type: Literal["json_schema"]


def _form(value: Any) -> str:
    given = type_of(value)
    return f"<{given}>" if given in ("json_object", "json_schema") else "<text>"


Form = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    Discriminator(_form),
]


class TextOptions(Strict):
    """Of the answer's text.

    Attributes:
        format: text of any form, any JSON object, or JSON of a schema.
        verbosity: the usual one only.
    """

    format: Annotated[Form | None, Field(json_schema_extra={LIMIT: "forms"})] = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    """Of what the model writes before its answer.

    Attributes:
        effort: given to the chat template, see `ChatRequest`.
        summary: "auto" is accepted; the reasoning itself is reported, and no summary.
    """

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponsesStreamOptions(Strict):
    """See `StreamOptions`."""

    include_obfuscation: Annotated[Literal[False], BOOLEAN] | None = None


class ResponsesRequest(Decoding):
    """A request of /v1/responses.

    Attributes:
        input: a text of the user, or the conversation so far: messages, reasoning, calls of functions, their results.
        instructions: a message of the system, before all others.
        max_output_tokens: greatest length of the answer, reasoning included; by default what the context allows.
        tools: functions that the model may call.
        tool_choice: "none", "auto" (the default where there are tools), "required", the function to be called, or
            "allowed_tools" with a mode and some of the tools.
        parallel_tool_calls: whether the answer may have several calls.
        text: `format` is the form of the answer: of any form, any JSON object, or JSON of a schema.
        reasoning: `effort` is given to the chat template as a variable.
        include: "message.output_text.logprobs" reports the log-probability of every token, and
            "reasoning.encrypted_content" nothing, since reasoning is reported as it is.
        top_logprobs: log-probabilities, with so many likeliest alternatives.
        chat_template_kwargs: further variables of the chat template, such as enable_thinking.
        stream_options, client_metadata: accepted, and not used.
        store, background: false only, since the server keeps no responses.
        truncation: "disabled" only: a conversation that is too long is refused.
        leapahead: an object with the server's own parameters, `stats` and `deadline_seconds`.
    """

    input: Annotated[Annotated[Text, Tag("<text>")] | Annotated[list[Item], SEVERAL, Tag("<list>")], PARTS]
    instructions: str | None = None
    max_output_tokens: Annotated[int, bounded("length", 1), INTEGER] | None = None
    tools: (
        Annotated[
            list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True, json_schema_extra={LIMIT: "tool_list"})
        ]
        | None
    ) = None
    tool_choice: Annotated[Choice | None, Field(json_schema_extra={LIMIT: "tools"})] = None
    parallel_tool_calls: Annotated[bool | None, Field(json_schema_extra={LIMIT: "tools"})] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, bounded("logprobs"), INTEGER] | None = None
    chat_template_kwargs: Variables | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: Annotated[Literal[False], BOOLEAN] | None = None
    background: Annotated[Literal[False], BOOLEAN] | None = None
    truncation: Literal["disabled"] | None = None
    client_metadata: dict[str, Any] | None = None
    leapahead: Reporting | None = None

    def chat(self) -> ChatRequest:
        """The request of a chat that is this one.

        Raises:
            ValidationError: it is none that the server takes, such as one of a function that is not among the tools.
        """
        given: dict[str, Any] = {
            name: getattr(self, name) for name in Decoding.model_fields if name in self.model_fields_set
        }
        given |= {
            "messages": messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_choice": _tool_choice(self.tool_choice),
            "response_format": None if self.text is None else _response_format(self.text.format),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": self.top_logprobs is not None or LOGPROBS in (self.include or ()),
            "top_logprobs": self.top_logprobs,
            "leapahead": None if self.leapahead is None else self.leapahead.model_dump(),
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        if self.tools is not None:
            functions = [tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in self.tools]
            given["tools"] = [{"type": "function", "function": function} for function in functions]
        return ChatRequest.model_validate(given)


def messages(instructions: str | None, items: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a conversation. Items that the model has put out one after another are one message."""
    found: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            found.append({"role": item.role, "content": _joined(item.content)})
        elif isinstance(item, ResultItem):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        else:
            _add_to_answer(found, item)
    return found


def _add_to_answer(found: list[dict[str, Any]], item: MessageItem | ReasoningItem | CallItem) -> None:
    """Adds what the model has put out to its last message, or begins one: with each reasoning, and a second text."""
    answer = found[-1] if found and found[-1]["role"] == "assistant" else None
    if isinstance(item, CallItem):
        if answer is None:
            found.append(answer := {"role": "assistant"})
        call = {"name": item.name, "arguments": item.arguments}
        answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
    elif isinstance(item, ReasoningItem):
        thought = "\n".join(part.text for part in item.content or item.summary or ())
        found.append({"role": "assistant", "reasoning_content": thought})
    elif answer is not None and "content" not in answer:
        answer["content"] = _joined(item.content)
    else:
        found.append({"role": "assistant", "content": _joined(item.content)})


def _joined(content: str | Sequence[InputTextPart | OutputTextPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool_choice(given: Choice | None) -> Any:
    """As a chat has it."""
    if isinstance(given, AllowedFunctionTools):
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in given.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.mode, "tools": tools}}
    if isinstance(given, NamedFunctionTool):
        return {"type": "function", "function": {"name": given.name}}
    return given


def _response_format(given: Form | None) -> Any:
    """As a chat has it."""
    if given is None:
        return None
    found = given.model_dump(by_alias=True, exclude_unset=True)
    return {"type": found.pop("type"), "json_schema": found} if isinstance(given, SchemaFormat) else found
