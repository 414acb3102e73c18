"""Tool calls of Qwen3-Coder and DeepSeek: what their chat templates write is read, and grammars enforce it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from itertools import count
from typing import Any

import jinja2
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import DEEPSEEK_V3, DEEPSEEK_V31, QWEN3_CODER

from leapahead import LLM
from leapahead.chat import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ChatParser,
    Message,
    Tool,
    ToolChoice,
    WithMarkers,
    parse,
    tool_format,
    tool_grammar,
)
from leapahead.chat.tool_grammar import enforceable
from leapahead.core.errors import BadParameter
from leapahead.grammar import Grammars
from leapahead.models.toy import ToyTarget

QWEN, V3, V31 = (TOOL_FORMATS[name] for name in ("qwen3_coder", "deepseek_v3", "deepseek_v31"))
TEMPLATES = {"qwen3_coder": QWEN3_CODER, "deepseek_v3": DEEPSEEK_V3, "deepseek_v31": DEEPSEEK_V31}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer"},
        "size": {"type": "number"},
        "sunny": {"type": "boolean"},
        "where": {"$ref": "#/$defs/Place"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"allOf": [{"$ref": "#/$defs/Unit"}], "default": "C"},
        "mixed": {"type": ["integer", "string"]},
        "odd": {"type": "float"},
        "free": {},
    },
    "required": ["city"],
    "$defs": {
        "Place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "Unit": {"enum": ["C", "F"]},
    },
}
FORECAST = Tool("forecast", parameters=PARAMETERS)
CLOCK = Tool("clock", parameters={"type": "object", "properties": {}, "additionalProperties": False})
B, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CB, CE, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def read(text: str, format: Any, *cuts: int) -> tuple[str | None, list[tuple[str, str]]]:
    """Content and calls of a text that comes in pieces."""
    ids = count()
    parser, found = ChatParser(format, new_id=lambda: str(next(ids)), functions=[FORECAST, CLOCK]), Message()
    for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        found.add(parser.add(text[start:end]))
    found.add(parser.finish())
    assert [call.id for call in found.tool_calls] == list(map(str, range(len(found.tool_calls))))
    return found.content, [(call.function.name, call.function.arguments) for call in found.tool_calls]


def call(name: str, **values: str) -> str:
    """A call as Qwen3-Coder writes it."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


CITY = '{"city": "Rome"}'
BROKEN = "<tool_call>\n<function=f>\n<parameter=a>\n1\n"
CASES: Sequence[tuple[Any, str, str | None, list[tuple[str, str]]]] = [
    (QWEN, "no <call", "no <call", []),
    (QWEN, "Yes.\n" + call("forecast", city="Rome"), "Yes.", [("forecast", CITY)]),
    (QWEN, call("clock"), None, [("clock", "{}")]),
    (QWEN, f"{call('clock')}\n{call('forecast', city='Rome')}\n", None, [("clock", "{}"), ("forecast", CITY)]),
    (QWEN, call("forecast", city='\nA "b"\n\\\n'), None, [("forecast", '{"city": "\\nA \\"b\\"\\n\\\\\\n"}')]),
    (QWEN, call("forecast", city=""), None, [("forecast", '{"city": ""}')]),
    (QWEN, call("forecast", city="12", days="12"), None, [("forecast", '{"city": "12", "days": 12}')]),
    (QWEN, call("forecast", days="two", size="2.50"), None, [("forecast", '{"days": "two", "size": 2.50}')]),
    (QWEN, call("forecast", days="5.0", sunny="True"), None, [("forecast", '{"days": 5.0, "sunny": true}')]),
    (QWEN, call("forecast", where="{'x': 1}", tags="[]"), None, [("forecast", '{"where": {"x": 1}, "tags": []}')]),
    (QWEN, call("forecast", where='{"x":\n1}'), None, [("forecast", '{"where": {"x":\n1}}')]),
    (QWEN, call("forecast", tags='["a"'), None, [("forecast", '{"tags": "[\\"a\\""}')]),
    (QWEN, call("forecast", note="None", unit="null"), None, [("forecast", '{"note": null, "unit": "null"}')]),
    (QWEN, call("forecast", note="[1]", free="1"), None, [("forecast", '{"note": "[1]", "free": "1"}')]),
    (QWEN, call("forecast", mixed="1", odd="1.5"), None, [("forecast", '{"mixed": 1, "odd": 1.5}')]),
    (QWEN, call("forecast", mixed="one", size="NaN"), None, [("forecast", '{"mixed": "one", "size": "NaN"}')]),
    (QWEN, call("unknown", a="1"), None, [("unknown", '{"a": "1"}')]),
    (QWEN, call("forecast", free="1 < 2 </para <x>"), None, [("forecast", '{"free": "1 < 2 </para <x>"}')]),
    (
        QWEN,
        "<tool_call><function=forecast><parameter=city>Rome</parameter></function></tool_call>",
        None,
        [("forecast", CITY)],
    ),
    (QWEN, "So\n\n" + call("forecast", city="Rome")[12:], "So", [("forecast", CITY)]),  # no <tool_call>
    (
        QWEN,
        "<tool_call>\n<function=forecast>\n<parameter=city>\nRome\n<parameter=days>\n2\n</function>",
        None,
        [("forecast", '{"city": "Rome", "days": 2}')],
    ),
    (QWEN, f"{BROKEN}</tool_call> Done.", " Done.", [("f", '{"a": "1"}')]),
    (QWEN, f"{BROKEN}</parameter>\nwhat?\n</function>", None, [("f", '{"a": "1"}')]),
    (QWEN, "<tool_call><function=f>\n<parameter=a\nb>1</parameter></function>", None, [("f", "{}")]),
    (QWEN, f"{BROKEN}</parameter>\n<tool_call><function=g></function>", None, [("f", '{"a": "1"}'), ("g", "{}")]),
    (QWEN, BROKEN[:-3], None, [("f", '{"a": ')]),  # the end of the text
    (QWEN, "<tool_call>\n<function=forecast>\n<parameter=days>\n1", None, [("forecast", '{"days": ')]),
    (
        QWEN,
        f"<tool_call>\n<function=f\n</function></tool_call>{call('clock')}",
        "<tool_call>\n<function=f\n</function></tool_call>",
        [("clock", "{}")],
    ),
    (QWEN, "<tool_call>\n<function=f", "<tool_call>\n<function=f", []),
    (QWEN, '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    (QWEN, "write <function=f>, like this", "write <function=f>, like this", []),
    (QWEN, "a <function= f>", "a <function= f>", []),
    (V3, f"Yes. {B}{CB}function{SEP}f\n```json\n{CITY}\n```{CE}{E}", "Yes.", [("f", CITY)]),
    (
        V3,
        f'{B}{CB}function{SEP}f\n```json\n{{"a": "```}}"}}\n```{CE}\n{CB}function{SEP}g\n```json\n{{}}\n```{CE}{E}',
        None,
        [("f", '{"a": "```}"}'), ("g", "{}")],
    ),
    (V31, f"text{B}{CB}f{SEP}{CITY}{CE}{CB}g{SEP}{{}}{CE}{E} more", "text more", [("f", CITY), ("g", "{}")]),
    (V3, f"{B}{CB}f{SEP}{CITY}{CE}{E}", None, [("f", CITY)]),  # either form by either name
    (V31, f"{B}{CB}function{SEP}f\n```json\n{CITY}\n```{CE}{E}", None, [("f", CITY)]),
    (V31, f"{B}{CB}f{SEP}```json\n{CITY}```{CE}{E}", None, [("f", CITY)]),
    (V31, f"{B}{CB}f{SEP}{CE}{E}", None, [("f", "{}")]),
    (V31, f"a {CB}f{SEP}{CITY}{CE}", "a", [("f", CITY)]),  # no marker of all calls
    (V31, f"{B}{CB}f{SEP}{CITY}{CB}g{SEP}{{}}{E}", None, [("f", CITY), ("g", "{}")]),  # no ends of calls
    (V31, f'{B}{CB}f{SEP}{{"a": ', None, [("f", '{"a": ')]),
    (V31, f'{B}{CB}f{SEP}{{"a": 1{CE}{CB}g{SEP}{{}}{CE}{E}', None, [("f", '{"a": 1'), ("g", "{}")]),
    (V31, f"{B}f{SEP}{CITY}{E}", f"{B}f{SEP}{CITY}{E}", []),
    (V31, f"{B}{CB}f", f"{B}{CB}f", []),
    (V31, f"{B}{CB}f{SEP}[1]{CE}{E}", f"{B}{CB}f{SEP}[1]{CE}{E}", []),
    (V31, f"{B}{CB}a b{SEP}{{}}{CE}{E}", f"{B}{CB}a b{SEP}{{}}{CE}{E}", []),
    (V31, f"{B}{E}", f"{B}{E}", []),
    (V31, f"{B}{CB}f{SEP}{{}}{CE}Done.", "Done.", [("f", "{}")]),
    (V3, "< <｜tool", "< <｜tool", []),
]


@pytest.mark.parametrize(("format", "text", "content", "expected"), CASES)
def test_a_text_whole_and_at_every_cut(format: Any, text: str, content: str | None, expected: Any) -> None:
    assert read(text, format) == (content, expected)
    for cut in range(len(text) + 1):
        assert read(text, format, cut) == (content, expected), cut
    assert read(text, format, *range(1, len(text))) == (content, expected)


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=a>", "</parameter>"),
    *("<function=forecast>", "<parameter=days>", "<parameter=where>", "\n", " ", "x", "1", "{", "}", '{"x": 1}', ">"),
    *("<para", "</", "<", B, E, CB, CE, SEP, "```json\n", "```", "f", "function", '{"a": "}"}', "<｜tool", "日本"),
]


@pytest.mark.slow
@settings(max_examples=400)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.sampled_from([QWEN, V3, V31]), st.data())
def test_every_division_gives_the_same_and_no_text_is_lost(pieces: list[str], format: Any, data: Any) -> None:
    text = "".join(pieces)
    found = read(text, format)
    assert found[1] or (found[0] or "") == text
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    assert read(text, format, *cuts) == found
    assert read(text, format, *range(len(text))) == found


def test_strings_stream_and_markers_are_held_back() -> None:
    parser, given_parts = ChatParser(QWEN, functions=[FORECAST]), []
    for character in call("forecast", city="Rome <b", days="12"):
        given_parts += [piece.arguments for piece in parser.add(character).tool_calls]
    first, second = ['{"city": ', '"', *"Rome", " ", "<b", '"'], [', "days": ', "12", "}"]
    assert [part for part in given_parts if part] == [*first, *second]


# What the chat templates write


def rendered(template: str, messages: Any, tools: Any = None) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(messages=messages, tools=tools, add_generation_prompt=False)


VALUES: dict[str, Any] = {"city": "Rome", "days": 2, "sunny": True, "where": {"x": 1}, "tags": ["a"], "note": None}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read(name: str) -> None:
    format = TOOL_FORMATS[name]
    assert tool_format(chat_template=TEMPLATES[name]) is format
    calls = [
        {"type": "function", "function": {"name": "forecast", "arguments": VALUES}},
        {"type": "function", "function": {"name": "clock", "arguments": {}}},
    ]
    if name == "deepseek_v31":  # which takes text only
        calls = [
            {**each, "function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])}}  # type: ignore[dict-item]
            for each in calls
        ]
    text = rendered(TEMPLATES[name], [{"role": "assistant", "content": "Let me see.", "tool_calls": calls}])
    content, found = read(text.partition("|>")[2].partition("<|end")[0], format)
    assert (content or "").strip() == "Let me see."
    assert [(each, json.loads(arguments)) for each, arguments in found] == [("forecast", VALUES), ("clock", {})]


# Grammars


@pytest.fixture(scope="module")
def marked(tokenizer: Any) -> Any:
    """The tokenizer with DeepSeek's special tokens, and a text token of Qwen."""
    from tokenizers import AddedToken

    found = deepcopy(tokenizer)
    found.add_tokens([AddedToken(text, special=True) for text in (B, E, CB, CE, SEP)])
    found.add_tokens([AddedToken("<tool_call>", special=False)])
    return found


@pytest.fixture(scope="module")
def llm(marked: Any) -> LLM:
    pytest.importorskip("llguidance")
    return LLM(ToyTarget(len(marked), sharpness=3.0), tokenizer=marked)


WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "unit": {"enum": ["C", "F", 3]},
            "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "parallel"),
    [(each, parallel) for each in (QWEN, V3, V31) for parallel in (False, True)],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_required_calls_have_their_schema(llm: LLM, marked: Any, format: Any, parallel: bool) -> None:
    functions = [WEATHER, CLOCK]
    grammar = tool_grammar(functions, ToolChoice("required"), format, marked, parallel=parallel)
    named = tool_grammar(functions, ToolChoice("required", "clock"), format, marked, parallel=False)
    shown, seen = WithMarkers(marked, format.markers), set()
    for seed in range(8):
        options: dict[str, Any] = {"temperature": 4.0, "seed": seed, "max_new_tokens": 600}
        result = llm.generate("weather", grammar=grammar, drafter_options={"nodes": 8}, **options)
        assert result.tokens == llm.generate("weather", grammar=grammar, drafter="plain", **options).tokens
        text = shown.decode(llm.generate("weather", grammar=named, **options).tokens, skip_special_tokens=True)
        assert [each.function.name for each in parse(text, format).tool_calls] == ["clock"]
        if result.finish_reason == "length":
            continue
        message = parse(shown.decode(result.tokens, skip_special_tokens=True), format, functions=functions)
        assert message.content is None
        assert len(message.tool_calls) == 1 or (parallel and message.tool_calls)
        for each in message.tool_calls:
            seen.add(each.function.name)
            schema = {tool.name: tool.parameters for tool in functions}[each.function.name]
            jsonschema.validate(json.loads(each.function.arguments), schema)
    assert seen == {"get_weather", "clock"}


def admits(marked: Any, grammar: Any, text: str) -> bool:
    """Whether a text may be written as a whole."""
    assert grammar is not None
    state = Grammars(marked, len(marked), (0,)).compile(grammar).follow([], len(marked))
    tokens = marked.encode(text, add_special_tokens=False)
    return state.admitted(0, tokens) == len(tokens) and bool(state.mask(0, tokens)[0])


@pytest.mark.parametrize(
    ("format", "choice", "text", "expected"),
    [
        (QWEN, "auto", "free <function", True),
        (QWEN, "auto", f"I {call('clock')}\n{call('clock')} Done.", True),
        (QWEN, "auto", f"I {call('other')}", False),
        (QWEN, "required", call("clock"), True),
        (QWEN, "required", f"{call('clock')}\n{call('clock')}", True),
        (QWEN, "required", call("clock", a="1"), False),
        (V3, "auto", "free ```json", True),
        (V3, "auto", f"I {B}{CB}function{SEP}clock\n```json\n{{}}\n```{CE}{E}", True),
        (V3, "auto", f"I {B}{CB}function{SEP}clock\n```json\n{{}}\n```{CE}", False),
        (
            V3,
            "required",
            B + "\n".join(2 * [f"{CB}function{SEP}clock\n```json\n{{}}\n```{CE}"]) + E,
            True,
        ),
        (V31, "required", f"{B}{CB}clock{SEP}{{}}{CE}{CB}clock{SEP}{{}}{CE}{E}", True),
        (V31, "required", f"{B}{CB}function{SEP}clock\n```json\n{{}}\n```{CE}{E}", False),
        (V31, "auto", f"a {B}{CB}clock{SEP}{{}}{CE}{E}", True),
        (V31, "auto", f"a {B}{CB}other", False),
    ],
)
def test_what_a_grammar_admits(marked: Any, format: Any, choice: str, text: str, expected: bool) -> None:
    pytest.importorskip("llguidance")
    assert admits(marked, tool_grammar([CLOCK], ToolChoice(choice), format, marked), text) is expected
    single = tool_grammar([CLOCK], ToolChoice(choice), format, marked, parallel=False)
    assert admits(marked, single, text) is (expected and text.count("clock") < 2 and "Done" not in text)


VALUES_OF_SCHEMAS: Sequence[tuple[Any, str, bool]] = [
    ({"type": "string", "maxLength": 3}, "abc", True),
    ({"type": "string", "maxLength": 3}, "abcd", False),
    ({"type": "string", "minLength": 2}, "a", False),
    ({"type": "string"}, "", True),
    ({"type": "string"}, '\na\n\n</para\n<param \\ "', True),
    ({"type": "string"}, "a</parameter>", False),
    ({"type": "string"}, "a\n<parameter=b>", False),
    ({"type": "string", "pattern": "^[a-z]{2}/$"}, "ab/", True),
    ({"type": "string", "pattern": "^[a-z]{2}/$"}, "abc/", False),
    ({"type": "string", "pattern": r"[0-9]{2}|\$"}, "a12b", True),
    ({"type": "string", "pattern": r"[0-9]{2}|\$"}, "a1b", False),
    ({"type": "string", "pattern": "^(a|b)[/|]"}, "b/ and more", True),
    ({"type": "string", "pattern": "^(a|b)[/|]"}, "cb/", False),
    ({"type": "string", "pattern": "^(?!x)y", "maxLength": 2}, "yz", True),  # which no grammar can enforce
    ({"type": "string", "pattern": "^(?!x)y", "maxLength": 2}, "xyz", False),
    ({"type": "string", "format": "uri"}, "anything", True),
    ({"enum": ["a", 1, None]}, "a", True),
    ({"enum": ["a", 1, None]}, "null", True),
    ({"enum": ["a", 1, None]}, "b", False),
    ({"type": "number", "enum": [1, "a"]}, "1", True),
    ({"type": "string", "enum": [1, "a"]}, "1", False),
    ({"const": "yes"}, "yes", True),
    ({"type": "integer", "minimum": 5}, "7", True),
    ({"type": "integer", "minimum": 5}, "4", False),
    ({"type": "integer"}, "seven", False),
    ({"$ref": "#/$defs/Place"}, '{"x": 1}', True),
    ({"$ref": "#/$defs/Place"}, '{"x": "1"}', False),
    ({"type": "array", "items": {"$ref": "#/$defs/Place"}}, '[{"x": 1}]', True),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "null", True),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "ab", True),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "abc", False),
    ({"type": ["string", "null"]}, "any text", True),
    ({}, "any {text", True),
    (True, "any {text", True),
    ({"$ref": "#/properties/a"}, "a schema that refers to itself", True),
    ({"$ref": "#/properties/b/anyOf/7"}, "a schema that refers to nothing", True),
]


@pytest.mark.parametrize(("schema", "text", "expected"), VALUES_OF_SCHEMAS)
def test_the_value_of_a_parameter(marked: Any, schema: Any, text: str, expected: bool) -> None:
    pytest.importorskip("llguidance")
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": PARAMETERS["$defs"]}
    tool = Tool("f", parameters=parameters)
    grammar = tool_grammar([tool], ToolChoice("required"), QWEN, marked)
    assert admits(marked, grammar, call("f", a=text)) is expected
    if expected and "properties" not in str(schema):
        (found,) = parse(call("f", a=text), QWEN, functions=[tool]).tool_calls
        jsonschema.validate(json.loads(found.function.arguments), parameters)


def test_patterns_that_no_grammar_can_enforce() -> None:
    for pattern in ("(?!x)y", "x(?=y)", "(?<=x)y", "(?<!x)y", r"(a)\1", r"(?<n>a)\k<n>", r"\bx\B"):
        assert enforceable({"type": "string", "pattern": pattern, "minLength": 2}) == {"type": "string", "minLength": 2}
        rest: Any = {"type": "object", "properties": {"x": True}}
        assert enforceable({**rest, "patternProperties": {pattern: {}, "z": {}}, "additionalProperties": False}) == rest
        kept = {"const": {"pattern": pattern}, "properties": {"pattern": {"enum": [{"pattern": pattern}]}}}
        assert enforceable({"$defs": {"const": {"pattern": pattern}}, "anyOf": [kept]}) == {
            "$defs": {"const": {}},
            "anyOf": [kept],
        }
    for pattern in (r"\(?=x", "[(?=]x", r"[]\]\b(?!]x", r"\\bx", "(?:x)(?i)", "x?", r"\d\.\0"):
        schema = {"items": [{"pattern": pattern}], "patternProperties": {pattern: {"pattern": "x"}}}
        assert enforceable(schema) == schema


def test_parameters_that_refer_to_parts_of_others(marked: Any) -> None:
    pytest.importorskip("llguidance")
    place = PARAMETERS["$defs"]["Place"]
    properties: Any = {
        "add": {"type": "array", "items": place},
        "first": {"anyOf": [place, {"type": "null"}]},
        "remove": {"type": "array", "items": {"$ref": "#/properties/add/items"}},
        "second": {"$ref": "#/properties/first/anyOf/0"},
        "tree": {"type": "array", "items": {"$ref": "#"}},
        "chain": {"type": "array", "items": {"$ref": "#/$defs/Again"}},
    }
    definitions = {"Again": {"$ref": "#/properties/second"}, "root": {"type": "null"}}
    parameters = {"$id": "https://example.org/f", "type": "object", "properties": properties, "$defs": definitions}
    for name, text, expected in (
        ("remove", '[{"x": 1}]', True),
        ("remove", '[{"x": "1"}]', False),
        ("second", '{"x": 1}', True),
        ("second", '{"x": "1"}', False),
        ("tree", '[{"remove": [{"x": 1}]}]', True),
        ("tree", '[{"remove": [{"x": "1"}]}]', False),
        ("chain", '[{"x": 1}]', True),
        ("chain", '[{"x": "1"}]', False),
    ):
        tool = Tool("f", parameters=parameters)
        grammar = tool_grammar([tool], ToolChoice("required"), QWEN, marked)
        assert admits(marked, grammar, call("f", **{name: text})) is expected, (name, text)
        if expected:
            (found,) = parse(call("f", **{name: text}), QWEN, functions=[tool]).tool_calls
            assert json.loads(found.function.arguments) == {name: json.loads(text)}


def test_parameters_that_are_left_out_or_not_in_the_schema(marked: Any) -> None:
    pytest.importorskip("llguidance")

    def admitted(parameters: Any, **values: str) -> bool:
        grammar = tool_grammar([Tool("f", parameters=parameters)], ToolChoice("required"), QWEN, marked)
        return admits(marked, grammar, call("f", **values))

    two = {"type": "object", "properties": {"a": {}, "b": {"type": "integer"}}, "required": ["b"]}
    assert admitted(two, b="1")
    assert admitted(two, a="x", b="1")
    assert not admitted(two, a="x")
    assert not admitted(two, b="1", c="x")
    assert admitted({"type": "object", "required": ["z"]}, z="x")
    assert admitted({"type": "object"})
    assert admitted({"type": "object"}, a="x", b="y")
    assert not admitted({"type": "object", "additionalProperties": {"type": "integer"}}, a="x")
    assert not admitted({"type": "object", "additionalProperties": False}, a="x")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "the tool 'f' have 'anyOf' at the top"),
        ({"properties": {"a>b": {}}}, "parameter 'a>b', which this model's format cannot name"),
        ({"properties": {"a": {"const": object()}}}, "not JSON"),
        ({"properties": 3}, "parameters of the tool 'f' are not JSON, or no schema"),
        ({"properties": {"a": {"type": "string", "pattern": 3}}}, "not JSON, or no schema"),
    ],
)
def test_schemas_that_xml_cannot_follow(marked: Any, parameters: Any, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        tool_grammar([Tool("f", parameters=parameters)], ToolChoice("required"), QWEN, marked)


def test_reasoning_stands_before_calls(marked: Any) -> None:
    pytest.importorskip("llguidance")
    think = REASONING_FORMATS["deepseek_r1"]
    grammar = tool_grammar([CLOCK], ToolChoice("required"), V31, marked, reasoning=think, prompt="<think>")
    text = f"Which {CB}?</think>{B}{CB}clock{SEP}{{}}{CE}{E}"
    assert not admits(marked, grammar, f"{B}{CB}clock{SEP}{{}}{CE}{E}")
    message = parse(text, V31, think, "<think>")
    assert (message.reasoning_content, message.content, len(message.tool_calls)) == (f"Which {CB}?", None, 1)
