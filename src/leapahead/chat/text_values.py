"""Arguments that a model writes as text: which JSON value a text is, by the tool's JSON schema."""

from __future__ import annotations

import ast
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
KINDS |= {list: "array", tuple: "array", dict: "object"}
OF_JSON = frozenset(KINDS.values())
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # templates may show Python's
DEEPEST = 16  # references of a schema, one behind another


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema without a reference at its top.

    Args:
        schema: JSON schema of a value.
        root: the schema that contains it, to which "#/..." points.
    """
    for _ in range(DEEPEST):
        if not isinstance(schema, Mapping):
            break
        several = schema.get("allOf")
        if isinstance(several, list) and len(several) == 1 and isinstance(several[0], Mapping):
            schema = {**several[0], **{key: value for key, value in schema.items() if key != "allOf"}}
        elif isinstance(reference := schema.get("$ref"), str):
            schema = _at(reference, root)
        else:
            return schema
    return {}


def _at(pointer: str, root: Mapping[str, Any]) -> Any:
    """What a JSON pointer "#/..." names; None if there is nothing."""
    found: Any = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        if isinstance(found, list):
            found = {str(index): each for index, each in enumerate(found)}
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def parameter(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema of a tool's parameter; an empty one where there is none.

    Args:
        schema: of the tool's parameters.
        name: of the parameter.
    """
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return resolved(properties[name], schema)
    return resolved(schema.get("additionalProperties"), schema)


def branches(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Schemas of at most one type each, of which a value has one: those of `anyOf`, of `oneOf` and of several types.

    Args:
        schema: of the value.
        root: see `resolved`.
    """
    found: list[Mapping[str, Any]] = []
    waiting, seen = deque([schema]), set()  # schemas may contain themselves
    while waiting:
        each = waiting.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        each = resolved(each, root)
        several = next((each[key] for key in ("anyOf", "oneOf") if isinstance(each.get(key), list)), None)
        if isinstance(types := each.get("type"), list):
            found += [{**each, "type": one} for one in types]
        elif several is None or types is not None:
            found.append(each)
        else:
            waiting.extendleft(reversed(several))
    return found


def kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a value may have, such as "string"; none where the schema does not say. See `branches`."""
    found = [_kinds(each) for each in branches(schema, root)]
    return frozenset().union(*found) if all(found) else frozenset()


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    if "type" in schema:
        return frozenset([str(schema["type"])])
    return frozenset(KINDS[type(value)] for value in listed(schema) or ())


def listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a schema that lists them; None for others."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def is_text(found: frozenset[str]) -> bool:
    """Whether every text is a string, so that nothing has to be known of it."""
    return found <= {"string"}


def is_of(kind: str, found: frozenset[str]) -> bool:
    """Whether a value of that type is one of several types; an integer is a number, too."""
    return kind in found or (kind == "integer" and "number" in found)


def json_of(text: str, found: frozenset[str]) -> str:
    """The JSON of a value.

    Args:
        text: as the model wrote it: JSON, or a literal of Python, which templates may show it; otherwise a string.
        found: its possible types, see `kinds`.
    """
    if not is_text(found):
        for read in (_json, _python):
            try:
                kind, written = read(text.strip())
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
            if is_of(kind, found) or (found - OF_JSON and kind != "string"):
                return written
    return json.dumps(text, ensure_ascii=False)


def _json(text: str) -> tuple[str, str]:
    text = WORDS.get(text.lower(), text)
    value = json.loads(text, parse_constant=_no_constant)
    kind = KINDS[type(value)]
    return ("integer" if kind == "number" and value.is_integer() else kind), text


def _python(text: str) -> tuple[str, str]:
    if text[:1] not in ("[", "{") or "\\" in text:  # whose escape sequences are not those of JSON
        raise ValueError
    value = ast.literal_eval(text)
    return KINDS.get(type(value), ""), json.dumps(value, ensure_ascii=False, allow_nan=False)


def _no_constant(name: str) -> None:
    raise ValueError(name)
