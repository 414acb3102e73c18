"""The grammars that make a model call tools, each with arguments of its schema, and those of `response_format`.

    required   the text is calls, one or several
    auto       the text is free up to the opening marker; behind it stands a call of one of the tools
    auto, with a form    the text is calls, or JSON of a schema

Where a model reasons, the reasoning before the call is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from leapahead.chat.formats import ReasoningFormat, ToolFormat
from leapahead.chat.markers import special_token
from leapahead.chat.text_grammar import DEFINITIONS, json_part, text_arguments
from leapahead.chat.tools import Tool, ToolChoice
from leapahead.core.errors import BadParameter
from leapahead.core.text import Tokenizer
from leapahead.grammar import Grammar
from leapahead.grammar.definition import literal

MOST_CALLS = 16  # of one text, where several are allowed
# In a regular expression, what no grammar can enforce, as a group; and escapes and classes, which may look like it.
BEYOND = re.compile(r"(\\[1-9bBk]|\(\?<?[=!])|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
BY_NAME = (
    "properties",
    "patternProperties",
    *DEFINITIONS,
)  # keywords whose values are schemas by name
VALUES = ("enum", "const", "default", "examples")  # keywords whose values are no schemas


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    format: ToolFormat,
    tokenizer: Tokenizer,
    *,
    parallel: bool = True,
    reasoning: ReasoningFormat | None = None,
    prompt: str = "",
    form: Mapping[str, Any] | bool | str | None = None,
) -> Grammar | None:
    """The grammar of a text that may or must call tools.

    Args:
        tools: that may be called.
        choice: whether one must be.
        format: how the model writes calls.
        tokenizer: of the model, which tells whether a marker is a special token.
        parallel: whether there may be several calls, at most 16.
        reasoning: how the model marks its reasoning; None if it does not reason.
        prompt: the text of the prompt, which may end inside the reasoning.
        form: JSON schema of an answer without calls, see `Grammar.json_schema`; None where its text is free.

    Returns:
        None where nothing is to be enforced: without tools, with the choice "none", and with "auto" in formats whose
        calls do not begin with a marker.

    Raises:
        BadParameter: the form is no JSON schema, or with "auto" the format's calls do not begin with a marker, so that
            calls and JSON cannot be told apart.
    """
    if form is not None and choice.mode == "auto" and format.leads:
        raise BadParameter(
            f"the model's tool calls ({format.name}) begin with no marker, so JSON and calls cannot be told apart"
        )
    if not tools or choice.mode == "none" or (choice.mode == "auto" and format.leads):
        return None
    if choice.name is not None:
        tools = [tool for tool in tools if tool.name == choice.name]
    calls = [rule for index, tool in enumerate(tools) for rule in _call(tool, f"call_{index}", format, tokenizer)]
    calls.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    start = "" if format.leads else _marker(tokenizer, format.start)
    if choice.mode != "auto":
        answer = [f"answer: {_required(start, format, tokenizer, parallel)}"]
    elif form is None:
        answer = _automatic(start, format, tokenizer, parallel)
    else:
        schema = json_part(json.loads(Grammar.json_schema(form).definition))
        answer = [f"answer: {_required(start, format, tokenizer, parallel)} | form", f"form: {schema}"]
        choice = ToolChoice("required")  # of both, what stands before is reasoning only
    lines = ["%llguidance {}", *_start(tokenizer, choice, reasoning, prompt), *answer, *calls, r"TEXT: /(.|\n)*/"]
    return Grammar.lark("\n".join(lines))


def _start(tokenizer: Tokenizer, choice: ToolChoice, reasoning: ReasoningFormat | None, prompt: str) -> list[str]:
    """The first rules: the answer, and the reasoning before it.

    Where a call is not required, the text may end inside the reasoning; and reasoning that the model begins itself is
    part of the free text, unless its marker is a special token, which no text matches.
    """
    if reasoning is None:
        return ["start: answer"]
    opened, begin = prompt.rstrip().endswith(reasoning.start), _marker(tokenizer, reasoning.start)
    end = _until(tokenizer, "thought", reasoning.end)
    if choice.mode == "auto":
        if opened:
            return ["start: thought answer | TEXT", *end]
        if not begin.startswith("<["):
            return ["start: answer"]
        return [f"start: ({begin} thought)? answer | {begin} TEXT", *end]
    space = "SPACE: /[ \\n]{1,4}/"
    if opened:
        return ["start: thought SPACE? answer", *end, space]
    return [f"start: ({begin} thought SPACE?)? answer", *end, space]


def _automatic(start: str, format: ToolFormat, tokenizer: Tokenizer, parallel: bool) -> list[str]:
    """Free text, and calls wherever it comes to the opening marker."""
    trigger = f"trigger: TEXT {start}" if start.startswith("<[") else f"trigger[lazy]: TEXT {start}"
    if format.listed:
        return [f"answer: TEXT | trigger {_list(format, tokenizer, parallel)}", trigger]
    return ["answer: " + ("(trigger call)* TEXT" if parallel else "TEXT | trigger call"), trigger]


def _required(start: str, format: ToolFormat, tokenizer: Tokenizer, parallel: bool) -> str:
    """One call, or up to 16."""
    if format.listed:
        return f"{start} {_list(format, tokenizer, parallel)}"
    more = f" ({literal(format.between)} {start} call){{0,{MOST_CALLS - 1}}}" if parallel else ""
    return f"{start} call{more}"


def _list(format: ToolFormat, tokenizer: Tokenizer, parallel: bool) -> str:
    """What stands behind a marker that stands once before all calls."""
    before, after = (_marked(tokenizer, format, text) for text in format.around)
    more = f" ({_marked(tokenizer, format, format.between)} call){{0,{MOST_CALLS - 1}}}" if parallel else ""
    return f"{before} call{more} {after}"


def _call(tool: Tool, rule: str, format: ToolFormat, tokenizer: Tokenizer) -> list[str]:
    """The rules of a call of this tool, behind the opening marker."""
    before, after = (_marked(tokenizer, format, text.replace("%s", tool.name)) for text in format.call)
    try:
        if not tool.strict:
            tool = replace(tool, parameters=enforceable(tool.parameters))
        if format.style == "xml":
            return [f"{rule}: {before} {rule}_arguments {after}", *text_arguments(tool, f"{rule}_arguments")]
        return [f"{rule}: {before} {json_part(tool.parameters, tool.strict)} {after}"]
    except BadParameter:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise BadParameter(f"the parameters of the tool {tool.name!r} are not JSON, or no schema: {error}") from None


def enforceable(schema: Any) -> Any:
    """A JSON schema without the patterns that no grammar can enforce, such as Zod's of e-mail addresses."""
    if isinstance(schema, list):
        return [enforceable(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    left_out = {"pattern"} if _is_beyond(schema.get("pattern")) else set()
    if any(map(_is_beyond, schema.get("patternProperties") or ())):
        left_out |= {"patternProperties", "additionalProperties"}  # which would refuse what the former allow
    found = {}
    for key, each in schema.items():
        if key in BY_NAME and isinstance(each, Mapping):
            found[key] = {name: enforceable(one) for name, one in each.items()}
        else:
            found[key] = each if key in VALUES else enforceable(each)
    return {key: each for key, each in found.items() if key not in left_out}


def _is_beyond(pattern: Any) -> bool:
    """Whether a regular expression has look-around, a reference to a group or a boundary of words."""
    return isinstance(pattern, str) and any(BEYOND.findall(pattern))


def _until(tokenizer: Tokenizer, name: str, marker: str) -> list[str]:
    """A rule for text up to a marker and the marker itself."""
    found = _marker(tokenizer, marker)
    return [f"{name}: TEXT {found}" if found.startswith("<[") else f"{name}[lazy]: TEXT {found}"]


def _marker(tokenizer: Tokenizer, marker: str) -> str:
    """A marker in Lark: a special token of the tokenizer, or a text."""
    token = special_token(tokenizer, marker)
    return literal(marker) if token is None else f"<[{token}]>"


def _marked(tokenizer: Tokenizer, format: ToolFormat, text: str) -> str:
    """A text in Lark, in which the format's markers may be special tokens."""
    parts = re.split("|".join(f"({re.escape(marker)})" for marker in format.markers), text)
    return " ".join(_marker(tokenizer, part) if part in format.markers else literal(part) for part in parts if part)


def json_grammar(
    schema: Mapping[str, Any] | bool | str,
    tokenizer: Tokenizer | None = None,
    reasoning: ReasoningFormat | None = None,
    prompt: str = "",
) -> Grammar:
    """The grammar of JSON of a schema, behind the reasoning of a model that reasons.

    Args:
        schema: see `Grammar.json_schema`.
        tokenizer: of the model; needed with `reasoning`.
        reasoning: how the model marks its reasoning; None if the whole text is to be JSON.
        prompt: the text of the prompt, which may end inside the reasoning.

    Raises:
        BadParameter: it is no JSON schema.
    """
    plain = Grammar.json_schema(schema)
    if reasoning is None or tokenizer is None:
        return plain
    rules = _start(tokenizer, ToolChoice("required"), reasoning, prompt)
    answer = f"answer: {json_part(json.loads(plain.definition))}"
    return Grammar.lark("\n".join(["%llguidance {}", *rules, answer, r"TEXT: /(.|\n)*/"]))
