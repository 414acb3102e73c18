"""Causal language models of Hugging Face Transformers as targets."""

from __future__ import annotations

from importlib import metadata

from leapahead.core.errors import LeapaheadError

LEAST_VERSION = (5, 23)  # of Transformers: selected hidden states, and the cache interface used here


def require_version(installed: str | None = None) -> None:
    """Refuses a Transformers release that is too old. Imports nothing of it.

    Args:
        installed: its version; by default that of the installed package, which must exist.

    Raises:
        LeapaheadError: it is older than `LEAST_VERSION`.
    """
    installed = installed or metadata.version("transformers")
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if numbers < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise LeapaheadError(
            f"leapahead needs Transformers {least} or newer, and {installed} is installed: "
            f'pip install --upgrade "transformers>={least}"'
        )
