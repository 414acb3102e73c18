"""Loading of draft models: by name, loaded, or made of the target itself; what cannot draft is refused by name."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leapahead import LLM, Engine
from leapahead.cli import main
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.drafters import draft_models
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.models import loading
from leapahead.models.base import TOP_K
from leapahead.models.loading import Loaded
from leapahead.models.toy import ToyTarget


class NoChains(ToyTarget):
    def __init__(self) -> None:
        super().__init__(capabilities=frozenset({TOP_K}))


def test_what_cannot_draft_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"toy.* cannot draft, since it does not have chain"):
        DraftModelDrafter(NoChains())
    with pytest.raises(BadParameter, match=r"needs draft=\.\.\., the smaller model"):
        DraftModelDrafter()
    with pytest.raises(BadParameter, match="there is no folder"):
        Engine(ToyTarget()).drafter("draft_model", draft=str(tmp_path / "none"))
    with pytest.raises(BadParameter, match=r"'plain' names a drafter, and no model: give drafter='plain'"):
        Engine(ToyTarget()).drafter("draft_model", draft="plain")
    with pytest.raises(BadParameter, match="draft names no model"):
        DraftModelDrafter(" , ")
    with pytest.raises(Refused, match=r"drafter 'draft_model' needs chain"):
        LLM(NoChains(), drafter="draft_model", draft=ToyTarget())


def test_the_name_of_a_folder_may_have_a_comma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "small,fast"
    folder.mkdir()
    monkeypatch.setattr(loading, "check_place", lambda name: None)
    assert draft_models.parsed(folder) == draft_models.parsed(str(folder)) == [str(folder)]
    assert draft_models.parsed(f"{folder}, bundled") == [f"{tmp_path}/small", "fast", "bundled"]
    assert draft_models.parsed([folder, "bundled"]) == [str(folder), "bundled"]


def test_a_draft_model_that_does_not_fit_beside_the_target_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "big.gguf"
    file.write_bytes(b"x" * 5000)
    monkeypatch.setattr(draft_models, "free_host_bytes", lambda: 4000)
    with pytest.raises(BadParameter, match=r"does not fit beside the target: its weights are .* GiB"):
        draft_models.load(str(file))


def test_a_name_is_loaded_once_for_all_drafters_of_an_engine_and_released_with_it() -> None:
    target = ToyTarget(vocab_size=4096)
    engine = Engine(target)
    models = [
        engine.drafter(name, draft="bundled").host.draft_models.get("bundled", target)
        for name in ("draft_model", "auto", "speculative_sampling")
    ]
    assert models[0] is models[1] is models[2]
    released = weakref.ref(models[0])
    del engine, models
    gc.collect()
    assert released() is None


def test_a_named_draft_model_is_loaded_as_the_target_was(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "trust_remote_code": True}
    target, seen = loading.load(**given).target, dict[str, Any]()

    def load(name: str, **options: Any) -> Any:
        seen[name] = options
        return draft_models.DraftModel.of(Loaded(ToyTarget(), None, ()))

    monkeypatch.setattr(draft_models, "load", load)
    models = draft_models.DraftModels()
    for name, beside in (("x", target), ("y", ToyTarget())):
        models.get(name, beside)
    assert seen == {"x": {"engine": "auto", **given}, "y": {}}


def test_another_tokenizer_is_refused_by_the_first_difference(tokenizer: Any) -> None:
    bundled = draft_models.load("bundled")
    assert bundled.tokenizer is not None
    target = ToyTarget(vocab_size=4096)
    with pytest.raises(BadParameter, match="another vocabulary than the target: "):
        Engine(target, tokenizer=tokenizer).drafter("draft_model", draft=bundled)
    with pytest.raises(BadParameter, match="another vocabulary"):
        Engine(target, tokenizer=bundled.tokenizer).drafter("auto", draft=Loaded(ToyTarget(), tokenizer, ()))
    Engine(target, tokenizer=bundled.tokenizer).drafter("draft_model", draft=bundled)


# ------------------------------------------------------------------------------------------------ the public interface


@pytest.mark.slow
def test_llm_takes_a_draft_model_for_all_its_drafters() -> None:
    llm = LLM(dtype="float32", drafter="draft_model", draft="bundled", nodes=6, depth=3)
    plain = LLM(dtype="float32", drafter="plain").generate("def add(a, b):", max_new_tokens=24)
    result = llm.generate("def add(a, b):", max_new_tokens=24)
    assert result.text == plain.text
    assert result.stats.accepted_by["draft"] > 0
    given = {"depth": 2, "width": 2}
    other = llm.generate("def add(a, b):", max_new_tokens=24, drafter="speculative_sampling", drafter_options=given)
    assert other.text == plain.text  # greedily the rules agree
    assert llm.generate("def add(a, b):", max_new_tokens=8, drafter="plain").tokens == plain.tokens[:8]
    with pytest.raises(BadParameter, match="no option 'draft'"):
        LLM(drafter="suffix", draft="bundled")


def test_the_command_line_takes_a_draft_model() -> None:
    options = ["--draft", "bundled", "-o", "nodes=6", "-o", "depth=3", "--dtype", "float32"]
    arguments = ["check", "-d", "draft_model", *options, "--limit", "1", "--max-new-tokens", "12"]
    checked = CliRunner().invoke(main, arguments)
    assert checked.exit_code == 0, checked.output


@pytest.mark.slow
def test_gguf_drafts_for_gguf_and_for_transformers() -> None:
    from gguf_models import bundled

    small = str(bundled("q8_0"))
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}
    llm = LLM(str(bundled("f32")), drafter="draft_model", draft=small, nodes=6, depth=3, **options)
    for params in ({}, {"temperature": 1.0, "seed": 5}):
        expected = llm.generate("def add(a, b):", max_new_tokens=24, drafter="plain", **params)  # type: ignore[arg-type]
        found = llm.generate("def add(a, b):", max_new_tokens=24, **params)  # type: ignore[arg-type]
        assert found.tokens == expected.tokens
        assert found.stats.acceptance_length > 2
    mixed = LLM(dtype="float32", drafter="draft_model", draft=loading.load(small), nodes=6, depth=3)
    assert mixed.generate("def add(a, b):", max_new_tokens=16).stats.accepted > 4


# ---------------------------------------------------------------------------------------------- the target's own drafts


@pytest.fixture(scope="module")
def own() -> LLM:
    return LLM(dtype="float32", drafter="plain")


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["self:skip=2-3", "self:skip=1m,4a", "self:first=3"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 2}], ids=["greedy", "sampled"])
def test_the_target_drafts_for_itself(own: LLM, draft: str, options: dict[str, Any]) -> None:
    llm = LLM(own.target, tokenizer=own.tokenizer, drafter="draft_model", draft=draft, nodes=6, depth=3)
    expected = own.generate("def add(a, b):", max_new_tokens=24, **options)
    found = llm.generate("def add(a, b):", max_new_tokens=24, **options)
    assert found.tokens == expected.tokens
    assert found.stats.accepted > 2
    assert own.generate("def add(a, b):", max_new_tokens=24, **options).tokens == expected.tokens


@pytest.mark.slow
def test_the_stored_result_of_a_search_is_used_and_its_lack_is_reported(
    own: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path))
    options: dict[str, Any] = {"drafter": "draft_model", "draft": "self:skip", "nodes": 4, "depth": 2}
    with pytest.raises(BadParameter, match="run `leapahead search-layers`"):
        LLM(own.target, tokenizer=own.tokenizer, **options)
    searched = ["search-layers", "--limit", "1", "--trials", "2", "--max-new-tokens", "8", "--dtype", "float32"]
    found = CliRunner().invoke(main, searched)
    assert found.exit_code == 0, found.output
    file = next((tmp_path / "skip").iterdir())
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r'"skip": "[^"]*"', '"skip": "2-3"', text), encoding="utf-8")
    again = LLM(dtype="float32", **options)
    assert again.generate("def add(a, b):", max_new_tokens=12).stats.accepted > 0
    file.write_text(re.sub(r'"skip": "[^"]*"', '"skip": ""', text), encoding="utf-8")
    with pytest.raises(BadParameter, match="does not pay"):
        LLM(dtype="float32", **options)


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ("self:skip=99", "99"),
        ("self:first=0", "draft='self:first=0' is not possible: .* layers; give self:first=1 to"),
        ("self:first=²", "there are self:skip"),
        ("self:sleep", "there are self:skip, self:skip=LAYERS, self:first=N and self:int8"),
        ("self:int8", "float32"),
    ],
)
def test_an_impossible_draft_of_the_target_is_refused_at_construction(own: LLM, draft: str, why: str) -> None:
    with pytest.raises(LeapaheadError, match=why):
        LLM(own.target, tokenizer=own.tokenizer, drafter="draft_model", draft=draft)
    with pytest.raises(Refused, match=r"needs a model of Transformers; for a model of another engine give"):
        LLM(ToyTarget(), drafter="auto", draft=draft)


def test_two_exits_of_one_target_are_refused() -> None:
    with pytest.raises(BadParameter, match="would use the same part of the target's cache"):
        Engine(ToyTarget()).drafter("draft_model", draft=["self:first=2", "self:first=3"])
