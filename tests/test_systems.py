"""The rows of the table of systems are complete, their commands run, and what is measured is recorded row by row."""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import heads
import numpy as np
import pytest
from click.testing import CliRunner, Result

from leapahead.cli import main
from leapahead.core.errors import BadParameter
from leapahead.drafters import registry
from research.cli import main as research
from research.systems.command import _todo
from research.systems.measure import Plan, compared, measured
from research.systems.record import CHECKED, MEASURED, Record, read
from research.systems.rows import NOT_COVERED, ROWS
from research.systems.system import DISTRIBUTION, NOT_FOUND, RELAXED, RULES, System, parsed

ROOT = Path(__file__).parents[1]
DECODING = [system for system in ROWS if system.command.startswith("leapahead generate")]
BY_KEY = {system.key: system for system in ROWS}
PROMPT = "def add(a, b):"


def keys(system: System) -> str:
    return system.key


def run(*words: object) -> Result:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(research, ["systems", *map(str, words)])
    assert "Traceback" not in done.output, done.output
    return done


# -------------------------------------------------------------------------------------------------------- the rows


@pytest.mark.parametrize("system", ROWS, ids=keys)
def test_a_row_says_all_that_the_table_shows(system: System) -> None:
    assert system.rule in RULES
    assert system.differs.endswith(".")
    told = system.published
    figures = {told.length, told.speedup} - {NOT_FOUND, ""}
    assert not figures or told.source, "a published figure has its source"
    assert not figures or told.setting, "and its setting"
    assert bool(system.before) >= bool(system.missing({"build/heads": Path("nowhere")})), "what is missing can be made"


def test_keys_are_unique() -> None:
    assert len(BY_KEY) == len(ROWS)
    assert {name for name, _, _ in NOT_COVERED}.isdisjoint(system.name for system in ROWS)


@pytest.mark.parametrize("system", DECODING, ids=keys)
def test_a_command_is_understood_by_the_program(system: System) -> None:
    """Its drafter and its options are registered, and its rule is the one that the row says."""
    found = parsed(system.command).configuration
    kind = registry.load(found.drafter)
    assert set(found.options) <= set(registry.options(kind))
    # Datastores and heads are read when their drafters are made.
    if not (system.made_here or system.missing({}) or "FOLDER" in system.command):
        registry.make(found.drafter, **found.options)
    assert (found.acceptance is not None) == (system.rule == RELAXED)
    assert getattr(kind, "same_text", True) == (system.rule != DISTRIBUTION)


def test_only_commands_of_the_program_are_parsed() -> None:
    with pytest.raises(ValueError, match="does not begin with leapahead generate"):
        parsed("leapahead check -d jacobi")


def test_folders_of_the_user_replace_those_that_are_printed() -> None:
    space = BY_KEY["space"]
    assert " -m there/space/tuned " in space.with_folders({"build/heads": Path("there")})
    assert space.with_folders({"build/head": Path("there")}) == space.command
    assert space.missing({"build/heads": Path("there")}) == ["there/space/tuned", "there/space/tuned/probes"]


# ------------------------------------------------------------------------------------------------------ the record


def test_the_committed_record_has_every_row_and_no_mismatch() -> None:
    """`python -m research systems --resume --minutes 0` renews the descriptions of rows that were edited."""
    found = read(ROOT / "docs/bench/systems")
    assert list(found["rows"]) == [system.key for system in ROWS]
    assert found["not_covered"] == [list(each) for each in NOT_COVERED]
    for system in ROWS:
        row = found["rows"][system.key]
        assert {name: row[name] for name in system.as_dict()} == json.loads(json.dumps(system.as_dict()))
        for figures in (*row.get(MEASURED, {}).values(), *row.get(CHECKED, {}).values()):
            assert figures["mismatches"] == 0
        for figures in row.get(CHECKED, {}).values():
            assert figures["tokens"] >= 5000


def test_a_record_is_resumed_row_by_row(tmp_path: Path) -> None:
    one, other = DECODING[:2]
    record = Record(tmp_path, [one, other], resume=False)
    record.agree(MEASURED, {"rounds": 2, "date": "today", "commit": "abc"})
    record.add(one, MEASURED, 0.0, {"mismatches": 0})
    with pytest.raises(BadParameter, match="already holds results; pass --resume"):
        Record(tmp_path, [one, other], resume=False)

    again = Record(tmp_path, [other, one], resume=True)
    assert list(read(tmp_path)["rows"]) == [other.key, one.key]
    assert again.has(one, MEASURED, 0.0)
    assert not again.has(other, MEASURED, 0.0)
    again.agree(MEASURED, {"rounds": 2, "date": "tomorrow", "commit": "def"})
    again.add(other, MEASURED, 0.0, {"mismatches": 0})
    figures = [read(tmp_path)["rows"][row.key][MEASURED]["0"] for row in (one, other)]
    assert [each["commit"] for each in figures] == ["abc", "def"]  # each is of the run that made it
    with pytest.raises(BadParameter, match="rounds was 2 and is 3"):
        again.agree(MEASURED, {"rounds": 3, "date": "tomorrow"})


def test_figures_of_another_machine_say_so(tmp_path: Path) -> None:
    one, other = DECODING[:2]
    record = Record(tmp_path, [one, other], resume=False)
    first = {"commit": "abc", "cpu": "a processor", "versions": {"torch": "1"}, "rounds": 2}
    record.agree(MEASURED, first)
    record.add(one, MEASURED, 0.0, {"mismatches": 0})
    again = Record(tmp_path, [one, other], resume=True)
    again.agree(MEASURED, {**first, "commit": "def", "cpu": "another"})
    again.add(other, MEASURED, 0.0, {"mismatches": 0})
    found = read(tmp_path)
    assert found["conditions"][MEASURED] == first
    assert found["rows"][one.key][MEASURED]["0"] == {"mismatches": 0, "commit": "abc"}
    assert found["rows"][other.key][MEASURED]["0"] == {"mismatches": 0, "commit": "def", "cpu": "another"}


def test_the_page_names_the_rows_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    page = importlib.import_module("systems")
    figures = {"commit": "abc", "mismatches": 0}
    other = {**figures, "cpu": "another", "versions": {"torch": "2", "numpy": "1"}}
    rows = {"a": {"name": "A", MEASURED: {"0": figures, "1": figures}}, "b": {"name": "B", MEASURED: {"0": other}}}
    told = {kind: {"versions": {"torch": "1", "numpy": "1"}} for kind in (MEASURED, CHECKED)}
    found = {"conditions": told, "rows": rows}
    lines = page._origins(found, MEASURED).splitlines()
    assert (lines[0], lines[-1]) == (
        "The figures are of commit abc. Other conditions have the rows:",
        "- commit abc on another with torch 2: B",
    )
    rows = {name: {"name": row["name"], CHECKED: row[MEASURED]} for name, row in rows.items()}
    assert page._origins({**found, "rows": rows}, CHECKED).endswith("\n- on another with torch 2: B")


def test_figures_of_another_command_are_dropped(tmp_path: Path) -> None:
    from dataclasses import replace

    one = DECODING[0]
    Record(tmp_path, [one], resume=False).add(one, MEASURED, 0.0, {"mismatches": 0})
    edited = replace(one, differs="In other words.")
    assert Record(tmp_path, [edited], resume=True).has(edited, MEASURED, 0.0)
    other = replace(one, command=f"{one.command} -o seed=1")
    assert not Record(tmp_path, [other], resume=True).has(other, MEASURED, 0.0)


def test_a_mismatch_is_an_error_that_names_its_row(tmp_path: Path) -> None:
    one = DECODING[0]
    record = Record(tmp_path, ROWS, resume=False)
    record.add(one, CHECKED, 1.0, {"mismatches": 3})
    assert record.mismatches() == [f"{one.key}, checked at temperature 1: 3"]
    done = run("--out", tmp_path, "--resume", "--minutes", 0, "--row", one.key)
    assert done.exit_code == 1
    assert f"MISMATCH: a text of an exact rule differs from plain decoding's: {one.key}, checked" in done.output


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="cannot be read"):
        read(tmp_path)
    (tmp_path / "systems.json").write_text("[]", encoding="utf-8")
    with pytest.raises(BadParameter, match="is not a record of systems"):
        read(tmp_path)


# ------------------------------------------------------------------------------------------------------ the command


def test_an_unknown_row_is_refused(tmp_path: Path) -> None:
    done = run("--out", tmp_path, "--row", "nothing")
    assert isinstance(done.exception, BadParameter) or done.exit_code == 2
    assert not (tmp_path / "systems.json").exists()


def test_a_row_that_is_named_is_done_anew(tmp_path: Path) -> None:
    one, other = DECODING[:2]
    record = Record(tmp_path, [one, other], resume=False)
    record.add(one, MEASURED, 0.0, {"mismatches": 0})
    todo = [list(_todo([one, other], record, MEASURED, anew)) for anew in (False, True)]
    assert todo == [[(other, 0.0), (one, 1.0), (other, 1.0)], [(one, 0.0), (other, 0.0), (one, 1.0), (other, 1.0)]]


@pytest.mark.slow
def test_a_row_is_measured_and_compared(tmp_path: Path) -> None:
    some = ["--out", tmp_path, "--row", "prompt-lookup", "--max-new-tokens", 6]
    measure = [*some, "--limit", 1, "--rounds", 1]
    assert run(*measure).exit_code == 0
    assert run(*some, "--check", "--tokens", 9, "--resume").exit_code == 0
    found = read(tmp_path)
    row = found["rows"]["prompt-lookup"]
    for figures in row[MEASURED].values():
        assert figures["mismatches"] == 0
        assert figures["acceptance_length"] >= 1
        assert figures["speedup"]["median"] > 0
    assert {temperature: figures["mismatches"] for temperature, figures in row[CHECKED].items()} == {"0": 0, "1": 0}
    assert all(figures["tokens"] >= 9 for figures in row[CHECKED].values())
    assert found["conditions"][CHECKED]["tokens"] == 9
    assert MEASURED not in found["rows"]["jacobi"]


def test_a_row_without_its_weights_is_left_out(tmp_path: Path) -> None:
    done = run("--out", tmp_path, "--row", "medusa", "--heads", tmp_path / "none")
    assert done.exit_code == 0
    assert MEASURED not in read(tmp_path)["rows"]["medusa"]


@pytest.mark.slow
def test_a_wrong_text_is_counted(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where acceptance is broken on purpose, both comparisons see it."""
    from leapahead.bench.contender import Configuration
    from leapahead.core import relaxed
    from leapahead.engine import loop
    from leapahead.models import loading

    loaded = loading.load(str(tiny_folder), dtype="float32")
    configuration = Configuration("prompt_lookup", {})
    prompts = [[5, 9, 30, 41, 5, 9, 30, 41, 5, 9]]

    def counted() -> tuple[int, int]:
        plan = Plan(max_new_tokens=12, rounds=1)
        one = measured(loaded, configuration, prompts, plan, 0.0)
        other = compared(loaded, configuration, prompts, 12, 0.0, max_new_tokens=12)
        return one["mismatches"], other["mismatches"]

    assert counted() == (0, 0)
    rule = relaxed.TopBeta(beta=1000, tau=1000.0)
    verify = loop.verify

    def lenient(tree: Any, chosen: Any) -> Any:
        if len(tree) == 1:
            return verify(tree, chosen)
        return relaxed.verify_relaxed(tree, chosen, lambda node: np.zeros(400), rule)

    monkeypatch.setattr(loop, "verify", lenient)
    assert all(counted())


# ------------------------------------------------------------------------------------------------ every command runs


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders like those of the recipes, with random weights for the tiny model; and hub names as folders."""
    import seq2seq
    import test_probes
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("made")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    vocabulary = model.config.vocab_size
    for kind in ("medusa", "hydra", "hydra++", "eagle", "peagle", "dflash", "dflash2"):
        heads.write(root / "heads" / kind / "head", kind, vocabulary)
    test_probes.write(root / "heads/pass/head", "pass", model)
    shutil.copytree(tiny_folder, root / "heads/space/tuned")
    test_probes.write(root / "heads/space/tuned/probes", "space", model)
    for where in ("distilled/draft/draft", "distilled/cllm/tuned"):
        shutil.copytree(tiny_folder, root / where)
    t5 = seq2seq.build("t5", vocab_size=vocabulary)
    t5.save_pretrained(root / "repair/model")
    tokenizer.save_pretrained(root / "repair/model")
    shutil.copytree(root / "repair/model", root / "repair/drafter/draft")
    _with_mask(root / "repair/drafter/draft")
    _with_mask(shutil.copytree(tiny_folder, root / "distilled/pard/draft"))
    return {
        **{f"build/{name}": root / name for name in ("heads", "distilled", "repair")},
        "dspark": heads.write(root / "dspark", "dspark", vocabulary),
        "jetspec": _jetspec(root / "jetspec", vocabulary),
        "build/systems": root / "systems",
    }


def _with_mask(folder: Path) -> None:
    """Names a mask token in the config of a draft model."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "pard_token": 3}), encoding="utf-8")


def _jetspec(folder: Path, vocabulary: int) -> Path:
    from leapahead.drafters.heads import checkpoint

    given = heads.config_of("dflash", vocabulary)
    own = {"target_layer_ids": [0, 1], "mask_token_id": 3, "causal_head": True}
    config = {**given["transformer_layer_config"], "block_size": 4, "dflash_config": own, "num_target_layers": 2}
    checkpoint.write(folder, config, heads.tensors_of("dflash", vocabulary))
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the draft model")  # which may take as long as the tiny model
@pytest.mark.parametrize("system", [each for each in DECODING if each.key != "mtp"], ids=keys)  # see test_mtp
def test_a_command_runs(system: System, made: dict[str, Path], tiny_folder: Path, tmp_path: Path) -> None:
    """As it is printed where the checkout has all that it needs; else on a tiny model with random weights."""
    command = system.with_folders(made)
    tiny = ["-m", str(tiny_folder)] if "build/" in system.command and "-m " not in system.command else []
    if system.made_here:
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_text('{"answer": "def add(a, b): return a + b"}\n' * 3, encoding="utf-8")
        build = system.before.replace("../shared/data/gsm8k_train.jsonl", str(corpus)).replace(" src ", " ")
        build = build.replace("build/systems", str(made["build/systems"]))
        made["build/systems"].mkdir()
        assert CliRunner().invoke(main, [*shlex.split(build)[1:], *tiny]).exit_code == 0
    if system.elsewhere:
        command = command.replace("FOLDER", str(made.get(system.key, "")))
        tiny = ["-m", str(tiny_folder)]
    words = [*shlex.split(command)[1:], *tiny, "--max-new-tokens", "6", "-q", PROMPT]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, f"{shlex.join(words)}: {done.output}{done.stderr}"
