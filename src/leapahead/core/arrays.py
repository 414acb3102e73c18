"""Arrays of scores, of numpy and of torch: their type, their place, and the best of each row. Imports no backend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, is_torch_array

Array = Any


def floats(logits: Array, copy: bool) -> Array:
    """Logits as float32, or float64 where they are: a new array if `copy`, or if they have another type."""
    if isinstance(logits, np.ndarray):  # without what finds the library: it takes longer, and imports all of numpy
        return logits.astype(np.float64 if logits.dtype == np.float64 else np.float32, copy=copy)
    xp = array_namespace(logits)
    return xp.astype(logits, logits.dtype if logits.dtype == xp.float64 else xp.float32, copy=copy)


def on_host(scores: Array) -> npt.NDArray[np.floating[Any]]:
    """Scores in the host's memory as a numpy array."""
    return np.asarray(scores.detach() if is_torch_array(scores) else scores)


def chosen_of(scores: Array) -> Array:
    """int64 [rows]: the argmax, the lowest of equals; -1 where the best is not finite."""
    if is_torch_array(scores):  # in the fewest operations, each of which takes its start on a device
        best, chosen = scores.max(dim=-1)  # a NaN if there is one
        return chosen.masked_fill(best - best != 0, -1)  # which is NaN for NaN and infinity
    if len(scores) == 1:  # the fast path of plain decoding
        best = int(scores[0].argmax())
        return np.array([best if math.isfinite(scores[0, best]) else -1])
    chosen = np.argmax(scores, axis=-1)
    best = scores[np.arange(len(chosen)), chosen]
    return np.where(np.isfinite(best), chosen, -1)  # argmax gives a NaN or +inf if there is one
