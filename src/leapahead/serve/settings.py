"""What an operator chooses: names, keys, limits, timeouts. Knows neither HTTP nor models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import number, whole

ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")
LONGEST_NAME = 256  # characters of a model's name


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may ask for, and how long it may take.

    Attributes:
        body_bytes: greatest size of a request's body.
        prompt_tokens: greatest length of a prompt; None for what the context allows.
        max_tokens: greatest `max_tokens`; None for what the context allows.
        default_max_tokens: `max_tokens` of chat requests that give none; None for what the context allows.
        samples: greatest `n`.
        prompts: most prompts of a request.
        queue: most texts that wait beside those that are decoded; more are answered with 429.
        logprobs: most alternatives that are reported for each token.
        stops: most stop strings of a request.
        header_seconds: a connection is closed if the headers of a request take longer.
        body_seconds: a request whose body takes longer is answered with 408.
        send_seconds: a connection is closed, and its request cancelled, if its client reads nothing of an answer for
            so long while more is waiting for it.
        request_seconds: a request that takes longer, its time in the queue included, is cancelled and answered with
            504; None for no such limit. A request may ask for less.
        shutdown_seconds: how long running requests may go on once the server was asked to stop.
        unread: outputs that a client may be behind before its text is no longer decoded.

    Raises:
        BadParameter: a value is impossible; the message names it.
    """

    body_bytes: int = 4 * 2**20
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    samples: int = 16
    prompts: int = 64
    queue: int = 256
    logprobs: int = 20
    stops: int = 16
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    send_seconds: float = 60.0
    request_seconds: float | None = None
    shutdown_seconds: float = 30.0
    unread: int = 64

    def __post_init__(self) -> None:
        for name, least in (
            ("body_bytes", 1),
            ("samples", 1),
            ("prompts", 1),
            ("queue", 0),
            ("logprobs", 0),
            ("stops", 0),
        ):
            whole(name, getattr(self, name), least)
        whole("unread", self.unread, 1)
        for name in ("prompt_tokens", "max_tokens", "default_max_tokens"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        if self.max_tokens is not None and (self.default_max_tokens or 0) > self.max_tokens:
            raise BadParameter(
                f"default_max_tokens={self.default_max_tokens} is not possible with max_tokens={self.max_tokens}, "
                "which is less; leave it out"
            )
        for name in ("header_seconds", "body_seconds", "send_seconds", "request_seconds", "shutdown_seconds"):
            value, above = getattr(self, name), " above 0" if name != "shutdown_seconds" else ""
            if value is not None and (number(value) is None or not (value > 0 if above else value >= 0)):
                raise BadParameter(f"{name}={value!r} is not possible: it must be a number of seconds{above}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a server is run.

    Attributes:
        names: by which requests name the model; the first is the one that responses name.
        keys: API keys; without any, requests need none.
        cors: origins whose pages may call the server from a browser; "*" for all.
        share_drafter_cache: whether requests with different keys share one drafter cache.
        log_prompts: whether logs contain prompts and texts.
        defaults: sampling parameters of requests that do not give them, instead of OpenAI's.
        tool_call_parser: name of the format of tool calls, see `leapahead.chat.TOOL_FORMATS`; "none" for no tools;
            None to find it by the chat template.
        reasoning_parser: the same of reasoning, see `leapahead.chat.REASONING_FORMATS`; with "none", all is content.
        tokenizer_info: whether /tokenizer_info tells the chat template and what else the tokenizer was made with.
        limits: see `Limits`.

    Raises:
        BadParameter: a value is impossible; the message names it.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    share_drafter_cache: bool = False
    log_prompts: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    tokenizer_info: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.names:
            raise BadParameter("names=() is not possible: give at least one")
        for name in self.names:
            if not (0 < len(name) <= LONGEST_NAME and name.isprintable()):
                rule = f"it must have 1 to {LONGEST_NAME} printable characters"
                raise BadParameter(f"names={name[:LONGEST_NAME]!r} is not possible: {rule}")
        for origin in self.cors:
            if not ORIGIN.fullmatch(origin):
                rule = "it must be of the form https://example.org:8000, without a path, or *"
                raise BadParameter(f"cors={origin!r} is not possible: {rule}")
