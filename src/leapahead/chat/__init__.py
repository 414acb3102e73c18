"""Chat as in OpenAI's API: tool calls and reasoning in what a model writes, and the grammars that enforce them.

    text of the model ──> ChatParser ──> Delta, Delta, ...       content, reasoning, tool calls; whole: `parse`
    tools, tool_choice ──> tool_grammar ──> Grammar              what a model must write to call a tool
    a JSON schema ──> json_grammar ──> Grammar                   JSON, also behind reasoning

Pure functions and objects over text: no model, no server, and of tokenizers only special tokens and chat templates.
"""

from leapahead.chat.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)
from leapahead.chat.markers import WithMarkers
from leapahead.chat.messages import Delta, Function, Message, ToolCall, ToolCallDelta
from leapahead.chat.parser import ChatParser, parse
from leapahead.chat.tool_grammar import json_grammar, tool_grammar
from leapahead.chat.tools import Tool, ToolChoice, tool_choice, tools

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ChatParser",
    "Delta",
    "Function",
    "Message",
    "ReasoningFormat",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolFormat",
    "WithMarkers",
    "json_grammar",
    "parse",
    "reasoning_format",
    "tool_choice",
    "tool_format",
    "tool_grammar",
    "tools",
]
