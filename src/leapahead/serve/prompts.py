"""Prompts, chats and predictions as token ids. Runs in threads: tokenizing a long text takes a while."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, TypeVar, cast

from leapahead.api import LLM
from leapahead.chat.template import chat_text
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.text import id_bound
from leapahead.core.token_bytes import token_bytes
from leapahead.inputs import Prompt, encode
from leapahead.serve.errors import ApiError, of
from leapahead.serve.messages import AssistantMessage, Message, ToolMessage, joined, json_object
from leapahead.serve.schema import ChatRequest
from leapahead.serve.tokenization import TokenizeMessages

T = TypeVar("T")
KEPT_TOKENS = 1 << 16  # token ids whose text is kept
END = "\ue000end\ue000"  # of a message that is continued, to see where the template writes it
NO_CONTENT = re.compile(
    r"content['\"]?\]?\s+is\s+(?:not\s+)?none", re.IGNORECASE
)  # in a template that has a case for it


class Texts:
    """Turns text into token ids and back, within the server's limits.

    Args:
        llm: the model.
        most: greatest length of a prompt; None for what the context allows.
    """

    def __init__(self, llm: LLM, most: int | None = None) -> None:
        self.llm, self.tokenizer, self.info = llm, llm.tokenizer, llm.target.info
        self._most = most
        self.token = lru_cache(KEPT_TOKENS)(self._token)

    def prompts(
        self, given: str | Sequence[Any], add_special_tokens: bool = True, last: int | None = None
    ) -> list[list[int]]:
        """The token ids of each prompt of a completion; only the last so many of them, where `last` is given.

        Raises:
            ApiError: a prompt is empty, too long, or has a token id outside the vocabulary.
        """
        single = isinstance(given, str) or not isinstance(given[0], (str, list))
        each: Sequence[Any] = [given] if single else given
        return [self._prompt(prompt, add_special_tokens, last) for prompt in each]

    def chat(self, body: ChatRequest, last: int | None = None) -> list[int]:
        """The token ids of a chat, by the tokenizer's chat template; see `prompts`.

        Raises:
            ApiError: there is no template, it does not take these messages, or the chat is too long.
        """
        return self._limited("messages", self.chat_of_any_length(body), last)

    def chat_of_any_length(self, body: ChatRequest | TokenizeMessages) -> list[int]:
        """The token ids of a chat, which may be longer than the context: clients count them to know that.

        Raises:
            ApiError: there is no template, or it does not take these messages.
        """
        effort = body.reasoning_effort
        variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        variables |= body.chat_template_kwargs or {}
        if body.tools:
            variables["tools"] = [
                tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) for tool in body.tools
            ]
        messages, final = list(body.messages), joined(body.messages[-1].content or "")
        if body.continue_final_message:
            messages[-1] = messages[-1].model_copy(update={"content": marked(final)})
        text = _about("messages", lambda: self._chat_text(messages, body.add_generation_prompt, variables))
        if body.continue_final_message:
            text = left_open(text, final)
        return self.ids(text, body.add_special_tokens)

    def _chat_text(self, messages: Sequence[Message], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        """The text of a chat. Messages with tool calls are given in the ways that templates expect, one after another.

        Arguments of calls are objects, or text for templates that join them to other text. No content is null for
        templates that have a case for it, if the tokenizer lets it pass, or an empty text.
        """
        called = any(isinstance(message, AssistantMessage) and message.tool_calls for message in messages)
        nulls = (True, False) if called and NO_CONTENT.search(self.template) else (False,)
        errors = []
        for null, as_text in product(nulls, (False, True) if called else (False,)):
            given = conversation(messages, self.template, null, as_text)
            try:
                return chat_text(given, self.tokenizer, add_generation_prompt, variables)
            except BadParameter as error:
                errors.append(error)
        raise errors[0]

    @property
    def template(self) -> str:
        """The chat template; "" where there is none."""
        return str(getattr(self.tokenizer, "chat_template", None) or "")

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        size = id_bound(self.tokenizer)
        known = [token for token in tokens if token < size]
        return self.tokenizer.decode(known, skip_special_tokens=False)

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text; none for an empty one.

        Raises:
            ApiError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer, so it takes token ids only", "prompt", "invalid_value")
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens)) if text else []

    def checked_text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            ApiError: one is outside the vocabulary.
        """
        if outside := [token for token in tokens if token >= self.info.vocab_size]:
            message = f"tokens has {outside[0]}, which is outside the vocabulary of {self.info.vocab_size}"
            raise ApiError(400, message, "tokens", "invalid_value")
        return self.text(tokens)

    def tokenizer_info(self) -> dict[str, Any]:
        """What the tokenizer was made with, paths left out: its class, special tokens and chat template among them."""
        given = getattr(self.tokenizer, "init_kwargs", {})  # of Transformers
        found = {name: value for name, value in given.items() if not name.endswith(("_file", "_path", "_files_only"))}
        for name in ("bos_token", "eos_token"):
            if (token := getattr(self.tokenizer, f"{name}_id", None)) is not None:
                found[name] = self.token(token)
        found["tokenizer_class"] = type(self.tokenizer).__name__
        if (template := getattr(self.tokenizer, "chat_template", None)) is not None:
            found["chat_template"] = template
        # Tokens are objects with a `content`; what else is no JSON becomes text.
        return dict(json.loads(json.dumps(found, default=lambda value: getattr(value, "content", str(value)))))

    def _token(self, token: int) -> str:
        return self.text([token])

    @cached_property
    def bytes(self) -> list[bytes] | None:
        """The bytes of every token of the tokenizer; None where it does not tell."""
        try:
            return None if self.tokenizer is None else token_bytes(self.tokenizer)[0]
        except (Refused, ValueError):
            return None

    def strings(self, tokens: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary writes them; their texts where the tokenizer has no other form."""
        convert = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        return list(map(self.token, tokens)) if convert is None else list(map(str, convert(list(tokens))))

    def _prompt(self, prompt: Any, add_special_tokens: bool, last: int | None) -> list[int]:
        if isinstance(prompt, str) and self.tokenizer is not None and (last is not None or not add_special_tokens):
            prompt = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return self._limited("prompt", prompt, last)

    def _limited(self, param: str, prompt: Prompt, last: int | None) -> list[int]:
        if last is not None and not isinstance(prompt, str):
            prompt = cast(Prompt, prompt[-last:])
        tokens = _about(param, lambda: encode(prompt, self.tokenizer, self.info))
        if self._most is not None and len(tokens) > self._most:
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens and this server takes {self._most}; shorten it",
                param,
                "context_length_exceeded",
            )
        return tokens


def _about(param: str, work: Callable[[], T]) -> T:
    """The result of the work; what it refuses is about this parameter."""
    try:
        return work()
    except LeapaheadError as error:  # others are logged and answered as the server's own
        found = of(error)
        raise ApiError(found.status_code, found.detail, param, found.code) from error


def marked(final: str) -> str:
    """A message that is continued, with `END` before the white space at its end, which templates may leave out."""
    return final.rstrip() + END + final[len(final.rstrip()) :]


def left_open(text: str, final: str) -> str:
    """The text of a chat up to the end of its final message, without what the template writes behind it.

    Args:
        text: of the chat, with `marked(final)`.
        final: the message; where it is empty, the text ends where it would begin.

    Raises:
        ApiError: the template does not write that message as it is.
    """
    before, found, after = text.rpartition(END)
    if not found:
        message = "the last message is not possible with continue_final_message: the chat template does not show it"
        raise ApiError(400, message, "messages", "invalid_value")
    space = final[len(final.rstrip()) :]
    return before + space if final.strip() and after.startswith(space) else before


def conversation(
    messages: Sequence[Message], template: str, null: bool = False, as_text: bool = False
) -> list[dict[str, Any]]:
    """Messages as a chat template takes them; developers' ones are system messages for templates that do not know them.

    Args:
        messages: as the client sent them.
        template: the source of the chat template.
        null: give null as the content of messages that have calls and nothing else; an empty text otherwise.
        as_text: leave the arguments of calls JSON text, which some templates join to other text.
    """
    return [_entry(message, template, null, as_text) for message in messages]


def _entry(message: Message, template: str, null: bool, as_text: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and "developer" not in template else message.role
    entry: dict[str, Any] = {"role": role, "content": "" if message.content is None else joined(message.content)}
    if message.name is not None:
        entry["name"] = message.name
    if isinstance(message, ToolMessage):
        entry["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if thought is not None:
            entry["reasoning_content"] = thought
        if message.tool_calls:
            if null and message.content is None:
                entry["content"] = None
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments if as_text else _arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
    return entry


def _arguments(text: str) -> Any:
    """Those of a call: the JSON object, which templates write as their model does; the text where it is none."""
    found = json_object(text)
    return text if found is None else found
