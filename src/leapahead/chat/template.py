"""The text of a chat, by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from leapahead.core.errors import BadParameter
from leapahead.core.text import Tokenizer


def chat_text(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer | None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of a chat by the tokenizer's template. See `encode`.

    Some templates, as of models that take images, read lists of parts only, and leave out a content that is a text. So
    where the last message is not shown, the contents are given as such lists.

    Raises:
        BadParameter: there is no template, or it does not take these messages.
    """
    if tokenizer is None:
        raise BadParameter("chat messages need a tokenizer; pass tokenizer=..., or a list of token ids")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadParameter(f'a chat message is {{"role": "user", "content": "..."}}, got {message!r}')
    conversation = [dict(message) for message in messages]
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt, **(variables or {})}
    try:
        text = tokenizer.apply_chat_template(conversation, **options)
    except ImportError as error:  # Transformers needs a recent jinja2
        raise BadParameter(f"chat templates cannot be used: {error}") from None
    except Exception as error:  # a template is somebody's program, and may raise anything
        if getattr(tokenizer, "chat_template", None) is None:
            raise BadParameter(
                "the tokenizer has no chat template; give the prompt as text (`leapahead generate` without --chat), or "
                "set tokenizer.chat_template"
            ) from None
        raise BadParameter(f"the chat template does not take these messages: {error}") from None
    if _shows_parts(conversation, text):
        raise BadParameter("the chat template takes no lists of parts; give the content of each message as text")
    if isinstance(last := conversation[-1]["content"], str) and last.strip() not in text:
        for each in conversation:
            if isinstance(each["content"], str):
                each["content"] = [{"type": "text", "text": each["content"]}]
        with suppress(Exception):  # it does not take lists, either
            other = tokenizer.apply_chat_template(conversation, **options)
            if last.strip() in other and not _shows_parts(conversation, other):
                return other
    return text


def _shows_parts(conversation: Iterable[Mapping[str, Any]], text: str) -> bool:
    """Whether a chat template has printed parts of a content as Python shows them."""
    lists = [each["content"] for each in conversation if isinstance(each["content"], list)]
    return any(isinstance(part, Mapping) and str(part) in text for parts in lists for part in parts)
