"""Logs: a line of JSON for each request and each event, on standard error."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from datetime import UTC, datetime
from typing import Any

logger = logging.getLogger("leapahead.serve")


class JsonLines(logging.Formatter):
    """A record as one line of JSON. What `event` was given is its members."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "members", {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=True, default=str)


def set_up(level: int = logging.INFO) -> None:
    """Lets the server's log and that of uvicorn go to standard error, and warnings into the log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for each, least in ((logger, level), (logging.getLogger("uvicorn"), max(level, logging.WARNING))):
        each.handlers, each.propagate = [handler], False
        each.setLevel(least)
    warnings.showwarning = _warning


def _warning(message: Warning | str, *where: Any, **more: Any) -> None:
    event("warning", logging.WARNING, message=" ".join(str(message).split()))


def event(name: str, level: int = logging.INFO, error: BaseException | None = None, **members: Any) -> None:
    """Writes a line.

    Args:
        name: what happened.
        level: of the logging package.
        error: whose traceback the line gets.
        members: of the JSON object.
    """
    logger.log(level, name, extra={"members": members}, exc_info=error)
