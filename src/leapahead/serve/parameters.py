"""The parameters of a request as those of `LLM.generate`, within the server's limits."""

from __future__ import annotations

from collections.abc import Sequence

from leapahead.inputs import Options
from leapahead.serve.errors import ApiError
from leapahead.serve.schema import ChatRequest, CompletionRequest, Generation, joined
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


def _stops(given: str | Sequence[str] | None, most: int) -> list[str]:
    stops = [given] if isinstance(given, str) else list(given or ())
    if len(stops) > most:
        raise ApiError(400, f"stop has {len(stops)} strings and this server takes {most}", "stop", "invalid_value")
    return stops


def completion_logprobs(body: CompletionRequest, settings: Settings) -> int | None:
    """Number of alternatives that a completion reports; None for no log-probabilities."""
    return _logprobs("logprobs", body.logprobs, settings.limits.logprobs)


def chat_logprobs(body: ChatRequest, settings: Settings) -> int | None:
    """The same of a chat."""
    return _logprobs("top_logprobs", (body.top_logprobs or 0) if body.logprobs else None, settings.limits.logprobs)


def _logprobs(name: str, given: int | None, most: int) -> int | None:
    if given is not None and given > most:
        raise ApiError(
            400, f"{name}={given} is not possible: this server reports at most {most}", name, "invalid_value"
        )
    return given


def completion_length(body: CompletionRequest, prompts: Sequence[Sequence[int]], settings: Settings, most: int) -> int:
    """Greatest length of a completion's texts."""
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 is possible with echo=true only", "max_tokens", "invalid_value")
    room = most - max(map(len, prompts))
    default = min(DEFAULT_COMPLETION_TOKENS, room)
    return _length("max_tokens", body.max_tokens, default, max(map(len, prompts)), settings, most)


def chat_length(body: ChatRequest, prompt: Sequence[int], settings: Settings, most: int) -> int:
    """Greatest length of a chat's answers."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens mean the same and differ; give one of them",
            name,
            "invalid_value",
        )
    limits = (most - len(prompt), settings.limits.max_tokens, settings.limits.default_max_tokens)
    return _length(name, given, min(limit for limit in limits if limit is not None), len(prompt), settings, most)


def _length(name: str, given: int | None, default: int, prompt: int, settings: Settings, most: int) -> int:
    """The length if it is given, else the default.

    Args:
        name: of the parameter.
        given: its value.
        default: see above.
        prompt: length of the longest prompt.
        settings: of the server.
        most: greatest length of prompt and text together.
    """
    if given is None:
        return default if settings.limits.max_tokens is None else min(default, settings.limits.max_tokens)
    if settings.limits.max_tokens is not None and given > settings.limits.max_tokens:
        raise ApiError(
            400,
            f"{name}={given} is not possible: this server writes at most {settings.limits.max_tokens} tokens",
            name,
            "invalid_value",
        )
    if prompt + given > most:
        raise ApiError(
            400,
            f"{name}={given} is not possible: the prompt has {prompt} tokens and the context {most}; ask for at most "
            f"{most - prompt}",
            name,
            "context_length_exceeded",
        )
    return given
