"""Every failure of a request, as OpenAI's error object: {"error": {"message", "type", "param", "code"}}.

With {"type": "error"} beside it, it is Anthropic's as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from leapahead.core.errors import BadParameter, CacheFull, ContextOverflow, Refused
from leapahead.serve.constraints import UNSUPPORTED
from leapahead.serve.schema import ChatRequest, CompletionRequest

SHOWN = 60  # characters of a wrong value that a message shows
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout_error",
}
NAMES = {  # of the library -> of the API, or the server's option
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_ctx": "--ctx-size",
}
PARAMETERS = frozenset({*CompletionRequest.model_fields, *ChatRequest.model_fields})
WORDS = {"bad word": "bad_words", "prediction": "prediction", "stop string": "stop", "prompt": "prompt"}
A_NAME = re.compile(r"[a-z][a-z0-9_]*")


class ErrorDetail(BaseModel):
    """OpenAI's error.

    Attributes:
        message: one sentence that names the value and the remedy.
        type: the kind of error.
        param: the parameter that it is about, if there is one.
        code: a word for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every response that is an error."""

    type: Literal["error"] = "error"
    error: ErrorDetail


class ApiError(HTTPException):
    """A request that cannot be answered.

    Args:
        status: of the response.
        message: one sentence that names the value and the remedy.
        param: the parameter that it is about.
        code: a word for programs.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status_code, TYPES[400] if self.status_code < 500 else "server_error")
        detail = ErrorDetail(message=self.detail, type=kind, param=self.param, code=self.code)
        return ErrorReply(error=detail).model_dump()

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


def of(error: BaseException) -> ApiError:
    """What the client is told of an exception; nothing of one that is not the client's fault."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    for ours, theirs in NAMES.items():
        message = message.replace(ours, theirs)
    if isinstance(error, ContextOverflow):
        return ApiError(400, message, "prompt", "context_length_exceeded")
    if isinstance(error, CacheFull):
        return ApiError(400, f"the prompt and max_tokens need more than the KV cache has: {message}", "max_tokens")
    if isinstance(error, (BadParameter, Refused)):
        return ApiError(400, message, _named(message), "invalid_value")
    return internal()


def internal() -> ApiError:
    """An error of the server."""
    return ApiError(500, "the server failed to answer this request; its log tells more", None, "internal_error")


def _named(message: str) -> str | None:
    """The parameter that a message of the library is about: the first that it gives as `name=` or mentions."""
    for word in re.finditer(r"\b[a-z_]+\b", message):
        if word[0] in PARAMETERS and ("_" in word[0] or message[word.end() :].startswith("=")):
            return word[0]
    return next((name for words, name in WORDS.items() if words in message), None)


def of_validation(errors: Sequence[Any]) -> ApiError:
    """The first error that the validation of a request has found."""
    first = errors[0]
    param = _param(first["loc"])
    kind, given = first["type"], _shown(first.get("input"))
    if kind == "extra_forbidden":
        message = f"there is no parameter {param!r} here; leave it out"
        return ApiError(400, message, param, "unknown_parameter")
    if kind == "missing":
        what = f"the parameter {param!r}" if param else "a body, which must be a JSON object,"
        return ApiError(400, f"{what} is missing", param, "missing_required_parameter")
    if (inner := first.get("ctx", {}).get("param")) is not None:
        code = "unsupported_parameter" if kind == UNSUPPORTED else "invalid_value"
        return ApiError(400, first["msg"], ".".join(part for part in (param, inner) if part), code)
    reason = first["msg"].removeprefix("Value error, ")
    message = f"{param or 'the body'}={given} is not possible: {reason[:1].lower()}{reason[1:]}"
    return ApiError(400, message, param, "invalid_type" if kind.endswith("_type") else "invalid_value")


@contextmanager
def of_chat(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of a chat that a request of another path was turned into, with that path's names of the parameters.

    Args:
        names: of chats -> of that path.
    """
    try:
        yield
    except ValidationError as error:
        found = of_validation([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])
        raise _renamed(found, names) from error
    except ApiError as error:
        raise _renamed(error, names) from error


def renamed(body: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The error object of a chat with another path's names of the parameters, see `of_chat`."""
    message, param = _with_names(body["error"]["message"], body["error"]["param"], names)
    return {**body, "error": {**body["error"], "message": message, "param": param}}


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    message, param = _with_names(error.detail, error.param, names)
    return ApiError(error.status_code, message, param, error.code, error.headers)


def _with_names(message: str, param: str | None, names: Mapping[str, str]) -> tuple[str, str | None]:
    for theirs, ours in names.items():
        if param is not None and (param == theirs or param.startswith(f"{theirs}.")):
            param = ours + param.removeprefix(theirs)
        # Those without an underscore are words, too.
        place = rf"\b{theirs}\b" if "_" in theirs else rf"\b{theirs}(?==)|^{theirs}\b|(?<=parameter '){theirs}(?=[.'])"
        message = re.sub(place, ours, message)
    return message, param


def _param(loc: Sequence[int | str]) -> str | None:
    """The path to a value, such as `messages.0.content`; without pydantic's names of types."""
    found: list[str] = []
    for index, part in enumerate(loc[1:], start=1):
        is_name = (
            not isinstance(part, str)
            or A_NAME.fullmatch(part)
            or (index == len(loc) - 1 and part[:1] not in ("<", "["))
        )
        if is_name:
            found.append(str(part)[:SHOWN])
    return ".".join(found) if found else None


def _shown(value: Any) -> str:
    """A value as the request has written it."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
