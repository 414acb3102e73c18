"""The formats in which models write tool calls and reasoning, and which of them a chat template belongs to.

    hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call>      Hermes 2 and 3, Qwen 2.5, Qwen 3
    llama3_json  <|python_tag|>{"name": "f", "parameters": {...}}              Llama 3.1 and later; marker optional
    mistral      [TOOL_CALLS][{"name": "f", "arguments": {...}}]               Mistral; also [TOOL_CALLS]f{...}

Names are those of vLLM's parsers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from leapahead.core.errors import BadParameter

Format = TypeVar("Format")


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        name: by which it is chosen.
        start: what stands before a call, or before all of them.
        end: what stands after each call; "" for nothing.
        arguments: the key of the arguments.
        leads: whether calls stand at the beginning of the text, even without `start`.
        listed: whether the calls are a JSON array.
        id_length: hexadecimal digits of a call's id; with "call_" before them unless the template wants digits alone.
        plain_id: whether it does.
    """

    name: str
    start: str
    end: str = ""
    arguments: str = "arguments"
    leads: bool = False
    listed: bool = False
    id_length: int = 24
    plain_id: bool = False


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks what it writes before its answer.

    Attributes:
        name: by which it is chosen.
        start, end: what stands before and after it.
    """

    name: str
    start: str
    end: str


TOOL_FORMATS = {
    each.name: each
    for each in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>"),
        ToolFormat("llama3_json", "<|python_tag|>", arguments="parameters", leads=True),
        ToolFormat("mistral", "[TOOL_CALLS]", listed=True, id_length=9, plain_id=True),
    )
}
REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>"),
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    )
}


def tool_format(name: str | None = None, chat_template: str | None = None) -> ToolFormat | None:
    """The format of a model's tool calls: the named one, else the one that its chat template writes; None if neither.

    Raises:
        BadParameter: there is no format of that name.
    """
    if name is not None:
        return _named("tool call", name, TOOL_FORMATS)
    template = chat_template or ""
    if "[TOOL_CALLS]" in template:
        return TOOL_FORMATS["mistral"]
    if "<tool_call>" in template:  # with <function=...> it is XML, as of Qwen3-Coder, for which there is no parser
        return None if "<function=" in template else TOOL_FORMATS["hermes"]
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return TOOL_FORMATS["llama3_json"]
    return None


def reasoning_format(name: str | None = None, chat_template: str | None = None) -> ReasoningFormat | None:
    """The format of a model's reasoning: the named one, else the one of its chat template; None if neither.

    Raises:
        BadParameter: there is no format of that name.
    """
    if name is not None:
        return _named("reasoning", name, REASONING_FORMATS)
    template = chat_template or ""
    return next((each for each in REASONING_FORMATS.values() if each.start in template or each.end in template), None)


def _named(what: str, name: str, formats: Mapping[str, Format]) -> Format:
    if name not in formats:
        raise BadParameter(f"there is no {what} format {name!r}; there are {', '.join(formats)}")
    return formats[name]
