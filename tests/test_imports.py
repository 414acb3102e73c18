"""The layers of the package: which package may import which, read from the source, and what an import must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import leapahead

SOURCE = Path(leapahead.__file__).parent

# From the bottom up: a package may import those that stand before it, and itself.
LAYERS = [
    "_native",  # compiled, from src/native
    "native",
    "interrupts",
    "core",
    "grammar",
    "chat",
    "models",
    "planner",
    "drafters",
    "engine",
    "inputs",
    "option_names",
    "results",
    "progress",
    "api",
    "asynchronous",
    "ties",
    "check",
    "integrations",
    "leapahead",  # the package itself: the names that users import
    "bench",
    "explain",
    "tune",
    "token_table",
    "layer_search",
    "training",
    "serve",
    "cli",
    "__main__",
]
CORE = {  # modules of core, and which others of core they may import
    "arrays": set[str](),
    "bad_words": set[str](),
    "bias": set[str](),
    "errors": set[str](),
    "tree": {"errors"},
    "verify": {"tree"},
    "rejection": {"errors", "tree", "verify"},
    "relaxed": {"errors", "parameters", "tree", "verify"},
    "noise": set[str](),
    "filters": set[str](),
    "grammar": set[str](),
    "penalties": set[str](),
    "parameters": {"errors"},
    "processors": {"errors"},
    "sampling": {
        "arrays",
        "bad_words",
        "errors",
        "filters",
        "grammar",
        "noise",
        "parameters",
        "penalties",
        "processors",
        "tree",
    },
    "stats": set[str](),
    "storage": {"errors"},
    "stop": {"errors", "parameters", "tree", "verify"},
    "text": {"errors"},
    "token_bytes": {"errors", "text"},
}
ENGINES = {
    "torch",
    "llama_cpp",
    "openvino",
    "openvino_genai",
}  # imported nowhere, not even in a function, but in these:
ENGINE_LAYERS = {"models", "integrations", "bench", "layer_search", "training"}
BACKENDS = ENGINES | {"transformers", "tokenizers", "safetensors", "huggingface_hub"}
LONGEST_FILE, LONGEST_FUNCTION = 400, 60  # lines


def module_name(file: Path) -> str:
    parts = ["leapahead", *file.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(file): file for file in sorted(SOURCE.rglob("*.py")) if "assets" not in file.relative_to(SOURCE).parts
}


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "leapahead"


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@cache
def imported(module: str) -> frozenset[str]:
    """Every module that the file imports anywhere in it: in functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            inner = {f"{origin}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else origin for name in inner}
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, name, "") for name in ("id", "attr")
        ):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return frozenset(found)


@cache
def ours(module: str) -> set[str]:
    return {name for name in imported(module) if name.split(".")[0] == "leapahead"}


def test_every_package_has_its_layer() -> None:
    assert {layer(module) for module in FILES} <= set(LAYERS)


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_only_those_before_it(package: str) -> None:
    """Imports in functions and under TYPE_CHECKING count as well."""
    for module in FILES:
        if layer(module) == package:
            wrong = {name for name in ours(module) if LAYERS.index(layer(name)) > LAYERS.index(package)}
            assert not wrong, f"{module} imports {sorted(wrong)}"
            assert not {name for name in imported(module) if name.split(".")[0] in ("research", "tests")}


@pytest.mark.parametrize("name", CORE)
def test_modules_of_core_need_very_little(name: str) -> None:
    module = f"leapahead.core.{name}"
    allowed = {f"leapahead.core.{other}" for other in CORE[name]} | {module, "leapahead.native"}
    assert ours(module) <= allowed
    assert {each.split(".")[0] for each in imported(module)} <= {"leapahead", "numpy", "array_api_compat"} | set(
        sys.stdlib_module_names
    )


def test_the_planner_knows_models_by_their_interface_only() -> None:
    allowed = (
        "leapahead.native",
        "leapahead.core.",
        "leapahead.planner",
        "leapahead.models.base",
        "leapahead.models.choices",
    )
    for module in FILES:
        if layer(module) == "planner":
            assert not {name for name in ours(module) if not name.startswith(allowed)}, module


def test_files_and_functions_are_short() -> None:
    for module, file in FILES.items():
        assert file.read_text().count("\n") <= LONGEST_FILE, module
        for node in ast.walk(parsed(module)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node, clean=False) or ""
                lines = (node.end_lineno or 0) - node.lineno + 1 - docstring.count("\n")
                assert lines <= LONGEST_FUNCTION, f"{module}.{node.name}"


def test_no_module_imports_itself_by_a_detour() -> None:
    """Depth first over the import graph; a cycle would be named."""
    state: dict[str, str] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != "open", " -> ".join((*trail, module))
        if module not in state:
            state[module] = "open"
            for name in sorted(ours(module) & FILES.keys() - {module}):
                visit(name, (*trail, module))
            state[module] = "done"

    for module in FILES:
        visit(module, ())
    assert set(state) == set(FILES)


def test_engines_are_imported_only_where_they_are_needed() -> None:
    for module in FILES:
        if layer(module) not in ENGINE_LAYERS and not module.startswith("leapahead.drafters.heads."):
            assert not {name.split(".")[0] for name in imported(module)} & ENGINES, module


def test_no_bare_except() -> None:
    for module in FILES:
        handlers = [node for node in ast.walk(parsed(module)) if isinstance(node, ast.ExceptHandler)]
        assert all(handler.type for handler in handlers), module


def test_no_utils() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert not {name for module in FILES for name in module.split(".")} & drawers


def test_importing_leapahead_brings_in_no_backend() -> None:
    code = (
        "import sys, leapahead, leapahead.drafters, leapahead.models.toy\n"
        "[leapahead.drafters.load(name) for name in leapahead.drafters.BUILT_IN]\n"
        "from leapahead import *; import inspect; inspect.getmembers(leapahead)\n"
        f"print(*sorted({BACKENDS!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)


def test_the_command_imports_next_to_nothing_before_it_handles_ctrl_c() -> None:
    code = (
        "import sys; before = {*sys.modules}\n"
        "import leapahead.__main__; print(*sorted({*sys.modules} - before - {'__future__'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["leapahead", "leapahead.__main__", "leapahead.interrupts"], "")


def test_the_reader_of_imports_reads_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: an import in a function, under TYPE_CHECKING, relative, or by name is seen."""
    file = tmp_path / "made_up.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nfrom importlib import import_module\nimport torch.nn as nn\n"
        "if TYPE_CHECKING:\n    from leapahead import check\n"
        "def f():\n    from .core import tree\n    import leapahead.api\n    import_module('leapahead.cli')\n"
    )
    monkeypatch.setitem(FILES, "leapahead.made_up", file)
    assert ours("leapahead.made_up") == {"leapahead.check", "leapahead.core.tree", "leapahead.api", "leapahead.cli"}
    assert "torch.nn" in imported("leapahead.made_up")
