"""On a CUDA device: captured, compiled and exact forwards give the text of plain decoding. Skipped where there is none.

`test_static` and its neighbours test the same code on the CPU, where a recording of operations takes the place of a
graph. What these tests add are torch's own graphs, kernels, streams and memory.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from architectures import EVERY, Architecture
from helpers import GREEDY, PROMPT, RandomTrees, Scattered, run

from leapahead import LLM, Engine, Request, StopParams
from leapahead.core.sampling import SamplingParams
from leapahead.drafters import registry
from leapahead.models import loading
from leapahead.models.transformers import pretrained
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.static.cache import StaticCache
from leapahead.models.transformers.static.compiled import Compiler
from leapahead.models.transformers.static.exact import CapturedExactExecutor
from leapahead.models.transformers.static.executor import StaticExecutor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DEVICE = "cuda"
SAMPLED = SamplingParams(temperature=0.8, seed=3, top_p=0.9)
DRAFTERS = ("lookahead", "recycling", "suffix", "prompt_lookup", "auto")
TREES = [each for each in EVERY if each.expect == "tree" and each.installed]


@pytest.fixture(scope="module")
def bundled() -> Any:
    """In float32, so that rounding decides no token."""
    model, _, _ = pretrained.load_files(loading.bundled(), "float32", trust_remote_code=False)
    return model.to(DEVICE)


@pytest.fixture(scope="module")
def captured(bundled: Any) -> TransformersTarget:
    return TransformersTarget(bundled, static="graphs", exclusive=True)


@pytest.fixture(scope="module")
def usual(bundled: Any) -> TransformersTarget:
    return TransformersTarget(bundled, static="off")


@pytest.mark.parametrize("architecture", TREES, ids=lambda each: each.name)
def test_families(architecture: Architecture) -> None:
    """Windows are smaller than the texts; a family that cannot be captured says so and gives the same text."""
    model = architecture.build().to(DEVICE)
    plain = run(TransformersTarget(model, static="off"), prompt=PROMPT)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the forwards of .* are not captured as CUDA graphs")
        target = TransformersTarget(model, exclusive=True)
    assert isinstance(target.executor, StaticExecutor) or target.refusals["static"]
    for drafter in (None, Scattered([*PROMPT, *plain.tokens])):
        assert run(target, drafter, PROMPT).tokens == plain.tokens


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_plain_decodings_without_graphs(
    captured: TransformersTarget, usual: TransformersTarget, name: str, params: SamplingParams
) -> None:
    stop = StopParams(max_new_tokens=96)
    plain = run(usual, params=params, stop=stop)
    assert run(captured, params=params, stop=stop).tokens == plain.tokens
    found = run(captured, registry.make(name), params=params, stop=stop)
    assert found.tokens == plain.tokens


@pytest.mark.parametrize("warm", [False, True])
def test_a_batch_gives_each_text_its_own(bundled: Any, usual: TransformersTarget, warm: bool) -> None:
    """Sequences of different lengths join and end while others go on; seldom shapes run in larger ones."""
    captured = TransformersTarget(bundled, static="graphs", exclusive=True)
    if warm:
        captured.warm_up(5)
    engine = Engine(captured, max_batch=5)
    handles, expected = [], []
    for number in range(9):
        params = SamplingParams(temperature=0.9, seed=number) if number % 2 else GREEDY
        prompt, stop = list(PROMPT[number % 4 :]), StopParams(max_new_tokens=6 + 5 * number)
        expected.append(run(usual, prompt=prompt, params=params, stop=stop).tokens)
        drafter = engine.drafter("recycling") if number % 3 else engine.drafter("lookahead")
        handles.append(engine.submit(Request(prompt, drafter, params, stop)))
    engine.run(handles)
    assert [handle.tokens for handle in handles] == expected


def test_a_cache_that_grows(bundled: Any, usual: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs are captured again, over the new memory; drafts are accepted, so that entries move."""
    monkeypatch.setattr(StaticCache, "first_capacity", 256)
    target = TransformersTarget(bundled, static="graphs", exclusive=True)
    executor = target.executor
    assert isinstance(executor, StaticExecutor)
    stop = StopParams(max_new_tokens=400)
    plain = run(usual, stop=stop)
    first = executor.cache.capacity
    found = run(target, Scattered([*PROMPT, *plain.tokens]), stop=stop)
    assert found.tokens == plain.tokens
    assert found.stats.acceptance_length > 3
    assert executor.cache.capacity > first
    assert len(executor.graphs) > 0


@pytest.mark.filterwarnings("default")  # what a compiler warns of while it works is none of ours
def test_compiled_forwards(bundled: Any, usual: TransformersTarget) -> None:
    target = TransformersTarget(bundled, static="graphs", exclusive=True)
    executor = target.executor
    assert isinstance(executor, StaticExecutor)
    told: list[str] = []
    executor.compiler = compiler = Compiler(tell=told.append, least_uses=2)
    stop = StopParams(max_new_tokens=48)
    plain = run(usual, stop=stop)
    for _ in range(4):
        assert run(target, RandomTrees(nodes=6), stop=stop).tokens == plain.tokens
        assert run(target, stop=stop).tokens == plain.tokens
        compiler.wait(120)
    assert not compiler.problem
    assert any(line.startswith("compiled") for line in told)
    compiler.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_exact_mode(dtype: str) -> None:
    model, _, _ = pretrained.load_files(loading.bundled(), dtype, trust_remote_code=False)
    target = TransformersTarget(model.to(DEVICE), exact=True, exclusive=True)
    assert isinstance(target.executor, CapturedExactExecutor)
    stop = StopParams(max_new_tokens=128)
    for params in (GREEDY, SAMPLED):
        plain = run(target, params=params, stop=stop)
        for name in ("recycling", "auto"):
            assert run(target, registry.make(name), params=params, stop=stop).tokens == plain.tokens


def test_exact_mode_in_batches_and_beyond_a_block() -> None:
    """Texts of several lengths together, one of which passes the border of a block of the attention."""
    model, _, _ = pretrained.load_files(loading.bundled(), "bfloat16", trust_remote_code=False)
    target = TransformersTarget(model.to(DEVICE), exact=True, exclusive=True)
    prompts = [(list(PROMPT) * 200)[:length] for length in (5, 70, 1000)]
    plain = [run(target, prompt=prompt, stop=StopParams(max_new_tokens=64)).tokens for prompt in prompts]
    engine = Engine(target, max_batch=3)
    drafter = engine.drafter("recycling")
    handles = [engine.submit(Request(prompt, drafter, GREEDY, StopParams(max_new_tokens=64))) for prompt in prompts]
    engine.run(handles)
    assert [handle.tokens for handle in handles] == plain


def test_two_threads_on_one_model() -> None:
    prompts = ["def add(a, b):", "for i in range(", "import ", "class Tree:"] * 2
    with LLM(device=DEVICE, dtype="float32") as llm, ThreadPoolExecutor(2) as threads:
        expected = [llm.generate(prompt, drafter="plain", max_new_tokens=40).text for prompt in prompts]
        found = list(threads.map(lambda prompt: llm.generate(prompt, max_new_tokens=40).text, prompts))
    assert found == expected


@pytest.mark.parametrize("static", ["auto", "graphs", "compiled", "off"])
def test_the_command_line(leapahead: Any, static: str) -> None:
    options = ["--device", DEVICE, "--dtype", "float32", "--static", static, "--max-new-tokens", "40"]
    result = leapahead("generate", "def add(a, b):", *options, "-d", "lookahead", "--compare")
    assert result.exit_code == 0, result.output


def test_check(leapahead: Any) -> None:
    options = ["--device", DEVICE, "--dtype", "float32", "--limit", "2", "--max-new-tokens", "64", "--batch", "2"]
    result = leapahead("check", *options, "-d", "auto", "-d", "recycling", "-d", "lookahead")
    assert result.exit_code == 0, result.output
