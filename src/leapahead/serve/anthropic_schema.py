"""What requests of /v1/messages consist of, and the chat that each of them is.

The instructions of the system come before all messages, see `anthropic_blocks`. If the last message is the assistant's,
the answer continues it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from leapahead.serve.anthropic_blocks import CacheControl, Message, Texts, messages
from leapahead.serve.messages import (
    INTEGER,
    LIMIT,
    MOST_TOOLS,
    SEVERAL,
    FunctionParam,
    Strict,
    Text,
    type_of,
)
from leapahead.serve.schema import INT32, STOPS, ChatRequest, Decoding, Label, Reporting, Variables


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


class ToolMode(Strict):
    """Whether tools are called.

    Attributes:
        type: "auto", "any" if one of them must be, or "none".
        disable_parallel_tool_use: whether the answer has one call at most.
    """

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedTool(Strict):
    """The tool that is called.

    Attributes:
        type: says so.
        name: of the tool.
        disable_parallel_tool_use: accepted; the answer has one call.
    """

    type: Literal["tool"]
    name: Text
    disable_parallel_tool_use: bool | None = None


def _of_choice(value: Any) -> str:
    return "<tool>" if type_of(value) == "tool" else "<mode>"


ToolChoice = Annotated[
    Annotated[ToolMode, Tag("<mode>")] | Annotated[NamedTool, Tag("<tool>")], Discriminator(_of_choice)
]


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
    format: Annotated[SchemaFormat | None, Field(json_schema_extra={LIMIT: "structured"})] = None


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
        tool_choice: which of them are called: {"type": "auto"} (the default), "any", "tool" with a name, or "none".
        thinking: whether the model thinks before its answer.
        output_config: `format` is a JSON schema that the answer has; `effort` is given to the chat template.
        chat_template_kwargs: further variables of the chat template, which count more than `thinking`.
        cache_control: accepted, and not used: the beginnings of chats are kept in any case.
        context_management: accepted, and not used: nothing is taken out of a chat.
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
        choice, output = self.tool_choice, self.output_config or OutputConfig()
        thinks = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        found: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages(self.system, self.messages)),
            "reasoning_effort": output.effort,
            "chat_template_kwargs": {**thinks, **(self.chat_template_kwargs or {})} or None,
        }
        if output.format is not None:
            schema = {"schema": output.format.definition}
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.tools:
            found["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        if choice is not None:
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
        max_tokens: greatest length of the answer, thinking included. A text also ends at the server's own limit, and
            where the context does.
        stop_sequences: strings before which the text ends.
        stop: not here; `stop_sequences` takes its place.
        metadata: `user_id` is written to the log, nothing else.
        service_tier: accepted, and not used.
        leapahead: an object with the server's own parameters, `stats` and `deadline_seconds`.
    """

    max_tokens: Annotated[int, Field(ge=1, le=INT32), INTEGER]
    stop_sequences: Annotated[list[Text], STOPS] | None = None
    stop: None = None
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
    if isinstance(given, NamedTool):
        return {"type": "function", "function": {"name": given.name}}
    return "required" if given.type == "any" else given.type
