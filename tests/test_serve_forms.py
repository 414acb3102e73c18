"""The form of a text in the server: `response_format` and `structured_outputs`, and what is refused of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pydantic
import pytest
from helpers import mostly_slow

from leapahead import LLM, Grammar
from tests.serving import Running, check, serving, toy_llm

pytest.importorskip("llguidance")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.5, "seed": 9}
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=99)
    mood: Literal["good", "bad"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """What the server's texts are compared with."""
    with LLM() as found:
        yield found


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    """The bundled model, whose template knows neither tools nor reasoning."""
    with serving(LLM()) as found:
        yield found
        assert found.idle()


def test_structured_outputs_of_the_official_client(plain: Running) -> None:
    found = plain.client().chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, temperature=1, seed=3, max_tokens=200
    )
    assert isinstance(found.choices[0].message.parsed, Person)
    with plain.client().chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Person, temperature=1, seed=3, max_tokens=200
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.content == found.choices[0].message.content
    assert streamed.parsed == found.choices[0].message.parsed


FORMS: dict[str, tuple[dict[str, Any], Grammar]] = {
    "object": ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}},
        Grammar.json_schema(PARAMETERS),
    ),
    "unnamed schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}},
        Grammar.json_schema(PARAMETERS),
    ),
    "schema of an object": (
        {"response_format": {"type": "json_object", "schema": PARAMETERS}},
        Grammar.json_schema(PARAMETERS),
    ),
    "json": ({"structured_outputs": {"json": json.dumps(PARAMETERS)}}, Grammar.json_schema(PARAMETERS)),
    "null": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [None]}}}},
        Grammar.json_schema({"enum": [None]}),
    ),
    "any object": ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    "regex": ({"structured_outputs": {"regex": "[a-z]{4}[0-9]{3}"}}, Grammar.regex("[a-z]{4}[0-9]{3}")),
    "choice": ({"structured_outputs": {"choice": ["Lyon", "Paris"]}}, Grammar.choices(["Lyon", "Paris"])),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "ab" [0-9]'}}, Grammar.lark('root ::= "ab" [0-9]')),
}


@pytest.mark.parametrize("sampling", mostly_slow([GREEDY, SAMPLED], SAMPLED), ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", mostly_slow(FORMS, "schema", "regex"))
def test_a_form_is_that_of_plain_decoding_under_the_grammar(
    plain: Running, llm: LLM, name: str, sampling: dict[str, Any]
) -> None:
    given, grammar = FORMS[name]
    options: dict[str, Any] = {**sampling, "max_new_tokens": 40, "grammar": grammar, "drafter": "plain"}
    body = {**given, **sampling, "max_tokens": 40}
    found = plain.post(CHAT, {**body, "messages": MESSAGES}).json()["choices"][0]
    assert found["message"] == {
        "role": "assistant",
        "content": llm.generate(MESSAGES, **options).text,
        "refusal": None,
    }
    completed = plain.post(COMPLETIONS, {**body, "prompt": "Paris: "}).json()["choices"][0]
    assert completed["text"] == llm.generate("Paris: ", **options).text


OBJECT = {"type": "json_object"}


def schema(given: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": given}}}


WRONG: Sequence[tuple[dict[str, Any], str, str]] = [
    ({"response_format": 5}, "response_format", ""),
    ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x", "leave it out"),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema", ""),
    (schema(None), "response_format.json_schema.schema", ""),
    (schema({"type": "nothing"}), "response_format", "Invalid type"),
    (schema({"not": {}}), "response_format", "Unimplemented keys"),
    (schema({"$ref": "https://example.org/a"}), "response_format", "does not fetch"),
    (schema({"type": "string", "minLength": 3, "maxLength": 2}), "response_format", "Unsatisfiable"),
    (schema({"enum": []}), "response_format", ""),
    ({"response_format": OBJECT, "ignore_eos": True}, "ignore_eos", "grammar"),
    ({"response_format": OBJECT, "structured_outputs": {"regex": "a"}}, "structured_outputs", "both"),
    ({"structured_outputs": {}}, "structured_outputs", "give one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "give one"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs", "look-ahead"),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs", "regular expression"),
    ({"structured_outputs": {"regex": "(" * 3000}}, "structured_outputs", "regular expression"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not JSON"),
    ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs", "grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "leave it out"),
    ({"guided_json": {}}, "guided_json", "structured_outputs"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", "structured_outputs"),
    ({"guided_decoding_backend": "guidance"}, "guided_decoding_backend", "leave it out"),
    ({"regex": "a"}, "regex", "use structured_outputs={'regex': ...}"),
    ({"json_schema": {}}, "json_schema", "use structured_outputs={'json': ...}"),
    ({"repeat_penalty": 1.1}, "repeat_penalty", "use repetition_penalty"),
]


@pytest.mark.parametrize(("body", "param", "words"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_refused(plain: Running, body: dict[str, Any], param: str, words: str) -> None:
    check(plain.post(CHAT, {"messages": MESSAGES, "max_tokens": 20, **body}), 400, param, words)
    check(plain.post(COMPLETIONS, {"prompt": "a", **body}), 400, param, words)


def test_guided_parameters_that_repeat_structured_outputs(plain: Running) -> None:
    """As guidance's model for vLLM sends them."""
    body = {"prompt": "a", "guided_regex": "[ab]c", "guided_decoding_backend": "guidance"}
    found = plain.post(COMPLETIONS, {**body, "structured_outputs": {"regex": "[ab]c"}})
    assert found.json()["choices"][0]["text"] in ("ac", "bc"), found.text


@pytest.mark.slow
def test_requests_with_forms_at_the_same_time(plain: Running, llm: LLM) -> None:
    """Beside each other and beside text of any form, as streams of the asynchronous client."""
    jobs = [*((form, 0) for form in FORMS.values()), (({}, None), 7)]

    async def one(client: Any, given: dict[str, Any], seed: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=24, temperature=1, seed=seed, stream=True, extra_body=given
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def every() -> list[str]:
        async with plain.asynchronous() as client:
            return await asyncio.gather(*(one(client, given, seed) for (given, _), seed in jobs))

    for ((_, grammar), seed), text in zip(jobs, asyncio.run(every()), strict=True):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_new_tokens": 24, "drafter": "plain"}
        assert text == llm.generate(MESSAGES, grammar=grammar, **options).text


@pytest.mark.slow
def test_tokenizers_that_cannot_serve() -> None:
    with serving(toy_llm()) as letters:
        body = {"messages": MESSAGES, "response_format": OBJECT}
        check(letters.post(CHAT, body), 400, "response_format", "Letters")
        parts = letters.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
        assert len(parts["response_format"]["anyOf"]) == 2
        assert parts["structured_outputs"]["anyOf"] == [{"type": "null"}]
