"""The two files of a batch, in the format of OpenAI's Batch API: a request or a result as JSON on each line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

from pydantic_core import from_json

from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.serve.errors import SHOWN

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
LONGEST = 64 * 2**20  # bytes of a line that is read
# Line separators that JSON leaves as they are, and at which Python's `str.splitlines` would divide a result.
SEPARATORS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}


@dataclass(frozen=True)
class Error:
    """Why there is no answer, as OpenAI's Batch API has it.

    Attributes:
        code: a word for programs.
        message: one sentence that names the value and the remedy.
        param: the member that it is about, if there is one.
        line: number of the line of the request, from 1.
    """

    code: str | None
    message: str
    param: str | None
    line: int


@dataclass(frozen=True)
class Result:
    """A line of the results.

    Attributes:
        id: a digest of the request, the same in every run.
        custom_id: the request's own; None where it has none.
        response: `status_code`, `request_id` and `body` of the service; None where the line was no request.
        error: None where the request was answered.
    """

    id: str
    custom_id: str | None
    response: dict[str, Any] | None
    error: Error | None

    def line(self) -> bytes:
        """The result as it is written."""
        return json.dumps(asdict(self), ensure_ascii=False).translate(SEPARATORS).encode() + b"\n"


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        line: its number, from 1.
        id: see `Result`.
        custom_id, url, body: members of the line.
    """

    line: int
    id: str
    custom_id: str
    url: str
    body: dict[str, Any]

    def result(self, status: int, request_id: str, body: dict[str, Any]) -> Result:
        """The result that the service's response becomes."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        if status == 200:
            return Result(self.id, self.custom_id, response, None)
        found = body["error"]
        return Result(
            self.id, self.custom_id, response, Error(found["code"], found["message"], found["param"], self.line)
        )


class Wrong(Exception):
    """A line that is no request that can be answered.

    Args:
        code, message, param: see `Error`.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers; of one that is too long, a byte more than is possible.

    Raises:
        LeapaheadError: the file cannot be read.
    """
    number = 0
    while line := _read(file):
        number += 1
        rest = line
        while len(rest) > LONGEST and not rest.endswith(b"\n"):
            rest = _read(file)
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line


def _read(file: BinaryIO) -> bytes:
    try:
        return file.readline(LONGEST + 1)
    except OSError as error:
        raise LeapaheadError(f"the requests cannot be read: {error.strerror}") from None


def requests(opened: Callable[[], BinaryIO], kept: Mapping[str, str]) -> Generator[Asked | Result, None, None]:
    """The requests of a file that have no result yet, and the results of lines that are wrong.

    Args:
        opened: opens the file, which is read no further than asked for, and closed with the iterator.
        kept: custom_id -> id, of the results that there are.

    Raises:
        BadParameter: there is a result of another request with the same custom_id.
        LeapaheadError: the file cannot be read.
    """
    seen: set[str] = set()
    with opened() as file:
        for number, line in lines(file):
            custom_id = None
            try:
                members = _members(line)
                custom_id = _custom_id(members)
                if custom_id in seen:
                    message = f"custom_id={_shown(custom_id)} occurs before; give another one"
                    raise Wrong("duplicate_custom_id", message, "custom_id")
                seen.add(custom_id)
                asked = _asked(number, custom_id, members)
            except Wrong as error:
                found = Error(error.code, str(error), error.param, number)
                yield Result(_digest(str(number).encode(), line.strip()), custom_id, None, found)
                continue
            if custom_id not in kept:
                yield asked
            elif kept[custom_id] != asked.id:
                raise BadParameter(
                    f"the result of custom_id={_shown(custom_id)} is of another request than that of line {number}; "
                    "name another file for the results"
                )


def _members(line: bytes) -> dict[str, Any]:
    if len(line) > LONGEST:
        raise Wrong("line_too_long", f"the line has more than the {LONGEST} bytes that are possible; send less")
    try:
        line.decode()
        found = from_json(line, allow_inf_nan=False)
    except UnicodeDecodeError as error:
        byte = line[error.start]
        message = f"the line is not UTF-8 text: byte 0x{byte:02x} at position {error.start}; convert the file to UTF-8"
        raise Wrong("invalid_json", message) from None
    except ValueError as error:
        reason = str(error).replace(" at line 1 column", " at column")
        raise Wrong("invalid_json", f"the line is not valid JSON: {reason}") from None
    if not isinstance(found, dict):
        raise Wrong("invalid_request", f"the line is {_shown(found)}; a request is a JSON object")
    return found


def _custom_id(members: dict[str, Any]) -> str:
    found = members.get("custom_id")
    if not isinstance(found, str) or not found:
        shown = f"custom_id={_shown(found)} is not possible" if "custom_id" in members else "custom_id is missing"
        raise Wrong("invalid_custom_id", f"{shown}; give a text that no other line has", "custom_id")
    return found


def _asked(number: int, custom_id: str, members: dict[str, Any]) -> Asked:
    method, url, body = (members.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        raise Wrong("invalid_method", f"method={_shown(method)} is not possible; it must be POST", "method")
    if url not in URLS:
        raise Wrong("invalid_url", f"url={_shown(url)} is not possible; it must be one of {', '.join(URLS)}", "url")
    if not isinstance(body, dict):
        raise Wrong("invalid_body", f"body={_shown(body)} is not possible; it must be a JSON object", "body")
    if body.get("stream") not in (None, False):
        shown = _shown(body["stream"])
        raise Wrong("invalid_value", f"stream={shown} is not possible: a result is whole; leave it out", "stream")
    return Asked(number, _digest(json.dumps([custom_id, url, body], sort_keys=True).encode()), custom_id, url, body)


def _digest(*parts: bytes) -> str:
    return f"batch_req_{blake2b(b' '.join(parts), digest_size=12).hexdigest()}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
