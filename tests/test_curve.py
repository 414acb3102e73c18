"""`python -m research curve`: variants, what it refuses, and a run on a small file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_models
import pytest
from click.testing import CliRunner, Result

from leapahead.core.errors import BadParameter
from research.cli import main as research

pytest.importorskip("llama_cpp")

from leapahead.models.llama_cpp.model import load
from leapahead.models.llama_cpp.options import LlamaCppOptions
from research.curve import MOST, Variant

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def curve(*words: Any) -> Result:
    result = CliRunner().invoke(research, ["curve", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_variants(tmp_path: Path) -> None:
    assert Variant.parse("installed") == ("installed", None, {})
    (tmp_path / "llama_cpp").mkdir()
    text = f"other:build={tmp_path},threads=2,flash_attn=off,repack=on"
    options = {"n_threads": 2, "flash_attn": False, "use_extra_bufts": True}
    assert Variant.parse(text) == ("other", tmp_path, options)
    for wrong in ("a:threads=two", "a:build=/nowhere", "a:flash_attn=maybe", "a:mmap=on", "a:threads"):
        with pytest.raises(BadParameter, match=f"--variant {wrong} is not possible because of"):
            Variant.parse(wrong)


@pytest.mark.slow
def test_every_size_of_every_variant_is_measured(tmp_path: Path) -> None:
    file, out = gguf_models.llama("q4_0"), tmp_path / "curve"
    words = ("--variant", "as it is:threads=1", "--variant", "not repacked:threads=1,repack=off")
    result = curve(file, *words, "--rounds", 2, "--repeats", 1, "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.with_suffix(".json").read_text())
    assert [row["variant"] for row in found["rows"]] == ["as it is", "not repacked"]
    for row in found["rows"]:
        assert (row["file"], row["threads"]) == (file.stem, 1)
        assert "Q4_0" in row["type"]
        assert "AVX" in row["build"] or "NEON" in row["build"]
        assert [int(n) for n in row["milliseconds"]] == list(range(1, MOST + 1))
        assert all(0 < each["low"] <= each["median"] <= each["high"] for each in row["milliseconds"].values())
        assert row["relative"]["1"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        assert row["prompt"]["median"] > 0
        assert f"{row['relative']['4']['median']:.2f}" in result.stdout
    assert "not repacked" in out.with_suffix(".svg").read_text()


def test_what_cannot_be_measured_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    for words, said in (
        ((broken, "--out", tmp_path / "out"), "broken.gguf under installed could not be measured"),
        ((tmp_path, "--out", tmp_path / "out"), "is a folder: say to which types it is exported with --types"),
        ((tmp_path, "--types", "q3", "--out", tmp_path / "out"), "a GGUF file of type 'q3' is not possible"),
        ((broken, "--out", "/nowhere/out"), "there is no folder /nowhere"),
    ):
        result = curve(*words)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("error: ")
        assert said in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_profile_belongs_to_a_build_and_to_how_weights_are_laid_out() -> None:
    """Both change T(n), so that a stored profile must not be used for another."""
    file = gguf_models.llama("q4_0")
    usual, other = (load(file, LlamaCppOptions(n_threads=1, use_extra_bufts=each))[0] for each in (True, False))
    assert usual.info.fingerprint != other.info.fingerprint
    assert "AVX" in usual.info.fingerprint or "NEON" in usual.info.fingerprint
