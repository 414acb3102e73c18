"""The scenarios of `test_cuda` on a simulated device, and how often a step copies between it and the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import heads
import numpy as np
import pytest
import seq2seq
import simulated_device
import test_cuda
import torch
from architectures import BY_NAME
from helpers import GREEDY, PROMPT, Scattered, mostly_slow, run
from image_families import BEGIN, END, FAMILIES, PAD, Picture
from simulated_device import SimulatedDevice
from test_cuda import SAMPLED, TREES, captured, usual  # noqa: F401  # fixtures among them

from leapahead import LLM, Grammar, hf
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models import loading
from leapahead.models.base import read_prompt
from leapahead.models.choices import Rows
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.static.executor import StaticExecutor

pytestmark = pytest.mark.skipif(not simulated_device.available, reason="this torch has kernels for CUDA")

DEVICE, CUDA = "cuda", cast(Any, torch.cuda)
PROMPTS = ["def add(a, b):\n    return a + b\n\ndef add(", "for number in range(10): print(", "The quick"]


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[SimulatedDevice]:
    with simulated_device.simulated_device() as found:
        yield found


@pytest.fixture(scope="module")
def bundled(device: SimulatedDevice) -> Any:
    return BY_NAME["llama"].build().to(DEVICE)


@pytest.fixture
def tiny(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the bundled model."""
    monkeypatch.setattr(loading, "bundled", lambda *_: str(tiny_folder))


# ------------------------------------------------------------------------------------------------- the simulation


def test_tensors_of_two_devices_do_not_mix() -> None:
    there, here = torch.arange(6.0, device=DEVICE).view(2, 3), torch.ones(2, 3)
    assert (there.device, there.is_cuda, (there + 1).device) == (torch.device("cuda:0"), True, torch.device("cuda:0"))
    for mixed in (
        lambda: there + here,
        lambda: here * there[0, 0],
        lambda: there @ here.T,
        lambda: torch.cat([there, here]),
        lambda: there.index_select(0, torch.tensor([0])),
        lambda: torch.nn.functional.embedding(torch.tensor([0]), there),
        lambda: here[torch.tensor([0], device=DEVICE)],
        lambda: there.__setitem__(torch.tensor([0]), here[:1]),
        lambda: here.add_(there),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(there)
    scalar = torch.tensor(2.0)
    assert (there * scalar + torch.where(there > 0, scalar, there)).tolist() == [[0, 4, 6], [8, 10, 12]]
    assert there[torch.tensor([1])].tolist() == [[3, 4, 5]]
    there[0] = here[0]
    assert here.copy_(there).tolist() == [[1, 1, 1], [3, 4, 5]]


def test_copies_are_counted(device: SimulatedDevice) -> None:
    reads, writes = len(device.to_host), len(device.to_device)
    there = torch.tensor([1, 0, 2], device=DEVICE)
    there = torch.tensor([3, 0, 4]).to(DEVICE) + there
    assert len(device.to_device) - writes == 2
    assert len(device.to_host) == reads
    for read in (there.cpu, there.tolist, there[0].item, there.nonzero, lambda: there[there > 1], there.any().__bool__):
        before = len(device.to_host)
        read()
        assert len(device.to_host) == before + 1


def test_what_is_captured_is_of_the_device_alone() -> None:
    """A replay computes with what memory holds; numbers of the host and new tensors are those of the capture."""
    given, found, graph = torch.ones(2, device=DEVICE), torch.zeros(2, device=DEVICE), CUDA.CUDAGraph()
    side = CUDA.Stream(DEVICE)
    number = 2
    with CUDA.graph(graph, pool=1, stream=side, capture_error_mode="thread_local"):
        found.copy_(given * number + torch.ones(2, device=DEVICE))
    number = 5
    given.fill_(10)
    graph.replay()
    assert found.tolist() == [21, 21]
    for refused in (lambda: given.cpu(), lambda: given.sum().item(), lambda: torch.ones(2).to(DEVICE)):
        with (
            pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
            CUDA.graph(CUDA.CUDAGraph(), pool=1, stream=side, capture_error_mode="thread_local"),
        ):
            refused()


def test_pinned_memory_is_left_alone_until_it_was_copied(device: SimulatedDevice) -> None:
    host = torch.zeros(2, pin_memory=True)
    there = torch.zeros(2, device=DEVICE)
    event = CUDA.Event()
    there.copy_(host, non_blocking=True)
    event.record()
    event.synchronize()
    host.fill_(1)
    there.copy_(host, non_blocking=True)
    host.fill_(2)
    with pytest.raises(AssertionError, match="pinned memory was written"):
        there.tolist()
    device.forget()


# ----------------------------------------------------------------------------------------- the scenarios of CUDA


@pytest.mark.parametrize("name", mostly_slow([each.name for each in TREES], "gemma3", "qwen3_moe"))
def test_families(name: str) -> None:
    test_cuda.test_families(BY_NAME[name])


@pytest.mark.parametrize(
    ("name", "params"),
    mostly_slow(
        [(name, params) for name in test_cuda.DRAFTERS for params in (GREEDY, SAMPLED)],
        ("lookahead", GREEDY),
        ("auto", SAMPLED),
    ),
)
def test_the_text_is_plain_decodings_without_graphs(
    captured: TransformersTarget,  # noqa: F811
    usual: TransformersTarget,  # noqa: F811
    name: str,
    params: SamplingParams,
) -> None:
    test_cuda.test_the_text_is_plain_decodings_without_graphs(captured, usual, name, params)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
def test_a_batch_gives_each_text_its_own(bundled: Any, usual: TransformersTarget, warm: bool) -> None:  # noqa: F811
    test_cuda.test_a_batch_gives_each_text_its_own(bundled, usual, warm)


@pytest.mark.slow
def test_a_cache_that_grows(
    bundled: Any,
    usual: TransformersTarget,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test_cuda.test_a_cache_that_grows(bundled, usual, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_exact_mode(tiny: None, dtype: str) -> None:
    test_cuda.test_exact_mode(dtype)


@pytest.mark.slow
def test_exact_mode_in_batches_and_beyond_a_block() -> None:
    test_cuda.test_exact_mode_in_batches_and_beyond_a_block()


@pytest.mark.slow
def test_two_threads_on_one_model(tiny: None) -> None:
    test_cuda.test_two_threads_on_one_model()


@pytest.mark.slow
@pytest.mark.parametrize("static", ["auto", "graphs", "off"])
def test_the_command_line(leapahead: Any, static: str) -> None:
    test_cuda.test_the_command_line(leapahead, static)


@pytest.mark.slow
def test_check(leapahead: Any) -> None:
    test_cuda.test_check(leapahead)


# ------------------------------------------------------------------------------------------------ the text of the CPU


def warmer(prefixes: Any, scores: Any) -> Any:
    return scores * 0.7


FEATURES: dict[str, dict[str, Any]] = {
    "forks": {"n": 3, "temperature": 0.9, "seed": 1},
    "logprobs": {"logprobs": 3},
    "grammar": {"grammar": Grammar.regex("[a-z ]{1,30}"), "ignore_eos": False},
    "processor": {"logits_processors": [warmer], "temperature": 0.7, "seed": 2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "filters": {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "seed": 1},
    "bias": {"logit_bias": {5: 2.0}, "bad_words": ["a"]},
    "typical": {"acceptance": "lossy-typical"},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "draft_model": {"drafter": "draft_model", "draft": "self:first=1"},
    "speculative_sampling": {"drafter": "speculative_sampling", "draft": "self:first=1"},
    "head": {"drafter": "head", "nodes": 6},
    "triforce": {"drafter": "triforce"},
    "exact": {"exact": True, "drafter": "recycling"},
}


def texts(found: Any) -> Any:
    return [texts(each) for each in found] if isinstance(found, list) else list(found.tokens)


@pytest.fixture(scope="module")
def llms(device: SimulatedDevice, tiny_folder: Path) -> Iterator[tuple[LLM, LLM]]:
    """On the CPU and on the device."""
    with (
        LLM(str(tiny_folder), device="cpu", drafter="recycling") as here,
        LLM(str(tiny_folder), device=DEVICE, drafter="recycling") as there,
    ):
        assert isinstance(there.target, TransformersTarget)
        assert isinstance(there.target.executor, StaticExecutor)
        yield here, there


@pytest.mark.parametrize("name", FEATURES)
def test_the_text_with(name: str, llms: tuple[LLM, LLM]) -> None:
    given = {"max_new_tokens": 24, "ignore_eos": True, **FEATURES[name]}
    here, there = (llm.generate(PROMPTS, **given) for llm in llms)
    assert texts(there) == texts(here)
    if name == "logprobs":
        expected, found = ([each.logprob for each in some[0].logprobs] for some in (here, there))
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.filterwarnings("ignore:the head", "ignore:the draft model")  # they take as long as the tiny model
def test_the_text_with_drafts_of(name: str, tiny_folder: Path, tmp_path: Path, tiny_model: Any) -> None:
    options = dict(DRAFTS[name])
    if name == "head":
        options["head"] = str(heads.write(tmp_path, "eagle3", tiny_model.config.vocab_size))
    found = []
    for place in ("cpu", DEVICE):
        with LLM(str(tiny_folder), device=place, **options) as llm:
            found.append(llm.generate(PROMPTS, max_new_tokens=20, temperature=0.8, seed=3, ignore_eos=True))
    assert texts(found[1]) == texts(found[0])


@pytest.mark.parametrize(
    ("name", "drafter"),
    mostly_slow([("mamba", "plain"), ("qwen3_next", "prompt_lookup"), ("llama", "recycling")], ("llama", "recycling")),
)
def test_the_text_of_generate(name: str, drafter: str) -> None:
    """Of Transformers' models that are not ours alone, states in place of entries among them."""
    model, found = BY_NAME[name].build(), []
    for place in ("cpu", DEVICE):
        inputs = {"input_ids": torch.tensor([PROMPT, PROMPT[::-1]], device=place)}
        moved = model.to(place)
        own = moved.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)
        mine = moved.generate(
            **inputs, max_new_tokens=20, do_sample=False, pad_token_id=0, custom_generate=hf.generate, drafter=drafter
        )
        assert mine.device.type == place
        found += [own.tolist(), mine.tolist()]
    assert found == [found[0]] * 4


def test_the_text_of_one_image() -> None:
    family = FAMILIES["qwen2_vl"]
    model, inputs, found = family.build(1), family.inputs([4, BEGIN, Picture(1), END, 5, 6, 7]), []
    for place in ("cpu", DEVICE):
        given = {name: value.to(place) for name, value in inputs.items()}
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}
        mine = model.to(place).generate(**given, **options, custom_generate=hf.generate, drafter="lookahead")
        found.append(mine.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("name", mostly_slow(["bart", "t5"], "t5"))
def test_the_text_of_an_encoder_and_a_decoder(name: str) -> None:
    found = []
    for place in ("cpu", DEVICE):
        with LLM(seq2seq.build(name).to(place), drafter="lookahead") as llm:
            found.append(llm.generate([list(PROMPT), list(PROMPT[:3])], max_new_tokens=20))
    assert texts(found[0]) == texts(found[1])


# ------------------------------------------------------------------------------------------------ copies of a step


def test_a_step_copies_its_inputs_and_its_choices(
    device: SimulatedDevice,
    captured: TransformersTarget,  # noqa: F811
) -> None:
    """To the device and back once each."""
    for params in (GREEDY, SAMPLED):
        plain = run(captured, params=params)
        drafter = Scattered([*PROMPT, *plain.tokens])
        run(captured, drafter, params=params)
        reads, writes = len(device.to_host), len(device.to_device)
        found = run(captured, drafter, params=params)
        assert len(device.to_host) - reads == found.stats.steps, device.to_host[reads:]
        moves = 1  # of the text before, whose last draft was accepted in part
        assert len(device.to_device) - writes <= found.stats.steps + moves, device.to_device[writes:]


@pytest.mark.filterwarnings("ignore:the head")
def test_a_forward_of_a_head_copies_its_inputs_and_its_candidates(
    device: SimulatedDevice, tiny_folder: Path, tmp_path: Path, tiny_model: Any
) -> None:
    head = str(heads.write(tmp_path, "eagle3", tiny_model.config.vocab_size))
    with LLM(str(tiny_folder), device=DEVICE, drafter="head", nodes=6, head=head) as llm:
        plain = llm.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True, drafter="plain")
        llm.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)
        reads, writes = len(device.to_host), len(device.to_device)
        found = llm.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)
    assert found.tokens == plain.tokens
    forwards = 2 * found.stats.steps  # one of each of the two models
    assert found.stats.drafted > 0
    assert len(device.to_host) - reads <= forwards
    assert len(device.to_device) - writes <= forwards + 4, device.to_device[writes:]  # and those of the prompt


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_are_one_copy(device: SimulatedDevice, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = Rows(logits.to(DEVICE))
    before = len(device.to_host)
    tokens, values = there.top_k(4)
    assert len(device.to_host) == before + 1
    own = logits.topk(4)
    assert (tokens.tolist(), values.tolist()) == (own.indices.tolist(), own.values.tolist())
    assert (str(tokens.dtype), str(values.dtype)) == ("int64", "float64")


def test_rows_are_exchanged_on_the_device(device: SimulatedDevice, usual: TransformersTarget) -> None:  # noqa: F811
    sessions = [usual.open(PROMPT, GREEDY) for _ in range(3)]
    for session in sessions:
        read_prompt(usual, session)
    copies = []
    for some in (sessions[:2], sessions[1:], sessions[::2]):  # neighbours, and rows that are none
        before = len(device.to_device)
        usual.step(some, [TokenTree.root(PROMPT[-1])] * 2)
        copies.append(len(device.to_device) - before)
    assert copies[2] <= min(copies[:2])
    for session in sessions:
        session.close()
