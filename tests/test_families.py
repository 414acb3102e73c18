"""The table of families in the documentation names all families of the tests, with what their targets find."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import architectures
import pytest
import seq2seq
from click.testing import CliRunner

from research.cli import main

ROOT = Path(__file__).parents[1]
ROWS = json.loads((ROOT / "docs/families.json").read_text(encoding="utf-8"))["rows"]
EXPECTED = {"tree": "trees", "chain": "chains", "replay": "chains with replay", "plain": "plain"}


def test_the_table_names_all_families_of_transformers() -> None:
    written = {row["family"]: row["mode"] for row in ROWS if row["engine"] == "Transformers"}
    assert written == {each.name: EXPECTED[each.expect] for each in architectures.EVERY}


def test_the_table_names_all_encoder_decoder_models() -> None:
    written = {row["family"]: row["mode"] for row in ROWS if row["engine"] == "Transformers, encoder-decoder"}
    assert written == {name: "chains" if name in ("umt5", "m2m") else "trees" for name in seq2seq.MODELS}


def test_the_table_names_all_architectures_of_gguf_files() -> None:
    pytest.importorskip("gguf")
    import gguf_architectures

    written = [row["family"] for row in ROWS if row["engine"] == "llama.cpp"]
    assert written == [each.name for each in gguf_architectures.ARCHITECTURES]


def test_the_table_names_all_families_under_openvino() -> None:
    """What exports is decoded with drafts, and what has recurrent layers is refused."""
    written = {row["family"]: row for row in ROWS if row["engine"] == "OpenVINO"}
    assert list(written) == [each.name for each in architectures.EVERY]
    for each in architectures.EVERY:
        mode = written[each.name]["mode"]
        if each.expect in ("replay", "plain"):
            assert mode == "refused"
        else:
            assert mode in (("trees", "chains") if each.name not in ("dbrx", "roberta") else ("refused",))


def test_the_page_has_every_family_and_a_reason_for_what_is_missing() -> None:
    """`test_generated_blocks_are_fresh` compares the whole block."""
    page = (ROOT / "docs/guide/models.md").read_text(encoding="utf-8")
    block = page.partition("<!-- generated: families -->")[2].partition("<!-- end -->")[0]
    assert all(f"`{row['family']}`" in block for row in ROWS)
    assert all(row["why"] for row in ROWS if row["mode"] != "trees")


@pytest.mark.slow
def test_the_command_writes_what_the_targets_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a few families: what it writes is what is committed."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    pytest.importorskip("openvino_tokenizers")
    import gguf_architectures

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(seq2seq, "MODELS", {"mbart": seq2seq.MODELS["mbart"]})
    some = ("mbart", "llama", "bloom", "lfm2", "mamba", "recurrent_gemma", "deepseek_v32", "nemotron_h")
    for module in (architectures, gguf_architectures):
        monkeypatch.setattr(module, "ARCHITECTURES", [each for each in module.ARCHITECTURES if each.name in some])
    out = tmp_path / "families.json"
    done = CliRunner().invoke(main, ["families", str(ROOT / "tests"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text(encoding="utf-8"))["rows"] == [row for row in ROWS if row["family"] in some]
