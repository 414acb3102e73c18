"""What responses of /v1/responses, and the events of their streams, consist of."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from leapahead.serve.replies import IfSet, Speculation, TokenLogprob
from leapahead.serve.responses_schema import Status


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(BaseModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class OutputItem(BaseModel):
    """A part of what the model has put out."""

    id: str
    status: Status = "in_progress"


class OutputMessage(OutputItem):
    """The answer itself."""

    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class OutputReasoning(OutputItem):
    """What the model wrote before its answer. There is no summary."""

    type: Literal["reasoning"] = "reasoning"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class OutputCall(OutputItem):
    """A call of a function: its name, and its arguments as JSON text. Its result names `call_id`."""

    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str = ""


class IncompleteDetails(BaseModel):
    """Why an answer ended before the model had ended it."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class InputTokensDetails(BaseModel):
    """Of the prompt's tokens, those whose cache entries were kept from earlier requests."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """Of the answer's tokens, those of its reasoning, and of the prediction as in `CompletionTokensDetails`."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponseUsage(BaseModel):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReply(BaseModel):
    """The response of /v1/responses. What the request has set is repeated."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    safety_identifier: IfSet[str] = None
    service_tier: IfSet[Literal["default"]] = None
    store: Literal[False] = False
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    leapahead: IfSet[Speculation] = None


class Event(BaseModel):
    """An event of a stream; what members it has, depends on its type."""

    type: str
    sequence_number: int
    response: IfSet[ResponseReply] = None
    output_index: IfSet[int] = None
    item: IfSet[OutputMessage | OutputReasoning | OutputCall] = None
    item_id: IfSet[str] = None
    content_index: IfSet[int] = None
    part: IfSet[OutputText | ReasoningText] = None
    delta: IfSet[str] = None
    text: IfSet[str] = None
    name: IfSet[str] = None
    arguments: IfSet[str] = None
    logprobs: IfSet[list[TokenLogprob]] = None
