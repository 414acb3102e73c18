"""The settings of matrix products on CUDA for exact mode: sums of full precision, in one order.

By default cuBLAS may divide the sum of a product among blocks (split-K) and add up their parts in the products' own
half precision. torch lets both be switched off where cuBLASLt computes, and TF32 for products of float32.

The settings are torch's, for the whole process. They are changed while a forward of exact mode runs in any thread, and
other models' forwards of that time have them too: those are as exact or more so, and may be slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from leapahead.core.errors import Refused
from leapahead.core.forks import Mutex

NEITHER = (False, False)  # reduced precision, split-K
HALF = ("bf16", "fp16")


class Precision(NamedTuple):
    """How products of float32 are computed, which torch lets be set in two ways.

    Attributes:
        legacy: of `torch.set_float32_matmul_precision` and `allow_tf32`; None where the other way was used, after which
            torch refuses to tell it.
        of_products: `fp32_precision`; None where torch has it not yet.
    """

    legacy: str | None
    of_products: str | None

    @classmethod
    def now(cls) -> Precision:
        try:
            legacy = torch.get_float32_matmul_precision()
        except RuntimeError:
            legacy = None
        return cls(legacy, getattr(torch.backends.cuda.matmul, "fp32_precision", None))

    def restore(self) -> None:
        if self.legacy == "high":
            torch.backends.cuda.matmul.allow_tf32 = True
        elif self.legacy == "medium":
            torch.set_float32_matmul_precision(self.legacy)
        if self.of_products is not None:
            torch.backends.cuda.matmul.fp32_precision = self.of_products


class Settings:
    """torch's settings of products, changed while at least one forward needs them.

    Args:
        library: changes the library and returns the one before, as `torch.backends.cuda.preferred_blas_library` does.
    """

    def __init__(self, library: Any = torch.backends.cuda.preferred_blas_library) -> None:
        self._library = library
        self._lock, self._users = Mutex(), 0
        self._before: tuple[Any, ...] = ()

    def enter(self) -> None:
        with self._lock:
            if not self._users:
                self._before = self._change()
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                library, precision, *halves = self._before
                self._library(library)
                precision.restore()
                for kind, value in zip(HALF, halves, strict=True):
                    self._set(kind, value)

    def _change(self) -> tuple[Any, ...]:
        """Returns what was set before."""
        try:
            before = (self._library(), Precision.now(), *(self._get(kind) for kind in HALF))
        except AttributeError as error:
            raise Refused(
                f"exact mode on CUDA needs a torch that can be told not to divide sums, and {torch.__version__} has no "
                f"setting for it ({error}); use a newer torch, or leave out exact"
            ) from error
        try:
            self._library("cublaslt")
        except RuntimeError as error:
            raise Refused(f"exact mode on CUDA needs a torch with cuBLASLt ({error}); leave out exact") from error
        torch.backends.cuda.matmul.allow_tf32 = False
        for kind in HALF:
            self._set(kind, NEITHER)
        return before

    def _get(self, kind: str) -> tuple[bool, bool]:
        products, name = torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction"
        return getattr(products, name), getattr(products, f"{name}_split_k")

    def _set(self, kind: str, value: tuple[bool, bool]) -> None:
        setattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", value)


_settings = Settings()


@contextmanager
def in_one_order(device: torch.device, settings: Settings = _settings) -> Iterator[None]:
    """Within the block, products on a CUDA device are summed in full precision, without split-K.

    Args:
        device: of the model; on others nothing is changed.

    Raises:
        Refused: torch was built without cuBLASLt.
    """
    if device.type != "cuda":
        yield
        return
    settings.enter()
    try:
        yield
    finally:
        settings.leave()
