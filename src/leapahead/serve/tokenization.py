"""What requests of /tokenize and /detokenize consist of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from leapahead.serve.messages import LIMIT, SEVERAL, Message, Strict, ToolParams
from leapahead.serve.schema import CONTINUING, Effort, TokenId, Variables, check_continuing


class TokenizePrompt(Strict):
    """A request of /tokenize for a text.

    Attributes:
        prompt: the text.
        add_special_tokens: let the tokenizer begin it as the model expects.
        return_token_strs: report each token as the vocabulary writes it, too.
    """

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeMessages(Strict):
    """A request of /tokenize for a chat. See `ChatRequest`."""

    model: str | None = None
    messages: Annotated[list[Message], SEVERAL]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Variables | None = None
    tools: Annotated[ToolParams | None, Field(json_schema_extra={LIMIT: "tool_list"})] = None
    return_token_strs: bool = False

    model_config = ConfigDict(json_schema_extra={"allOf": [CONTINUING]})

    @model_validator(mode="after")
    def _continues_or_begins(self) -> TokenizeMessages:
        check_continuing(self)
        return self


def _of_chat(value: Any) -> str:
    return "<messages>" if isinstance(value, dict) and value.get("messages") is not None else "<prompt>"


TokenizeRequest = Annotated[
    Annotated[TokenizePrompt, Tag("<prompt>")] | Annotated[TokenizeMessages, Tag("<messages>")], Discriminator(_of_chat)
]


class DetokenizeRequest(Strict):
    """A request of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
