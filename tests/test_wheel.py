"""The wheel: what it holds, and a description that works on a package index."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("leapahead-*.whl")
    with zipfile.ZipFile(file) as opened:
        yield opened


def metadata(wheel: zipfile.ZipFile) -> str:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return wheel.read(name).decode("utf-8")


def test_it_holds_the_package_alone(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"leapahead"}
    assert {"leapahead/py.typed", "leapahead/assets/tiny/config.json", "leapahead/assets/explain.html"} <= {*names}
    assert "leapahead/integrations/custom_generate/generate.py" in names
    assert not any("research" in name or "/train/" in name or name.endswith((".pyc", ".cpp")) for name in names)


def test_it_holds_the_compiled_module_where_this_machine_can_build_it(wheel: zipfile.ZipFile) -> None:
    compiled = [name for name in wheel.namelist() if name.startswith("leapahead/_native.") and name[-4:] != ".pyi"]
    assert len(compiled) == (shutil.which("cmake") is not None and shutil.which("c++") is not None)
    assert len(compiled) <= 1


def test_its_description_has_no_relative_link_and_no_image_of_the_repository(wheel: zipfile.ZipFile) -> None:
    description = Parser().parsestr(metadata(wheel)).get_payload()
    assert isinstance(description, str)
    tokens = [child for token in MarkdownIt().enable("table").parse(description) for child in token.children or ()]
    links = [
        str(token.attrs.get("href") or token.attrs.get("src"))
        for token in tokens
        if token.type in ("link_open", "image")
    ]
    assert [link for link in links if not link.startswith("https://")] == []
    assert "generated:" not in description
    assert "## Install" in description
    assert "| `auto` |" in description


def test_its_metadata(wheel: zipfile.ZipFile) -> None:
    from leapahead import __version__

    told = Parser().parsestr(metadata(wheel))
    assert told["Version"] == __version__
    assert told["License-Expression"] == "Apache-2.0"
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*(told.get_all("Provides-Extra") or ())} == {*project["optional-dependencies"]}
