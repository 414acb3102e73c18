"""The text of a chat, by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from leapahead.core.errors import BadParameter
from leapahead.core.text import Tokenizer

MARK = "\ue0ff"  # of Unicode's private use, which no template has in its own text


def chat_text(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer | None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of a chat by the tokenizer's template. See `encode`.

    Some templates, as of models that take images, read lists of parts only, and leave out a content that is a text. The
    contents are given to them as such lists.

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
    if not _shows(MARK, tokenizer, options) and _shows(_parts(MARK), tokenizer, options):
        for each in conversation:
            each["content"] = _parts(each["content"])
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
    return text


def _parts(content: Any) -> Any:
    """A content that is a text as a list of its one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _shows(content: Any, tokenizer: Tokenizer, options: Mapping[str, Any]) -> bool:
    """Whether the chat template shows this content of a user, in which there is the mark, and not as Python does."""
    messages = [{"role": "user", "content": content}]
    try:
        text = tokenizer.apply_chat_template(messages, **options)
    except Exception:  # a template is somebody's program, and may raise anything
        return False
    return MARK in text and not _shows_parts(messages, text)


def _shows_parts(conversation: Iterable[Mapping[str, Any]], text: str) -> bool:
    """Whether a chat template has printed parts of a content as Python shows them."""
    lists = [each["content"] for each in conversation if isinstance(each["content"], list)]
    return any(isinstance(part, Mapping) and str(part) in text for parts in lists for part in parts)
