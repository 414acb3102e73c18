"""Compiles the extension module `leapahead._native` from src/native while the package is built or installed.

Where it cannot be compiled (no compiler, no CMake), the package is built without it and works in Python alone. An
editable installation gets the module beside the Python files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LEAST_CMAKE = (3, 18)


def _has_cmake() -> bool:
    """Whether there is a CMake that is new enough and starts in an isolated build, unlike one of the user's site."""
    try:
        told = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=True).stdout
        return tuple(map(int, re.findall(r"\d+", told)[:2])) >= LEAST_CMAKE
    except (OSError, subprocess.CalledProcessError):
        return False


class NativeModule(BuildHookInterface[Any]):
    """Runs CMake. hatchling makes one for each wheel and for each editable installation."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """What an isolated build needs beside `build-system.requires`."""
        if _has_cmake():
            return []
        cmake = f"cmake>={'.'.join(map(str, LEAST_CMAKE))}"
        return [cmake] if os.name == "nt" else [cmake, "ninja"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = TemporaryDirectory()
        try:
            module = self._compiled(Path(self._folder.name))
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stdout", None) or ""
            self.app.display_warning(f"{output}leapahead is built without its compiled module: {error}")
            return
        if version == "editable":
            place = Path(self.root, "src", "leapahead", module.name)
            shutil.copy2(module, new := place.with_name(f"{module.name}.new"))
            new.replace(place)  # at once: a running process may have mapped the former one
            return
        build_data["pure_python"] = False
        build_data["force_include"][str(module)] = f"leapahead/{module.name}"
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._folder.cleanup()

    def _compiled(self, folder: Path) -> Path:
        """The extension module, built in a folder.

        Raises:
            OSError: CMake is not there.
            ImportError: nanobind is not there.
            subprocess.CalledProcessError: it failed.
        """
        import nanobind

        # Under Windows, CMake finds an installed Visual C++ by itself, but not for Ninja, unless its prompt is open.
        has_compiler = os.name != "nt" or shutil.which("cl") or "CXX" in os.environ
        ninja = ["-G", "Ninja"] if shutil.which("ninja") and has_compiler else []
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "Python_EXECUTABLE": sys.executable,
            "nanobind_ROOT": nanobind.cmake_dir(),
            "CMAKE_INSTALL_PREFIX": str(folder / "installed"),
        }
        defined = [f"-D{name}={value}" for name, value in settings.items()]
        build = str(folder / "build")
        for command in (
            ["cmake", "-S", str(Path(self.root, "src", "native")), "-B", build, *ninja, *defined],
            ["cmake", "--build", build, "--config", "Release", "--parallel", "2"],
            ["cmake", "--install", build, "--config", "Release"],
        ):
            subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (module,) = (folder / "installed").glob("_native*")
        return module
