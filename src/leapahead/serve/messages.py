"""The messages and the tools of a chat, and what all objects of requests have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from leapahead.chat.tools import NAME
from leapahead.serve.constraints import refuse

LIMIT = "x-limit"  # marks what depends on the server, see `bounds`
MOST_TOOLS = 128  # OpenAI's
MOST_CALLS = 1024  # of a message
SEVERAL = Field(min_length=1, fail_fast=True)
Text = Annotated[str, Field(min_length=1)]


def _kind(value: Any) -> str | None:
    """Which of several types a value is meant to be, so that the error of that one is reported."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<lists>"
    return "<ids>" if isinstance(first, (int, float)) else "<list>"


def either(what: str) -> Discriminator:
    """Tells texts and lists apart."""
    return Discriminator(_kind, "kind", f"it must be {what}")


class Strict(BaseModel):
    """A JSON object without unknown members."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        return refuse(cls.__name__, data)


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], SEVERAL, Tag("<list>")],
    either("text, or a list of parts with text"),
]


def joined(content: str | list[TextPart], separator: str = "\n") -> str:
    """The text of a message's content; vLLM separates parts by newlines, too."""
    if isinstance(content, str):
        return content
    return separator.join(part.text for part in content)


def _role(value: Any) -> Any:
    if value not in ("system", "developer", "user"):
        raise ValueError("it must be system, developer, user, assistant or tool")
    return value


class GivenMessage(Strict):
    """A message of the user, or of whoever instructs the model.

    Attributes:
        role: of who wrote it.
        content: a text, or parts of type "text", which are joined by newlines.
        name: of who wrote it, for chat templates that show it.
    """

    role: Annotated[Literal["system", "developer", "user"], BeforeValidator(_role)]
    content: Content
    name: str | None = None


class CalledFunction(Strict):
    """What a tool call has called.

    Attributes:
        name: of the function.
        arguments: JSON text. A chat template gets the object; the text itself where it is no JSON object.
    """

    name: Text
    arguments: str


class CallParam(Strict):
    """A tool call that the model has made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Strict):
    """A message of the model.

    Attributes:
        role: says so.
        content: see `GivenMessage`.
        name: see there.
        tool_calls: that it has made.
        reasoning_content, reasoning: what it wrote before the answer, by either name. Chat templates get the former.
    """

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallParam], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolMessage(Strict):
    """What a tool has returned.

    Attributes:
        role: says so.
        content: see `GivenMessage`.
        tool_call_id: of the call.
        name: of the function.
    """

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


def _sort(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else None
    return f"<{role}>" if role in ("assistant", "tool") else "<given>"


Message = Annotated[
    Annotated[GivenMessage, Tag("<given>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(_sort),
]


class FunctionParam(Strict):
    """A function that the model may call.

    Attributes:
        name: at most 64 letters, digits, underscores and dashes.
        description: for the model.
        parameters: the JSON schema of its arguments.
        strict: accepted for OpenAI's clients; calls that a grammar enforces have this schema in any case.
    """

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(Strict):
    """A tool."""

    type: Literal["function"]
    function: FunctionParam


ToolParams = Annotated[list[ToolParam], Field(max_length=MOST_TOOLS, fail_fast=True)]


class NamedFunction(Strict):
    """The name of a function."""

    name: Text


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoiceParam = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[NamedTool, Tag("<named>")],
    Discriminator(lambda value: "<named>" if isinstance(value, (dict, NamedTool)) else "<mode>"),
]
