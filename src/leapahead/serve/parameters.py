"""The parameters of a request as those of `LLM.generate`, within the server's limits."""

from __future__ import annotations

from collections.abc import Sequence

from leapahead.inputs import Options
from leapahead.serve.errors import ApiError
from leapahead.serve.messages import joined
from leapahead.serve.schema import ChatRequest, CompletionRequest, Generation
from leapahead.serve.settings import Settings

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


def options(body: Generation, settings: Settings, vocab_size: int) -> Options:
    """What completions and chats have in common, without the length.

    Raises:
        ApiError: more than the server's limits allow, or a token outside the vocabulary.
    """
    defaults = {"temperature": 1.0, **settings.defaults}
    found: Options = {
        "ignore_eos": body.ignore_eos,
        "include_stop": body.include_stop_str_in_output,
        "min_new_tokens": body.min_tokens,
        "n": body.n or 1,
        "stop": _stops(body.stop, settings.limits.stops),
        "stop_token_ids": list(body.stop_token_ids or ()),
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
    }
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(body, name)
        if value is not None or name in defaults:
            found[name] = value if value is not None else defaults[name]
    top_k = body.top_k if body.top_k is not None else defaults.get("top_k", 0)
    found["top_k"] = max(0, int(top_k))
    if body.seed is not None:
        found["seed"] = body.seed
    if body.bad_words:
        found["bad_words"] = list(body.bad_words)
    if body.prediction is not None:
        found["prediction"] = joined(body.prediction.content, "")
    for name, tokens in (("logit_bias", found["logit_bias"]), ("stop_token_ids", found["stop_token_ids"])):
        if outside := [token for token in tokens if token >= vocab_size]:
            raise ApiError(
                400, f"{name} has {outside[0]}, which is outside the vocabulary of {vocab_size}", name, "invalid_value"
            )
    return found


def samples(body: Generation, settings: Settings) -> int:
    """Number of texts for each prompt."""
    check_count("n", body.n or 1, settings.limits.samples)
    return body.n or 1


def check_count(name: str, count: int, most: int) -> None:
    """Refuses more of something than a limit allows."""
    if count > most:
        raise ApiError(400, f"{name}: {count} are more than the {most} that this server takes", name, "invalid_value")


def _stops(given: str | Sequence[str] | None, most: int) -> list[str]:
    stops = [given] if isinstance(given, str) else list(given or ())
    check_count("stop", len(stops), most)
    return stops


def completion_logprobs(body: CompletionRequest, settings: Settings) -> int | None:
    """Number of alternatives that a completion reports; None for no log-probabilities."""
    return _logprobs("logprobs", body.logprobs, settings.limits.logprobs, None)


def chat_logprobs(body: ChatRequest, settings: Settings, vocab_size: int) -> int | None:
    """The same of a chat."""
    asked = (body.top_logprobs or 0) if body.logprobs else None
    return _logprobs("top_logprobs", asked, settings.limits.logprobs, vocab_size)


def prompt_logprobs(body: Generation, settings: Settings, vocab_size: int) -> int | None:
    """The same of the tokens of prompts."""
    return _logprobs("prompt_logprobs", body.prompt_logprobs, settings.limits.logprobs, vocab_size)


def _logprobs(name: str, given: int | None, most: int, vocab_size: int | None) -> int | None:
    """Number of alternatives; where `vocab_size` is given, -1 stands for it."""
    if given == -1 and vocab_size is not None and vocab_size <= most:
        return vocab_size
    if given is not None and not 0 <= given <= most:
        raise ApiError(
            400, f"{name}={given} is not possible: this server reports at most {most}", name, "invalid_value"
        )
    return given


def set_length(options: Options, length: int) -> None:
    """Sets the greatest length of a text. Where it is less than `min_tokens`, there is no end of text before it."""
    options["max_new_tokens"] = length
    options["min_new_tokens"] = min(options.get("min_new_tokens", 0), length)


def completion_length(body: CompletionRequest, prompts: Sequence[Sequence[int]], settings: Settings, most: int) -> int:
    """Greatest length of a completion's texts, which also end where the context does."""
    _length("min_tokens", body.min_tokens, settings, most)
    found = _length("max_tokens", body.max_tokens, settings, most)
    default = min(DEFAULT_COMPLETION_TOKENS, settings.limits.max_tokens or DEFAULT_COMPLETION_TOKENS)
    return min(default if found is None else found, most - min(map(len, prompts)))


def chat_length(body: ChatRequest, before: Sequence[int], settings: Settings, most: int) -> int:
    """Greatest length of a chat's answers, which also end where the context does.

    Args:
        before: what stands before the answer in the context.
        most: tokens of the context.
    """
    limits = settings.limits
    _length("min_tokens", body.min_tokens, settings, most)
    given = (
        _length("max_tokens", body.max_tokens, settings, most),
        _length("max_completion_tokens", body.max_completion_tokens, settings, most),
    )
    asked = [length for length in given if length is not None]
    asked = asked or [length for length in (limits.max_tokens, limits.default_max_tokens) if length is not None]
    return min([*asked, most - len(before)])


def _length(name: str, given: int | None, settings: Settings, most: int) -> int | None:
    """The length that is given.

    Raises:
        ApiError: it is more than the server's limit, or than the context.
    """
    limit = settings.limits.max_tokens
    if given is not None and limit is not None and given > limit:
        raise ApiError(
            400, f"{name}={given} is not possible: this server writes at most {limit}", name, "invalid_value"
        )
    if given is not None and given > most:
        message = f"{name}={given} is not possible: the context of the model has {most} tokens"
        raise ApiError(400, message, name, "context_length_exceeded")
    return given
