"""The grammar of arguments that a model writes as text, parameter by parameter: those of Qwen3-Coder's XML.

    <parameter=city>       a string stands there as it is: `enum`, `const`, `pattern`, `minLength` and `maxLength` hold,
    Paris                  `format` does not
    </parameter>
    <parameter=days>       everything else is JSON
    3
    </parameter>

Parameters come in the order of the schema. Without any in the schema, there may be any parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from leapahead.chat.text_values import KINDS, branches, is_of, is_text, kinds, listed, resolved
from leapahead.chat.tools import Tool
from leapahead.core.errors import BadParameter
from leapahead.grammar.definition import WHITESPACE, literal

END = literal("\n</parameter>\n")
ENDS = r"(?s:.*)(<\/parameter>|\n<parameter=|\n<\/function>|\n<\/tool_call>)(?s:.*)"  # what no value contains
COMBINATIONS = ("anyOf", "oneOf", "allOf", "not", "if", "$ref", "enum", "const")
OF_OBJECTS = ("patternProperties", "propertyNames", "minProperties", "maxProperties")
DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
DEFINITIONS = ("$defs", "definitions")
LOCAL = re.compile(r'"\$ref": "#(?=["/])')  # a reference within a schema, as JSON
ELSEWHERE = re.compile(rf"{LOCAL.pattern}(?!/(\$defs|definitions)/)")  # and not to a definition


def json_part(schema: Mapping[str, Any], strict: bool = True) -> str:
    """A JSON schema as a part of a Lark grammar.

    Args:
        schema: of any value.
        strict: see `Tool`.
    """
    given = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": not strict}}
    return f"%json {json.dumps(given, ensure_ascii=False, allow_nan=False)}"


def text_arguments(tool: Tool, rule: str) -> list[str]:
    """The rules of a tool's arguments.

    Args:
        tool: that is called.
        rule: name of the first rule, with which the names of the others begin.

    Raises:
        BadParameter: its schema says something of the arguments as a whole, or has a parameter that XML cannot name.
    """
    schema = tool.parameters
    if wrong := [key for key in (*COMBINATIONS, *OF_OBJECTS, *DEPENDENCIES) if key in schema]:
        raise BadParameter(
            f"the parameters of the tool {tool.name!r} have {wrong[0]!r} at the top of their schema, which calls in "
            "this model's format (XML) cannot be made to follow; describe each parameter under 'properties'"
        )
    properties, required = dict(schema.get("properties") or {}), list(schema.get("required") or ())
    rules, parts = [], []
    for index, name in enumerate({**properties, **dict.fromkeys(required)}):
        if not re.fullmatch(r"[^>\s]([^>\n]*[^>\s])?", name):
            raise BadParameter(
                f"the tool {tool.name!r} has a parameter {name!r}, which this model's format cannot name"
            )
        value, more = _value(properties.get(name, {}), schema, f"{rule}_{index}", tool.strict)
        parts.append(f"({literal(f'<parameter={name}>' + chr(10))} {value}){'' if name in required else '?'}")
        rules += more
    others = schema.get("additionalProperties", True)
    if not parts and others is not False:
        value, rules = _value(others, schema, f"{rule}_any", tool.strict)
        parts.append(f'("<parameter=" /[^>\\s]+/ ">\\n" {value})*')
    return [f"{rule}: {' '.join(parts) or literal('')}", *rules]


def _value(schema: Any, root: Mapping[str, Any], rule: str, strict: bool) -> tuple[str, list[str]]:
    """What stands behind the name of a parameter, its end included, and the rules for that."""
    schema = resolved(schema, root)
    found = kinds(schema, root)
    if found and "string" not in found:
        return f"{_json(schema, root, strict)} {END}", []
    alternatives, texts = [], []
    for each in branches(schema, root):
        if (values := listed(each)) is not None:
            of_type = [value for value in values if "type" not in each or is_of(KINDS[type(value)], kinds(each, root))]
            alternatives += [f"{literal(_shown(value))} {END}" for value in of_type]
        elif is_text(kinds(each, root)):
            texts.append(_text(each))
        else:
            alternatives.append(f"{_json(each, root, strict)} {END}")
    if _text({}) in texts:  # everything else is such a text as well
        texts, alternatives = [_text({})], []
    rules = [f"{rule}_{index}[lazy]: ({text}) {END}" for index, text in enumerate(texts)]
    return f"({' | '.join([*alternatives, *(each.split('[')[0] for each in rules)])})", rules


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)


def _json(schema: Mapping[str, Any], root: Mapping[str, Any], strict: bool) -> str:
    """JSON of a parameter. What it refers to is part of its grammar: definitions, or else the schema of the tool."""
    refers = '"$ref"' in json.dumps(schema)
    given = {**{key: root[key] for key in DEFINITIONS if refers and key in root}, **schema}
    if ELSEWHERE.search(json.dumps(given)):
        whole = {key: each for key, each in root.items() if key != "$id"}  # to which its references would be relative
        given = json.loads(LOCAL.sub('"$ref": "#/$defs/root', json.dumps({**schema, "$defs": {"root": whole}})))
    return json_part(given, strict)


def _text(schema: Mapping[str, Any]) -> str:
    """A terminal for a string as it is."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    length = "*" if (least, most) == (0, "") else f"{{{least},{most}}}"
    parts = [f"/(?s:.{length})/", f"~/{ENDS}/"]
    if "pattern" in schema:
        parts.append(f"/{_whole(schema['pattern'])}/")
    return " & ".join(parts)


def _whole(pattern: str) -> str:
    """A regular expression for a whole text in which `pattern`, which may have anchors, is found, as part of Lark."""
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern)  # without what is no operator
    while (outer := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = outer
    before = after = "(?s:.*)"
    if "|" not in bare:
        if bare.startswith("^") and pattern.startswith("^"):
            pattern, before = pattern[1:], ""
        if bare.endswith("$") and pattern.endswith("$"):
            pattern, after = pattern[:-1], ""
    escaped = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern)
    return f"{before}({escaped}){after}"
