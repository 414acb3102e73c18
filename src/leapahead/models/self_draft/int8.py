"""A bfloat16 model whose linear layers read int8 weights for few tokens, on the CPU, as a draft model.

On a CPU the time of a forward of few tokens is that of reading the weights, which int8 halves. Each row of a weight
becomes integers and one scale by optimum-quanto's absmax rule, and is multiplied by torch's kernel for that form. It
needs no training, and most of its drafts are accepted.

Time of a linear layer relative to bfloat16, 576 to 1536 and 2048 to 8192 features, one thread of an AVX-512 machine:

    tokens    1            4            8           64          256
              0.41 0.68    0.69 0.90    1.3 1.9     4.8 4.8     7.1 5.7

So more than a few tokens, as of a prompt, are multiplied by the user's own weight, which stays in memory. Quanto's own
modules are not used: they call the kernel for any number of tokens, also with rows that are no multiple of its vectors,
where it crashes; and on a small model their tensors take as long in Python as the kernel saves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leapahead.core.errors import Refused, needing
from leapahead.core.tree import UNLIMITED
from leapahead.models.base import CHAIN
from leapahead.models.self_draft.layer_skip import as_view
from leapahead.models.transformers.linears import PackedLinear, copied, weight_of
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.twin import twin

FEW = 4  # rows up to which the kernel is faster
MULTIPLE = 32  # of a layer's inputs, else the kernel reads beyond the row
LEAST = 0.5  # the part of a model's weights, its embedding excluded, that must be in linear layers


class Int8Linear(nn.Module):
    """x W' + b, with an approximate W where x has few rows.

    Args:
        linear: of the user's model, which is shared.
        integers: int8 [out, in].
        scale: bfloat16 [out]; a row of the approximate W is its integers times its scale.

    Attributes:
        few: rows up to which W is approximate.
    """

    def __init__(self, linear: nn.Linear, integers: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.exact = linear
        self.integers, self.scale = nn.Buffer(integers), nn.Buffer(scale)
        self.few = UNLIMITED

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > self.few * x.shape[-1]:
            exact: Tensor = self.exact(x)
            return exact
        rows = x.reshape(-1, x.shape[-1])  # [rows, in]
        result = torch._weight_int8pack_mm(rows, self.integers, self.scale).reshape(*x.shape[:-1], -1)
        return result if self.exact.bias is None else result + self.exact.bias


def int8(target: TransformersTarget) -> TransformersTarget:
    """The target with int8 weights, which take half as many bytes as its own, beside them; the model is not changed.

    Raises:
        Refused: not bfloat16 on a CPU, few linear layers, or a state that cannot forget.
        LeapaheadError: optimum-quanto is not installed.
    """
    if CHAIN not in target.info.capabilities:
        raise Refused(f"{target.info.name} decodes token by token, so that it cannot draft for itself")
    if target.device.type != "cpu" or target.model.dtype != torch.bfloat16:
        kind = f"{target.model.dtype}".removeprefix("torch.")
        raise Refused(
            f"{target.info.name} is {kind} on {target.device.type}; int8 weights are for bfloat16 on a CPU only"
        )
    view = twin(target.model)
    embedding = target.model.get_input_embeddings().weight
    quantised = _quantise(view, embedding)
    other = sum(each.numel() for each in target.model.parameters()) - embedding.numel() - copied(target.model)
    if quantised < LEAST * other:
        raise Refused(
            f"{target.info.name} has {quantised:,} of {other:,} weights beside its embedding in linear layers, "
            "too few for int8 to be faster"
        )
    tested = as_view(target, view, "in int8")
    for layer in view.modules():
        if isinstance(layer, Int8Linear):
            layer.few = FEW  # after the test, which compares forwards of few tokens with forwards of many
    return tested


@torch.no_grad()
def _quantise(model: Any, embedding: Tensor) -> int:
    """Replaces the linear layers; returns how many weights they had, without those tied to the embedding."""
    with needing("an int8 draft", "int8", "optimum"):
        from optimum.quanto import AbsmaxOptimizer, qint8, quantize_weight
    scale_of, count = AbsmaxOptimizer(), 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) not in (nn.Linear, PackedLinear) or child.in_features % MULTIPLE:
                continue  # a subclass may do more than multiply
            weight = weight_of(child)
            if weight is None or weight.dtype != torch.bfloat16:
                continue
            found = quantize_weight(weight, qint8, 0, scale_of(weight, qint8, 0))
            setattr(module, name, Int8Linear(child, found._data, found._scale.flatten()))
            count += 0 if weight is embedding else weight.numel()
    return count
