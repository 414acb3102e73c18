"""The documents say what is so: generated blocks are fresh, the code in them runs, links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_generated_blocks_are_fresh() -> None:
    done = run("tools/docs.py", "--check")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}; run `python tools/docs.py`"


def test_a_stale_block_is_noticed(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import docs
    finally:
        sys.path.pop(0)
    stale = "<!-- generated: drafters -->\nold\n<!-- end -->\n"
    assert docs.renewed(stale, ROOT) != stale
    assert docs.renewed(docs.renewed(stale, ROOT), ROOT) == docs.renewed(stale, ROOT)


def test_the_drafter_of_the_tutorial_runs() -> None:
    (code, *_) = python_blocks(ROOT / "docs/write-a-drafter.md")
    done = run("-W", "error", "-c", code + "\nassert result.stats.drafted > 0, result.stats\n")
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_readme_runs() -> None:
    (code, *_) = python_blocks(ROOT / "README.md")
    done = run("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 1


def test_the_figures_hold_what_is_promised() -> None:
    """The committed run compared at least 20,000 tokens with every drafter, over all settings, without a mismatch."""
    rows = json.loads((ROOT / "docs/figures.json").read_text(encoding="utf-8"))["check"]
    assert {(row["temperature"], row["batch"]) for row in rows} == {(0.0, 1), (0.0, 4), (1.0, 1), (1.0, 4)}
    assert {row["drafter"] for row in rows} >= {"plain", "jacobi", "prompt_lookup", "lookahead"}
    for row in rows:
        assert row["mismatches"] == 0
    for drafter in {row["drafter"] for row in rows}:
        assert sum(row["tokens"] for row in rows if row["drafter"] == drafter) >= 20_000


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
