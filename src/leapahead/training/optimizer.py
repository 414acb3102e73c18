"""What changes the weights in training: AdamW, or Muon for the hidden matrices with AdamW for all else.

    adamw    every weight by its own gradient and its variance                       (1711.05101)
    muon     a matrix by its momentum made orthogonal, all directions as far         (Keller Jordan, 2024)

A step of Muon is scaled such that it changes a matrix about as much as a step of AdamW with the same rate
(2502.16982, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leapahead.core.errors import BadParameter
from leapahead.training.settings import MUON

BETAS, MOMENTUM, WEIGHT_DECAY = (0.9, 0.95), 0.95, 0.01
FUSED = {"cpu", "cuda"}  # devices for which PyTorch has AdamW as one kernel
# In the names of matrices with a row for every token, which are no hidden ones.
OF_TOKENS = ("embed", "lm_head", "codebook")


class Optimizer:
    """Changes weights by their gradients.

    Args:
        name: one of `leapahead.training.settings.OPTIMIZERS`.
        parameters: what is trained, by name.

    Raises:
        BadParameter: this version of PyTorch has no such optimizer.
    """

    def __init__(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        places: dict[bool, list[int]] = {True: [], False: []}
        for place, (own, each) in enumerate(parameters.items()):
            is_hidden = each.ndim == 2 and not any(part in own for part in OF_TOKENS)
            places[name == MUON and is_hidden].append(place)
        every = list(parameters.values())
        self._parts: list[tuple[list[int], Any]] = []
        if places[True]:
            self._parts.append((places[True], _muon([every[place] for place in places[True]])))
        if places[False]:
            others = [every[place] for place in places[False]]
            self._parts.append((places[False], _adamw(others)))

    def step(self, rate: float) -> None:
        """Changes the weights, with this learning rate, and forgets their gradients."""
        for _, part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Its state, by the place of the parameter and a name: "3.exp_avg"."""
        return {
            f"{place}.{name}": each
            for places, part in self._parts
            for own, some in part.state_dict()["state"].items()
            for name, each in some.items()
            for place in (places[own],)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up the state of another one of the same kind and for the same parameters."""
        found: dict[int, dict[str, Tensor]] = {}
        for name, each in tensors.items():
            place, _, which = name.partition(".")
            found.setdefault(int(place), {})[which] = each
        for places, part in self._parts:
            state = {own: found[place] for own, place in enumerate(places) if place in found}
            part.load_state_dict({**part.state_dict(), "state": state})


def _adamw(others: list[nn.Parameter]) -> Any:
    is_fused = {each.device.type for each in others} <= FUSED  # a pass over each weight instead of ten
    return torch.optim.AdamW(others, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=is_fused or None)


def _muon(matrices: list[nn.Parameter]) -> Any:
    if not hasattr(torch.optim, "Muon"):
        raise BadParameter(
            f"optimizer='muon' needs PyTorch 2.9 or newer, and this is {torch.__version__}; give optimizer='adamw'"
        )
    return torch.optim.Muon(matrices, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
