"""Tool calls and reasoning: parsers give the same at every division of a text; grammars enforce what they parse."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from time import process_time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
    reasoning_format,
    tool_choice,
    tool_format,
    tool_grammar,
    tools,
)
from leapahead.core.errors import BadParameter
from leapahead.grammar import Grammar, Grammars
from leapahead.models.toy import ToyTarget

HERMES, LLAMA, MISTRAL, QWEN, DEEPSEEK, DEEPSEEK_V31 = TOOL_FORMATS.values()
THINK = REASONING_FORMATS["qwen3"]
WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
CLOCK = Tool("clock", parameters={"type": "object", "properties": {}, "additionalProperties": False})


def numbered() -> Callable[[], str]:
    numbers = count()
    return lambda: f"id{next(numbers)}"


def whole(text: str, tools: Any = None, reasoning: Any = None, prompt: str = "") -> Message:
    return parse(text, tools, reasoning, prompt, numbered())


def calls(message: Message) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


# Whole texts: what is expected was written by hand from the formats' documentation and vLLM's tests.

CASES: list[tuple[str, Any, str, str | None, list[tuple[str, str]]]] = [
    ("no call", HERMES, "Hello, world.", "Hello, world.", []),
    (
        "one",
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>',
        None,
        [("f", '{"a": "b"}')],
    ),
    (
        "text and two",
        HERMES,
        'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call>\n',
        "Let me look.",
        [("f", '{"a": [1, {"b": "}"}]}'), ("g", "{}")],
    ),
    (
        "arguments first",
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        None,
        [("f", '{"a": 1}')],
    ),
    ("no arguments", HERMES, '<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
    ("null", HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", "{}")]),
    ("a string", HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', None, [("f", '{"a": 1}')]),
    (
        "quotes",
        HERMES,
        r'<tool_call>{"name": "f", "arguments": {"a": "\"}\\"}}</tool_call>',
        None,
        [("f", r'{"a": "\"}\\"}')],
    ),
    ("cut off in the arguments", HERMES, '<tool_call>{"name": "f", "arguments": {"a": ', None, [("f", '{"a": ')]),
    (
        "a missing bracket",
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"</tool_call>So',
        "So",
        [("f", '{"a": "</tool_call>"')],
    ),
    ("cut off before", HERMES, 'x <tool_call>{"name": "f", "argu', 'x <tool_call>{"name": "f", "argu', []),
    ("no JSON", HERMES, "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
    ("no name", HERMES, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    ("half a marker", HERMES, "a < b <tool_", "a < b <tool_", []),
    (
        "a missing end",
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        None,
        [("f", "{}"), ("g", "{}")],
    ),
    ("text behind", HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call> Done. ', " Done.", [("f", "{}")]),
    ("one", LLAMA, '{"name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
    ("marker", LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
    (
        "two",
        LLAMA,
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("type", LLAMA, '{"type": "function", "name": "f", "parameters": {}}', None, [("f", "{}")]),
    ("other JSON", LLAMA, '{"answer": {"a": 1}}', '{"answer": {"a": 1}}', []),
    ("a name alone", LLAMA, '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    ("half a pair", LLAMA, r'{"name": "\ud83d", "parameters": {}}', r'{"name": "\ud83d", "parameters": {}}', []),
    ("text", LLAMA, "It is {} o'clock.", "It is {} o'clock.", []),
    ("one", MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', None, [("f", '{"a": 1}')]),
    (
        "two",
        MISTRAL,
        'Yes. [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": "]"}}]',
        "Yes.",
        [("f", "{}"), ("g", '{"x": "]"}')],
    ),
    ("name first", MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{"b": 2}', None, [("f", '{"a": 1}'), ("g", '{"b": 2}')]),
    ("ARGS", MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}', None, [("f", '{"a": 1}')]),
    ("an array cut off", MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}},', None, [("f", "{}")]),
    ("a list", MISTRAL, "[1, 2]", "[1, 2]", []),
]


@pytest.mark.parametrize(("name", "format", "text", "content", "expected"), CASES, ids=lambda each: str(each)[:24])
def test_a_whole_text(name: str, format: Any, text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    message = whole(text, format)
    assert (message.content, calls(message)) == (content, expected)
    assert [call.id for call in message.tool_calls] == [f"id{index}" for index in range(len(expected))]


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<", "</"),
        *('{"name": "f", "arguments": {"a": "}{"}}', '{"name": "g", "parameters": {"b": [1, "\\""]}}', '{"name"'),
        *(
            '{"arguments": 1.5, "name": "h"}',
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            "; ",
            ":",
            " ",
            "\n",
            "f",
            "12",
            "text",
        ),
        *('"name": "f"', '"arguments": ', "null", "日本"),
    ]
)


@settings(max_examples=400)
@given(
    pieces=st.lists(PIECES, max_size=12),
    tools=st.sampled_from([HERMES, LLAMA, MISTRAL, None]),
    reasoning=st.sampled_from([THINK, None]),
    prompt=st.sampled_from(["", "<think>\n"]),
    data=st.data(),
)
def test_streaming_gives_the_same_at_every_division(
    pieces: list[str], tools: Any, reasoning: Any, prompt: str, data: Any
) -> None:
    text = "".join(pieces)
    expected = whole(text, tools, reasoning, prompt)
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    for bounds in (cuts, range(len(text) + 1)):
        parser, found = ChatParser(tools, reasoning, prompt, numbered()), Message()
        for start, end in zip(bounds, list(bounds)[1:], strict=False):
            found.add(parser.add(text[start:end]))
        found.add(parser.finish())
        assert found == expected


@pytest.mark.parametrize(("name", "format", "text", "content", "expected"), CASES, ids=lambda each: str(each)[:24])
def test_every_case_at_every_single_cut(
    name: str, format: Any, text: str, content: str | None, expected: list[tuple[str, str]]
) -> None:
    for cut in range(len(text) + 1):
        parser, found = ChatParser(format, new_id=numbered()), Message()
        for piece in (parser.add(text[:cut]), parser.add(text[cut:]), parser.finish()):
            found.add(piece)
        assert (found.content, calls(found)) == (content, expected), cut


@settings(max_examples=100)
@given(st.lists(PIECES, max_size=10), st.sampled_from([HERMES, LLAMA, MISTRAL]))
@example(["<tool_call>", "x"], HERMES)
@example(["[TOOL_CALLS]", "[", "]"], MISTRAL)
def test_no_text_is_lost_where_there_is_no_call(pieces: list[str], format: Any) -> None:
    text = "".join(pieces)
    message = whole(text, format)
    if not message.tool_calls:
        assert (message.content or "") == text


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", "argum'),
        (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "par'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "argum'),
        (TOOL_FORMATS["qwen3_coder"], "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g"),
    ],
)
def test_a_forced_call_that_is_cut_is_no_content(format: Any, text: str) -> None:
    """Wherever the text ends; elsewhere the beginning of a call is content, since it may be none."""
    for end in range(len(text) + 1):
        message, parser, found = parse(text[:end], format, forced=True), ChatParser(format, forced=True), Message()
        for piece in (*map(parser.add, text[:end]), parser.finish()):
            found.add(piece)
        assert (message.content or "", calls(message)) == (found.content or "", calls(found)) == ("", calls(found))
    assert [name for name, _ in calls(message)] == ["f"]
    assert whole(text, format).content


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (LLAMA, '{"result": [%s0]}'),  # JSON that is no call: all of it is content, which is known at its end
        (LLAMA, '{"result": "%s"}'),
        (HERMES, '<tool_call>{"arguments": {"a": [%s0]}, "name": "f"}</tool_call>'),
    ],
)
def test_a_piece_takes_as_long_in_a_long_text_as_in_a_short_one(format: Any, text: str) -> None:
    """The parser runs in the server's event loop, for every token."""
    text, parser, found = text % ("[1, 2, 34]," * 4000), ChatParser(format, new_id=numbered()), Message()
    began = process_time()
    for at in range(0, len(text), 4):
        found.add(parser.add(text[at : at + 4]))
    found.add(parser.finish())
    assert found.content == text or calls(found)
    assert process_time() - began < 4.0  # about 0.3; more than 20 where every piece is read from the start


def test_arguments_stream_and_half_a_marker_is_never_content() -> None:
    parser = ChatParser(HERMES, new_id=numbered())
    given_pieces = []
    for character in 'Hi <tool_call>{"name": "f", "arguments": {"a": 12}}</tool_call>':
        if delta := parser.add(character):
            given_pieces.append((delta.content, [(c.id, c.name, c.arguments) for c in delta.tool_calls]))
    assert "".join(content for content, _ in given_pieces) == "Hi"
    pieces = [call for _, found in given_pieces for call in found]
    assert pieces[0] == ("id0", "f", "{")
    assert [arguments for _, _, arguments in pieces] == list('{"a": 12}')
    assert parser.called


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "", "\nhm\n", "\n\nYes."),
        ("hm</think>Yes.", "...<think>\n", "hm", "Yes."),
        ("never ends", "<think>", "never ends", None),
        ("Yes.", "", None, "Yes."),
        ("Yes <think>no</think>", "", None, "Yes <think>no</think>"),
        ("<thin", "", None, "<thin"),
        ("\n<think>a", "", "a", None),
        ("", "<think>", None, None),
    ],
)
def test_reasoning(text: str, prompt: str, reasoning: str | None, content: str | None) -> None:
    message = whole(text, None, THINK, prompt)
    assert (message.reasoning_content, message.content) == (reasoning, content)


def test_calls_inside_the_reasoning_are_none() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = whole(f"<think>{call}</think>{call}", HERMES, THINK)
    assert (message.reasoning_content, message.content, len(message.tool_calls)) == (call, None, 1)


@pytest.mark.parametrize(
    ("template", "calls_name", "reasoning_name"),
    [
        ('... <tool_call>\\n{"name": ... </tool_call> ... <think> ...', "hermes", "deepseek_r1"),
        ("{{ '<|python_tag|>' }}", "llama3_json", None),
        ('<|start_header_id|> {"name": x, "parameters": y}', "llama3_json", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<tool_call><function=f>", "qwen3_coder", None),
        ("<tool_call>f<arg_key>", None, None),
        ("<｜tool▁calls▁begin｜> + '```' + 'json' </think>", "deepseek_v3", "deepseek_r1"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31", None),
        ("<|im_start|>", None, None),
        (None, None, None),
    ],
)
def test_the_format_of_a_template(template: str | None, calls_name: str | None, reasoning_name: str | None) -> None:
    found, thought = tool_format(chat_template=template), reasoning_format(chat_template=template)
    assert (found and found.name, thought and thought.name) == (calls_name, reasoning_name)
    assert tool_format("mistral", template) is MISTRAL
    with pytest.raises(BadParameter, match="there is no tool call format 'x'; there are hermes"):
        tool_format("x")
    with pytest.raises(BadParameter, match="there is no reasoning format 'x'"):
        reasoning_format("x")


# Requests


def function(**attributes: Any) -> dict[str, Any]:
    return {"type": "function", "function": attributes}


def test_tools_and_choices_of_a_request() -> None:
    found = tools([function(name="f", description="d", parameters={"type": "object"}), function(name="g")])
    assert found == [Tool("f", "d", {"type": "object"}), Tool("g")]
    assert tools(None) == []
    assert tool_choice(None, found) == ToolChoice("auto")
    assert tool_choice(None, []) == ToolChoice("none")
    assert tool_choice("required", found) == ToolChoice("required")
    assert tool_choice(function(name="g"), found) == ToolChoice("required", "g")


@pytest.mark.parametrize(
    ("given_tools", "message"),
    [
        ({}, "list of functions"),
        (["f"], r"tools\[0\] .*of the type"),
        ([{"type": "function"}], r"tools\[0\]\.function is not possible"),
        ([function(name="a b")], "'a b'"),
        ([function()], "None"),
        ([function(name="f", description=3)], "description"),
        ([function(name="f", parameters=[1])], "parameters"),
        ([function(name="f"), function(name="f")], "two functions of the name 'f'"),
    ],
)
def test_tools_that_are_none(given_tools: Any, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        tools(given_tools)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("maybe", "choose"),
        (3, "choose"),
        (function(name="x"), "'x', which is not among the tools; there are f"),
        ({}, "it must be"),
    ],
)
def test_choices_that_are_none(choice: Any, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        tool_choice(choice, [Tool("f")])
    with pytest.raises(BadParameter, match="needs tools"):
        tool_choice("required", [])


# Grammars


@pytest.fixture(scope="module")
def marked(tokenizer: Any) -> Any:
    """The tokenizer with special tokens of Mistral and a text token of Qwen."""
    from copy import deepcopy

    from tokenizers import AddedToken

    found = deepcopy(tokenizer)
    found.add_tokens(
        [AddedToken(text, special=True) for text in ("[TOOL_CALLS]", "<|python_tag|>", "[THINK]", "[/THINK]")]
    )
    found.add_tokens([AddedToken("<tool_call>", special=False)])
    return found


@pytest.fixture(scope="module")
def llm(marked: Any) -> LLM:
    pytest.importorskip("llguidance")
    return LLM(ToyTarget(len(marked), sharpness=3.0), tokenizer=marked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "parallel"),
    [(each, parallel) for each in (HERMES, LLAMA, MISTRAL) for parallel in (False, True)],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_required_calls_have_their_schema(llm: LLM, marked: Any, format: Any, parallel: bool) -> None:
    grammar = tool_grammar([WEATHER, CLOCK], ToolChoice("required"), format, marked, parallel=parallel)
    named = tool_grammar([WEATHER, CLOCK], ToolChoice("required", "clock"), format, marked, parallel=False)
    assert grammar is not None
    assert named is not None
    seen = set()
    shown = WithMarkers(marked, [format.start])
    for seed in range(8):
        options: dict[str, Any] = {"temperature": 4.0, "seed": seed, "max_new_tokens": 400}
        result = llm.generate("weather", grammar=grammar, drafter_options={"nodes": 8}, **options)
        assert result.tokens == llm.generate("weather", grammar=grammar, drafter="plain", **options).tokens
        if result.finish_reason == "length":
            continue
        message = whole(shown.decode(result.tokens, skip_special_tokens=True), format)
        assert message.content is None
        assert (len(message.tool_calls) == 1) or parallel
        for name, arguments in calls(message):
            seen.add(name)
            found = json.loads(arguments)
            assert (list(found) == ["city", "unit"] and found["unit"] in "CF") if name == "get_weather" else found == {}
        text = shown.decode(llm.generate("weather", grammar=named, **options).tokens, skip_special_tokens=True)
        assert [name for name, _ in calls(whole(text, format))] == ["clock"]
    assert seen == {"get_weather", "clock"}


def follows(marked: Any, grammar: Grammar | None, text: str) -> tuple[bool, bool]:
    """Whether a text may be written, and whether it may end there."""
    assert grammar is not None
    state = Grammars(marked, len(marked), (0,)).compile(grammar).follow([], len(marked))
    tokens = marked.encode(text, add_special_tokens=False)
    return state.admitted(0, tokens) == len(tokens), bool(state.mask(0, tokens)[0])


CALL = '{"name": "clock", "arguments": {}}'


@pytest.mark.parametrize(
    ("format", "parallel", "text", "expected"),
    [
        (HERMES, True, "free text", (True, True)),
        (HERMES, True, "I <tool_call>nothing", (False, True)),
        (HERMES, True, "I <tool_call>", (True, False)),
        (HERMES, True, f"I <tool_call>\n{CALL}\n</tool_call>", (True, True)),
        (HERMES, True, f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call> Done.", (True, True)),
        (HERMES, False, f"<tool_call>\n{CALL}\n</tool_call>\n", (False, True)),
        (HERMES, True, '<tool_call>\n{"name": "clock", "arguments": {"a"', (False, True)),
        (MISTRAL, True, "free [1]", (True, True)),
        (MISTRAL, True, "a [TOOL_CALLS]", (True, False)),
        (MISTRAL, True, f"a [TOOL_CALLS][{CALL}, {CALL}]", (True, True)),
        (MISTRAL, False, f"a [TOOL_CALLS][{CALL},", (False, True)),
    ],
)
def test_an_automatic_call_is_constrained_behind_the_marker(
    marked: Any, format: Any, parallel: bool, text: str, expected: tuple[bool, bool]
) -> None:
    pytest.importorskip("llguidance")
    grammar = tool_grammar([CLOCK], ToolChoice("auto"), format, marked, parallel=parallel)
    may, ends = follows(marked, grammar, text)
    assert may == expected[0]
    if may:
        assert ends == expected[1]


@pytest.mark.parametrize(
    ("choice", "prompt", "text", "expected"),
    [
        ("required", "<think>\n", "hm <tool_call> hm", (True, False)),
        ("required", "<think>\n", f"hm</think>\n\n<tool_call>\n{CALL}\n</tool_call>", (True, True)),
        ("required", "<think>\n", "hm</think>No.", (False, False)),
        ("required", "", f"<think>hm</think><tool_call>\n{CALL}\n</tool_call>", (True, True)),
        ("required", "", f"<tool_call>\n{CALL}\n</tool_call>", (True, True)),
        ("required", "", "hm", (False, False)),
        ("auto", "<think>\n", "hm", (True, True)),
        ("auto", "<think>\n", "hm</think>Yes", (True, True)),
        ("auto", "<think>\n", "hm</think><tool_call>x", (False, False)),
        ("auto", "", "<think>hm</think>Yes", (True, True)),
    ],
)
def test_reasoning_before_a_call_is_free(
    marked: Any, choice: str, prompt: str, text: str, expected: tuple[bool, bool]
) -> None:
    pytest.importorskip("llguidance")
    grammar = tool_grammar([CLOCK], ToolChoice(choice), HERMES, marked, reasoning=THINK, prompt=prompt)
    may, ends = follows(marked, grammar, text)
    assert may == expected[0]
    if may:
        assert ends == expected[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yes", (True, True)),
        ("[THINK]hm", (True, True)),
        ("[THINK]hm[/THINK]Yes", (True, True)),
        ('[THINK]hm[/THINK][TOOL_CALLS][{"name": "clock", "arguments": {}}]', (True, True)),
        ("Yes[THINK]", (False, False)),
    ],
)
def test_a_model_with_special_tokens_around_its_reasoning_may_reason(
    marked: Any, text: str, expected: tuple[bool, bool]
) -> None:
    """Free text matches no special token."""
    pytest.importorskip("llguidance")
    thinking, calling = REASONING_FORMATS["mistral"], TOOL_FORMATS["mistral"]
    grammar = tool_grammar([CLOCK], ToolChoice("auto"), calling, marked, reasoning=thinking)
    may, ends = follows(marked, grammar, text)
    assert may == expected[0]
    assert not may or ends == expected[1]


def test_where_nothing_is_enforced(marked: Any) -> None:
    assert tool_grammar([], ToolChoice("auto"), HERMES, marked) is None
    assert tool_grammar([CLOCK], ToolChoice("none"), HERMES, marked) is None
    assert tool_grammar([CLOCK], ToolChoice("auto"), LLAMA, marked) is None
    with pytest.raises(BadParameter, match="parameters of the tool 'x' are not JSON"):
        tool_grammar([Tool("x", parameters={"a": object()})], ToolChoice("required"), HERMES, marked)


def test_special_tokens_that_parsers_look_for_are_shown(marked: Any) -> None:
    tokens = marked.encode('a [TOOL_CALLS]f{"x": 1}<|end|>', add_special_tokens=False)
    assert "[TOOL_CALLS]" not in marked.decode(tokens, skip_special_tokens=True)
    shown = WithMarkers(marked, ["[TOOL_CALLS]", "<tool_call>", "missing"])
    assert shown.decode(tokens, skip_special_tokens=True) == 'a [TOOL_CALLS]f{"x": 1}'
    assert shown.decode(tokens) == marked.decode(tokens)
    assert (len(shown), shown.encode("a"), shown.eos_token_id) == (len(marked), marked.encode("a"), marked.eos_token_id)
