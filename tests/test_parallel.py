"""Several devices: the text of plain decoding on one, whatever is divided; processes that fail, and bad input."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations, count
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
from helpers import GREEDY, PROMPT, FixedLatency, Scattered, run, trees
from hypothesis import given
from hypothesis import strategies as st
from parallel import divided, on_devices

from leapahead import LLM, Engine, Request, SamplingParams, StopParams
from leapahead.core.bias import LogitBias
from leapahead.core.errors import BadLogits, BadParameter, CacheFull, LeapaheadError, Refused
from leapahead.core.tree import TokenTree
from leapahead.core.verify import verify
from leapahead.models.base import CHAIN, Capture, Target, read_prompt
from leapahead.models.loading import bundled
from leapahead.models.parallel import launch
from leapahead.models.parallel.device import Step
from leapahead.models.parallel.launch import checked
from leapahead.models.parallel.link import Disconnected, connected
from leapahead.models.parallel.split import split
from leapahead.models.parallel.target import ParallelTarget
from leapahead.models.parallel.worker import Stop, follow
from leapahead.models.toy import ToySession, ToyTarget
from leapahead.planner.measurement import rounds

SAMPLED = SamplingParams(temperature=0.9, seed=5)
PENALISED = SamplingParams(temperature=1.2, seed=2, top_p=0.95, repetition_penalty=1.3, bad_words=((1, 1),))
DRAFTERS: dict[str, dict[str, Any]] = {"lookahead": {}, "auto": {"nodes": 12}, "recycling": {}, "plain": {}}


# --------------------------------------------------------------------------------------------------- dividing a tree


def largest(tree: TokenTree, bounds: tuple[int, ...], ahead: list[int]) -> int:
    """Rows of the largest part if the leaves, in the order of a depth-first walk, are cut there."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parent_list):
        children.setdefault(parent, []).append(node)

    def walk(node: int) -> Iterator[int]:
        if node not in children:
            yield node
        for child in children.get(node, []):
            yield from walk(child)

    leaves = list(walk(0))
    parts = [leaves[a:b] for a, b in zip((0, *bounds), (*bounds, len(leaves)), strict=True)]
    nodes = [{node for leaf in part for node in tree.path(leaf)} for part in parts]
    return max(len(some or {0}) + before for some, before in zip(nodes, ahead, strict=True))


@given(trees(), st.lists(st.integers(0, 4), min_size=2, max_size=4))
def test_a_tree_is_divided_into_root_paths_as_evenly_as_its_order_allows(tree: TokenTree, ahead: list[int]) -> None:
    parts = split(tree, ahead)
    assert len(parts) == len(ahead)
    assert {node for part in parts for node in part} == set(range(len(tree)))
    for part in parts:
        assert part[0] == 0
        assert part == sorted(set(part))
        assert all(tree.parent_list[node] in part for node in part[1:])
    cuts = combinations(sorted([*range(tree.num_leaves + 1)] * (len(ahead) - 1)), len(ahead) - 1)
    best = min(largest(tree, bounds, ahead) for bounds in set(cuts))
    assert max(len(part) + before for part, before in zip(parts, ahead, strict=True)) == best


def test_guesses_and_columns_of_lookahead_are_divided() -> None:
    """The tree of W = 7, N = 5, G = 7 without common prefixes: 28 guessed nodes, and 27 of the window."""
    guesses = [[10 * at + depth for depth in range(4)] for at in range(1, 8)]
    spine = list(range(200, 206))
    columns = [spine[:at] + [300 + 10 * at + row for row in range(3)] for at in range(7)]
    tree = TokenTree.from_paths(1, [*guesses, *columns])
    assert len(tree) == 56
    assert [len(part) for part in split(tree, [0, 0])] == [29, 28]
    assert max(map(len, split(tree, [0, 0, 0, 0]))) <= 20


# -------------------------------------------------------------------------------------------------------- exactness


@pytest.fixture(scope="module", params=[2, 3])
def toys(request: pytest.FixtureRequest) -> Iterator[ParallelTarget]:
    with on_devices(ToyTarget, request.param) as target:
        yield target


def test_a_forked_process_does_not_end_the_processes_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_devices(ToyTarget, 2) as target:
        with monkeypatch.context() as child:
            child.setattr("leapahead.models.parallel.followed.os.getpid", lambda: -1)
            target.close()
        assert not target.link.problem
        assert run(target, "lookahead").tokens == run(ToyTarget()).tokens


def test_closing_closes_the_own_target(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(ToyTarget, "close", lambda self: closed.append(self), raising=False)
    target = divided([ToyTarget(), ToyTarget()])
    target.close()
    assert closed == [target.here.target]


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_gives_the_text_of_plain_decoding_on_one_device(
    toys: ParallelTarget, drafter: str, params: SamplingParams
) -> None:
    plain = run(ToyTarget(), None, params=params)
    engine = Engine(toys, latency=FixedLatency(toys, {1: 1.0, 64: 1.1}))
    for _ in range(2):  # the second text is drafted from what the first one taught
        request = Request(
            list(PROMPT), engine.drafter(drafter, **DRAFTERS[drafter]), params, StopParams(max_new_tokens=24)
        )
        engine.run([handle := engine.submit(request)])
        assert handle.tokens == plain.tokens


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_random_trees_are_verified_as_on_one_device(toys: ParallelTarget, params: SamplingParams) -> None:
    text = [*PROMPT, *run(ToyTarget(), None, params=params).tokens]
    found = run(toys, Scattered(text, seed=3), params=params)
    one = run(ToyTarget(), Scattered(text, seed=3), params=params)
    assert found.tokens == one.tokens
    assert found.stats.accepted == one.stats.accepted > 0


def test_a_device_computes_what_it_lacks_again(toys: ParallelTarget) -> None:
    """An accepted branch was computed by one device; the next trees of the others begin with its tokens."""
    session = toys.open(PROMPT, GREEDY)
    read_prompt(toys, session)
    text = run(ToyTarget(), None).tokens
    wrong = [(text[0] + 1) % 12, 1, 1, 1]
    tree = TokenTree.from_paths(PROMPT[-1], [wrong, text[:4]])
    (choices,) = toys.step([session], [tree])
    verdict = verify(tree, choices)
    assert verdict.accepted == 4
    session.commit(verdict)
    lag = [len(session.tokens) - held for held in session.held]
    assert sorted(lag) == [0, *[4] * (toys.link.size - 1)]
    (choices,) = toys.step([session], [TokenTree.root(session.tokens[-1])])
    assert choices[0] == text[5]
    session.commit(verify(TokenTree.root(session.tokens[-1]), choices))
    assert set(session.held) == {len(session.tokens)}
    session.close()


@pytest.mark.slow
def test_batches_of_samples_with_logprobs(toys: ParallelTarget) -> None:
    """Requests join and leave; logits are gathered for the log-probabilities."""

    def texts(target: Target) -> list[Any]:
        engine = Engine(target, max_batch=3, latency=FixedLatency(target, {1: 1.0, 64: 1.1}))
        drafter = engine.drafter("lookahead")
        handles = []
        for length in (5, 17, 9):
            request = Request(list(PROMPT), drafter, SAMPLED, StopParams(max_new_tokens=length), logprobs=2)
            samples = [SamplingParams(temperature=0.9, seed=seed) for seed in (length, length + 1)]
            handles += engine.submit_samples(request, samples)
        engine.run(handles)
        return [(handle.tokens, [round(each.logprob, 9) for each in handle.logprobs]) for handle in handles]

    assert texts(toys) == texts(ToyTarget())


def test_captured_top_k_tokens_are_those_of_one_device(toys: ParallelTarget) -> None:
    tree = TokenTree.from_paths(PROMPT[-1], [[1, 2, 3], [1, 4], [5, 6], [7]])
    found = []
    for target in (toys, ToyTarget()):
        session = target.open(PROMPT, GREEDY, Capture(top_k=3))
        (rows,) = read_prompt(target, session)
        (choices,) = target.step([session], [tree], capture=Capture(top_k=3))
        found.append([rows.top_k(3)[0], *choices.top_k(3), choices.of(range(len(tree)))])
        session.close()
    for here, there in zip(*found, strict=True):
        np.testing.assert_array_equal(here, there)


def test_forwards_are_measured_over_as_many_branches_as_there_are_devices(toys: ParallelTarget) -> None:
    seen: list[int] = []
    step = ToyTarget.step

    class Counting(ToyTarget):
        def step(self, sessions: Any, trees: Any, *args: Any, **more: Any) -> Any:
            seen.extend(map(len, trees))
            return step(self, sessions, trees, *args, **more)

    with on_devices(Counting, 2) as target:
        found = rounds(target, sizes=(1, 9), seconds=0.05, clock=count(0, 0.001).__next__)  # on busy machines, too
    assert set(found[0]) == {1, 9}
    assert max(seen) <= 9  # 5 rows, and those that the device lacks


# ---------------------------------------------------------------------------------------------- failures and bad input


class Failing(ToyTarget):
    """Fails in a step, or has no room for a second session."""

    how = ""

    def step(self, *args: Any, **more: Any) -> Any:
        if self.how == "step":
            raise ValueError("broken on purpose")
        return super().step(*args, **more)

    def open(self, *args: Any, **more: Any) -> ToySession:
        if self.how == "open":
            raise CacheFull("no room on purpose")
        return super().open(*args, **more)


def test_an_error_of_another_process_is_told_in_one_sentence_and_ends_nothing_else() -> None:
    targets = [ToyTarget(), Failing()]
    target = divided(targets)
    targets[1].how = "step"
    with pytest.raises(LeapaheadError, match="process 1 of 2 failed: broken on purpose"):
        run(target, "lookahead")
    targets[1].how = "open"
    with pytest.raises(CacheFull, match="no room on purpose"):
        run(target, "lookahead")
    targets[1].how = ""
    assert run(target, "lookahead").tokens == run(ToyTarget(), None).tokens
    target.close()


def test_an_interrupt_while_a_step_is_sent_ends_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to that step would be taken for the one to the next command."""
    target, steps = divided([ToyTarget(), ToyTarget()]), count(1)
    send = target.link.send

    def interrupted(to: int, message: Any, *more: Any) -> None:
        send(to, message, *more)
        if isinstance(message[-1], Step) and next(steps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(target.link, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, "lookahead")
    for drafter in ("lookahead", None):
        with pytest.raises(LeapaheadError, match="has ended: it was interrupted in the middle of a step; make"):
            run(target, drafter)
    target.link.receive(1)  # so that the other process, which is a thread here, can be told to stop
    send(1, [Stop()])
    target.close()


def test_an_interrupt_in_the_own_part_of_a_step_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    target, steps, step = divided([ToyTarget(), ToyTarget()]), count(1), Step.run

    def interrupted(self: Step, device: Any) -> Any:
        if device is target.here and next(steps) == 2:
            raise KeyboardInterrupt
        return step(self, device)

    monkeypatch.setattr(Step, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, "lookahead")
    assert run(target, "lookahead").tokens == run(ToyTarget(), None).tokens
    target.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_is_added_on_every_device(toys: ParallelTarget, temperature: float) -> None:
    found = []
    for target in (ToyTarget(), toys):
        llm = LLM(target, drafter="lookahead")
        options: Any = {"temperature": temperature, "seed": 3, "logit_bias": {2: -50.0, 5: 1.5}}
        samples = llm.generate([1, 2, 3], n=2, max_new_tokens=30, **options)
        gathered = llm.generate([1, 2, 3], max_new_tokens=30, logprobs=1, **options)
        found.append([each.tokens for each in (*samples, gathered)])
    assert found[0] == found[1]
    assert not any(2 in tokens for tokens in found[0])


def test_a_copy_of_a_bias_has_no_tensors_of_a_device() -> None:
    bias = LogitBias({3: 0.1, 1: -2.5})
    logits = bias(None, torch.zeros(1, 4))
    copy = pickle.loads(pickle.dumps(bias))
    assert copy._there is None
    assert torch.equal(copy(None, torch.zeros(1, 4)), logits)


def test_after_the_end_one_sentence_says_so() -> None:
    with on_devices(ToyTarget, 2) as target:
        pass
    target.close()
    with pytest.raises(LeapaheadError, match="has ended: the target was closed"):
        run(target, None)


def test_processes_that_cannot_be_told_to_stop_are_ended_at_once() -> None:
    waits: list[float] = []
    for problem in ("", "it was interrupted in the middle of a message"):
        own, other = connected(2)
        thread = Thread(target=follow, args=(ToyTarget(), other), daemon=True)
        thread.start()
        target = ParallelTarget(ToyTarget(), own, waits.append)
        own.problem = problem
        target.close()
        if problem:  # so that the other process, which is a thread here, ends
            own.send(1, [Stop()])
        thread.join()
    assert waits == [5.0, 0.0]


def test_processes_end_within_one_time() -> None:
    sleepers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(3)]
    began = monotonic()
    launch._end(sleepers, 0.6)
    assert monotonic() - began < 1.7  # of 1.8 one after the other
    assert all(each.returncode for each in sleepers)


def test_a_process_that_does_not_answer_is_given_up() -> None:
    own, other = connected(2, timeout=0.2)
    with pytest.raises(Disconnected, match="process 1 of 2, which computes a part of every step, does not answer"):
        own.receive(1)
    assert own.problem
    assert not other.problem


def test_long_messages_arrive_whole() -> None:
    own, other = connected(2)
    messages = [b"x" * size for size in (0, 8000, 8170, 8192, 100_000)]
    thread = Thread(target=lambda: [own.send(1, message) for message in messages])
    thread.start()
    assert [other.receive(0) for _ in messages] == messages
    thread.join()


def test_another_model_is_refused() -> None:
    with pytest.raises(LeapaheadError, match="process 1 has loaded another model than process 0: weights; start all"):
        divided([ToyTarget(seed=0), ToyTarget(seed=1)])
    with pytest.raises(LeapaheadError, match="another model than process 0: vocabulary, weights"):
        divided([ToyTarget(), ToyTarget(vocab_size=13)])


def test_what_cannot_be_divided_is_refused_by_name(toys: ParallelTarget) -> None:
    with pytest.raises(Refused, match="takes no token trees, so there are no branches to divide; leave out devices"):
        divided([ToyTarget(capabilities=frozenset({CHAIN})), ToyTarget()])
    with pytest.raises(Refused, match=r"this capture needs hidden from the target, which toy.* on several devices"):
        toys.open(PROMPT, GREEDY, Capture(hidden=(1,)))
    with pytest.raises(Refused, match="logits processors cannot be used with devices"):
        toys.open(PROMPT, SamplingParams(processors=(lambda ids, scores: scores,)))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("cpu", "devices='cpu' names 1 of at least two devices; for one, use device='cpu'"),
        ([], "devices names none of at least two devices"),
        ("cpu,,cpu", "name devices as 'cuda:0,cuda:1', or 'torchrun'"),
        ([0, 1], "name devices as"),
        (2, "devices=2 is not possible: name devices as"),
    ],
)
def test_bad_names_of_devices(devices: Any, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        checked(devices)


def test_bad_values_are_told_before_anything_is_loaded(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for options, message in {
        ("--devices", "cpu"): "--devices='cpu' names 1 of at least two devices",
        ("--devices", "cpu,cpu", "--device", "cpu"): "--device='cpu' is not possible with --devices='cpu,cpu'",
        (
            "--devices",
            "cpu,cpu",
            "-m",
            "x.gguf",
        ): "--devices='cpu,cpu' can be set for a model of Transformers",
        ("--devices", "torchrun"): "--devices='torchrun' needs processes that torchrun started",
    }.items():
        result = leapahead("generate", "def", *options)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert message in result.stderr
    with pytest.raises(BadParameter, match=r"devices=.* can be set for .* only, not for a loaded one"):
        LLM(ToyTarget(), devices="cpu,cpu")


# -------------------------------------------------------------------------------------------------- real processes


PROMPTS = ["def add(a, b):\n    return", "for number in range(10):"]


def texts(llm: LLM, drafter: str, temperature: float, length: int) -> list[list[int]]:
    options: dict[str, Any] = {"max_new_tokens": length, "temperature": temperature, "ignore_eos": True}
    together = llm.generate(PROMPTS, seed=7, drafter=drafter, **options)
    assert llm.generate(PROMPTS[0], seed=7, drafter=drafter, **options).tokens == together[0].tokens
    return [result.tokens for result in together]


@pytest.mark.slow
def test_two_processes_give_the_text_of_one(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise SystemExit(1)")  # is not what the other process imports
    with LLM(str(tiny_folder), dtype="float32", drafter="plain") as one:
        plain = {temperature: texts(one, "plain", temperature, 24) for temperature in (0.0, 0.9)}
    with LLM(str(tiny_folder), dtype="float32", devices="cpu,cpu", drafter="lookahead") as two:
        for temperature, expected in plain.items():
            for drafter in ("lookahead", "recycling"):
                assert texts(two, drafter, temperature, 24) == expected


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_the_bundled_model_gives_its_text_on_several_processes(size: int) -> None:
    with LLM(dtype="float32", drafter="plain") as one:
        plain = {temperature: texts(one, "plain", temperature, 200) for temperature in (0.0, 0.8)}
    with LLM(dtype="float32", devices=["cpu"] * size) as several:
        for temperature, expected in plain.items():
            for drafter in ("plain", "lookahead", "auto", "recycling", "suffix", "prompt_lookup", "jacobi"):
                assert texts(several, drafter, temperature, 200) == expected, (drafter, temperature)


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", *args]


@pytest.mark.slow
def test_a_process_that_dies_ends_the_command_with_one_sentence() -> None:
    program = (
        "import os, signal, sys\n"
        "from leapahead import LLM\n"
        "from leapahead.core.errors import LeapaheadError\n"
        "llm = LLM(dtype='float32', devices='cpu,cpu', drafter='lookahead')\n"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read().split()\n"
        "pieces = llm.stream('def', max_new_tokens=500, ignore_eos=True)\n"
        "next(pieces)\n"
        "os.kill(int(children[0]), signal.SIGKILL)\n"
        "try:\n    list(pieces)\nexcept LeapaheadError as error:\n    print(error)\n"
        "try:\n    llm.generate('def')\nexcept LeapaheadError as error:\n    print(error)\n"
        "llm.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    first, second = done.stdout.splitlines()
    assert first == "process 1 of 2, which computes a part of every step, has ended; make a new LLM", done.stderr
    assert second.startswith("decoding on several devices has ended: process 1 of 2")
    assert done.returncode == 0


@pytest.mark.slow
def test_other_processes_read_no_tokenizer_and_know_types_of_torch(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{bad")
    texts = []
    for devices in ({}, {"devices": "cpu,cpu"}):
        with LLM(folder, tokenizer=str(tiny_folder), dtype=torch.float32, **devices) as llm:
            texts.append(llm.generate("def", max_new_tokens=8).text)
    assert texts[0] == texts[1]


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_only_the_own_part_of_a_step_computes_in_fewer_threads(four_threads: None) -> None:
    used = []

    class Counting(ToyTarget):
        def step(self, *args: Any, **more: Any) -> Any:
            used.append(torch.get_num_threads())
            return super().step(*args, **more)

    own, other = connected(2)
    thread = Thread(target=follow, args=(ToyTarget(), other), daemon=True)
    thread.start()
    target = ParallelTarget(Counting(), own, thread.join, threads=2)
    run(target, "lookahead")
    target.close()
    assert set(used) == {2}
    assert torch.get_num_threads() == 4


def test_commits_change_no_number_of_threads(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes new threads for another number."""
    changes: list[int] = []
    with on_devices(ToyTarget, 2) as target:
        target.here.threads = 2
        session = target.open([1, 2, 3], GREEDY)
        read_prompt(target, session)
        monkeypatch.setattr(torch, "set_num_threads", changes.append)
        choices = target.step([session], [TokenTree.root(3)])
        session.commit(verify(TokenTree.root(3), choices[0]))
        session.close()
    assert len(changes) == 2  # before the step and behind it


def test_logits_that_are_no_numbers_are_told_as_on_one_device() -> None:
    class Wrong(ToyTarget):
        def row(self, prefix: Any) -> Any:
            return np.full(self.info.vocab_size, np.nan, dtype=np.float32)

    with on_devices(Wrong, 2) as target, pytest.raises(BadLogits):
        LLM(target, drafter="lookahead").generate([1, 2, 3], max_new_tokens=4)


def test_where_no_process_starts_the_number_of_threads_stays(
    four_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_process", lambda *_: subprocess.Popen([sys.executable, "-c", ""]))
    with pytest.raises(LeapaheadError, match="it has ended with exit code 0"):
        launch.launched("cpu,cpu", lambda device: (ToyTarget(), None), {})
    assert torch.get_num_threads() == 4


@pytest.mark.slow
def test_the_processes_share_the_threads(four_threads: None) -> None:
    with LLM(dtype="float32", devices="cpu,cpu") as llm:
        assert torch.get_num_threads() == 4
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        environments = [Path(f"/proc/{child}/environ").read_bytes() for child in children]
        assert [each for each in environments if b"OMP_NUM_THREADS=2\0" in each]
        assert llm.target.info.fingerprint.endswith(" 2 on 2 devices")  # in which the model was tested
        llm.generate("def", max_new_tokens=2)
        assert torch.get_num_threads() == 4


@pytest.mark.slow
def test_other_processes_end_with_the_first_one() -> None:
    program = (
        "import os, sys\n"
        "from leapahead import LLM\n"
        "llm = LLM(dtype='float32', devices='cpu,cpu', drafter='plain')\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "os.kill(os.getpid(), int(sys.argv[1]))\n"
    )
    for number in (0, signal.SIGKILL, signal.SIGINT):  # 0 lets it end by itself, without closing its LLM
        done = subprocess.run(
            [sys.executable, "-c", program, str(int(number))], capture_output=True, text=True, timeout=120
        )
        (child,) = done.stdout.split()
        for _ in range(100):
            if not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text():
                break
            sleep(0.1)
        else:
            pytest.fail(f"process {child} is still there")


@pytest.mark.slow
def test_under_torchrun_the_first_process_writes_and_the_others_follow() -> None:
    line = ("leapahead", "generate", "def fibonacci(n):", "--dtype", "float32", "--max-new-tokens", "40", "--json")
    alone = subprocess.run(command(*line, "-d", "plain"), capture_output=True, text=True, timeout=120, check=True)
    torchrun = ("torch.distributed.run", "--nproc-per-node", "3", "-m")
    done = subprocess.run(
        command(*torchrun, *line, "-d", "lookahead", "--devices", "torchrun"),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert json.loads(done.stdout)["text"] == json.loads(alone.stdout)["text"]
    single = subprocess.run(
        command("torch.distributed.run", "--nproc-per-node", "1", "-m", *line, "--devices", "torchrun"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "needs at least two processes, and torchrun started 1" in single.stderr


@pytest.mark.slow
def test_processes_with_different_models_are_refused(tiny_folder: Path) -> None:
    """torchrun's processes load what their own command line names, here by their rank."""
    program = (
        "import os\n"
        "from leapahead import LLM\n"
        f"LLM([{str(tiny_folder)!r}, {bundled()!r}][int(os.environ['RANK'])], dtype='float32', devices='torchrun')\n"
    )
    script = tiny_folder.parent / "different.py"
    script.write_text(program)
    torchrun = command("torch.distributed.run", "--nproc-per-node", "2", str(script))
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=120)
    assert "process 1 has loaded another model than process 0: vocabulary, context length, weights" in done.stderr
    assert done.returncode != 0
