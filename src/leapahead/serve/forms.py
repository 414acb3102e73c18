"""The form of a text that a request asks for, as a grammar."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from leapahead.chat import ReasoningFormat, json_grammar
from leapahead.core.text import Tokenizer
from leapahead.grammar import Grammar
from leapahead.serve.constraints import refusal
from leapahead.serve.messages import BOOLEAN, Strict, Text

MOST_CHOICES = 4096


def _known(value: Any) -> Any:
    if value != "text":
        raise ValueError("it must be text, json_object or json_schema")
    return value


class TextFormat(Strict):
    """Text of any form."""

    type: Annotated[Literal["text"], BeforeValidator(_known)]


class JsonObjectFormat(Strict):
    """A JSON object, or JSON of a schema.

    Attributes:
        type: says so.
        schema: that the text must have, as llama.cpp's server takes it; any object without one.
    """

    type: Literal["json_object"]
    definition: dict[str, Any] | None = Field(None, alias="schema")


class JsonSchema(Strict):
    """A JSON schema with a name.

    Attributes:
        name: at most 64 letters, digits, underscores and dashes; models do not see it.
        description: accepted; models do not see it.
        schema: that the text must have.
        strict: accepted; the text has the schema in any case.
    """

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


def _type(value: Any) -> str:
    given = value.get("type") if isinstance(value, dict) else None
    return f"<{given}>" if given in ("json_object", "json_schema") else "<text>"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(_type),
]


class StructuredOutputs(Strict):
    """The form of the text, as vLLM's extension has it. One of them is given.

    Attributes:
        json: a JSON schema, as an object or as text.
        json_object: true for any JSON object.
        regex: a regular expression that matches the text as a whole.
        choice: the text is one of these.
        grammar: a Lark or GBNF grammar.
    """

    schema_of_json: (
        Annotated[
            dict[str, Any] | Text, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1}]})
        ]
        | None
    ) = Field(None, alias="json")
    json_object: Annotated[Literal[True], BOOLEAN] | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)] | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        count = sum(value is not None for value in self.model_dump().values())
        if count != 1:
            message = f"structured_outputs has {count} of json, json_object, regex, choice and grammar; give one"
            raise refusal("", message, "invalid")
        return self


def json_schema(given: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> Any:
    """The JSON schema that a response_format asks for; None for text of any form."""
    if isinstance(given, JsonSchemaFormat):
        return given.json_schema.definition
    if isinstance(given, JsonObjectFormat):
        return {"type": "object"} if given.definition is None else given.definition
    return None


def grammar(
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
    structured: StructuredOutputs | None,
    tokenizer: Tokenizer | None = None,
    reasoning: ReasoningFormat | None = None,
    prompt: str = "",
) -> Grammar | None:
    """The grammar of what a request asks for; None for text of any form.

    Args:
        response_format: of the request.
        structured: of the request; not both.
        tokenizer: of the model; only used with `reasoning`.
        reasoning: how the model marks its reasoning, which may stand before JSON.
        prompt: the end of the prompt's text, which may have begun the reasoning.

    Raises:
        BadParameter: it cannot be a grammar.
    """
    if structured is not None and structured.regex is not None:
        return Grammar.regex(structured.regex)
    if structured is not None and structured.choice is not None:
        return Grammar.choices(structured.choice)
    if structured is not None and structured.grammar is not None:
        return Grammar.lark(structured.grammar)
    if structured is not None:
        schema = {"type": "object"} if structured.json_object else structured.schema_of_json
    else:
        schema = json_schema(response_format)
    return None if schema is None else json_grammar(schema, tokenizer, reasoning, prompt)
