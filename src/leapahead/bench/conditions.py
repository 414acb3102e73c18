"""What a measurement was made with: versions, machine, commit. Knows nothing of models."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from leapahead import __version__
from leapahead.planner.profile import processor

PACKAGES = ("numpy", "torch", "transformers", "llama-cpp-python")


def conditions() -> dict[str, Any]:
    """Plain types, the same for two runs on one installation and machine."""
    return {
        "versions": {"leapahead": __version__, "python": platform.python_version(), **_packages()},
        "commit": commit(),
        "system": platform.platform(),
        "cpu": processor(),
        "gpu": gpu(),
    }


def commit() -> str | None:
    """Of the checkout that runs, "-dirty" behind it where files were changed; None outside of one."""
    here = Path(__file__).resolve()
    if not _git(here.parent, "ls-files", "--error-unmatch", "__init__.py"):
        return None  # installed, perhaps inside another project's checkout
    return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def gpu() -> str | None:
    """The name of the GPU that torch would use."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _packages() -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
