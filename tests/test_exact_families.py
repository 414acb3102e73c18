"""Texts in exact mode are plain decoding's, on models with windows and experts of every engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
pytest.importorskip("openvino_tokenizers")

from research import exact_families
from research.cli import main

ROOT = Path(__file__).parents[1]
ROWS = json.loads((ROOT / exact_families.OUT).read_text(encoding="utf-8"))["rows"]
CASES = exact_families.cases()


def assert_equal(row: dict[str, Any]) -> None:
    """Nothing differs, or the family is refused by name."""
    assert "refused" in row or row["differing"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "/".join(map(str, case.key)))
def test_texts_are_plain_decodings(case: exact_families.Case) -> None:
    assert_equal(exact_families.measured(case, 4, 24))


def test_the_measured_rows() -> None:
    """At least 10,000 tokens of each case, none of which differs, where the control finds differences."""
    names = ("engine", "weights", "family", "temperature")
    written = [tuple(row[name] for name in names) for row in ROWS]
    assert written == [case.key for case in CASES if case.key in written]
    for row in ROWS:
        assert_equal(row)
        assert "refused" in row or row["tokens"] >= 10_000
    for engine in {row["engine"] for row in ROWS if "control" in row}:
        controls = [row["control"] for row in ROWS if row["engine"] == engine and "control" in row]
        assert sum(control["differing"] for control in controls) > 0


@pytest.mark.slow
def test_the_command_writes_every_case_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    keys = {("llama.cpp", "bf16", "mixtral", 0.3), ("Transformers", "bf16", "gpt_oss", 0.0)}
    some = [case for case in CASES if case.key in keys]
    monkeypatch.setattr(exact_families, "cases", lambda: some)
    out = tmp_path / "rows.json"
    words = ["exact-families", str(ROOT / "tests"), "--texts", "2", "--max-new-tokens", "6", "--out", str(out)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    refused, compared = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert refused["refused"].startswith("the attention of GptOssAttention uses s_aux")
    assert compared["differing"] == 0
    assert compared["tokens"] == 2 * 6 * len(compared["drafters"])
    before = out.read_bytes()
    done = CliRunner().invoke(main, [*words, "--resume"])
    assert (done.exit_code, done.output) == (0, "")  # nothing is left to measure
    assert out.read_bytes() == before


@pytest.mark.slow
def test_without_exact_mode_texts_differ() -> None:
    """The control can fail: rounding shows on the same models."""
    case = next(case for case in CASES if case.key == ("Transformers", "bf16", "mistral", 0.0))
    assert exact_families.measured(case, 16, 40)["control"]["differing"] > 0
