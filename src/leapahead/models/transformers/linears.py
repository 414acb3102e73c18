"""Linear layers whose weights are laid out once as oneDNN multiplies them, instead of in every forward.

PyTorch's product of a bfloat16 matrix with few rows takes the weights as they lie, and reads them slower than memory
gives them. oneDNN's own layout, which `torch.compile` uses when it freezes a model, does not: on two cores a forward of
one token takes 0.6 to 0.7 of the time (`leapahead tune`, with and without `--no-pack`). The values are the same, and
the products are so up to rounding.

Weights in that layout cannot be read element by element; `weight_of` gives them as they were.
"""

from __future__ import annotations

import platform
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from leapahead.models.transformers import weights

PROCESSORS = ("x86_64", "AMD64")


class PackedLinear(nn.Linear):
    """x W' + b, with a W in oneDNN's layout.

    Args:
        linear: the layer whose values it has. Its weight [out, in] is bfloat16 on the CPU.
        is_shared: whether another module has this weight too, so that it stays in memory.
    """

    def __init__(self, linear: nn.Linear, is_shared: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        own = linear.weight.detach()
        self.plain = (linear.weight,) if is_shared else ()  # a tuple, so that it is no parameter of this module
        self.weight = nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(own, None), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return found


def weight_of(layer: Any) -> Tensor | None:
    """The weight of a layer, to be read element by element; None where it has none. It may be a copy."""
    if isinstance(layer, PackedLinear):
        return layer.plain[0] if layer.plain else layer.weight.detach().to_dense()
    found = getattr(layer, "weight", None)
    return found if isinstance(found, Tensor) else None


def is_packed(model: nn.Module) -> bool:
    """Whether a model has packed layers."""
    return any(isinstance(each, PackedLinear) for each in model.modules())


def copied(model: nn.Module) -> int:
    """How many of a model's weights are there twice: packed, and as they were, for other modules."""
    return sum(each.weight.numel() for each in model.modules() if isinstance(each, PackedLinear) and each.plain)


def can_pack() -> bool:
    """Whether this processor's bfloat16 products are computed by oneDNN."""
    onednn = torch.backends.mkldnn
    if platform.machine() not in PROCESSORS or not onednn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(onednn.enabled and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def pack(model: nn.Module) -> int:
    """Replaces the linear layers of a model that have bfloat16 weights on the CPU. Returns how many.

    Subclasses, which may do more than multiply, and layers with hooks stay as they are. A weight that another module
    has too, as that of an embedding, is copied.
    """
    known = weights.digest(model)
    uses = Counter(id(each) for module in model.modules() for each in module._parameters.values() if each is not None)
    replaced = dict[int, PackedLinear]()  # a layer may occur twice
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and fits(child):
                if id(child) not in replaced:
                    assert isinstance(child, nn.Linear)
                    replaced[id(child)] = PackedLinear(child, uses[id(child.weight)] > 1).eval()
                module._modules[name] = replaced[id(child)]
    if replaced:
        weights.remember(model, known)
    return len(replaced)


@torch.no_grad()
def unpack(model: nn.Module) -> None:
    """Takes back what `pack` has done."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, PackedLinear):
                linear = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                plain = weight_of(child)
                assert plain is not None
                linear.weight = plain if isinstance(plain, nn.Parameter) else nn.Parameter(plain, requires_grad=False)
                linear.bias = child.bias
                module._modules[name] = linear.eval()
    weights.forget(model)


def fits(layer: nn.Module) -> bool:
    """Whether a layer can be packed."""
    return (
        type(layer) is nn.Linear
        and layer.weight.dtype == torch.bfloat16
        and layer.weight.device.type == "cpu"
        and layer.weight.layout == torch.strided
        and (layer.bias is None or layer.bias.dtype == torch.bfloat16)
        and not (layer._forward_hooks or layer._forward_pre_hooks or "_hf_hook" in vars(layer))
    )
