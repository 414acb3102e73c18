"""Models on other devices and on several, as far as it can be tested on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import BY_NAME
from helpers import PROMPT, Scattered, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from leapahead import LLM
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.tree import TokenTree
from leapahead.models.transformers import devices, families, grouped, memory
from leapahead.models.transformers.exact import ExactCache, ExactExecutor
from leapahead.models.transformers.forward import MaskedExecutor
from leapahead.models.transformers.kv_cache import KVCache
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.pretrained import load
from leapahead.models.transformers.static import choice
from leapahead.models.transformers.static.graphs import Calls
from leapahead.models.transformers.twin import twin

TREES = ([-1, 0, 0, 2, 1], [-1, 0, 1], [-1])  # parents


def moved(value: Any, device: str) -> Any:
    """What Accelerate's hooks do with the inputs of a layer that lies on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(each, device) for each in value)
    return value


def divide(model: Any, mode: FakeTensorMode) -> None:
    """The last layer and the head go to a simulated device; inputs are moved there."""
    second = [model.model.layers[-1], model.model.norm, model.lm_head]
    for module in second:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (moved(args, "meta"), {name: moved(each, "meta") for name, each in kwargs.items()}),
            with_kwargs=True,
        )
    there = {id(inner) for module in second for inner in module.modules()}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, each in list(tensors.items()):
                if each is not None:
                    tensors[name] = mode.from_tensor(each).detach().to("meta" if id(module) in there else "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_on_two_devices_are_computed_where_they_lie(name: str, packs: bool) -> None:
    """An operation on tensors of two devices is an error.

    Trees of different sizes are packed by operations on the host that cannot be simulated; `Block.on` is tested below.
    """
    shapes = TREES[:1] * 3 if packs else TREES
    model = BY_NAME[name].build(attention="sdpa")
    patterns = families.patterns(model.config)
    assert patterns is not None
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        divide(model, mode)
        executor = MaskedExecutor(model, KVCache(), patterns, True, model.config if packs else None)
        states = [executor.open(list(range(3, 3 + length))) for length in (18, 5, 9)]
        for state in states:
            executor.prefill(state, len(state.tokens) - 1)
        for _ in range(2):
            trees = [TokenTree(np.arange(len(parents)), np.array(parents)) for parents in shapes]
            found = executor.forward(states, trees)
            assert [tuple(each.logits.shape) for each in found] == [(len(parents), 120) for parents in shapes]
            assert {each.logits.device.type for each in found} == {"meta"}
            for state, path in zip(states, ([0, 2, 3], [0], [0]), strict=True):
                state.commit(path)
    assert {group.entries.device.type for group in executor.cache.groups} == {"cpu", "meta"}


def test_packed_trees_lie_where_the_layer_does() -> None:
    mixed = grouped.Packing.of([1, 30, 2], torch.device("cpu"))
    there = [block.on(torch.device("meta")) for block in mixed.blocks]
    assert [type(each) for each in there] == [grouped.Block, grouped.OneTree]
    nodes = torch.zeros(33, 4, 8, device="meta")
    for block in there:
        taken = block.take(nodes)
        assert taken.device.type == "meta"
        block.put(taken.transpose(1, 2), nodes)


def test_why_forwards_are_not_captured() -> None:
    assert devices.of(BY_NAME["llama"].build()) == [torch.device("cpu")]
    pair = [torch.device("cuda", index) for index in range(2)]
    assert devices.eager_because(pair) == "its layers lie on 2 devices (cuda:0, cuda:1), and a graph is of one"
    assert devices.eager_because(pair[:1]) == ""


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_accelerators_say_that_they_capture_nothing(kind: str) -> None:
    model = BY_NAME["llama"].build()
    executor = MaskedExecutor(model, KVCache(), {}, True)
    assert choice.upgraded(executor, "it", np.arange(9), (3, 1), "auto", True) == (executor, {})
    executor.device = torch.device(kind)
    found, refusals = choice.upgraded(executor, "it", np.arange(9), (3, 1), "auto", True)
    assert found is executor
    assert refusals == {"static": f"torch captures graphs on CUDA devices only, and this model is on {kind}"}


def test_exact_mode_is_captured_on_cuda_or_says_once_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].build()
    executor = ExactExecutor(model, ExactCache(), {})
    assert choice.upgraded(executor, "it", np.arange(9), (3, 1), "auto", True) == (executor, {})
    executor.device = torch.device("cuda")
    monkeypatch.setattr(choice, "CudaGraphs", lambda device: Calls())
    model._can_compile_fullgraph = False
    why = "Transformers does not say of LlamaForCausalLM that its forward can be compiled as a whole"
    with pytest.warns(UserWarning, match="the forwards of it are not captured as CUDA graphs, so they take longer"):
        found = choice.upgraded(executor, "it", np.arange(9), (3, 1), "auto", True)
    assert found == (executor, {"static": why})
    with pytest.raises(Refused, match=r"cannot be captured .*; leave out static"):
        choice.upgraded(executor, "it", np.arange(9), (3, 1), "graphs", True)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_memory_that_torch_keeps_for_reuse_is_free(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `model.generate`, whose cache torch keeps."""
    torch_on = getattr(torch, kind)
    monkeypatch.setattr(torch_on, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch_on, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch_on, "memory_allocated", lambda device: 200)
    assert memory.free_bytes(torch.device(kind, 1)) == 1300


@pytest.mark.parametrize(("there", "fitting"), [(100_000, 50_000 // 64), (9_000_000, 500_000 // 64)])
def test_a_cache_on_several_devices_is_bounded_by_the_fullest(
    there: int, fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of two layers, each on a device of its own: 2 heads of width 8 in 4 bytes."""
    free = {"cpu": 1_000_000, "meta": there}
    monkeypatch.setattr(memory, "free_bytes", lambda device: free[device.type])
    cache = KVCache()
    cache.begin([cache.take([3, 4], 0)], [2])
    for layer, device in enumerate(free):
        cache.write((layer, 0), torch.zeros(1, 2, 2, 8, device=device))
    cache.end()
    assert memory.usual_tokens(cache, torch.device("cpu")) == fitting


def test_tensor_parallelism_is_refused_by_name() -> None:
    model = BY_NAME["llama"].build()
    model._tp_size = 2
    with pytest.raises(Refused, match=r"among 2 processes.*tensor_parallel=True"):
        LLM(model)


def on_gpus(monkeypatch: pytest.MonkeyPatch, **counts: int) -> None:
    monkeypatch.setattr(devices, "count", lambda kind: {"cpu": 1, **counts}.get(kind, 0))


def test_auto_is_an_accelerator_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for counts, kind in (({}, "cpu"), ({"mps": 1}, "mps"), ({"xpu": 1}, "xpu"), ({"cuda": 2, "xpu": 1}, "cuda")):
        on_gpus(monkeypatch, **counts)
        assert devices.checked_device("auto") == torch.device(kind)


def test_layers_are_divided_among_gpus_that_are_there(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    on_gpus(monkeypatch)
    with pytest.raises(BadParameter, match="'balanced' divides a model among GPUs, and torch sees none"):
        load(tiny_folder, device="balanced")
    on_gpus(monkeypatch, cuda=2)
    assert devices.checked_device("balanced") == "balanced"
    assert devices.checked_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(BadParameter, match="'cuda:2' is not there: torch sees 2 CUDA devices"):
        devices.checked_device("cuda:2")
    monkeypatch.setattr(devices, "find_spec", lambda _: None)
    with pytest.raises(BadParameter, match="needs the package accelerate: pip install accelerate"):
        devices.checked_device("balanced")


def test_a_divided_model_is_loaded_by_its_map(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    """Accelerate divides it among the devices that there are, here one CPU."""
    maps: list[Any] = []
    whole = AutoModelForCausalLM.from_pretrained

    def from_pretrained(source: Any, **options: Any) -> Any:
        maps.append(options.get("device_map"))
        return whole(source, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr("leapahead.models.transformers.pretrained.checked_device", lambda _: "sequential")
    target, _ = load(tiny_folder, device="sequential")
    assert maps == ["sequential"]
    assert target.device.type == "cpu"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_with_the_hooks_of_accelerate_keeps_its_text(name: str) -> None:
    """They move every layer's inputs to its device, as those of a divided model do; here all lie on one."""
    accelerate = pytest.importorskip("accelerate")
    expected = run(TransformersTarget(BY_NAME[name].build(), exclusive=True), prompt=PROMPT).tokens
    model = accelerate.dispatch_model(BY_NAME[name].build(), {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert any("_hf_hook" in vars(module) for module in model.modules())
    target = TransformersTarget(model, exclusive=True)
    assert isinstance(target.executor, MaskedExecutor)
    assert target.executor.config is not None
    assert not target.refusals
    assert run(target, Scattered([*PROMPT, *expected]), prompt=PROMPT).tokens == expected


def test_a_copy_of_a_model_shares_the_weights_that_are_offloaded() -> None:
    """They lie in the hooks of Accelerate, not in the modules."""
    accelerate = pytest.importorskip("accelerate")
    model = BY_NAME["llama"].build()
    accelerate.cpu_offload(model.model.layers[1], torch.device("cpu"))
    copied = twin(model)
    layer, of_copy = (each.model.layers[1].mlp.up_proj for each in (model, copied))
    assert layer.weight.is_meta
    assert of_copy._hf_hook is not layer._hf_hook
    assert of_copy._hf_hook.weights_map["weight"].data_ptr() == layer._hf_hook.weights_map["weight"].data_ptr()
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        assert torch.equal(copied(ids).logits, model(ids).logits)
