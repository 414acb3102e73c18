"""Forwards that are compiled in the background: which, when they are used, and what happens when that fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch
from architectures import BY_NAME
from helpers import GREEDY, PROMPT, Scattered, run
from static_parts import recorded
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import read_prompt
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.static import compiled
from leapahead.models.transformers.static.compiled import Compiler, Traced, write_out
from leapahead.models.transformers.static.executor import StaticExecutor, agree
from leapahead.models.transformers.static.graphs import Calls, capturing


def target_with(compiler: Compiler, backend: Any = None, name: str = "llama") -> TransformersTarget:
    target = TransformersTarget(BY_NAME[name].build(), static=backend or recorded())
    executor_of(target).compiler = compiler
    return target


def executor_of(target: TransformersTarget) -> StaticExecutor:
    assert isinstance(target.executor, StaticExecutor)
    return target.executor


class Interpreted:
    """In place of a compiler: runs the traced operations, and counts."""

    def __init__(self, change: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None) -> None:
        self.change, self.compiled, self.runs = change, 0, 0
        self.done = Event()

    def __call__(self, traced: Any, tensors: Sequence[torch.Tensor]) -> Traced:
        self.compiled += 1
        self.done.set()

        def call(*given: torch.Tensor) -> None:
            self.runs += 1
            traced(*given)
            self.change(given)

        return call


def plain_text(target: TransformersTarget, compiler: Compiler, interpreted: Interpreted) -> list[int]:
    """The second of two texts, before which the forward of plain decoding is compiled."""
    first = run(target, prompt=PROMPT).tokens
    assert interpreted.done.wait(20)
    compiler.wait(20)
    second = run(target, prompt=PROMPT).tokens
    assert second == first
    return second


@pytest.mark.slow
@pytest.mark.parametrize("backend", [recorded, Calls], ids=["graphs", "calls"])
def test_what_is_used_most_is_compiled_and_then_used(backend: Callable[[], Any]) -> None:
    told = list[str]()
    interpreted = Interpreted()
    compiler = Compiler(interpreted, told.append, least_uses=5)
    target = target_with(compiler, backend())
    text = plain_text(target, compiler, interpreted)
    assert text == run(TransformersTarget(BY_NAME["llama"].build()), prompt=PROMPT).tokens
    assert interpreted.compiled == 1
    assert interpreted.runs > 1
    assert told[0] == "compiling the forward of batch 1, 1 rows, 1024 cached, the 1. in use"
    assert told[1].startswith("compiled the forward of batch 1, 1 rows, 1024 cached in ")
    assert not compiler.problem


@pytest.mark.slow
def test_compiled_code_is_used_over_another_cache_of_the_same_size() -> None:
    interpreted = Interpreted()
    compiler = Compiler(interpreted, lambda line: None, least_uses=5)
    target = target_with(compiler, Calls())
    plain_text(target, compiler, interpreted)
    before = interpreted.runs
    target.executor.forget()
    assert run(target, prompt=PROMPT).tokens == plain_text(target, compiler, interpreted)
    assert interpreted.runs > before
    assert interpreted.compiled == 1


@pytest.mark.slow
def test_code_with_other_logits_is_not_used() -> None:
    told = list[str]()

    def change(tensors: Sequence[torch.Tensor]) -> None:
        tensors[1].mul_(1.1)

    interpreted = Interpreted(change)
    compiler = Compiler(interpreted, told.append, least_uses=5)
    target = target_with(compiler)
    plain_text(target, compiler, interpreted)
    assert interpreted.runs == 1
    assert told[-1] == (
        "forwards are no longer compiled: batch 1, 1 rows, 1024 cached has other logits when it is compiled"
    )


@pytest.mark.slow
def test_entries_of_code_with_other_logits_are_not_kept() -> None:
    class OfAnotherToken(Interpreted):
        def __call__(self, traced: Any, tensors: Sequence[torch.Tensor]) -> Traced:
            interpreted = super().__call__(traced, tensors)

            def call(*given: torch.Tensor) -> None:
                given[0][:8].view(torch.int64).fill_(9)
                interpreted(*given)

            return call

    interpreted = OfAnotherToken()
    compiler = Compiler(interpreted, lambda line: None, least_uses=2)
    targets = target_with(compiler, Calls()), TransformersTarget(BY_NAME["llama"].build(), static="off")
    sessions = [each.open(PROMPT, GREEDY) for each in targets]
    for target, session in zip(targets, sessions, strict=True):
        read_prompt(target, session)
    for _ in range(4):
        found = []
        for target, session in zip(targets, sessions, strict=True):
            found += [each.logits for each in target.step([session], [TokenTree.root(session.tokens[-1])])]
            session.commit(Verdict((0,), (5,), 0))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        compiler.wait(20)
    assert compiler.problem
    assert interpreted.runs == 1


@pytest.mark.slow
def test_a_compiler_that_fails_is_told_of_once() -> None:
    told, failed = list[str](), Event()

    def fail(traced: Any, tensors: Sequence[torch.Tensor]) -> Traced:
        failed.set()
        raise RuntimeError("no C++ compiler\nfound")

    compiler = Compiler(fail, told.append, least_uses=2)
    target = target_with(compiler, Calls())
    text = run(target, prompt=PROMPT).tokens
    assert failed.wait(20)
    compiler.wait(20)
    assert run(target, Scattered([*PROMPT, *text]), PROMPT).tokens == text
    assert [line for line in told if "no longer" in line] == [
        "forwards are no longer compiled: batch 1, 1 rows, 1024 cached: no C++ compiler"
    ]


def test_logits_that_differ_by_rounding_agree() -> None:
    logits = torch.randn(4, 50, dtype=torch.bfloat16)
    assert agree(logits, logits)
    assert agree((logits.float() * 1.001).bfloat16(), logits)
    assert not agree(logits.roll(1, 1), logits)
    assert not agree(torch.full_like(logits, torch.nan), logits)
    assert not agree(logits.float() + 0.05, logits.float())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_inductor_gives_plain_decodings_text(name: str) -> None:
    """The compiler itself. The cache is large: code that copied it would take a second a step."""
    plain = run(TransformersTarget(BY_NAME[name].build()), prompt=PROMPT).tokens
    target = TransformersTarget(BY_NAME[name].build(), static="compiled")
    compiler = executor_of(target).compiler
    assert compiler is not None
    compiler._least_uses = 2
    for drafter in (Scattered([*PROMPT, *plain]), None):
        run(target, drafter, PROMPT)
        compiler.wait(300)
        assert not compiler.problem
    compiler.close()
    for params in (SamplingParams(), SamplingParams(temperature=0.8, seed=3)):
        text = run(TransformersTarget(BY_NAME[name].build()), prompt=PROMPT, params=params).tokens
        assert run(target, prompt=PROMPT, params=params).tokens == text
        assert run(target, Scattered([*PROMPT, *text]), PROMPT, params).tokens == text
    assert len(compiler._kept) >= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what a compiler warns of while it works is none of ours
def test_what_was_compiled_is_found_again_and_computes_with_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a later process finds it, whose model may have the same shapes and other weights."""

    def hits() -> int:
        return counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before = 0
    for seed in (0, 1):
        before = hits()
        compiler = Compiler(tell=lambda line: None, least_uses=5)
        target = TransformersTarget(BY_NAME["llama"].build(seed=seed), static=Calls())
        executor_of(target).compiler = compiler
        text = run(target, prompt=PROMPT).tokens
        compiler.wait(200)
        assert [run(target, prompt=PROMPT).tokens for _ in range(2)] == [text, text]
        assert not compiler.problem
    assert hits() > before


def test_inductor_waits_for_the_device_between_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    log, asked = list[object](), Event()
    monkeypatch.setattr(CudaInterface, "synchronize", staticmethod(log.append))
    compiled.spare_captures.__wrapped__()

    def waits() -> None:
        asked.set()
        CudaInterface.synchronize("cuda:0")

    with ThreadPoolExecutor(1) as thread:
        with capturing:
            waiting = thread.submit(waits)
            assert asked.wait(10)
            sleep(0.1)
            log.append("captured")
        waiting.result()
    assert log == ["captured", "cuda:0"]


def test_a_compiler_for_gpus_spares_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    spared = list[bool]()
    monkeypatch.setattr(compiled, "spare_captures", lambda: spared.append(True))
    monkeypatch.setattr(compiled, "prepare", lambda: None)
    monkeypatch.setattr(compiled, "inductor", lambda traced, tensors: traced)
    compiler, numbers = Compiler(compiled.inductor, lambda line: None), torch.zeros(4)
    compiler.order("key", "a row", lambda: numbers.add_(1), [numbers])
    compiler.wait(10)
    assert spared == [True]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_one_row_are_written_out(rows: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 5, bias=bias, dtype=dtype)
    given = torch.randn(rows, 8, dtype=dtype)
    with torch.no_grad():
        traced = make_fx(layer)(given)
        write_out(traced)
        torch.testing.assert_close(traced(given), layer(given))
    left = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default} & {node.target for node in traced.graph.nodes}
    assert bool(left) == (rows == 2)


ENDING = """
from threading import Event
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from leapahead.models.transformers.static import compiled
from leapahead.models.transformers.static.compiled import Compiler

begun = Event()
def trace(traced, tensors):
    with FakeTensorMode():
        values = torch.empty(8, 8)
        while True:
            values = (values @ values).relu()
            begun.set()
numbers = torch.zeros(4)
Compiler(trace, print).order("key", "a row", lambda: numbers.add_(1), [numbers])
assert begun.wait(60)
print("ends")
"""


@pytest.mark.slow
def test_the_interpreter_ends_while_a_forward_is_compiled() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", "ends")
