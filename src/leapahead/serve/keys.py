"""API keys: where they come from, and their comparison."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from leapahead.core.errors import BadParameter

ENVIRONMENT = "LEAPAHEAD_API_KEY"
DIGITS = 12  # hex digits of a key's id


class Keys:
    """The keys of a server.

    Args:
        keys: none of them is stored.

    Attributes:
        ids: of the keys, in order.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = {identity(key): _digest(key) for key in keys}
        self.ids = tuple(self._digests)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: str) -> str | None:
        """The id of a key; None if it is none of the server's. Takes equally long for every key."""
        given, found = _digest(key), None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found


def identity(key: str) -> str:
    """A key's id, for logs and file names: hex digits from which it cannot be computed."""
    return sha256(b"leapahead key\0" + key.encode("utf-8", "surrogateescape")).hexdigest()[:DIGITS]


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def given(options: Sequence[str], file: Path | None, environment: str | None) -> tuple[str, ...]:
    """All keys: of the command line, of a file with one in each line, and of the environment, separated by commas.

    Lines of the file that begin with # are comments.

    Raises:
        BadParameter: the file cannot be read or has no key; a key has other characters than visible ASCII.
    """
    found = list(options)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise BadParameter(f"the file of API keys {file} cannot be read: {error}") from None
        listed = [line for line in lines if line and not line.startswith("#")]
        if not listed:
            raise BadParameter(f"the file of API keys {file} has no key; write one into each line")
        found += listed
    found += [key.strip() for key in (environment or "").split(",") if key.strip()]
    for key in found:
        if not key or not all("!" <= character <= "~" for character in key):
            raise BadParameter(f"an API key of {len(key)} characters is not possible: it must be visible ASCII")
    return tuple(dict.fromkeys(found))
