"""Memory of a device: how much is free, how much a KV cache may take, and errors that say it ran out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from leapahead.core.errors import LeapaheadError
from leapahead.models.memory import free_host_bytes
from leapahead.models.transformers.kv_cache import FIRST_CAPACITY, KVCache

# The part of the free memory that the cache may take by default; the rest is for activations and for other programs.
CACHE_SHARE = {"cuda": 0.7, "cpu": 0.5}
# The texts of torch's errors that are no `OutOfMemoryError`: of the CPU, MPS and cuBLAS.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
SMALLER = "use a smaller batch, a shorter context, or dtype bfloat16"  # what helps in decoding


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a device: what its driver has left, and what torch keeps for reuse."""
    if device.type not in ("cuda", "xpu"):
        return free_host_bytes()
    torch_on = torch.get_device_module(device)
    kept = torch_on.memory_reserved(device) - torch_on.memory_allocated(device)
    return int(torch_on.mem_get_info(device)[0] + kept)


def usual_tokens(cache: KVCache, device: torch.device) -> int:
    """How many tokens fit in the cache's part of the free memory, on whichever of its devices has the least.

    Args:
        cache: after a forward.
        device: of the model, for a cache without entries.
    """
    fitting = [
        int(CACHE_SHARE.get(there.type, CACHE_SHARE["cpu"]) * free_bytes(there)) // size
        for there, size in (cache.bytes_per_token or {device: 1}).items()
    ]
    return max(FIRST_CAPACITY, min(fitting))


@contextmanager
def out_of_memory_in(what: str, batch: int, device: torch.device, remedy: str = SMALLER) -> Iterator[None]:
    """Turns torch's errors of exhausted memory into one clear sentence; other errors pass.

    Args:
        what: the computation, for the message.
        batch: its number of sequences.
        device: where it is computed.
        remedy: what the user can do.
    """
    try:
        yield
    except RuntimeError as error:
        is_memory = isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY)
        if not is_memory:
            raise
        raise LeapaheadError(f"out of memory in {what}, batch {batch}, on {device}; {remedy}") from error
