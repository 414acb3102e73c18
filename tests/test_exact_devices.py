"""Exact mode on other devices than the CPU, as far as it can be tested without one: settings, and where tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from architectures import BY_NAME
from torch._subclasses.fake_tensor import FakeTensorMode

from leapahead.core.errors import Refused
from leapahead.core.tree import TokenTree
from leapahead.models.transformers import executors, families
from leapahead.models.transformers.exact import ExactCache, ExactExecutor
from leapahead.models.transformers.products import Settings, in_one_order

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Library:
    """The library that products are computed by, as torch keeps it."""

    def __init__(self) -> None:
        self.name = "cublas"

    def __call__(self, name: str | None = None) -> str:
        before, self.name = self.name, name or self.name
        return before


def halves() -> list[tuple[bool, bool]]:
    """Whether products in half precision may be of reduced precision, and divided."""
    products = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    return [(getattr(products, name), getattr(products, f"{name}_split_k")) for name in names]


@pytest.fixture
def restored() -> Iterator[None]:
    """Puts torch's settings back, whatever a test does."""
    products = torch.backends.cuda.matmul
    before = halves()
    yield
    products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    products.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def precisions() -> list[str]:
    """Of products of float32, in all ways to set it; "" where torch does not tell."""

    def told(read: Callable[[], object]) -> str:
        try:
            return str(read())
        except RuntimeError:
            return ""

    backends = torch.backends
    ways = [torch.get_float32_matmul_precision, lambda: backends.cuda.matmul.allow_tf32]
    return [told(way) for way in ways] + [each.fp32_precision for each in (backends, backends.cuda.matmul)]


def set_all() -> None:
    torch.backends.fp32_precision = "tf32"


def set_products() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def set_legacy() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


@pytest.mark.parametrize(
    "change",
    [
        lambda: None,
        set_all,
        set_products,
        set_legacy,
        partial(torch.set_float32_matmul_precision, "high"),
        partial(torch.set_float32_matmul_precision, "medium"),
    ],
)
def test_the_precision_of_float32_may_be_set_in_any_way(change: Callable[[], None], restored: None) -> None:
    change()
    before = precisions()
    with in_one_order(CUDA, Settings(Library())):
        assert precisions()[1::2] == ["False", "ieee"]
    assert precisions() == before


def test_a_torch_without_a_setting_of_split_k_is_refused(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Settings, kind: str) -> tuple[bool, bool]:
        raise AttributeError("Unknown attribute allow_bf16_reduced_precision_reduction_split_k")

    monkeypatch.setattr(Settings, "_get", missing)
    with pytest.raises(Refused, match="newer torch, or leave out exact"), in_one_order(CUDA, Settings(Library())):
        pass


def test_products_are_summed_in_one_order_within_the_block(restored: None) -> None:
    library, products = Library(), torch.backends.cuda.matmul
    settings = Settings(library)
    products.allow_tf32 = True
    products.allow_fp16_reduced_precision_reduction = (False, True)
    before = halves()
    with in_one_order(CUDA, settings):
        assert halves() == [(False, False), (False, False)]
        assert (library.name, products.allow_tf32) == ("cublaslt", False)
        with in_one_order(CUDA, settings):  # of another thread
            pass
        assert halves() == [(False, False), (False, False)]
    assert halves() == before == [(True, True), (False, True)]
    assert (library.name, products.allow_tf32) == ("cublas", True)


def test_an_error_in_the_block_restores_them(restored: None) -> None:
    settings, before = Settings(Library()), halves()
    with pytest.raises(KeyError), in_one_order(CUDA, settings):
        raise KeyError
    assert halves() == before


def test_other_devices_change_nothing() -> None:
    before = halves()
    with in_one_order(CPU, Settings(Library())):
        assert halves() == before


def test_a_torch_without_the_library_is_refused(restored: None) -> None:
    def missing(name: str | None = None) -> str:
        if name is not None:
            raise RuntimeError("not compiled with cuBLASLt")
        return "cublas"

    before = halves()
    with pytest.raises(Refused, match="needs a torch with cuBLASLt"), in_one_order(CUDA, Settings(missing)):
        pass
    assert halves() == before


@pytest.mark.slow
def test_a_forward_is_computed_where_the_model_is() -> None:
    """On a simulated device, where an operation on tensors of two devices is an error."""
    model = BY_NAME["llama"].build(torch.bfloat16)
    patterns = families.patterns(model.config)
    assert patterns is not None
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                there = {name: each for name, each in tensors.items() if each is not None}
                moved = {name: mode.from_tensor(each).detach().to("meta") for name, each in there.items()}
                tensors.update(moved)
        executor = ExactExecutor(model, ExactCache(), patterns)
        state = executor.open(list(range(3, 103)))
        while state.length < 99:
            executor.prefill(state, min(executor.chunk, 99 - state.length))
        for parents in ([-1, 0, 0, 2], [-1, 0, 1]):
            tree = TokenTree(np.arange(len(parents)), np.array(parents))
            (found,) = executor.forward([state], [tree])
            assert (found.logits.shape, found.logits.device.type) == ((len(parents), 120), "meta")
            state.commit([0, 2][: len(parents) - 1])


def test_a_model_on_several_devices_is_refused_by_name() -> None:
    model: Any = BY_NAME["llama"].build()
    model.model.layers[1].to("meta")
    with pytest.raises(Refused, match="on the CPU or on one CUDA device; this one is on cpu and meta"):
        executors.tested_exact(model, "it", np.arange(3, 50), 1 << 20)
