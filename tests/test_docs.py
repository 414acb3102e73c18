"""Generated blocks are up to date, numbers agree with the data, links lead somewhere, and the site builds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import leapahead

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)


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


def test_the_conditions_of_several_benches_are_one_line() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import benches
    finally:
        sys.path.pop(0)
    notes = {"one": "Conditions: a, b 1; commit x.", "two": "Conditions: a, b 2; commit x."}
    assert benches.together(notes) == "Conditions: a, b 1 (one) and b 2 (two); commit x."


def test_the_figures_hold_what_is_promised() -> None:
    """The committed run compared at least 20,000 tokens with every drafter, over all settings, without a mismatch."""
    rows = json.loads((ROOT / "docs/figures.json").read_text(encoding="utf-8"))["check"]
    assert {(row["temperature"], row["batch"]) for row in rows} == {(0.0, 1), (0.0, 4), (1.0, 1), (1.0, 4)}
    assert {row["drafter"] for row in rows} >= {"plain", "jacobi", "prompt_lookup", "lookahead"}
    for row in rows:
        assert row["mismatches"] == 0
    for drafter in {row["drafter"] for row in rows}:
        assert sum(row["tokens"] for row in rows if row["drafter"] == drafter) >= 20_000


def test_every_figure_is_linked() -> None:
    """And every link of a document leads to a figure that is there, see below."""
    linked = {
        (path.parent / target).resolve()
        for path in DOCUMENTS
        for target in re.findall(r"!\[[^\]]*\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    }
    figures = sorted((ROOT / "docs/figures").glob("*.svg"))
    assert figures
    assert [path.name for path in figures if path.resolve() not in linked] == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs/figures").glob("*.json")), ids=lambda path: path.name)
def test_a_figure_is_drawn_from_its_data(path: Path) -> None:
    """Small, with its conditions, and the plot beside it."""
    assert path.stat().st_size < 200_000
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["conditions"]["versions"]["leapahead"]
    assert path.with_suffix(".svg").read_text(encoding="utf-8").count("<svg") == 1


def test_the_page_of_claims_says_what_the_data_say() -> None:
    """Its generated blocks are compared with the data above; here a few numbers by hand, from the data to the page."""
    page = (ROOT / "docs/research/claims.md").read_text(encoding="utf-8")
    for name in ("compression", "compression-sampled"):
        found = json.loads((ROOT / f"docs/figures/{name}.json").read_text(encoding="utf-8"))
        assert f"α = {found['fit']['alpha']:.3f}, f = {found['fit']['f']:.3f}" in page
        assert all(row["different_texts"] == 0 for row in found["rows"])
    overall = json.loads((ROOT / "docs/figures/pool.json").read_text(encoding="utf-8"))["overall"]
    assert f"greedy: {overall['acceptance_length']:.2f} tokens a step; by the formula" in page
    assert "60.00 MiB" in page  # 120 tokens of half a MiB: 2 x 32 layers x 32 heads x 128 x 2 bytes


@pytest.mark.parametrize("name", ["135m", "1b"])
def test_the_report_is_a_bench_without_a_mismatch_of_ours(name: str) -> None:
    folder = ROOT / "docs/bench" / name
    found = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    told = found["conditions"]
    assert told["commit"]
    assert not told["commit"].endswith("-dirty")
    assert {target["backend"] for target in told["targets"].values()} == {"transformers", "llama.cpp"}
    ours = [row for row in found["results"] if not row["drafter"].startswith("peer:")]
    assert {row["drafter"] for row in ours} >= {"plain", "jacobi", "prompt_lookup", "lookahead"}
    assert sum(row["mismatches"] for row in ours) == 0
    assert {"peer:transformers", "peer:llama-lookahead", "peer:vllm-suffix"} <= {r["drafter"] for r in found["results"]}
    assert (folder / "report.md").read_text(encoding="utf-8").count("| overall |") > 10


def test_a_number_of_the_bench_is_the_one_in_the_readme() -> None:
    """By hand, beside the comparison of whole blocks: from the samples of a row to the text."""
    found = json.loads((ROOT / "docs/bench/auto/135m/bench.json").read_text(encoding="utf-8"))
    rows = [
        r for r in found["results"] if r["temperature"] == 0 and r["target"] == "135m-bf16" and r["task"] != "overall"
    ]
    speeds = {}
    for drafter in ("plain", "auto"):
        samples = [r["samples"] for r in rows if r["drafter"] == drafter]
        tokens, seconds = (sum(sum(each[key][0]) for each in samples) for key in ("tokens", "seconds"))
        speeds[drafter] = tokens / seconds
    line = next(
        line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if "bfloat16, 135M |" in line
    )
    assert f"**{speeds['auto'] / speeds['plain']:.2f} (" in line


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if not target.startswith("http"):
            page = path.parent / target if target else path
            assert page.exists(), f"{path.name}: {target}"
            # A documented name has its place by a directive; the build of the site looks for it.
            assert not anchor or anchor.startswith("leapahead.") or anchor in anchors(page), f"{path.name}: {link}"


def test_what_is_called_as_an_attribute_of_the_package_is_one() -> None:
    """Other modules of it must be imported by name."""
    for path in DOCUMENTS:
        called = re.findall(r"\bleapahead\.(\w+)[\w.]*\(", path.read_text(encoding="utf-8"))
        assert {*called} <= {*leapahead.__all__, "hf"}, path.name


def test_every_member_that_the_reference_names_exists() -> None:
    for path in sorted((ROOT / "docs/reference").glob("*.md")):
        blocks = re.findall(r"^::: leapahead\.(\w+)\n.*\n +members: \[(.+)\]", path.read_text(encoding="utf-8"), re.M)
        for owner, members in blocks:
            for name in members.split(", "):
                assert hasattr(getattr(leapahead, owner), name), f"{path.name}: {owner}.{name}"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as the site and GitHub name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_extra_is_described() -> None:
    table = (ROOT / "docs" / "guide" / "installation.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(extras)


def test_what_an_example_needs_is_told() -> None:
    """Each package that an example imports is named on the page of examples."""
    page = (ROOT / "docs/guide/examples.md").read_text(encoding="utf-8").lower()
    for path in (ROOT / "examples").glob("*.py"):
        imported = re.findall(r"^ *(?:import|from) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        for package in {*imported} - {*sys.stdlib_module_names, "leapahead", "torch"}:
            assert re.search(rf"\b{package}\b", page), f"{path.name}: {package}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.slow
def test_the_site_builds_without_a_warning() -> None:
    """Strict: every link, anchor, page of the navigation and documented name exists."""
    pytest.importorskip("zensical")
    done = run("-m", "zensical", "build", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (ROOT / "build/site/reference/llm.html").read_text(encoding="utf-8").count("AsyncLLM") > 1
