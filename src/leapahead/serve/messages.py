"""The messages and the tools of a chat, and what all objects of requests have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema

from leapahead.chat.tools import NAME
from leapahead.serve.constraints import given, refusal

LIMIT = "x-limit"  # marks what depends on the server, see `bounds`
MOST_TOOLS = 128  # OpenAI's
MOST_CALLS = 1024  # of a message
SEVERAL = Field(min_length=1, fail_fast=True)
Text = Annotated[str, Field(min_length=1)]


def _integer(value: Any) -> Any:
    """In JSON, 3.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return value


INTEGER = BeforeValidator(_integer)
BOOLEAN = BeforeValidator(_boolean)  # of a literal, which 0 and 1 would pass


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
    """A JSON object without unknown members. A null is what clients send for one that they do not give.

    So it has its default, is left out where it is unknown, and is refused where it is required.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def _required(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        return given(cls.__name__, data, cls._required())

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(core)
        schema, required = handler.resolve_ref_schema(found), cls._required()
        schema["additionalProperties"] = {"type": "null"}
        parts = schema["properties"]
        for name, part in parts.items():
            about = {key: part.pop(key) for key in ("default", "title") if key in part}
            if part and name not in required and {"type": "null"} not in part.get("anyOf", ()):
                part = {"anyOf": [part, {"type": "null"}]}
            parts[name] = {**part, **about}
        return found


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    """A part of an answer in which the model has declined."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def type_of(value: Any) -> Any:
    """The member `type` of a JSON object, read already or not; None where there is none."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _part(value: Any) -> str:
    given = type_of(value)
    return "<refusal>" if given == "refusal" else "<text>"


TEXTS = either("text, or a list of parts with text")
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], SEVERAL, Tag("<list>")],
    TEXTS,
]
AnswerPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(_part)
]
AnswerContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[AnswerPart], SEVERAL, Tag("<list>")],
    TEXTS,
]


def joined(content: str | Sequence[TextPart | RefusalPart], separator: str = "\n") -> str:
    """The text of a message's content; vLLM separates parts by newlines, too."""
    if isinstance(content, str):
        return content
    return separator.join(part.text for part in content)


def json_object(text: str) -> Any:
    """The JSON object of a text; None if it is none.

    Half of a surrogate pair, which JSON can name and no text can contain, becomes a question mark.
    """
    try:
        found = json.loads(text)
        encodable = json.dumps(found, ensure_ascii=False).encode(errors="replace")
    except (ValueError, RecursionError):
        return None
    return json.loads(encodable) if isinstance(found, dict) else None


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
        parsed_arguments: the same as OpenAI's client has read them; not used.
    """

    name: Text
    arguments: str
    parsed_arguments: Any = None


class CallParam(Strict):
    """A tool call that the model has made.

    Attributes:
        id: of the call.
        type: says that it is one of a function.
        function: that it has called.
        index: of the call in a stream; not used.
    """

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: Annotated[int, INTEGER] | None = None


class AssistantMessage(Strict):
    """A message of the model.

    Attributes:
        role: says so.
        content: see `GivenMessage`; also parts of type "refusal".
        name: see there.
        refusal: what it wrote when it declined, which chat templates get as content.
        tool_calls: that it has made.
        reasoning_content, reasoning: what it wrote before the answer, by either name. Chat templates get the former.
        parsed: the content as OpenAI's client has read it; not used.
        annotations: of the content, such as sources; not used.
    """

    role: Literal["assistant"]
    content: AnswerContent | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallParam], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    parsed: Any = None
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _with_refusal(self) -> AssistantMessage:
        said = joined(self.content) if self.content else ""
        if self.refusal:
            self.content = f"{said}\n{self.refusal}" if said else self.refusal
        return self


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
        strict: whether a schema with keywords that no grammar can enforce is refused, instead of those being left out.
            Calls that a grammar enforces have the schema in any case.
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
    """A tool that must be called, or may be."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    """Some of the tools.

    Attributes:
        mode: whether one of them must be called.
        tools: that may be called.
    """

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


class AllowedToolsChoice(Strict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice(value: Any) -> str:
    if isinstance(value, AllowedToolsChoice) or (isinstance(value, dict) and value.get("type") == "allowed_tools"):
        return "<allowed>"
    return "<named>" if isinstance(value, (dict, NamedTool)) else "<mode>"


ToolChoiceParam = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")],
    Discriminator(_choice),
]


def only_allowed(
    tools: list[ToolParam] | None, choice: ToolChoiceParam | None
) -> tuple[list[ToolParam] | None, ToolChoiceParam | None]:
    """The tools and the choice of a request, without the tools that the choice does not allow.

    Raises:
        PydanticCustomError: it allows one that is not there.
    """
    if not isinstance(choice, AllowedToolsChoice):
        return tools, choice
    names = [each.function.name for each in choice.allowed_tools.tools]
    known = [tool.function.name for tool in tools or ()]
    if missing := [name for name in names if name not in known]:
        there = ", ".join(known) or "none"
        why = f"tool_choice allows the function {missing[0]!r}, which is not among the tools; there are {there}"
        raise refusal("tool_choice", why, "invalid")
    return [tool for tool in tools or () if tool.function.name in names], choice.allowed_tools.mode
