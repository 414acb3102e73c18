"""The tools and the tool choice of a request, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leapahead.core.errors import BadParameter

NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: at most 64 letters, digits, underscores and dashes.
        description: for the model.
        parameters: the JSON schema of its arguments; without one there are none, as OpenAI says.
        strict: whether a schema with keywords that no grammar can enforce is refused. Else these do not hold, as
            clients expect whose schemas are made from types (such as `propertyNames` of Zod's records, and look-around
            in its patterns).
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    strict: bool = False


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model is to call a tool.

    Attributes:
        mode: "none", "auto" or "required".
        name: the tool that must be called; None for any.
    """

    mode: str = "auto"
    name: str | None = None


def tools(given: Any) -> list[Tool]:
    """The value of `tools` in a request.

    Raises:
        BadParameter: it is no list of functions.
    """
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise BadParameter(f"tools={given!r} is not possible: it must be a list of functions")
    found = [_tool(index, each) for index, each in enumerate(given)]
    names = [tool.name for tool in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadParameter(f"tools has two functions of the name {twice[0]!r}; names must differ")
    return found


def _tool(index: int, given: Any) -> Tool:
    where = f"tools[{index}]"
    if not isinstance(given, Mapping) or given.get("type") != "function":
        raise BadParameter(f'{where} is not possible: it must be an object of the type "function"')
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise BadParameter(f"{where}.function is not possible: it must be an object")
    name, description = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadParameter(
            f"{where}.function.name={name!r} is not possible: it must be 1 to 64 letters, digits, underscores, dashes"
        )
    if not isinstance(description, str):
        raise BadParameter(f"{where}.function.description is not possible: it must be a text")
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        return Tool(name, description)
    if not isinstance(parameters, Mapping):
        raise BadParameter(f"{where}.function.parameters is not possible: it must be a JSON schema")
    return Tool(name, description, parameters, function.get("strict") is True)


def tool_choice(given: Any, available: Sequence[Tool]) -> ToolChoice:
    """The value of `tool_choice` in a request: "auto" by default where there are tools, else "none".

    Raises:
        BadParameter: it is none of OpenAI's values, names no tool that is there, or requires one where there is none.
    """
    if given is None:
        return ToolChoice("auto" if available else "none")
    if isinstance(given, Mapping):
        function = given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if given.get("type") != "function" or not isinstance(name, str):
            raise BadParameter(
                f'tool_choice={given!r} is not possible: it must be {{"type": "function", "function": {{"name": ...}}}}'
            )
        if name not in [tool.name for tool in available]:
            known = ", ".join(tool.name for tool in available) or "none"
            raise BadParameter(
                f"tool_choice names the function {name!r}, which is not among the tools; there are {known}"
            )
        return ToolChoice("required", name)
    if given not in ("none", "auto", "required"):
        raise BadParameter(
            f'tool_choice={given!r} is not possible: choose "none", "auto", "required" or a function of the tools'
        )
    if given != "none" and not available:
        raise BadParameter(f'tool_choice="{given}" needs tools; give some, or leave it out')
    return ToolChoice(given)
