"""Every example of this environment runs, and so does every complete block of code in README and the guide."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
ELSEWHERE = ("vllm_", "ray_")  # examples that need another environment, and run there
HERE = sorted(path.stem for path in EXAMPLES.glob("*.py") if not path.name.startswith(ELSEWHERE))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/guide").glob("*.md"))]


def run(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, cwd=ROOT, input=stdin, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_an_example_runs(name: str) -> None:
    printed = run(f"examples/{name}.py", stdin="Tom has 3 apples. How many has he?\nAnd now?\n")
    assert printed.strip()


@pytest.mark.slow
def test_the_code_edit_gains_by_its_prediction() -> None:
    printed = run("examples/code_edit.py")
    without, with_prediction = (int(count) for count in re.findall(r"in (\d+) forwards", printed))
    assert with_prediction < without


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "forwards" in run("-c", "\n".join(code))
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")


def test_the_example_of_the_readme_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The text exactly; how many forwards it took depends on the machine's latency profile."""
    (code, *_), (shown, *_) = blocks(ROOT / "README.md"), blocks(ROOT / "README.md", "text")
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.rstrip().splitlines()
    assert printed[:-1] == shown.rstrip().splitlines()[:-1]
    tokens, forwards = (int(count) for count in re.findall(r"\d+", printed[-1]))
    assert forwards < tokens / 3


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_code_of_a_page_runs(path: Path) -> None:
    """Those blocks that load a model of their own, the bundled one; the others are fragments."""
    complete = [block for block in blocks(path) if "LLM()" in block or "load()" in block]
    if complete:
        run("-c", "\n\n".join(complete))
