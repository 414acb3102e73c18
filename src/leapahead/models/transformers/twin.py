"""Copies of a model that share its weights."""

from __future__ import annotations

import copy
from typing import Any

from leapahead.core.errors import Refused


def twin(model: Any) -> Any:
    """A copy of all modules and of the configuration; parameters and buffers are the model's own tensors.

    Raises:
        Refused: something in the model cannot be copied.
    """
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, tensors)
    except Exception as error:
        raise Refused(
            f"{type(model).__name__} cannot be copied ({error}), so it cannot draft for itself; use another draft model"
        ) from error
