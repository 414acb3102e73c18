"""Tests on the loaded model that recurrent states do not depend on how many tokens a forward reads.

    A   p p p p .. p | x y             two tokens in one forward
    B   p p p p .. p | x | y           the same, one by one: as the model itself generates

Some models have formulas for several tokens that begin with an empty state, or that bound the time step where the one
for a single token does not. How much of that is seen in the logits depends on the weights, and in half precision it may
be less than rounding; in the states themselves it is seen always. So the states of the first layer of each kind, which
have the least rounding behind them, must be equal after both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from leapahead.core.errors import Refused
from leapahead.core.tree import IntArray
from leapahead.models.transformers.replay import ReplayExecutor, bounds_time_step
from leapahead.models.transformers.states import Place

PROMPT = 16  # tokens before
DRAWS = 3  # of tokens; one must agree, since in half precision another expert may be chosen before the first such layer
# States may be as far apart as logits may, relative to their size, but never further than this. In bfloat16 right ones
# are up to 0.002 apart, and those after a wrong beginning 0.04 to 0.7.
CEILING = 0.015


def check(executor: ReplayExecutor, model: Any, ids: IntArray, tolerance: float) -> None:
    """Tests `executor` on `model`.

    Args:
        ids: token ids without a special meaning for the model.
        tolerance: of the logits.

    Raises:
        Refused: chains would not give the text of plain decoding.
    """
    if not executor.settings and any(map(bounds_time_step, model.modules())):
        raise Refused("the model bounds its time steps in forwards of several tokens, and not in those of one")
    for draw in range(DRAWS):
        if (error := distance(executor, ids, draw)) <= min(tolerance, CEILING):
            return
    raise Refused(f"states after several tokens in one forward are {error:.2g} of their size off")


def distance(executor: ReplayExecutor, ids: IntArray, draw: int) -> float:
    """How far the states are apart, relative to their size, where they are furthest apart; NaN where one is."""
    *prompt, x, y = (int(token) for token in np.random.default_rng(draw).choice(ids, size=PROMPT + 2))
    executor.forget()
    together = _first(executor.states_after(prompt, [[x, y]]))
    alone = _first(executor.states_after(prompt, [[x], [y]]))
    return float(torch.stack([apart(together[place], alone[place]) for place in alone]).max())


def apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The length of the difference of two tensors, relative to the second."""
    one, other = one.cpu().double(), other.cpu().double()  # not every device has float64
    found: torch.Tensor = (one - other).norm() / other.norm().clamp_min(torch.finfo(torch.double).tiny)
    return found


def _first(states: dict[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
    """Of the first layer that has states of a kind."""
    least: dict[str, int] = {}
    for kind, layer, _ in states:
        least[kind] = min(least.get(kind, layer), layer)
    return {place: each for place, each in states.items() if place[1] == least[place[0]]}
