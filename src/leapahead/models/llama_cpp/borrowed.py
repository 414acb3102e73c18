"""Memory of llama.cpp's as numpy arrays."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


class _Memory:
    """Memory of llama.cpp's as numpy takes it."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<f4", "version": 3}


@lru_cache(maxsize=64)  # from one step to the next, the memory is nearly always the same
def borrowed(address: int, rows: int, width: int) -> npt.NDArray[np.float32]:
    """float32 [rows, width] over llama.cpp's memory."""
    return np.asarray(_Memory(address, (rows, width)))
