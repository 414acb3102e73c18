"""What requests consist of. An unknown parameter is refused by its name; `constraints` refuses what is not supported.

The types are strict: a number in quotes is no number, true is not 1, and there is no NaN.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from leapahead.core.sampling import LEAST_TEMPERATURE
from leapahead.serve.constraints import refusal
from leapahead.serve.forms import ResponseFormat, StructuredOutputs
from leapahead.serve.messages import (
    BOOLEAN,
    INTEGER,
    LIMIT,
    Content,
    Message,
    Strict,
    Text,
    ToolChoiceParam,
    ToolParams,
    either,
    only_allowed,
)

LARGEST_SEED = 2**63 - 1  # a sample's index is added to it
MOST_BIASES = 1024
MOST_IDS = 1024  # of stop_token_ids
INT32 = 2**31 - 1


def bounded(limit: str, least: int = 0) -> Any:
    """A whole number that is bounded by one of the server's limits."""
    return Field(ge=least, le=INT32, json_schema_extra={LIMIT: limit})


def _not_tiny(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"it must be 0, or at least {LEAST_TEMPERATURE:g}")
    return value


TokenId = Annotated[int, bounded("vocabulary"), INTEGER]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
BIAS = Field(ge=-100, le=100)
Biases = Annotated[
    dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")], Annotated[float, BIAS]],
    Field(max_length=MOST_BIASES),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MOST_BIASES,
            LIMIT: "biases",
        }
    ),
]
Visible = Annotated[str, Field(pattern=r"[^\s\x1c-\x1f\x85]")]
Temperature = Annotated[
    float,
    Field(ge=0, le=100),
    AfterValidator(_not_tiny),
    WithJsonSchema({"anyOf": [{"const": 0}, {"type": "number", "minimum": LEAST_TEMPERATURE, "maximum": 100}]}),
]


STOPS = Field(fail_fast=True, json_schema_extra={LIMIT: "stops"})
PROMPTS = Field(min_length=1, fail_fast=True, json_schema_extra={LIMIT: "prompts"})
Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], PROMPTS, Tag("<list>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], PROMPTS, Tag("<lists>")],
    either("text, a list of texts, token ids, or a list of lists of token ids"),
]
Stop = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Text], STOPS, Tag("<list>")],
    either("text, or a list of texts"),
]


class Prediction(Strict):
    """What the text is expected to be, as for an edit. Wrong parts cost time and never change the text."""

    type: Literal["content"]
    content: Content


class StreamOptions(Strict):
    """What a stream contains beside the text.

    Attributes:
        include_usage: a last chunk without choices reports the usage.
        continuous_usage_stats: every chunk reports it; together with `include_usage` only.
        include_obfuscation: whether to pad chunks to equal lengths, which the server does not.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[Literal[False], BOOLEAN] | None = None


class Reporting(Strict):
    """Leapahead's own parameters.

    Attributes:
        stats: report what drafting did, as `leapahead` in the response or at the end of a stream.
        deadline_seconds: cancel the request if it takes longer, its time in the queue included.
    """

    stats: bool = False
    deadline_seconds: Annotated[float, Field(ge=0.1, le=86400)] | None = None


class Extension(Reporting):
    """Leapahead's own parameters for completions and chats.

    Attributes:
        spans: report in every chunk of a stream which parts of its text had been drafted, as `leapahead.spans`.
    """

    spans: bool = False


OF_TEMPLATES = ("messages", "conversation", "chat_template", "tokenize", "add_generation_prompt", "tools", "documents")


def _not_what_is_set(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name in OF_TEMPLATES:
            raise ValueError(f"{name!r} cannot be set here")
    return given


Variables = Annotated[
    dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], Any],
    AfterValidator(_not_what_is_set),
    WithJsonSchema(
        {"type": "object", "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": [*OF_TEMPLATES]}}}
    ),
]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


def _condition(name: str, given: dict[str, Any], needs: str) -> dict[str, Any]:
    """A schema by which a parameter is possible only where another one is true."""
    return {
        "if": {"required": [name], "properties": {name: given}},
        "then": {"required": [needs], "properties": {needs: {"const": True}}},
    }


WITH_SPANS = {"type": "object", "required": ["spans"], "properties": {"spans": {"const": True}}}
Condition = dict[str, Any]
NOT_OF_STREAMS: Condition = {
    "if": {"required": ["prompt_logprobs"], "properties": {"prompt_logprobs": {"type": "integer"}}},
    "then": {"properties": {"stream": {"enum": [False, None]}}},
}
CONTINUING: Condition = {
    "if": {"required": ["continue_final_message"], "properties": {"continue_final_message": {"const": True}}},
    "then": {
        "required": ["add_generation_prompt"],
        "properties": {"add_generation_prompt": {"const": False}},
    },
}
OF_STREAMS = (
    _condition("stream_options", {"type": "object"}, "stream"),
    _condition("leapahead", WITH_SPANS, "stream"),
)


Label = Annotated[str, Field(max_length=256)]


class Decoding(Strict):
    """What the requests of all paths that decode have in common.

    Attributes:
        model: one of the names at /v1/models; the first of them by default.
        temperature: 0 is greedy decoding.
        top_p: the likeliest tokens whose probabilities add up to it.
        top_k: so many of the likeliest tokens; 0 and -1 for all.
        min_p: tokens that are at least so many times as likely as the likeliest.
        seed: the same seed and parameters give the same text, up to rounding without --exact.
        stop: strings before which the text ends.
        stop_token_ids: token ids after which the text ends.
        include_stop_str_in_output: let the text end after the stop string.
        ignore_eos: continue after the model's end of text.
        min_tokens: no end of text and none of stop_token_ids before so many tokens; stop strings end the text before,
            too.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that the text has.
        repetition_penalty: above 1, tokens of prompt and text become less likely.
        logit_bias: token id -> number that is added to its logits.
        bad_words: strings that are banned as the tokenizer writes them at the beginning of a text and after a space; as
            parts of other tokens they may occur.
        skip_special_tokens: texts have no special tokens.
        stream: send the text piece by piece, as server-sent events.
        prediction: what the text is expected to be. Wrong parts cost time and never change the text.
        user, safety_identifier, prompt_cache_key, prompt_cache_retention, metadata: written to the log, nothing else.
        service_tier: any of OpenAI's. There is one only, which the answer names: "default".
    """

    model: str | None = None
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=INT32), INTEGER] | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED), INTEGER] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, bounded("length"), INTEGER] = 0
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Biases | None = None
    bad_words: Annotated[list[Visible], Field(max_length=MOST_IDS, fail_fast=True)] | None = None
    skip_special_tokens: Annotated[Literal[True], BOOLEAN] = True
    stream: bool = False
    prediction: Prediction | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None


class Generation(Decoding):
    """What completions and chats have in common.

    Attributes:
        n: number of texts for each prompt. Text i has the seed plus i.
        stream_options: `include_usage` lets a last chunk report the usage; `continuous_usage_stats`, every chunk.
        response_format: text of any form, any JSON object, or JSON of a schema. The text has this form in any case.
        structured_outputs: one of `json`, `json_object`, `regex`, `choice`, `grammar`, as vLLM has them; not together
            with a form in `response_format`.
        return_token_ids: report the token ids of prompts and texts, too.
        return_tokens_as_token_ids: log-probabilities name tokens by their ids, as "token_id:17".
        prompt_logprobs: report the log-probability of every token of the prompts, and of so many likeliest
            alternatives; -1 for all. Not in streams.
        truncate_prompt_tokens: only the last so many tokens of a prompt are read.
        leapahead: an object with the server's own parameters.
    """

    n: Annotated[int, bounded("samples", 1), INTEGER] | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[ResponseFormat | None, Field(json_schema_extra={LIMIT: "forms"})] = None
    structured_outputs: Annotated[StructuredOutputs | None, Field(json_schema_extra={LIMIT: "structured"})] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, bounded("logprobs", -1), INTEGER] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=INT32), INTEGER] | None = None
    leapahead: Extension | None = None

    model_config = ConfigDict(json_schema_extra={"allOf": [*OF_STREAMS, NOT_OF_STREAMS]})

    @model_validator(mode="after")
    def _of_streams_only(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "stream_options are possible with stream=true only", "invalid")
        if self.prompt_logprobs is not None and self.stream:
            raise refusal("prompt_logprobs", "prompt_logprobs are possible without stream=true only", "invalid")
        if self.extension.spans and not self.stream:
            raise refusal("leapahead.spans", "leapahead.spans is possible with stream=true only", "invalid")
        return self

    @property
    def extension(self) -> Extension:
        return self.leapahead or Extension()


class CompletionRequest(Generation):
    """A request of /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of either.
        max_tokens: greatest length of a text; 16 by default. A text also ends where the context does.
        logprobs: report the log-probability of every token, and of so many likeliest alternatives.
        echo: begin the text with the prompt.
        add_special_tokens: let the tokenizer begin a prompt as the model expects it.
        best_of: accepted for older clients.
    """

    prompt: Prompt
    max_tokens: Annotated[int, bounded("length"), INTEGER] | None = None
    logprobs: Annotated[int, bounded("logprobs"), INTEGER] | None = None
    echo: bool = False
    add_special_tokens: bool = True
    best_of: Literal[1] | None = None


class ChatRequest(Generation):
    """A request of /v1/chat/completions.

    Attributes:
        messages: the chat so far.
        max_tokens, max_completion_tokens: greatest length of a text, the smaller one if both are given; by default
            what the context allows.
        logprobs: report the log-probability of every token.
        top_logprobs: and of so many likeliest alternatives; -1 for all.
        echo: begin the answer with the last message, if it is the assistant's.
        add_generation_prompt: let the chat template begin the assistant's message.
        continue_final_message: continue the last message, which the chat template leaves open; needs
            add_generation_prompt=false.
        add_special_tokens: let the tokenizer begin the chat as the model expects it, where the template does not.
        chat_template_kwargs: further variables of the chat template, such as enable_thinking.
        reasoning_effort: given to the chat template as a variable, for those that know it; the same name in
            `chat_template_kwargs` counts more.
        tools: functions that the model may call.
        tool_choice: "none", "auto" (the default where there are tools), "required", the function to be called, or
            "allowed_tools" with a mode and some of the tools: the others are left out of the chat.
        parallel_tool_calls: whether an answer may have several calls.
        modalities: of the answer, which is text.
        store: whether to keep the answer, which the server does not.
    """

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, bounded("length", 1), INTEGER] | None = None
    max_completion_tokens: Annotated[int, bounded("length", 1), INTEGER] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, bounded("logprobs", -1), INTEGER] | None = None
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Effort | None = None
    tools: Annotated[ToolParams | None, Field(json_schema_extra={LIMIT: "tool_list"})] = None
    tool_choice: Annotated[ToolChoiceParam | None, Field(json_schema_extra={LIMIT: "tools"})] = None
    parallel_tool_calls: Annotated[bool | None, Field(json_schema_extra={LIMIT: "tools"})] = None
    modalities: list[Literal["text"]] | None = None
    store: Annotated[Literal[False], BOOLEAN] | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                *OF_STREAMS,
                NOT_OF_STREAMS,
                _condition("top_logprobs", {"type": "integer", "not": {"const": 0}}, "logprobs"),
                CONTINUING,
            ]
        }
    )

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs are possible with logprobs=true only", "invalid")
        return self

    @model_validator(mode="after")
    def _only_allowed_tools(self) -> ChatRequest:
        self.tools, self.tool_choice = only_allowed(self.tools, self.tool_choice)
        return self

    @model_validator(mode="after")
    def _continues_or_begins(self) -> ChatRequest:
        check_continuing(self)
        return self


class Continuing(Protocol):
    """A chat whose last message may be continued."""

    add_generation_prompt: bool
    continue_final_message: bool


def check_continuing(body: Continuing) -> None:
    """Refuses a message that is to be continued as well as a new one begun."""
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message needs add_generation_prompt=false"
        raise refusal("continue_final_message", message, "invalid")
