"""The server's limits in the OpenAPI schema, so that it tells what will be refused."""

from __future__ import annotations

from typing import Any

from leapahead.models.base import TargetInfo
from leapahead.serve.messages import LIMIT
from leapahead.serve.settings import Limits


def longest(limits: Limits, info: TargetInfo) -> int:
    """Greatest `max_tokens` that a request may give."""
    return info.context_length if limits.max_tokens is None else min(info.context_length, limits.max_tokens)


def apply(schema: Any, limits: Limits, info: TargetInfo, has_grammars: bool, has_tools: bool) -> None:
    """Writes the limits into the parts of a schema that are marked by `LIMIT`.

    Args:
        schema: is changed.
        limits: of the server.
        info: of the model.
        has_grammars: whether texts can have a form.
        has_tools: whether the format of the model's tool calls is known.
    """
    nothing = {"anyOf": [{"type": "null"}]}
    no_tools = {"anyOf": [{"type": "array", "maxItems": 0}, {"type": "null"}]}
    text = {"anyOf": [{"$ref": "#/components/schemas/TextFormat"}, {"type": "null"}]}
    known: dict[str, dict[str, Any]] = {
        "vocabulary": {"maximum": info.vocab_size - 1},
        "biases": {"propertyNames": {"pattern": below(info.vocab_size)}},
        "length": {"maximum": longest(limits, info)},
        "samples": {"maximum": limits.samples},
        "prompts": {"maxItems": limits.prompts},
        "logprobs": {"maximum": limits.logprobs, **({} if limits.logprobs >= info.vocab_size else {"minimum": 0})},
        "stops": {"maxItems": limits.stops},
        "forms": {} if has_grammars else text,
        "structured": {} if has_grammars else nothing,
        "tools": {} if has_tools else nothing,
        "tool_list": {} if has_tools else no_tools,
    }
    if isinstance(schema, dict):
        schema.update(known.get(schema.pop(LIMIT, ""), {}))
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        apply(part, limits, info, has_grammars, has_tools)


def below(size: int) -> str:
    """A pattern of the decimal numbers from 0 to `size` - 1, without leading zeros: each has one spelling."""
    digits = str(size - 1)
    count = len(digits)
    choices = [digits]
    if count > 1:
        choices.append(f"0|[1-9][0-9]{{0,{count - 2}}}")
    for index, digit in enumerate(digits):
        least = int(index == 0 and count > 1)
        if int(digit) > least:
            rest = count - index - 1
            choices.append(f"{digits[:index]}[{least}-{int(digit) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return f"^({'|'.join(choices)})$"
