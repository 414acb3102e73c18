"""`leapahead tune` and the calibration figure: their numbers against each other and against targets that are known."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gguf_models
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from helpers import PROMPT, FixedLatency, run
from test_latency import Timed, line

from leapahead import tune as tuning
from leapahead.bench import plots
from leapahead.bench.conditions import Data, conditions
from leapahead.bench.plan import Model
from leapahead.cli import main, tune_forms
from leapahead.cli.tune import comparison, show_auto
from leapahead.core.errors import BadParameter
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.drafters.base import SequenceDrafter
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models.base import CHAIN, LOGITS, TOP_K, Cost
from leapahead.models.decoder import Decoder
from leapahead.models.loading import Loaded
from leapahead.models.toy import Entries, ToySession, ToyTarget
from leapahead.planner.draft import Forward, Proposal, SequenceView, Step
from leapahead.planner.latency import LatencyProfile
from leapahead.planner.profile import LatencyProfiles, ProfileStore
from research import plots as figures
from research.curves.calibration import LEAST_NODES, binned, calibration, trials

PROMPTS = (PROMPT, (4, 5, 6, 4, 5), (7, 1, 7, 2))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ------------------------------------------------------------------------------------------------------- numbers


def test_the_rows_say_what_the_target_takes() -> None:
    target = Timed(line(0.1, 0.002))
    found, profiles = tuning.tune(target, seconds=3.0, clock=target.clock)
    rows = {row["nodes"]: row for row in found["rows"]}
    assert rows[1]["milliseconds"]["median"] == pytest.approx(2.0)
    assert rows[1]["last_node"] is rows[1]["needs"] is None
    for n, row in rows.items():
        assert row["cost"] == pytest.approx(1 + 0.1 * (n - 1), rel=1e-3)
        if n > 1:
            assert row["last_node"] == pytest.approx(0.1, rel=1e-2)
            assert row["needs"] == pytest.approx(0.1, rel=1e-2)
    assert found["free"] == 1  # 1.1 times a plain step, and not more
    assert not found["busy"]
    assert not found["few"]
    assert max(row["times"] for row in rows.values()) >= 3
    assert profiles.profile(1)(8) == pytest.approx(0.0034, rel=1e-3)
    assert LatencyProfiles(target.info).profile(1)(8) == pytest.approx(0.0034, rel=1e-3)  # and so do later processes


def test_a_busy_machine_is_measured_again_and_nothing_is_stored() -> None:
    """Half of the forwards take three times as long as the others."""
    target = Timed()
    target.seconds = lambda rows: 0.006 if int(target.clock.now / 0.05) % 4 else 0.002
    told: list[int] = []
    found, _ = tuning.tune(target, seconds=1.0, clock=target.clock, progress=lambda what, done, all: told.append(all))
    assert list(dict.fromkeys(told)) == [1000, 2000, 4000]
    assert found["busy"]
    assert found["stored"] is None
    assert ProfileStore(target.info.fingerprint).read(1) is None


def test_too_few_samples_are_measured_again() -> None:
    """At 0.05 s for each forward one second is enough for one or two samples of each size, four are for more."""
    target = Timed(lambda rows: 0.05)
    found, _ = tuning.tune(target, seconds=1.0, clock=target.clock)
    assert not found["few"]
    assert found["stored"] is not None
    Path(found["stored"]).unlink()
    slow = Timed(lambda rows: 0.05 + 1e-9 * rows)
    found, profiles = tuning.tune(slow, seconds=0.1, clock=slow.clock)
    assert found["few"]
    assert found["stored"] is None
    assert ProfileStore(slow.info.fingerprint).read(1) is None
    profiles.prepare(slow)
    assert profiles.profile(1)(8) == pytest.approx(0.05, rel=1e-3)  # what follows counts with what was measured
    batch, profiles = tuning.tune(slow, sequences=4, seconds=0.1, clock=slow.clock)
    assert batch["few"]
    profiles.prepare(slow)
    assert profiles.profile(4)(8) == pytest.approx(0.05, rel=1e-3)


def test_what_is_free_may_be_all_that_was_measured() -> None:
    assert tuning.free(LatencyProfile({1: 1.0, 128: 1.05}), 128) == 127
    assert tuning.free(LatencyProfile({1: 1.0, 2: 1.5, 4: 1.0}), 4) == 0
    assert tuning.free(LatencyProfile({4: 1.0, 8: 1.1, 16: 2.0}), 16, sequences=4) == 4


def test_a_batch_is_measured_by_rows_and_kept_beside_the_others() -> None:
    target = Timed(line(0.1, 0.002))
    LatencyProfiles(target.info).put(1, LatencyProfile({1: 1.0, 2: 2.0}))
    found, profiles = tuning.tune(target, sequences=4, seconds=3.0, clock=target.clock)
    assert {row["nodes"] % 4 for row in found["rows"]} == {0}
    one, two = found["rows"][:2]
    # Four rows take 1.3 units for four tokens; four more take 0.4, and each must bring a share of those four tokens.
    assert two["needs"] == pytest.approx(0.4 / 1.3, rel=1e-3)
    assert two["last_node"] == pytest.approx(0.4 / 1.3, rel=1e-3)
    assert one["cost"] == 1.0
    kept = json.loads(profiles.store.path.read_text())["profiles"]
    assert set(kept) == {"1", "4"}
    assert kept["1"]["seconds"] == {"1": 1.0, "2": 2.0}


def test_a_window_is_recommended_where_rows_are_free_and_not_where_they_cost() -> None:
    flat = tuning.lookahead(LatencyProfile({1: 1.0, 128: 1.02}), 128)
    (best,) = [row for row in flat if row["best"]]
    assert best["speedup"] == max(row["speedup"] for row in flat) > 1.5
    steep = tuning.lookahead(LatencyProfile({1: 1.0, 128: 30.0}), 128)
    assert not any(row["best"] for row in steep)
    assert max(row["speedup"] for row in steep) < 1
    unknown = tuning.lookahead(LatencyProfile({1: 1.0, 16: 1.0}), 16)
    assert {row["speedup"] is None for row in unknown if row["nodes"] > 16} == {True}  # not measured, not told
    assert all(row["at_most"] == pytest.approx(row["compression"]) for row in unknown)  # not ruled out either
    assert sum(row["best"] for row in unknown) == 1
    hopeless = tuning.lookahead(LatencyProfile({1: 1.0, 4: 2.0}), 4)
    assert all(row["speedup"] is None and row["at_most"] < 1 for row in hopeless)


def test_every_drafter_is_served_or_refused_by_name() -> None:
    chained = {row["name"]: row["refused"] for row in tuning.served(ToyTarget(capabilities=frozenset({CHAIN})))}
    assert chained["plain"] is chained["prompt_lookup"] is None
    assert "needs tree" in chained["lookahead"]


@pytest.mark.parametrize("sequences", [1, 2])
def test_the_prices_of_a_practice_are_those_of_its_forwards(sequences: int) -> None:
    target = ToyTarget(order=1, capabilities=frozenset({CHAIN, LOGITS, TOP_K}))  # no tree, and so no window
    latency = FixedLatency(target, {1: 1.0, 101: 26.0} if sequences == 1 else {2: 1.0, 102: 26.0})
    # Every row costs a quarter of a step.
    found = tuning.practise(target, latency, PROMPTS, sequences, max_new_tokens=40, seconds=60)
    drafted = sum(row["drafted"] for row in found["sources"])
    assert found["texts"] == {1: 3, 2: 4}[sequences]  # of two at a time the first comes again
    assert drafted > 0
    assert found["nodes_per_step"] == pytest.approx(drafted / found["steps"], abs=1e-3)
    for row in found["sources"]:
        if row["drafted"]:
            # In the time of a row, and of a step of so many texts; of one when the other has ended.
            assert 0.25 * row["drafted"] - 1e-3 <= row["price"] <= 0.25 * sequences * row["drafted"] + 1e-3
            assert row["pays"] == (row["accepted"] > row["price"])
        else:
            assert row["price"] is row["pays"] is None
    assert found["acceptance_length"] > 1.2
    assert {"auto", "plain"} == set(found["tokens_per_second"]) == set(found["expected"])
    # A plain step takes a second and yields a token of each text; drafts take a quarter of that for each row.
    assert found["expected"]["plain"] == pytest.approx(sequences, rel=0.02)
    if sequences == 1:
        expected = found["acceptance_length"] / (1 + 0.25 * found["nodes_per_step"])
        assert found["expected"]["auto"] == pytest.approx(expected, rel=0.02)


def test_few_prompts_are_repeated_until_all_sequences_are_decoded_together() -> None:
    target = ToyTarget()
    found = tuning.practise(
        target, FixedLatency(target, {8: 1.0, 108: 26.0}), PROMPTS, 8, max_new_tokens=40, seconds=60
    )
    assert (len(PROMPTS), found["texts"]) == (3, 8)
    assert found["expected"]["plain"] == pytest.approx(8, rel=0.02)


def test_plain_decoding_of_texts_that_end_apart_is_expected_to_take_its_forwards() -> None:
    """A forward of the last text takes its time, though it yields one token only."""
    target, prompts = ToyTarget(), PROMPTS[:2]
    engine = Engine(target, max_batch=2)
    stop = StopParams(max_new_tokens=40)
    handles = [engine.submit(Request(prompt, engine.drafter("plain"), stop=stop)) for prompt in prompts]
    engine.run(handles)
    one, two = (handle.tokens for handle in handles)
    end = max({*one} & {*two}, key=lambda token: abs(one.index(token) - two.index(token)))
    first, last = sorted((one.index(end) + 1, two.index(end) + 1))
    assert 2 * first < last
    latency = FixedLatency(target, {1: 1.0, 2: 1.0, 102: 1.0})
    found = tuning.practise(target, latency, prompts, 2, max_new_tokens=40, eos_token_ids=[end], seconds=60)
    assert found["expected"]["plain"] == pytest.approx((first + last) / last, rel=0.02)


def test_a_form_is_released_before_the_next_one_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[weakref.ref[ToyTarget]] = []

    def load(path: str | None, **arguments: Any) -> Loaded:
        gc.collect()  # a toy holds itself
        assert all(target() is None for target in targets)
        target = ToyTarget()
        targets.append(weakref.ref(target))
        return Loaded(target, None, ())

    monkeypatch.setattr(tune_forms.loading, "load", load)
    monkeypatch.setattr(tune_forms.tasks, "fitting", lambda *given: PROMPTS)
    monkeypatch.setattr(tuning, "tune", lambda *given, **others: ({}, None))
    monkeypatch.setattr(tuning, "practise", lambda *given, **others: {"expected": dict.fromkeys(("auto", "plain"))})
    tune_forms.compare({"one": Model(), "two": Model()}, {}, [], 1, 4, 0.1, 0.1)
    assert len(targets) == 2


def test_the_first_text_of_a_practice_is_not_counted() -> None:
    opened = []

    class Watched(ToyTarget):
        def open(self, tokens: Sequence[int], *args: Any, **options: Any) -> ToySession:
            opened.append(list(tokens))
            return super().open(tokens, *args, **options)

    target = Watched()
    found = tuning.practise(target, FixedLatency(target, {1: 1.0}), PROMPTS, max_new_tokens=40, seconds=60)
    assert found["tokens"] == 40 * len(PROMPTS)
    assert opened == [list(PROMPTS[-1]), *(list(prompt) for prompt in PROMPTS for _ in ("plain", "auto"))]


def test_a_practice_without_time_says_so() -> None:
    target = ToyTarget()
    found = tuning.practise(target, FixedLatency(target, {1: 1.0}), PROMPTS, seconds=-1)
    assert found["texts"] == found["steps"] == 0
    assert found["nodes_per_step"] is found["acceptance_length"] is found["tokens_per_second"]["auto"] is None
    assert found["expected"] == {"auto": None, "plain": None}


# ------------------------------------------------------------------------------------------------------- command


def call(*words: str) -> Result:
    return CliRunner().invoke(main, ["tune", *words], env={"COLUMNS": "100"})


QUICK = ("--seconds", "0.2", "--text-seconds", "1", "--limit", "1", "--max-new-tokens", "8")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_command_prints_the_numbers_that_it_gives_as_json(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = call(*QUICK, "--json")
    assert given.exit_code == 0, given.output
    found = json.loads(given.stdout)
    file = cache / "latency" / "stored.json"
    assert found["stored"] in (None, *map(str, (cache / "latency").glob("*.json")))
    found |= {"stored": str(file), "busy": False, "few": False}  # whatever else this machine does
    profile = {row["nodes"]: row["cost"] for row in found["rows"]}
    monkeypatch.setattr(tuning, "tune", lambda target, *_, **__: (dict(found), FixedLatency(target, profile)))
    monkeypatch.setattr(tuning, "practise", lambda *_, **__: found["auto"])
    shown = call(*QUICK, "--plot", str(tmp_path / "curve.svg"))
    assert shown.exit_code == 0, shown.output
    table = [line.split() for line in shown.stdout.splitlines()]
    for row in found["rows"]:
        (cells,) = [cells for cells in table if cells[:1] == [str(row["nodes"])] and "█" in cells[-1]]
        assert f"{row['cost']:.2f}" in cells
        assert f"{row['milliseconds']['median']:.4g}" == cells[1]
        assert str(row["times"]) in cells
    for source in found["auto"]["sources"]:
        (cells,) = [cells for cells in table if cells[:1] == [source["name"]]]
        assert str(source["drafted"]) in cells
    assert "Drafters that can draft for this model: auto" in shown.stdout
    assert str(file) in shown.stdout.replace("\n", "")
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    assert not any("nan" in line.lower().split() for line in shown.stdout.splitlines())


@pytest.mark.parametrize(
    ("model", "conditions", "info", "command"),
    [
        ("a.gguf", {"backend": "llama.cpp"}, {}, "leapahead tune a.gguf 'a.gguf(engine=openvino)'"),
        ("a", {"backend": "transformers", "device": "cuda:0"}, {}, None),
        ("a", {}, {}, None),  # on several devices
        ("a.gguf", {"backend": "llama.cpp", "gpu": "a GPU"}, {}, None),
        ("a", {"backend": "transformers", "device": "cpu"}, {"replays": True}, None),
        ("a", {"backend": "transformers", "device": "cpu"}, {"decoder": Decoder((0,))}, None),
        ("a", {"backend": "transformers", "device": "cpu"}, {"capabilities": frozenset({"logits"})}, None),
        ("a", {"backend": "openvino"}, {}, None),
        ("bundled", {"backend": "transformers", "device": "cpu"}, {}, None),
    ],
)
def test_a_model_on_a_cpu_is_to_be_compared_with_itself_under_openvino(
    model: str, conditions: Data, info: dict[str, Any], command: str | None
) -> None:
    found = comparison(model, {"gpu": None, **conditions}, replace(ToyTarget().info, **info))
    assert found == command


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_token_table_is_computed_on_request(cache: Path, tiny_folder: Path) -> None:
    model = ("-m", str(tiny_folder), "--text-seconds", "0", "--seconds", "0.2")
    before = call(*model)
    assert "No token table is stored for this model; --table computes one" in before.stdout
    assert f"leapahead tune {tiny_folder} '{tiny_folder}(engine=openvino, weights=bf16)'" in before.stdout
    made = call(*model, "--table", "--table-k", "4", "--json")
    assert made.exit_code == 0, made.output
    table = json.loads(made.stdout)["table"]
    (file,) = (cache / "tables").iterdir()
    assert (table["k"], table["bytes"], table["stored"]) == (4, 24 * table["tokens"], str(file))
    assert table["seconds"] > 0
    assert f"token table: {table['tokens']} tokens, 0.0 MB, about 0 s" in made.stderr  # said before its end
    after = call(*model)
    assert f"the 4 likeliest tokens after each of {table['tokens']}" in after.stdout
    file.write_bytes(b"nothing")
    assert "No token table is stored" in call(*model).stdout
    (cache / "tables" / file.name).unlink()
    (cache / "tables").rmdir()
    (cache / "tables").write_text("in the way")
    refused = call(*model, "--table")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: the token table cannot be written to")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-m", "/nowhere/model.gguf"), "/nowhere/model.gguf"),
        (("--plot", "curve.pdf"), "must end in .png or .svg"),
        (("--plot", "/nowhere/curve.png"), "there is no folder /nowhere"),
        (("--data", "/nowhere"), "there is no folder or file '/nowhere'"),
        (("--data", "/nowhere", "--text-seconds", "0"), "there is no folder or file '/nowhere'"),
        (("-n", "99999"), "with --max-new-tokens=99999; give fewer, or shorter prompts"),
        (("--table-k", "8"), "--table-k 8 needs --table"),
        (("model.gguf", "--table-k", "8"), "--table-k 8 needs --table"),
        (("--threads", "2"), "GGUF"),
    ],
)
def test_what_cannot_be_is_one_sentence(words: Sequence[str], said: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.fixture
def files() -> list[str]:
    """The bundled model in two types."""
    pytest.importorskip("llama_cpp")
    return [str(gguf_models.bundled(kind)) for kind in ("q8_0", "q4_0")]


@pytest.mark.slow
def test_files_of_one_model_are_compared(cache: Path, files: list[str]) -> None:
    given = call(*files, *QUICK, "--threads", "1", "--text-seconds", "20", "--json")
    assert given.exit_code == 0, given.output
    found = json.loads(given.stdout)
    assert [row["model"] for row in found["models"]] == files
    for row in found["models"]:
        assert row["bytes"] == Path(row["model"]).stat().st_size
        assert row["rows"][0]["nodes"] == 1
    for which, name in (("auto", "fastest"), ("plain", "fastest_plain")):
        speeds = {row["model"]: row["auto"]["expected"][which] or 0.0 for row in found["models"]}
        assert found[name] is None or speeds[found[name]] == max(speeds.values()) > 0  # None on a very busy machine


def test_the_comparison_names_the_fastest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    target = Timed(line(0.1, 0.002))
    measured, _ = tuning.tune(target, seconds=1.0, clock=target.clock)
    one = {**measured, "busy": False, "model": "a/one.gguf", "bytes": 5_000_000}
    auto = {"acceptance_length": 2.0, "expected": {"auto": 90.0, "plain": 60.0}, "tokens": tuning.FEW_TOKENS}
    two = {**one, "model": "a/two.gguf", "auto": auto}
    one["auto"] = {"acceptance_length": 1.5, "expected": {"auto": 75.0, "plain": 70.0}, "tokens": 60}
    tune_forms.show({"models": [one, two], "fastest": "a/two.gguf", "fastest_plain": "a/one.gguf"})
    shown = capsys.readouterr().out
    (row,) = [line.split() for line in shown.splitlines() if line.startswith(" two.gguf") or "two.gguf " in line]
    assert row == ["two.gguf", "5", "2", "1.10", "1.30", "1.70", "2.50", "2.00", "60.0", "90.0", "1.50"]
    assert "Fastest with drafting: a/two.gguf. Fastest plainly: a/one.gguf." in shown
    assert "Few tokens were decoded with one.gguf. With fewer than 200 tokens" in shown


@pytest.mark.slow
def test_engines_are_compared(cache: Path, files: list[str]) -> None:
    pytest.importorskip("openvino_genai")
    forms = [files[0], f"{files[0]}(engine=openvino, precision=f32)"]
    given = call(*forms, *QUICK, "--text-seconds", "20", "--json")
    assert given.exit_code == 0, given.output
    assert [row["model"] for row in json.loads(given.stdout)["models"]] == forms


@pytest.mark.parametrize("busy", [False, True])
def test_a_machine_that_was_busy_while_texts_were_decoded(capsys: pytest.CaptureFixture[str], busy: bool) -> None:
    """Then the ratio of two speeds that were measured one after the other tells nothing."""
    speeds = {"auto": 3.0, "plain": 0.4} if busy else {"auto": 78.0, "plain": 65.0}
    counts: dict[str, Any] = {"texts": 1, "tokens": 9, "nodes_per_step": 0.0, "plain_steps": 9, "steps": 9}
    counts |= {"acceptance_length": 1.0, "sources": []}
    expected = {"auto": 70.0, "plain": 71.0}
    show_auto({**counts, "tokens_per_second": speeds, "expected": expected})
    shown = capsys.readouterr().out
    assert ("The machine was busy" in shown) == busy
    assert ("70.0 tokens/s, plain decoding 71.0: 0.99 times as fast" in shown) == busy
    assert "With fewer than 200 tokens of auto the gain is uncertain" in shown


@pytest.mark.slow
def test_files_that_cannot_be_compared_are_refused_before_anything_is_measured(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    for words, said in (
        ((files[0],), "alone cannot be compared: give further files"),
        ((files[0], "model"), "model cannot be compared: give GGUF files"),
        ((files[0], files[0] + "(flash-attn=on)", files[0] + "(fa=on)"), "was given twice"),
        ((files[0], files[0] + "(thread=1)"), "No such option"),
        ((files[0], files[0] + "(weights=int8)"), "can be set for an OpenVINO model (--engine='openvino') only"),
        ((files[0], "/nowhere/model.gguf"), "there is no file '/nowhere/model.gguf'"),
        ((files[0], str(broken)), "broken.gguf"),
        ((*files, "--table"), "--table is not possible where models are compared"),
        ((*files, "-m", "bundled"), "--model is not possible where models are compared"),
        ((*files, "--text-seconds", "0"), "--text-seconds 0 is not possible"),
        ((*files, "--data", "/nowhere"), "there is no folder or file '/nowhere'"),
        ((*files, "-n", "99999"), "no prompt fits the context of "),
    ):
        result = call(*words)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("error: ")
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
    monkeypatch.setattr(
        tune_forms, "fingerprint", lambda tokenizer: object()
    )  # as of files with different vocabularies
    result = call(*files)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "has another vocabulary than" in result.stderr


@pytest.mark.slow
def test_the_figure_can_be_drawn(tmp_path: Path) -> None:
    target = Timed(line(0.1, 0.002))
    found, _ = tuning.tune(target, seconds=1.0, clock=target.clock)
    (path,) = plots.save(plots.latency, tuning.figure(found), tmp_path / "curve", kinds=("svg",))
    assert "T(1) = 2 ms" in path.read_text()
    (tmp_path / "link.svg").symlink_to(path)
    path.write_text("")
    plots.save(plots.latency, tuning.figure(found), tmp_path / "link", kinds=("svg",))
    assert (tmp_path / "link.svg").is_symlink()
    assert "T(1) = 2 ms" in path.read_text()


# --------------------------------------------------------------------------------------------------- calibration

CHANCES = (0.05, 0.15, 0.35, 0.5, 0.65, 0.85, 0.95)


class Coin(ToyTarget):
    """Token 1 follows with a known probability, else 2: a coin for every prefix, as biased as its position says."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(vocab_size=4, seed=seed, order=1 << 20)  # its rows read the whole text

    def chance(self, position: int) -> float:
        return CHANCES[position % len(CHANCES)]

    def row(self, attended: Entries) -> npt.NDArray[np.float64]:
        coin = np.random.default_rng([self._seed, *(token for _, token in attended)]).random()
        logits = np.zeros(4)
        logits[1 if coin < self.chance(len(attended)) else 2] = 9.0
        return logits


class Honest(SequenceDrafter):
    """Knows the coins of `Coin` but for how they fall: two of its children of every node along the ones."""

    name: ClassVar[str] = "honest"

    def __init__(self, depth: int = 3, lie: float = 1.0) -> None:
        self.depth, self.lie = depth, lie

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        builder = TreeBuilder(sequence.root, budget)
        expected, node, following = [1.0], 0, 0
        for depth in range(self.depth):
            p = CHANCES[(len(sequence.tokens) + depth) % len(CHANCES)]
            for token, chance in ((1, p), (2, 1 - p)):
                if (child := builder.add(node, token)) is not None:
                    expected.append(expected[node] * chance**self.lie)
                    following = child if token == 1 else following
                else:
                    return self.drafted(builder, expected)
            node = following
        return self.drafted(builder, expected)

    def drafted(self, builder: TreeBuilder, expected: list[float]) -> Proposal:
        tree = builder.build()
        sources = ("", *("one" if token == 1 else "two" for token in tree.tokens[1:]))
        return Proposal(tree, sources, np.array(expected))


def observed(batch: int = 1, **options: Any) -> Any:
    prompts = [(3, 1 + index % 2, 1 + index // 2 % 2, 1 + index // 4 % 2) for index in range(8)]
    return calibration(Coin(), prompts, Honest, options, max_new_tokens=320, batch=batch)


@pytest.mark.slow
def test_a_drafter_that_knows_comes_out_calibrated() -> None:
    found = observed(batch=3)
    assert found["path"]["nodes"] > 2500
    for kind in ("path", "conditional"):
        assert found[kind]["deviation"] < 0.06
        inside = [row["interval"]["low"] <= row["predicted"] <= row["interval"]["high"] for row in found[kind]["rows"]]
        assert sum(inside) >= len(inside) - 2
    assert {row["name"] for row in found["sources"]} == {"one", "two"}
    assert sum(row["nodes"] for row in found["sources"]) == found["path"]["nodes"]
    assert found["steps"] > 0
    assert found["acceptance_length"] > 1.5
    again = observed(batch=1)
    assert (again["path"], again["conditional"]) == (found["path"], found["conditional"])


@pytest.mark.slow
@pytest.mark.parametrize("lie", [0.3, 3.0])
def test_a_drafter_that_lies_does_not(lie: float) -> None:
    found = observed(lie=lie)
    for kind in ("path", "conditional"):
        assert found[kind]["deviation"] > 0.12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_says_what_it_expects_greedy_and_sampled(temperature: float) -> None:
    found = calibration(
        ToyTarget(order=1), PROMPTS * 4, "auto", {"nodes": 8}, 60, temperature=temperature, seed=3, batch=3
    )
    assert found["path"]["nodes"] > 500
    assert found["path"]["nodes"] == sum(row["nodes"] for row in found["path"]["rows"])
    assert found["conditional"]["nodes"] < found["path"]["nodes"]
    assert found["conditions"]["temperature"] == temperature
    json.dumps(found)


def test_bins_by_hand() -> None:
    found = binned([(0.05, False)] * 300 + [(0.15, True)] * 10 + [(1.0, True), (1.2, True)])
    assert [(row["low"], row["nodes"], row["observed"]) for row in found["rows"]] == [
        (0.0, 300, 0.0),
        (0.1, 10, 1.0),
        (0.9, 2, 1.0),
    ]
    assert found["deviation"] is None  # no bin is large enough
    low = found["rows"][0]["interval"]
    assert low["low"] == 0.0
    assert low["high"] == pytest.approx(1 - 0.025 ** (1 / 300), abs=1e-4)  # Clopper and Pearson
    enough = binned([(0.5, index % 4 == 0) for index in range(LEAST_NODES)])
    assert enough["deviation"] == pytest.approx(0.25)
    assert binned([]) == {"nodes": 0, "deviation": None, "least_nodes": LEAST_NODES, "rows": []}


@pytest.mark.slow
def test_the_figure_says_which_bins_count(tmp_path: Path) -> None:
    """A bin of few nodes lies far off; the figure says why it is not the greatest deviation."""
    found = calibration(ToyTarget(order=1), PROMPTS, "auto", {"nodes": 8}, 40)
    pairs = [(0.5, index % 2 == 0) for index in range(LEAST_NODES)] + [(0.9, False)] * (LEAST_NODES - 1)
    found |= {"path": binned(pairs), "conditional": binned(pairs)}
    assert found["path"]["deviation"] == 0
    (path,) = figures.save(found, tmp_path / "calibration", kinds=("svg",))
    text = path.read_text()
    assert text.count(f"greatest deviation 0.000 (bins with ≥ {LEAST_NODES} nodes)") == 2
    assert f"pale points: bins with fewer than {LEAST_NODES} nodes" in text.replace("\n", " ")


class Fixed(SequenceDrafter):
    """A tree of a right chain and a wrong branch."""

    name: ClassVar[str] = "fixed"

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        done = len(sequence.tokens) - sequence.prompt_length
        right = self.text[done : done + min(3, budget.depth)]
        builder = TreeBuilder(sequence.root, budget)
        if right:
            builder.add_path([*right])
            builder.add_path([(right[0] + 1) % sequence.vocab_size])
        tree = builder.build()
        return Proposal(tree, (), 0.5**tree.depths)


def test_what_lies_behind_a_stop_is_not_counted() -> None:
    def decoded(drafter: SequenceDrafter, **stop: Any) -> list[Step]:
        return run(ToyTarget(), drafter, PROMPT, stop=StopParams(**stop)).steps

    text = run(ToyTarget(), None, PROMPT, stop=StopParams(max_new_tokens=12)).tokens
    first = decoded(Fixed(text), max_new_tokens=12)[0]
    assert [trial.accepted for trial in trials(first)] == [True, True, True, False]
    assert [trial.conditional for trial in trials(first)] == [0.5, 0.5, 0.5, 0.5]
    stopped = decoded(Fixed(text), max_new_tokens=12, eos_token_ids=(text[1],))[0]
    assert list(stopped.tokens) == text[: text.index(text[1]) + 1]
    shallow = [depth for depth in stopped.tree.depths[1:].tolist() if depth <= len(stopped.tokens)]
    assert len(shallow) < len(stopped.tree) - 1
    assert [trial.accepted for trial in trials(stopped)] == [True] * len(stopped.tokens) + [False]
    bare = Step(Proposal(TokenTree.root(1)), first.choices, first.verdict, 0, Forward(1.0, Cost(1, 1, 1)))
    assert list(trials(bare)) == []


def test_a_drafter_without_expectations_is_refused() -> None:
    with pytest.raises(BadParameter, match="has no acceptance estimates"):
        calibration(ToyTarget(), PROMPTS, "prompt_lookup")
    with pytest.raises(BadParameter, match="no prompts"):
        calibration(ToyTarget(), [])
    with pytest.raises(BadParameter, match="batch=0"):
        calibration(ToyTarget(), PROMPTS, batch=0)


def test_the_gpu_is_the_one_that_the_model_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from leapahead.models import loading

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number=0: f"GPU {number}")
    named = ((None, "GPU 0"), ("auto", "GPU 0"), ("cuda:1", "GPU 1"), ("cuda:2", None), ("cpu", None))
    assert [conditions(device=device)["gpu"] for device, _ in named] == [name for _, name in named]
    assert conditions(device="cuda:1")["device"] == "cuda:1"
    target = loading.load(device="cpu").target
    assert (conditions(target)["device"], conditions(target)["gpu"]) == ("cpu", None)
    monkeypatch.setattr("leapahead.bench.conditions.describe", lambda target: {"device": "cuda:1"})
    assert conditions(target)["gpu"] == "GPU 1"


def test_a_gguf_file_is_named_with_its_own_type_and_threads() -> None:
    """In the conditions and on the figure: not a precision that happens to be that of bfloat16, nor torch's threads."""
    pytest.importorskip("llama_cpp")
    from gguf_models import llama

    from leapahead.models import loading

    target = loading.load(str(llama("q8_0")), n_threads=1).target
    found = conditions(target, rounds=3)
    assert (found["backend"], found["threads"]) == ("llama.cpp", 1)
    assert "Q8_0" in found["dtype"]
    caption = plots.caption(found)
    assert "Q8_0" in caption
    assert "bfloat16" not in caption
    assert "1 thread;" in caption
