"""What requests of /v1/messages consist of, and the chat that each of them is.

    system                                     a message of the system, before all others
    text of anybody                            a message
    thinking, text, tool_use of an answer      one message of the assistant
    tool_result                                a message of a tool

If the last message is the assistant's, the answer continues it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from leapahead.serve.messages import (
    INTEGER,
    LIMIT,
    MOST_TOOLS,
    SEVERAL,
    FunctionParam,
    Strict,
    Text,
    either,
    type_of,
)
from leapahead.serve.schema import INT32, STOPS, ChatRequest, Decoding, Label, Reporting, Variables

CacheControl = dict[str, Any]  # marks what Anthropic's servers keep; here the beginnings of chats are kept in any case


class Block(Strict):
    """A part of a message's content.

    Attributes:
        cache_control: accepted, and not used.
    """

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """Text.

    Attributes:
        type: says so.
        text: of the part.
        citations: as an answer has had them; not used.
    """

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(Block):
    """What the model wrote before its answer.

    Attributes:
        type: says so.
        thinking: the text.
        signature: as an answer has had it; not used.
    """

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    """A call of a tool that the model has made.

    Attributes:
        type: says so.
        id: by which its result names it.
        name: of the tool.
        input: the arguments.
        caller: accepted, and not used.
    """

    type: Literal["tool_use"]
    id: str
    name: Text
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


def _text_only(value: Any) -> str:
    return "<text>"


def _of_user(value: Any) -> str:
    return "<tool_result>" if type_of(value) == "tool_result" else "<text>"


def _of_assistant(value: Any) -> str:
    given = type_of(value)
    return f"<{given}>" if given in ("thinking", "tool_use") else "<text>"


BLOCKS = either("text, or a list of blocks")
Texts = Annotated[Annotated[str, Tag("<text>")] | Annotated[list[TextBlock], Tag("<list>")], BLOCKS]


class ToolResultBlock(Block):
    """What a tool has returned.

    Attributes:
        type: says so.
        tool_use_id: of the call.
        content: a text, or blocks of text, which are joined by newlines.
        is_error: accepted; chat templates have no place for it.
    """

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")], Discriminator(_of_user)
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    Discriminator(_of_assistant),
]


class UserMessage(Strict):
    """A message of the user, or of the system.

    Attributes:
        role: of who wrote it.
        content: a text, or blocks: texts, which are joined by newlines, and results of tools.
    """

    role: Literal["user", "system"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[list[UserBlock], SEVERAL, Tag("<list>")], BLOCKS]


class AssistantMessage(Strict):
    """A message of the model.

    Attributes:
        role: says so.
        content: a text, or blocks: thinking, texts and calls of tools.
    """

    role: Literal["assistant"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[list[AssistantBlock], Tag("<list>")], BLOCKS]


def _role(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return "<assistant>" if role == "assistant" else "<user>"


Message = Annotated[
    Annotated[UserMessage, Tag("<user>")] | Annotated[AssistantMessage, Tag("<assistant>")], Discriminator(_role)
]


class Tool(Strict):
    """A tool that the model may call.

    Attributes:
        name: at most 64 letters, digits, underscores and dashes.
        description: for the model.
        input_schema: the JSON schema of its arguments.
        type: "custom" only.
        strict: see `FunctionParam`.
        cache_control, eager_input_streaming, defer_loading, input_examples: accepted, and not used.
    """

    name: Annotated[str, FunctionParam.model_fields["name"].metadata[0]]
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class ToolChoice(Strict):
    """Which tools are called.

    Attributes:
        type: "auto", "any" for one of them, "tool" for the one that is named, or "none".
        name: of the tool.
        disable_parallel_tool_use: whether the answer has one call at most.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether the model thinks before its answer.

    Attributes:
        type: given to the chat template as the variable `enable_thinking`, for those that know it.
        budget_tokens, display: accepted, and not used: max_tokens alone bounds an answer, and thinking is reported.
    """

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, INTEGER] | None = None
    display: Literal["summarized", "omitted"] | None = None


class SchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    definition: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Of the answer.

    Attributes:
        effort: given to the chat template, see `ChatRequest`.
        format: the form of the text.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[SchemaFormat | None, Field(json_schema_extra={LIMIT: "forms"})] = None


class Metadata(Strict):
    """Of the request.

    Attributes:
        user_id: written to the log, nothing else.
    """

    user_id: Label | None = None


class Conversation(Strict):
    """What the answer depends on, but for how it is decoded.

    Attributes:
        messages: the chat so far. If the last message is the assistant's, the answer continues it.
        system: a message of the system, before all others.
        tools: functions that the model may call.
        tool_choice: which of them are called; "auto" by default.
        thinking: whether the model thinks before its answer.
        output_config: `format` is a JSON schema that the answer has; `effort` is given to the chat template.
        chat_template_kwargs: further variables of the chat template, which count more than `thinking`.
        cache_control, context_management: accepted, and not used: nothing is taken out of a chat.
    """

    model: str | None = None
    messages: Annotated[list[Message], SEVERAL]
    system: Texts | None = None
    tools: (
        Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True, json_schema_extra={LIMIT: "tool_list"})]
        | None
    ) = None
    tool_choice: Annotated[ToolChoice | None, Field(json_schema_extra={LIMIT: "tools"})] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Variables | None = None
    cache_control: CacheControl | None = None
    context_management: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The request of a chat that is this one.

        Raises:
            ValidationError: it is none that the server takes.
        """
        return ChatRequest.model_validate(self._chat())

    def _chat(self) -> dict[str, Any]:
        choice, output = self.tool_choice or ToolChoice(type="auto"), self.output_config or OutputConfig()
        thinks = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        found: dict[str, Any] = {
            "model": self.model,
            "messages": list(_messages(self.system, self.messages)),
            "reasoning_effort": output.effort,
            "chat_template_kwargs": {**thinks, **(self.chat_template_kwargs or {})} or None,
        }
        if output.format is not None:
            schema = {"schema": output.format.definition}
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.tools:
            found["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
            found["tool_choice"] = _choice(choice)
            found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.messages[-1].role == "assistant":
            found |= {"continue_final_message": True, "add_generation_prompt": False}
        return found


class CountTokensRequest(Conversation):
    """A request of /v1/messages/count_tokens."""


class MessagesRequest(Conversation, Decoding):
    """A request of /v1/messages.

    Attributes:
        max_tokens: greatest length of the answer, thinking included. A text also ends where the context does.
        stop_sequences: strings before which the text ends, as `stop`.
        metadata: `user_id` is written to the log, nothing else.
        service_tier: accepted, and not used.
        leapahead: an object with the server's own parameters, `stats` and `deadline_seconds`.
    """

    max_tokens: Annotated[int, Field(ge=1, le=INT32), INTEGER]
    stop_sequences: Annotated[list[Text], STOPS] | None = None
    metadata: Metadata | None = None  # type: ignore[assignment]
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]
    leapahead: Reporting | None = None

    def _chat(self) -> dict[str, Any]:
        own = Conversation.model_fields.keys() | {"metadata", "service_tier"}
        names = (Decoding.model_fields.keys() & self.model_fields_set) - own
        found = {**{name: getattr(self, name) for name in names}, **super()._chat(), "max_tokens": self.max_tokens}
        if self.stop_sequences is not None:
            found["stop"] = self.stop_sequences
        if self.metadata is not None and self.user is None:
            found["user"] = self.metadata.user_id
        if self.leapahead is not None:
            found["leapahead"] = self.leapahead.model_dump()
        if self.stream:
            found["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return found


def _messages(system: str | Sequence[TextBlock] | None, given: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The messages of a chat. Each result of a tool is one, and so are the texts between them."""
    if system:
        yield {"role": "system", "content": _joined(system)}
    for message in given:
        if isinstance(message, AssistantMessage):
            yield _answer(message.content)
        elif isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        else:
            texts: list[TextBlock] = []
            for block in message.content:
                if isinstance(block, TextBlock):
                    texts.append(block)
                    continue
                if texts:
                    yield {"role": message.role, "content": _joined(texts)}
                    texts = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content or "")}
            if texts:
                yield {"role": message.role, "content": _joined(texts)}


def _answer(content: str | Sequence[AssistantBlock]) -> dict[str, Any]:
    """A message of the assistant: its thinking, its text and its calls, each in their order."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    found: dict[str, Any] = {"role": "assistant"}
    if thoughts := [block.thinking for block in content if isinstance(block, ThinkingBlock)]:
        found["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in content if isinstance(block, ToolUseBlock)]
    texts = [block for block in content if isinstance(block, TextBlock)]
    if texts or not calls:
        found["content"] = _joined(texts)
    if calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
            }
            for call in calls
        ]
    return found


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _function(tool: Tool) -> dict[str, Any]:
    """As a chat has it."""
    given = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {name: value for name, value in given.items() if value is not None}


def _choice(given: ToolChoice) -> Any:
    """As a chat has it."""
    if given.type == "tool":
        return {"type": "function", "function": {"name": given.name}}
    return "required" if given.type == "any" else given.type
