"""`python -m research gpu`: all of it on the CPU with tiny settings, what is kept and left out, and bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from static_parts import FakeCuda, recorded

from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.models import loading
from leapahead.models.transformers import packed
from leapahead.models.transformers.pretrained import load_files
from leapahead.models.transformers.static.compiled import LEAST_USES, Compiler
from research.cli import main as research
from research.gpu import attention, peers, plots, report, timing, vllm_worker
from research.gpu.cells import Cell, cells, compiled
from research.gpu.lab import KINDS, TINY, Lab, Settings
from research.gpu.simulated import Times
from research.gpu.timing import WARM_UPS, Clock, captured_seconds
from research.standin import Shapes
from research.standin_memory import build

CPU = torch.device("cpu")
SMALL = ("--prompts", "1", "--max-new-tokens", "6", "--rounds", "1", "--exact-tokens", "6", "--dtype", "float32")


def run(out: Path, *options: str) -> Result:
    arguments = ["gpu", "--device", "cpu", "--cost", TINY, "--out", str(out), *SMALL, *options]
    return CliRunner(env={"COLUMNS": "120"}).invoke(research, arguments)


def cell(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / TINY / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ROWS", (1, 7))
    monkeypatch.setattr(attention, "CELLS", (1024,))
    monkeypatch.setattr("research.gpu.cells.SIZES", (1, 4))
    monkeypatch.setattr("research.gpu.cells.CONTEXT", 16)


@pytest.mark.slow
def test_every_cell_is_measured_written_and_reported(
    few_shapes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("research.gpu.cells.BATCHES", (2,))
    names = ("bandwidth", "plain", "curve", "code-t1-b2", "outside", "attention", "exact", "transformers", "vllm")
    result = run(tmp_path, *(word for name in names for word in ("--cell", name)))
    assert result.exit_code == 0, result.output
    assert {file.stem for file in (tmp_path / TINY).glob("*.json")} == set(names)
    found = {name: cell(tmp_path, name) for name in names}
    assert not any(each.get("failed") for each in found.values()), result.output
    assert found["bandwidth"]["bytes_per_second"] > 1e8
    assert found["plain"]["weights"] == 4 * sum(each.numel() for each in Lab(TINY, settings()).model.parameters())
    assert [row["drafter"] for row in found["code-t1-b2"]["rows"]] == ["plain", "auto", "lookahead"]
    assert {row["differing_texts"] for row in found["code-t1-b2"]["rows"]} == {0}
    assert {row["differing_texts"] for row in found["exact"]["rows"]} == {0}
    assert {row["nodes"] for row in found["outside"]["rows"]} == {64}
    assert {row["variant"] for row in found["attention"]["rows"]} >= {"packed", "keys repeated", "compacted"}
    assert found["transformers"]["tokens"] == 6
    assert "--vllm-python" in found["vllm"]["refused"]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for title in report.TABLES:
        assert f"### {title}" in text or title in ("Captured forwards", "Compiled forwards")
    assert "- tiny, vllm: vLLM is not installed here" in text
    for name in ("curve", "gain"):
        assert (tmp_path / f"{name}.svg").read_text(encoding="utf-8").count("<svg") == 1


@pytest.mark.slow
def test_what_was_measured_is_kept_and_the_rest_repeated(tmp_path: Path) -> None:
    assert run(tmp_path, "--cell", "bandwidth").exit_code == 0
    kept = cell(tmp_path, "bandwidth")
    result = run(tmp_path, "--cell", "bandwidth", "--resume")
    assert result.exit_code == 0
    assert "done" not in result.output
    assert cell(tmp_path, "bandwidth") == kept
    file = tmp_path / TINY / "bandwidth.json"
    file.write_text(json.dumps({**kept, "refused": "no time was left"}), encoding="utf-8")
    assert "done" in run(tmp_path, "--cell", "bandwidth", "--resume").output
    file.write_text(json.dumps({**kept, "conditions": {**kept["conditions"], "gpu": "another"}}), encoding="utf-8")
    result = run(tmp_path, "--cell", "bandwidth", "--resume")
    assert result.exit_code != 0
    assert "was measured with gpu another, and this run has None; name another --out" in " ".join(result.output.split())
    file.write_text(json.dumps({**kept, "conditions": {**kept["conditions"], "commit": "other"}}), encoding="utf-8")
    result = run(tmp_path, "--cell", "bandwidth", "--resume")
    assert "was measured with commit other, and this run has " in " ".join(result.output.split())
    assert "done" in run(tmp_path, "--cell", "bandwidth").output
    file.write_text("{}", encoding="utf-8")
    assert "is no cell of this command" in " ".join(run(tmp_path, "--cell", "bandwidth", "--resume").output.split())


def test_what_does_not_fit_into_the_time_is_left_out(tmp_path: Path) -> None:
    result = run(tmp_path / "new" / "folder", "--minutes", "0")
    assert result.exit_code == 0, result.output
    count = len(list(cells(Lab(TINY, settings()))))
    assert f"{count} cells did not fit into 0 minutes; --resume measures them" in result.output
    assert not (tmp_path / "new" / "folder" / TINY).exists()
    (tmp_path / "file").touch()
    result = run(tmp_path / "file" / "folder", "--minutes", "0")
    assert result.exit_code != 0
    assert "cannot be written: Not a directory" in " ".join(result.output.split())


def placed(out: Path, cost: str, **conditions: str | None) -> Path:
    """The cell of an earlier run."""
    own = {"versions": {"leapahead": "0"}, "cpu": "one", "gpu": None, "device": "cpu", "dtype": "float32"} | conditions
    file = out / cost / "curve.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    row = {"engine": "captured", "milliseconds": {"1": 10.0, "64": 11.0}}
    file.write_text(json.dumps({"cell": "curve", "cost": cost, "rows": [row], "conditions": own}), encoding="utf-8")
    return file


def test_what_is_measured_anew_is_removed_first(tmp_path: Path) -> None:
    """What does not fit into the time keeps no figures of another GPU or another commit."""
    old, other = placed(tmp_path, TINY, gpu="another", commit="other"), placed(tmp_path, "1b", commit="other")
    assert run(tmp_path, "--cell", "bandwidth", "--minutes", "0").exit_code != 0
    assert old.is_file()
    result = run(tmp_path, "--minutes", "0")
    assert result.exit_code == 0, result.output
    assert not old.exists()
    assert other.is_file()
    assert (tmp_path / "curve.svg").is_file()
    other.unlink()
    assert run(tmp_path, "--minutes", "0").exit_code == 0
    assert not (tmp_path / "curve.svg").exists()


def test_cells_of_another_device_are_not_put_beside_those_of_this_one(tmp_path: Path) -> None:
    other, own = placed(tmp_path, "1b", gpu="another"), placed(tmp_path, TINY)
    for options in ([], ["--resume"], ["--cell", "bandwidth"]):
        result = run(tmp_path, "--minutes", "0", *options)
        assert result.exit_code != 0
        words = " ".join(result.output.split())
        assert f"{other.name} was measured with gpu another, and this run has None; name another --out" in words
    assert own.is_file()


def test_only_devices_are_measured_whose_work_can_be_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("research.gpu.command.checked_device", torch.device)
    result = run(tmp_path, "--device", "mps")
    assert result.exit_code != 0
    assert "--device mps is not possible here: this measures one CUDA device, or the CPU" in result.output


def test_a_cell_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(lab: Lab, clock: Clock) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def other(lab: Lab, clock: Clock) -> dict[str, Any]:
        raise NameError("module is not installed as a submodule")

    every = [Cell("broken", "it", 1, broken), Cell("other", "it", 1, other), *list(cells(Lab(TINY, settings())))[:1]]
    monkeypatch.setattr("research.gpu.command.cells", lambda _: every)
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert cell(tmp_path, "broken")["refused"] == "OutOfMemoryError: CUDA out of memory"
    assert cell(tmp_path, "other")["failed"]
    assert "bytes_per_second" in cell(tmp_path, "bandwidth")
    assert "- tiny, broken: OutOfMemoryError: CUDA out of memory" in (tmp_path / "report.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cost", "2b"], "--cost 2b is not possible; there are 135m, 360m, 1b, 3b, 7b, tiny"),
        (["--cost", "hybrid-135m"], "--cost hybrid-135m is not possible"),
        (["--cell", "speed"], "there is no cell 'speed'; there are bandwidth, plain"),
        (["--dtype", "int8"], "--dtype int8 is not possible; there are float32, bfloat16"),
        (["--data", "nowhere"], "there is no folder 'nowhere' of prompts"),
        (["--device", "gpu"], "device 'gpu' is not possible"),
        (["--device", "balanced"], "device 'balanced' divides a model among GPUs, and torch sees none"),
        (["--minutes", "-1"], "-1.0 is not in the range"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, options: list[str], words: str) -> None:
    result = run(tmp_path, *options)
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


def settings(**more: Any) -> Settings:
    return Settings(CPU, "float32", **more)


def test_no_prompt_is_decoded_twice() -> None:
    """A drafter would know the text of the first time."""
    lab = Lab(TINY, settings())
    found = lab.prompts("code", 4)
    assert len({tuple(each) for each in found}) == len(found) == 3
    assert lab.prompts("code") == found
    every = {each.name: each for each in cells(lab)}
    with pytest.raises(Refused, match="16 prompts of code are needed and there are 3; name a folder with --data"):
        every["code-t0-b16"].measure(lab, Clock(60))


@pytest.mark.slow
def test_exact_mode_compares_every_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    lab = Lab(TINY, settings(max_new_tokens=4, prompts=1))
    speed = lab.speed

    def watched(kind: str, drafter: str, options: Any, prompts: Any, *given: Any, **more: Any) -> Any:
        seen.extend(tuple(each) for each in prompts if drafter == "recycling")
        return speed(kind, drafter, options, prompts, *given, **more)

    monkeypatch.setattr(lab, "speed", watched)
    monkeypatch.setattr("research.gpu.cells.EXACT_BATCH", 2)  # of three prompts of each task
    found = {each.name: each for each in cells(lab)}["exact"].measure(lab, Clock(600))
    assert len(seen) == len(set(seen)) == 6
    assert sum(row["texts"] for row in found["rows"] if row["drafter"] == "recycling") == 6


@pytest.mark.slow
def test_captured_forwards_are_measured_where_there_are_any(few_shapes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs that are recorded and repeated on the CPU."""
    monkeypatch.setitem(KINDS, "captured", {"static": recorded(FakeCuda(taken=lambda: 1000))})
    lab = Lab(TINY, settings(rounds=1, max_new_tokens=4, prompts=1))
    every = {each.name: each for each in cells(lab)}
    found = {name: every[name].measure(lab, Clock(60)) for name in ("graphs", "curve")}
    fingerprints = [lab.loaded(kind).target.info.fingerprint for kind in ("captured", "eager")]
    assert fingerprints[0] == fingerprints[1] + " captured"
    assert (found["graphs"]["graphs"], found["graphs"]["bytes"]) == (
        3,
        3000,
    )  # with the largest, whose memory is shared
    assert 0 <= found["graphs"]["longest"] <= found["graphs"]["capture_seconds"]
    assert [row["engine"] for row in found["curve"]["rows"]] == ["captured", "eager"]
    assert not any("refused" in row for row in found["curve"]["rows"])
    conditions = {"conditions": {"versions": {}, "gpu": "none", "dtype": "float32"}}
    text = "\n".join(report.text({TINY: {name: {**each, **conditions} for name, each in found.items()}}))
    assert "| tiny | 3 | 0 | " in text
    assert "leapahead, captured forwards" in text


@pytest.mark.slow
def test_compiled_forwards_are_measured_when_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that leaves the operations as they are, and with one that fails."""
    lab = Lab(TINY, settings(max_new_tokens=4, prompts=1))
    monkeypatch.setattr("research.gpu.cells.Compiler", partial(Compiler, compile=lambda traced, tensors: traced))
    found = compiled(lab, Clock(60))
    assert found["rows"][0]["tokens"] == LEAST_USES + 1
    assert [row["drafter"] for row in found["rows"]] == ["plain", "auto"]
    assert [line.split()[0] for line in found["told"]][:2] == ["compiling", "compiled"]
    assert report.plain_rates({"compiled": found}) == {"compiled": found["rows"][0]["tokens_per_second"]}
    assert "| tiny | `auto` |" in report.compiled_table({TINY: {"compiled": found}})

    def fails(traced: Any, tensors: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("research.gpu.cells.Compiler", partial(Compiler, compile=fails))
    with pytest.raises(Refused, match="no compiler here"):
        compiled(lab, Clock(60))
    with pytest.raises(Refused, match="no forward was compiled in the time that was left"):
        compiled(lab, Clock(0))


@pytest.mark.slow
def test_nothing_is_measured_beside_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the time ends while a forward is compiled."""
    lab = Lab(TINY, settings(max_new_tokens=4, prompts=1))
    speed, made, busy = lab.speed, list[Compiler](), list[bool]()

    def slow(traced: Any, tensors: Any) -> Any:
        sleep(0.5)
        return traced

    def compiler(tell: Callable[[str], None]) -> Compiler:
        made.append(Compiler(slow, tell))
        return made[0]

    class UntilBusy(Clock):
        def part(self, seconds: float) -> Clock:
            return self

        @property
        def has_run_out(self) -> bool:
            return made[0].is_busy

    def watched(*given: Any, passes: int = 2) -> Any:
        if passes == 2:
            busy.append(made[0].is_busy)
        found = speed(*given, passes=passes)
        if passes == 2:
            busy.append(made[0].is_busy)
        return found

    monkeypatch.setattr("research.gpu.cells.Compiler", compiler)
    monkeypatch.setattr(lab, "speed", watched)
    assert [row["drafter"] for row in compiled(lab, UntilBusy(60))["rows"]] == ["plain", "auto"]
    assert busy == [False] * 4


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A folder as `research gpu` writes it."""
    conditions = {"versions": {}, "gpu": "a GPU", "dtype": "bfloat16"}
    cells_found: dict[str, Any] = {
        "curve": {"rows": [{"engine": "captured", "milliseconds": {"1": 10.0, "64": 11.0, "128": 13.0}}]},
        "graphs": {"longest": 0.1},
        "outside": {"rows": [{"outside_ms": 0.5}, {"outside_ms": 0.7}]},
    }
    folder = tmp_path / "measured" / "7b"
    folder.mkdir(parents=True)
    for name, found in cells_found.items():
        found |= {"cell": name, "cost": "7b", "conditions": conditions}
        (folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    return folder.parent


def test_times_between_and_beyond_the_measured_sizes(measured: Path) -> None:
    times = Times(measured / "7b")
    assert [times.step(rows) for rows in (1, 64, 96, 128, 192)] == pytest.approx([0.010, 0.011, 0.012, 0.013, 0.015])
    assert (times.capture, times.outside) == (0.1, 0.0005)


@pytest.mark.slow
def test_drafting_on_captured_forwards_is_simulated(measured: Path, tmp_path: Path) -> None:
    """By the times of the folder: the speed-up of texts that are drafted well, and a capture for each new shape."""
    out = tmp_path / "new" / "rows.json"
    options = [
        "--measured",
        str(measured),
        "--batch",
        "1",
        "--prompts",
        "1",
        "--max-new-tokens",
        "24",
        "--out",
        str(out),
    ]
    result = CliRunner(env={"COLUMNS": "120"}).invoke(research, ["gpu-simulated", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["measured"] == {"gpu": "a GPU", "dtype": "bfloat16"}
    greedy = [row for row in found["rows"] if row["temperature"] == 0]
    assert len(greedy) == 2
    for row in greedy:
        assert row["captures"][-1] == 0
        assert 1.0 < row["speed_ups"][-1] < row["acceptance_length"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--measured", "nowhere"], "nowhere has no curve of any cost; name another --measured"),
        (["--cost", "3b"], "has no curve of 3b; name another --measured"),
        (["--data", "nowhere"], "there is no folder 'nowhere' of prompts"),
        (["--batch", "0"], "0 is not in the range"),
    ],
)
def test_bad_input_of_the_simulation_is_one_sentence(measured: Path, options: list[str], words: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        research, ["gpu-simulated", "--measured", str(measured), *options]
    )
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


class Timed(FakeCuda):
    """Whose events are a tenth of a second apart for each operation that was replayed between them."""

    def Event(self, enable_timing: bool) -> Any:
        return Moment(self)


class Moment:
    def __init__(self, cuda: Timed) -> None:
        self._cuda, self.at = cuda, 0

    def record(self) -> None:
        self.at = sum(graph.replays * len(graph.tape.operations) for graph in self._cuda.alive)

    def synchronize(self) -> None:
        self._cuda.log.append("synchronize")

    def elapsed_time(self, end: Moment) -> float:
        return 100.0 * (end.at - self.at)


def test_work_is_timed_without_its_launches() -> None:
    total = torch.zeros(1)
    cuda = Timed()
    seconds = captured_seconds(lambda: total.add_(1), CPU, 3, 5, cuda)
    assert seconds == pytest.approx(0.1)
    assert total.item() == WARM_UPS + 5 + 5 * (3 + WARM_UPS)
    assert cuda.captured == 1


def test_work_is_timed_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def entering(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    second = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device", entering)
    monkeypatch.setattr(timing, "captured_seconds", lambda *_: float(entered == [second]))
    assert timing.median_seconds(lambda: None, second) == 1.0


def test_a_wrong_attention_is_not_timed(few_shapes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(TINY, settings(rounds=1))
    monkeypatch.setattr(packed, "added", lambda mask, dtype: torch.zeros(mask.shape, dtype=dtype))
    with pytest.raises(LeapaheadError, match="the attention 'packed' is wrong: it differs by"):
        attention.measure(lab, Clock(9))


@pytest.mark.slow
def test_a_stand_in_built_in_memory_has_the_logits_of_its_source() -> None:
    source, _, _ = load_files(loading.bundled(), "float32", False)
    own = source.config
    wide = Shapes(
        hidden=2 * own.hidden_size,
        intermediate=2 * own.intermediate_size,
        layers=own.num_hidden_layers + 2,
        heads=2 * own.num_attention_heads,
        kv_heads=2 * own.num_key_value_heads,
        head_dim=own.head_dim,
        vocab=own.vocab_size,
        source="this test",
    )
    seen: list[tuple[int, int]] = []
    made = build(wide, CPU, "float32", progress=lambda what, done, total: seen.append((done, total)))
    tokens = torch.arange(5, 40)[None]
    with torch.no_grad():
        found, expected = made(tokens).logits, source(tokens).logits
    assert (found - expected).abs().max() < 1e-4 * expected.std()
    assert not torch.equal(made.model.layers[0].mlp.up_proj.weight, torch.zeros(()))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 20
    with pytest.raises(Refused, match="hybrid-135m has recurrent layers"):
        build("hybrid-135m", CPU)
    with pytest.raises(BadParameter, match="unknown cost"):
        build("2b", CPU)


FAKE_VLLM = """
__version__ = "0.0"
import time
class SamplingParams:
    def __init__(self, **options):
        self.tokens = options["max_tokens"]
class LLM:
    def __init__(self, **options):
        assert options["load_format"] == "dummy" and options["max_num_seqs"] == 1, options
        import json, pathlib
        config = json.loads((pathlib.Path(options["model"]) / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"], config
    def generate(self, prompts, params, use_tqdm):
        assert prompts[0]["prompt_token_ids"]
        time.sleep(0.001 * params.tokens)
"""


@pytest.fixture
def with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def install(code: str) -> None:
        (tmp_path / "vllm.py").write_text(code, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def test_vllm_is_timed_without_its_prompt(with_vllm: Callable[[str], None]) -> None:
    """With a package in its place that takes a millisecond for each token."""
    with_vllm(FAKE_VLLM)
    lab = Lab(TINY, settings(max_new_tokens=40, vllm_python=sys.executable))
    found = peers.vllm(lab, [1, 2, 3], Clock(60))
    assert (found["tokens"], found["version"]) == (20, "0.0")
    assert 100 < found["tokens_per_second"] < 1500  # of two runs, each longer by chance


@pytest.mark.slow
def test_a_vllm_that_ends_or_hangs_is_refused(with_vllm: Callable[[str], None], tmp_path: Path) -> None:
    with_vllm("raise SystemExit('no GPU here')")
    lab = Lab(TINY, settings(vllm_python=sys.executable))
    with pytest.raises(Refused, match="vLLM ended with an error: no GPU here"):
        peers.vllm(lab, [1], Clock(60))
    with_vllm("import time; time.sleep(60)")
    with pytest.raises(Refused, match="did not answer in the time that was left"):
        peers.vllm(lab, [1], Clock(0))
    with pytest.raises(Refused, match=r"--vllm-python .*nothing cannot be run: No such file"):
        peers.vllm(Lab(TINY, settings(vllm_python=str(tmp_path / "nothing"))), [1], Clock(60))
    assert vllm_worker.__doc__


def test_the_report_is_in_the_order_of_batches() -> None:
    conditions = {"versions": {"leapahead": "0"}, "cpu": "one", "dtype": "float32"}

    def found(batch: int) -> dict[str, Any]:
        rows = [
            {"drafter": name, "tokens_per_second": 9.0, "speed_up": 1.0, "acceptance_length": 1.0, "distinct_4": 1.0}
            for name in ("plain", "auto")
        ]
        rows = [{**row, "differing_texts": 0} for row in rows]
        return {"task": "code", "temperature": 0.0, "batch": batch, "texts": 1, "rows": rows, "conditions": conditions}

    cells_found = {TINY: {f"code-t0-b{batch}": found(batch) for batch in (1, 16, 4)}}
    data = plots.data("gain", cells_found)
    assert data is not None
    assert [row["batch"] for row in data["rows"]] == [1, 4, 16]
    lines = [line for line in report.speculation_table(cells_found).splitlines() if "`auto`" in line]
    assert [line.split("|")[4].strip() for line in lines] == ["1", "4", "16"]
    assert plots.data("curve", cells_found) is None
