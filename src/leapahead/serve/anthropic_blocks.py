"""The messages of a request of /v1/messages, their blocks of content, and the messages of a chat that they are.

text of anybody                            a message
thinking, text, tool_use of an answer      one message of the assistant
tool_result                                a message of a tool
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from leapahead.serve.messages import SEVERAL, Strict, Text, either, type_of

# A block that Claude Code puts before its instructions. It is not for the model, and changes with every request, after
# which nothing of an earlier chat could be reused.
ACCOUNTING = "x-anthropic-billing-header:"
CacheControl = dict[str, Any]  # marks what Anthropic's servers keep; here the beginnings of chats are kept in any case


class Block(Strict):
    """A part of a message's content.

    Attributes:
        cache_control: accepted, and not used.
    """

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """Text.

    Attributes:
        type: says so.
        text: of the part.
        citations: as an answer has had them; not used.
    """

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(Block):
    """What the model wrote before its answer.

    Attributes:
        type: says so.
        thinking: the text.
        signature: as an answer has had it; not used.
    """

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    """A call of a tool that the model has made.

    Attributes:
        type: says so.
        id: by which its result names it.
        name: of the tool.
        input: the arguments.
        caller: accepted, and not used.
    """

    type: Literal["tool_use"]
    id: str
    name: Text
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


def _text_only(value: Any) -> str:
    return "<text>"


def _of_user(value: Any) -> str:
    return "<tool_result>" if type_of(value) == "tool_result" else "<text>"


def _of_assistant(value: Any) -> str:
    given = type_of(value)
    return f"<{given}>" if given in ("thinking", "tool_use") else "<text>"


BLOCKS = either("text, or a list of blocks")
Texts = Annotated[Annotated[str, Tag("<text>")] | Annotated[list[TextBlock], Tag("<list>")], BLOCKS]


class ToolResultBlock(Block):
    """What a tool has returned.

    Attributes:
        type: says so.
        tool_use_id: of the call.
        content: a text, or blocks of text, which are joined by newlines.
        is_error: accepted; chat templates have no place for it.
    """

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")], Discriminator(_of_user)
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    Discriminator(_of_assistant),
]


class UserMessage(Strict):
    """A message of the user, or of the system.

    Attributes:
        role: of who wrote it.
        content: a text, or blocks: texts, which are joined by newlines, and results of tools.
    """

    role: Literal["user", "system"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[list[UserBlock], SEVERAL, Tag("<list>")], BLOCKS]


class AssistantMessage(Strict):
    """A message of the model.

    Attributes:
        role: says so.
        content: a text, or blocks: thinking, texts and calls of tools.
    """

    role: Literal["assistant"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[list[AssistantBlock], Tag("<list>")], BLOCKS]


def _role(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return "<assistant>" if role == "assistant" else "<user>"


Message = Annotated[
    Annotated[UserMessage, Tag("<user>")] | Annotated[AssistantMessage, Tag("<assistant>")], Discriminator(_role)
]


def messages(system: str | Sequence[TextBlock] | None, given: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The messages of a chat. Each result of a tool is one, and so are the texts between them."""
    if not isinstance(system, str):
        system = [block for block in system or () if not block.text.startswith(ACCOUNTING)]
    if system:
        yield {"role": "system", "content": _joined(system)}
    for message in given:
        if isinstance(message, AssistantMessage):
            yield _answer(message.content)
        elif isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        else:
            texts: list[TextBlock] = []
            for block in message.content:
                if isinstance(block, TextBlock):
                    texts.append(block)
                    continue
                if texts:
                    yield {"role": message.role, "content": _joined(texts)}
                    texts = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content or "")}
            if texts:
                yield {"role": message.role, "content": _joined(texts)}


def _answer(content: str | Sequence[AssistantBlock]) -> dict[str, Any]:
    """A message of the assistant: its thinking, its text and its calls, each in their order."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    found: dict[str, Any] = {"role": "assistant"}
    if thoughts := [block.thinking for block in content if isinstance(block, ThinkingBlock)]:
        found["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in content if isinstance(block, ToolUseBlock)]
    texts = [block for block in content if isinstance(block, TextBlock)]
    if texts or not calls:
        found["content"] = _joined(texts)
    if calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
            }
            for call in calls
        ]
    return found


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
