"""The bias of single tokens, as a logits processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

Array = Any  # a numpy array or a torch tensor


class LogitBias:
    """Adds a number to the logits of some tokens, whatever the prefix is.

    Args:
        biases: token id -> what is added. Finite.
    """

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._tokens = np.array(list(biases), dtype=np.int64)
        self._values = np.array(list(biases.values()), dtype=np.float32)
        self._there: tuple[Any, Array, Array] | None = None  # device, and both arrays on it

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process that gets a copy may compute on another device."""
        return LogitBias, (dict(zip(self._tokens.tolist(), self._values.tolist(), strict=True)),)

    def __call__(self, prefixes: Array, logits: Array, /) -> Array:
        """logits: float [rows, vocab], which is changed in place and returned."""
        xp, place = array_namespace(logits), device(logits)
        if self._there is None or self._there[0] != place:
            self._there = place, xp.asarray(self._tokens, device=place), xp.asarray(self._values, device=place)
        _, tokens, values = self._there
        logits[:, tokens] += xp.astype(values, logits.dtype)
        return logits
