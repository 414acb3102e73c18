"""The rooms of the house: who may import whom, read from the source; and what `import leapahead` must not bring in."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import leapahead

SOURCE = Path(leapahead.__file__).parent

# From the ground up; a room may import what stands before it (and itself). DESIGN section 4.
ROOMS = [
    "errors",
    "memory",
    "tree",
    "verify",
    "rejection",
    "sampling",
    "stats",
    "target",
    "text",
    "drafter",
    "stop",
    "decode",
    "drafters",
    "targets",
    "planner",
    "generate",
    "prompts",
    "compare",
    "ties",
    "check",
    "integrations",
    "leapahead",  # the package itself: the names that users import
    "serve",
    "lab",
    "train",
    "cli",
    "__main__",
]
ONLY = {
    "errors": set(),
    "tree": {"errors"},
    "verify": {"tree"},
    "rejection": {"errors", "tree", "verify"},
    "sampling": {"errors", "tree"},
    "stats": set(),
    "stop": {"errors", "tree", "verify"},
}
ENGINES = {"torch", "llama_cpp"}  # not even inside a function, but in these rooms:
ENGINE_ROOMS = {"targets", "integrations", "train", "lab"}
BACKENDS = ENGINES | {"transformers", "tokenizers", "safetensors", "huggingface_hub"}


def module_name(file: Path) -> str:
    parts = ["leapahead", *file.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(file): file for file in sorted(SOURCE.rglob("*.py")) if "assets" not in file.relative_to(SOURCE).parts
}


def room(module: str) -> str:
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
        elif isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return frozenset(found)


def ours(module: str) -> set[str]:
    return {name for name in imported(module) if name.split(".")[0] == "leapahead"}


def test_the_rooms_are_known() -> None:
    """A new room must be given its place in ROOMS, and the design."""
    assert {room(module) for module in FILES} <= set(ROOMS)


@pytest.mark.parametrize("module", FILES)
def test_a_room_imports_only_rooms_before_it(module: str) -> None:
    """Imports in functions and under TYPE_CHECKING count as well."""
    mine = ROOMS.index(room(module))
    wrong = {name for name in ours(module) if ROOMS.index(room(name)) > mine}
    assert not wrong, f"{module} imports {sorted(wrong)}"


@pytest.mark.parametrize("module", [module for module in FILES if room(module) in ONLY])
def test_the_lowest_rooms_need_very_little(module: str) -> None:
    assert {room(name) for name in ours(module)} <= ONLY[room(module)]


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


@pytest.mark.parametrize("module", FILES)
def test_engines_are_imported_only_where_they_live(module: str) -> None:
    if room(module) not in ENGINE_ROOMS:
        assert not {name.split(".")[0] for name in imported(module)} & ENGINES


@pytest.mark.parametrize("module", FILES)
def test_no_bare_except(module: str) -> None:
    bare = [node.lineno for node in ast.walk(parsed(module)) if isinstance(node, ast.ExceptHandler) and not node.type]
    assert bare == []


def test_no_utils() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert not {name for module in FILES for name in module.split(".")} & drawers


def test_importing_leapahead_brings_in_no_backend() -> None:
    code = (
        "import sys, leapahead, leapahead.decode, leapahead.drafters, leapahead.targets.toy\n"
        "[leapahead.drafters.load(name) for name in leapahead.drafters.BUILT_IN]\n"
        f"print(*sorted({BACKENDS!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)


def test_the_reader_of_imports_reads_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: an import in a function, under TYPE_CHECKING, relative, or by name is seen."""
    file = tmp_path / "made_up.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nfrom importlib import import_module\nimport torch.nn as nn\n"
        "if TYPE_CHECKING:\n    from leapahead import decode\n"
        "def f():\n    from .tree import Budget\n    import leapahead.stop\n    import_module('leapahead.cli')\n"
    )
    monkeypatch.setitem(FILES, "leapahead.made_up", file)
    assert ours("leapahead.made_up") == {"leapahead.decode", "leapahead.tree", "leapahead.stop", "leapahead.cli"}
    assert "torch.nn" in imported("leapahead.made_up")
