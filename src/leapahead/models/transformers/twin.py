"""Copies of a model that share its weights."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

from leapahead.core.errors import Refused
from leapahead.models.transformers import devices


def twin(model: Any) -> Any:
    """A copy of all modules and of the configuration; parameters and buffers are the model's own tensors.

    So are the weights that Accelerate offloads, which its hooks have.

    Raises:
        Refused: something in the model cannot be copied.
    """
    shared = [*model.parameters(), *model.buffers()]
    for hook in chain.from_iterable(map(devices.hooks, model.modules())):
        maps = (getattr(hook, name, None) for name in ("weights_map", "tied_params_map"))
        shared += [each for each in maps if each is not None]
    try:
        return copy.deepcopy(model, {id(each): each for each in shared})
    except Exception as error:
        raise Refused(
            f"{type(model).__name__} cannot be copied ({error}), so it cannot draft for itself; use another draft model"
        ) from error
