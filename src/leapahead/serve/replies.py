"""What responses consist of."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from leapahead import __version__

FINGERPRINT = f"leapahead-{__version__}"
FinishReason = Literal["stop", "length", "tool_calls"]
T = TypeVar("T")
IfSet = Annotated[T | None, Field(exclude_if=lambda value: value is None)]  # left out of the JSON where it is None


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens, those whose cache entries were kept from earlier requests."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Of the prediction's tokens, those that were drafted and accepted, and those that were drafted in vain."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class Speculation(BaseModel):
    """What drafting did for a request, all its texts together.

    Attributes:
        steps: forwards of the model after the prompt.
        drafted: tokens that were drafted.
        accepted: tokens of the texts that had been drafted.
        acceptance_length: tokens per step; 1 without drafting.
        accepted_by: source of drafts -> its accepted tokens.
    """

    steps: int
    drafted: int
    accepted: int
    acceptance_length: float
    accepted_by: dict[str, int]


class Span(BaseModel):
    """A part of a chunk's text.

    Attributes:
        text: the part.
        drafted: whether it had been drafted.
        reasoning: true where it belongs to the reasoning, not to the content.
    """

    text: str
    drafted: bool
    reasoning: IfSet[Literal[True]] = None


class Spans(BaseModel):
    """What drafting did for a chunk: the parts of its content and reasoning, in order."""

    spans: list[Span]


class Reply(BaseModel):
    """What all responses with texts have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    service_tier: IfSet[Literal["default"]] = None
    usage: IfSet[Usage] = None
    leapahead: IfSet[Speculation | Spans] = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion; an entry for each token. The first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """A token at a position of the prompt.

    Attributes:
        logprob: its log-probability.
        rank: 1 for the likeliest; null where it is none of the alternatives.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None  # the first token has none


class CompletionChoice(BaseModel):
    """One text of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] | None = None


class CompletionReply(Reply):
    """The response of /v1/completions, and a chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    """What is called: the name of a function, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallReply(BaseModel):
    """A tool call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(BaseModel):
    """The answer.

    Attributes:
        role: of the model.
        content: the text; null where there are tool calls, or reasoning, and no text beside.
        refusal: always null.
        tool_calls: that the answer has.
        reasoning_content, reasoning: what the model wrote before its answer, by both names that vLLM has had for it.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: IfSet[list[ToolCallReply]] = None
    reasoning_content: IfSet[str] = None
    reasoning: IfSet[str] = None


class ChatChoice(BaseModel):
    """One answer of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatReply(Reply):
    """The response of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(BaseModel):
    """What a chunk adds to a call of a function."""

    name: IfSet[str] = None
    arguments: str


class ToolCallPiece(BaseModel):
    """What a chunk adds to a tool call; id, type and name come with the call's first piece."""

    index: int
    id: IfSet[str] = None
    type: IfSet[Literal["function"]] = None
    function: FunctionDelta


class Delta(BaseModel):
    """What a chunk adds to an answer. See `AnswerMessage`."""

    role: IfSet[Literal["assistant"]] = None
    content: IfSet[str] = None
    tool_calls: IfSet[list[ToolCallPiece]] = None
    reasoning_content: IfSet[str] = None
    reasoning: IfSet[str] = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: IfSet[list[int]] = None


class ChatChunk(Reply):
    """A chunk of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: IfSet[list[int]] = None


class Model(BaseModel):
    """A name of the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["leapahead"] = "leapahead"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[Any] = []


class Models(BaseModel):
    """The response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeReply(BaseModel):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(BaseModel):
    """The response of /detokenize."""

    prompt: str


class Version(BaseModel):
    """The response of /version."""

    version: str = __version__


class Load(BaseModel):
    """The response of /load: texts that are waiting or decoded."""

    server_load: int


class Health(BaseModel):
    """The response of /health."""

    status: Literal["ok"] = "ok"
