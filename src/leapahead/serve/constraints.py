"""Parameters of OpenAI and vLLM that this server does not have, refused by their names. Nulls are left out here."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal

from pydantic_core import PydanticCustomError

UNSUPPORTED: Literal["unsupported"] = "unsupported"
NOT_HERE = "is not supported by this server; leave it out"
FUNCTIONS = ("functions", "function_call")
GENERATION = {
    name: NOT_HERE
    for name in (
        *("tools", "tool_choice", "parallel_tool_calls", "suffix", "use_beam_search"),
        *("length_penalty", "priority", "audio", "reasoning_effort", "web_search_options", "verbosity"),
        *("chat_template", "continue_final_message", "documents", "echo", "best_of"),
    )
}
FORMS = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
FORMS |= {"json_schema": "json", "regex": "regex", "grammar": "grammar", "ebnf": "grammar"}  # SGLang's, llama.cpp's
GENERATION |= {
    name: f"is not supported by this server; use structured_outputs={{{kind!r}: ...}}" for name, kind in FORMS.items()
}
ELSEWHERE = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}  # llama.cpp's names
ELSEWHERE |= dict.fromkeys(FUNCTIONS, "tools and tool_choice")
GENERATION |= {name: f"is not supported by this server; use {ours}" for name, ours in ELSEWHERE.items()}
MESSAGE = {name: NOT_HERE for name in ("function_call", "audio")}
MESSAGES = ("GivenMessage", "AssistantMessage", "ToolMessage")
OF_ANSWERS = ("tool_calls", "reasoning_content", "reasoning", "refusal", "parsed", "annotations")
OF_OTHERS = {name: NOT_HERE for name in (*OF_ANSWERS, "tool_call_id")}
PARTS = (
    *("image_url", "input_audio", "video_url", "audio_url", "file", "image", "refusal", "input_image", "input_file"),
    *("document", "search_result", "redacted_thinking"),
)
ONLY_FUNCTIONS = "this server knows functions only, whose type is here"
TOOLS = {"FunctionTool": "function", "Tool": "custom"}  # the only type of each
REFUSED = {"CompletionRequest": GENERATION, "ChatRequest": GENERATION}
REFUSED |= dict.fromkeys(MESSAGES, MESSAGE | OF_OTHERS)
KEEPS_NOTHING = "is not possible: the server keeps no responses; send the whole conversation as input"
REFUSED["ResponsesRequest"] = {
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), KEEPS_NOTHING),
    **{name: NOT_HERE for name in ("context_management", "max_tool_calls", "moderation", "n")},
    "messages": "is not supported by this path; use input, or /v1/chat/completions",
    "response_format": "is not supported by this path; use text={'format': ...}",
    **{
        name: "is not supported by this path; use max_output_tokens" for name in ("max_tokens", "max_completion_tokens")
    },
    "reasoning_effort": "is not supported by this path; use reasoning={'effort': ...}",
}
REFUSED["MessagesRequest"] = {
    **{name: NOT_HERE for name in ("container", "mcp_servers", "inference_geo", "speed", "n", "logprobs")},
    "stop": "is not supported by this path; use stop_sequences",
    "response_format": "is not supported by this path; use output_config={'format': ...}",
    "max_completion_tokens": "is not supported by this path; use max_tokens",
    "reasoning_effort": "is not supported by this path; use output_config={'effort': ...}",
}
KNOWN = {  # that the others lack
    "CompletionRequest": ("echo", "best_of"),
    "ChatRequest": (
        *("tools", "tool_choice", "parallel_tool_calls", "continue_final_message", "echo", "reasoning_effort"),
    ),
    "AssistantMessage": OF_ANSWERS,
    "ToolMessage": ("tool_call_id",),
}


def given(kind: str, data: Any, required: Set[str]) -> Any:
    """The members of a JSON object without those that are null, but for required ones, which validation refuses.

    Args:
        kind: name of the model that it is to become.
        data: the object, or something else, which validation refuses.
        required: members of the model without a default.

    Raises:
        PydanticCustomError: it has something that is not supported, of the type `UNSUPPORTED`.
    """
    if not isinstance(data, dict):
        return data
    if kind in ("TextPart", "InputTextPart", "TextBlock") and data.get("type") in PARTS:
        raise refusal("type", f"content of type {data['type']!r} {NOT_HERE}")
    if kind in TOOLS and (data.get("type") or TOOLS[kind]) != TOOLS[kind]:
        raise refusal("type", f"a tool of type {data['type']!r} is not possible; {ONLY_FUNCTIONS} {TOOLS[kind]!r}")
    if kind in ("ResponsesRequest", "ChatRequest") and data.get("store") is True:
        raise refusal("store", "store=true is not possible: the server keeps no answers; leave it out")
    if kind in ("CompletionRequest", "ChatRequest"):
        data = _without_repeated(data)
    refused = {name: why for name, why in REFUSED.get(kind, {}).items() if name not in KNOWN.get(kind, ())}
    for name, why in refused.items():
        if data.get(name) is not None:
            raise refusal(name, f"{name} {why}")
    return {name: value for name, value in data.items() if value is not None or name in required}


def _without_repeated(data: dict[str, Any]) -> dict[str, Any]:
    """A request without `guided_*` that repeat its `structured_outputs`: clients of several versions of vLLM send both.

    `guided_decoding_backend` says what compiles these forms, which are the same with all.
    """
    forms = data.get("structured_outputs")
    if not isinstance(forms, dict):
        return data
    repeated = {name for name, kind in FORMS.items() if kind in forms and data.get(name) == forms[kind]}
    return {name: value for name, value in data.items() if name not in {*repeated, "guided_decoding_backend"}}


def refusal(param: str, why: str, kind: Literal["unsupported", "invalid"] = UNSUPPORTED) -> PydanticCustomError:
    """An error of validation that names a parameter, or a part of the one that is validated."""
    return PydanticCustomError(kind, "{why}", {"param": param, "why": why})
