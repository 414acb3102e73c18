"""Tensor parallelism: the text of one device, whatever is drafted; processes that fail, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import mtp
import pytest
import torch
from helpers import GREEDY, PROMPT, Scattered, run
from parallel import followed, together

from leapahead import LLM, Grammar, SamplingParams
from leapahead.core.errors import BadParameter, CacheFull, LeapaheadError, Refused
from leapahead.drafters.heads.mtp import own
from leapahead.models.loading import bundled
from leapahead.models.parallel.device import Device
from leapahead.models.parallel.tensor import Called, Forward, TensorParallelTarget, connected, interrupts_held
from leapahead.models.toy import ToyTarget
from leapahead.models.transformers import devices, families, pretrained
from leapahead.models.transformers.model import TransformersTarget

SAMPLED = SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.2)
FAMILIES = ("llama", "qwen3", "gemma3", "mixtral", "deepseek_v3", "gpt_oss", "phi3", "qwen3_next")
PROGRAM = "from leapahead import LLM\nllm = LLM(dtype='float32', devices='cpu,cpu', tensor_parallel=True)\n"


@pytest.fixture(scope="module", params=[2, 3])
def toys(request: pytest.FixtureRequest) -> Iterator[TensorParallelTarget]:
    target = together([ToyTarget() for _ in range(request.param)])
    yield target
    target.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["plain", "lookahead", "recycling", "suffix"])
def test_every_drafter_gives_the_text_of_one_device(
    toys: TensorParallelTarget, drafter: str, params: SamplingParams
) -> None:
    assert run(toys, drafter, params=params).tokens == run(ToyTarget(), params=params).tokens


def test_the_other_devices_hold_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are told fits what this process does, so that their forwards have the same shapes."""
    seen: dict[bool, list[Any]] = {True: [], False: []}

    def watched(kind: Any) -> Any:
        plain = kind.run

        def noted(self: Any, device: Device) -> Any:
            sessions = self.sessions if kind is Called else [device.sessions[number] for number in self.numbers]
            sizes = [len(each[0]) if kind is Forward else len(each) for each in self.trees]
            seen[kind is Called].append(([list(each.tokens) for each in sessions], sizes, self.num_computed))
            return plain(self, device)

        return noted

    for kind in (Called, Forward):
        monkeypatch.setattr(kind, "run", watched(kind))
    target = together([ToyTarget(), ToyTarget()])
    run(target, Scattered([*PROMPT, *run(ToyTarget()).tokens]))
    target.close()
    assert seen[True] == seen[False]
    assert any(max(sizes) > 1 for _, sizes, _ in seen[True])


def test_grammars_processors_forks_and_logprobs(toys: TensorParallelTarget) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.8, "seed": 3}
    found = []
    for target in (ToyTarget(), toys):
        llm = LLM(target, drafter="lookahead")
        samples = llm.generate(list(PROMPT), n=2, logprobs=2, **options)
        changed = llm.generate(list(PROMPT), logits_processors=[lambda ids, scores: -scores], **options)
        found.append(([each.tokens for each in samples], samples[0].logprobs, changed.tokens))
    assert found[0] == found[1]


@pytest.mark.parametrize("told", ["Open", "Commit", "Close"])
def test_ctrl_c_does_not_come_before_the_others_are_told(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = together([ToyTarget(), ToyTarget()])
    tell, given = target.tell, list[str]()

    def interrupted(rank: int, command: Any) -> None:
        name = type(command).__name__
        if name == told and told not in given:
            os.kill(os.getpid(), signal.SIGINT)
        tell(rank, command)
        given.extend([name] * (rank > 0))

    monkeypatch.setattr(target, "tell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, "lookahead")
    assert told in given
    assert run(target, "lookahead").tokens == run(ToyTarget()).tokens
    target.close()


class Failing(ToyTarget):
    """Its third step fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.steps = error, 0

    def step(self, *args: Any, **options: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            raise self.error
        return super().step(*args, **options)


def test_a_full_cache_and_bad_values_end_nothing_else() -> None:
    for error in (CacheFull("it is full"), BadParameter("it is bad")):
        target = together([Failing(error), Failing(error)])
        with pytest.raises(type(error)):
            run(target, "lookahead")
        assert run(target, "lookahead").tokens == run(ToyTarget()).tokens
        target.close()


def test_what_another_process_reports_is_told_rather_than_a_lost_connection() -> None:
    target = together([Failing(RuntimeError("Connection closed by peer")), Failing(MemoryError("it has no memory"))])
    with pytest.raises(LeapaheadError, match="process 1 of 2 failed: it has no memory"):
        run(target, "lookahead")
    target.close()


def test_ctrl_c_waits_for_the_end_of_a_forward() -> None:
    class Interrupted(ToyTarget):
        steps = 0

        def step(self, *args: Any, **options: Any) -> Any:
            self.steps += 1
            if self.steps == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().step(*args, **options)

    target = together([Interrupted(), ToyTarget()])
    with pytest.raises(KeyboardInterrupt):
        run(target, "lookahead")
    assert target.here.target.steps == 2  # type: ignore[attr-defined]
    assert run(target, "lookahead").tokens == run(ToyTarget()).tokens
    target.close()


def test_signals_of_other_threads_and_handlers_are_left_alone() -> None:
    before, found = signal.getsignal(signal.SIGINT), list[Any]()

    def inside() -> None:
        with interrupts_held():
            found.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=inside)
    thread.start()
    thread.join()
    inside()
    assert found[0] is before
    assert found[1] is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_the_smallest_cache_limits_all(tiny_model: Any) -> None:
    own, other = (TransformersTarget(tiny_model, cache_tokens=tokens) for tokens in (900, 500))
    target = followed([own, other], TensorParallelTarget)
    assert target.info.cache_tokens == own.executor.cache.limit == other.executor.cache.limit == 500  # type: ignore
    assert "divided among 2 devices" in target.info.fingerprint
    assert target.device == torch.device("cpu")
    weight = target.whole_weight("get_input_embeddings")
    assert weight is tiny_model.get_input_embeddings().weight
    target.close()


def test_another_model_is_refused() -> None:
    with pytest.raises(LeapaheadError, match="process 1 has loaded another model than process 0: vocabulary; start"):
        together([ToyTarget(), ToyTarget(vocab_size=13)])


class Config:
    """As much of a configuration as the check reads."""

    model_type = "some"

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def get_text_config(self) -> Config:
        return self


def test_mtp_modules_of_a_divided_target_are_refused(tmp_path: Path) -> None:
    """They compute with its embedding and output layer, which one process has no more than a part of."""
    folder = mtp.write(tmp_path, "mellum", 1)
    target = followed([pretrained.load(folder, with_tokenizer=False)[0] for _ in range(2)], TensorParallelTarget)
    with pytest.raises(Refused, match="use its own layers, whose weights are divided among processes"):
        own(target)
    target.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no plan by which the weights of M \\(some\\) are divided"),
        (
            {"base_model_tp_plan": {"a": "colwise"}, "num_attention_heads": 9},
            "M has 9 attention heads, which 2",
        ),
        (
            {"base_model_tp_plan": {"a": "colwise"}, "num_attention_heads": 8, "num_key_value_heads": 1},
            "M has 1 key-value heads, which 2 devices cannot share evenly",
        ),
    ],
)
def test_models_that_cannot_be_divided(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        devices.check_parallel("M", Config(**fields), 2)


def test_what_is_refused(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadParameter, match="tensor_parallel=True needs devices, over which weights are divided"):
        LLM(tensor_parallel=True)
    with pytest.raises(BadParameter, match="names cuda:0 twice, and tensor_parallel needs one for each part"):
        LLM(devices="cuda:0,cuda:0", tensor_parallel=True)
    monkeypatch.setattr("leapahead.models.parallel.launch._process", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(BadParameter, match="device 'cpux' is not possible"):
        LLM(devices="cpux,cpux:1", tensor_parallel=True)
    with pytest.raises(BadParameter, match="are of several types, and tensor_parallel needs one type of device"):
        LLM(devices="cpu,cuda:0", tensor_parallel=True)
    with pytest.raises(BadParameter, match="tensor_parallel='yes' is not possible"):
        LLM(tensor_parallel="yes")
    with pytest.raises(BadParameter, match="tensor_parallel=True can be set for a model of Transformers"):
        LLM(tiny_model, tensor_parallel=True)
    with pytest.raises(BadParameter, match="use devices='cuda:0,cuda:1' and tensor_parallel=True"):
        LLM(tensor_parallel_size=2)
    with pytest.raises(Refused, match="not possible on cuda:1: on this machine Transformers divides weights over"):
        connected(None, 0, 2, "cuda:1", True).__enter__()  # type: ignore[arg-type]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(Refused, match="is in use in this process already"):
        connected(None, 0, 2, "cpu", True).__enter__()  # type: ignore[arg-type]


def test_a_divided_model_is_refused_where_it_was_not_divided_here(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = pretrained.load_files(bundled(), "float32", trust_remote_code=False)
    monkeypatch.setattr(type(model), "tp_size", 2, raising=False)
    with pytest.raises(Refused, match="LlamaForCausalLM is divided by tensor parallelism among 2 processes"):
        LLM(model)
    assert families.language_model(model, is_divided=True) is model
    with pytest.raises(Refused, match="cannot be captured \\(its weights are divided among 2 processes\\)"):
        TransformersTarget(model, exclusive=True, static="compiled", is_divided=True)


# -------------------------------------------------------------------------------------------------------- processes


@pytest.mark.slow
def test_two_processes_give_the_text_of_one() -> None:
    prompts, options = ["def add(a, b):\n    return", "for number in range(10):", "import "], {"max_new_tokens": 60}
    drafters = ("plain", "auto", "lookahead", "recycling", "suffix", "head")
    with LLM(dtype="float32", drafter="plain") as one:
        expected = {
            temperature: [each.tokens for each in one.generate(prompts, temperature=temperature, seed=7, **options)]
            for temperature in (0.0, 0.8)
        }
    several = {"devices": "cpu,cpu", "tensor_parallel": True, "head": "bundled", "draft": "bundled"}
    with LLM(dtype="float32", cache_tokens=400, **several) as two:  # all three do not fit at once
        assert two.target.info.cache_tokens == 400
        for temperature, tokens in expected.items():
            for drafter in drafters:
                found = two.generate(prompts, temperature=temperature, seed=7, drafter=drafter, **options)
                assert [each.tokens for each in found] == tokens, (drafter, temperature)
        assert set(two.generate("x", grammar=Grammar.regex("[a-c]{5}"), max_new_tokens=20).text) <= set("abc")
        with pytest.raises(Refused, match="is in use in this process already"):
            LLM(dtype="float32", devices="cpu,cpu", tensor_parallel=True)
        assert two.generate(prompts[0], **options).tokens == expected[0.0][0]
    assert not torch.distributed.is_initialized()
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.slow
def test_families_give_the_text_of_the_whole_model(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    program = [sys.executable, str(Path(__file__).with_name("tensor_families.py"))]
    lines = [[*program, str(rank), str(port), str(tmp_path), *FAMILIES] for rank in (0, 1)]
    other = subprocess.Popen(lines[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        done = subprocess.run(lines[0], capture_output=True, text=True, timeout=300)
    finally:
        other.kill()
        other.wait()
    assert sorted(done.stdout.split()) == sorted(FAMILIES), done.stderr[-2000:]


@pytest.mark.slow
def test_a_process_that_dies_is_named_and_a_new_llm_works() -> None:
    program = (
        "import os, signal\nfrom leapahead.core.errors import LeapaheadError\n"
        + PROGRAM
        + "ref = llm.generate('def')\n"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read().split()\n"
        "pieces = llm.stream('def', max_new_tokens=500, ignore_eos=True)\n"
        "next(pieces)\n"
        "os.kill(int(children[0]), signal.SIGKILL)\n"
        "for call in (lambda: list(pieces), lambda: llm.generate('def')):\n"
        "    try:\n        call()\n"
        "    except LeapaheadError as error:\n        print(error)\n"
        "llm.close()\n" + PROGRAM.partition("\n")[2] + "assert llm.generate('def').text == ref.text\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    first, second = done.stdout.splitlines()
    assert first == "process 1 of 2, which computes a part of every step, has ended; make a new LLM", done.stderr
    assert second.startswith("decoding on several devices has ended: process 1 of 2")
    assert done.returncode == 0


@pytest.mark.slow
def test_an_llm_that_was_dropped_does_not_stop_the_next_one() -> None:
    program = (
        "import gc\n" + PROGRAM + "first = llm.generate('def').text\ndel llm\ngc.collect()\n"
        "" + PROGRAM.partition("\n")[2] + "llm.close()\nold = llm\n" + PROGRAM.partition("\n")[2] + ""
        "del old\ngc.collect()\nassert llm.generate('def').text == first\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_under_torchrun_the_first_process_writes() -> None:
    line = ["leapahead", "generate", "def fibonacci(n):", "--dtype", "float32", "--max-new-tokens", "40", "--json"]
    alone = subprocess.run(
        [sys.executable, "-m", *line, "-d", "plain"], capture_output=True, text=True, timeout=120, check=True
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", *line]
    done = subprocess.run(
        [*torchrun, "--devices", "torchrun", "--tensor-parallel"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert json.loads(done.stdout)["text"] == json.loads(alone.stdout)["text"]
