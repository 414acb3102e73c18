"""Causal language models of Hugging Face Transformers as targets."""

from __future__ import annotations

from importlib import metadata

from leapahead.core.errors import LeapaheadError

LEAST_VERSION = (5, 23)  # of Transformers: selected hidden states, and the cache interface used here
TOO_NEW = (5, 25)  # the first with which the tests were not run


def require_version(installed: str | None = None) -> None:
    """Refuses a Transformers release that is too old or too new. Imports nothing of it.

    Args:
        installed: its version; by default that of the installed package, which must exist.

    Raises:
        LeapaheadError: it is older than `LEAST_VERSION`, or not older than `TOO_NEW`.
    """
    installed = installed or metadata.version("transformers")
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if not LEAST_VERSION <= numbers < TOO_NEW:
        least, end = (".".join(map(str, version)) for version in (LEAST_VERSION, TOO_NEW))
        raise LeapaheadError(
            f"leapahead needs Transformers {least} or newer, before {end}, and {installed} is installed: "
            f'pip install "transformers>={least},<{end}"'
        )
