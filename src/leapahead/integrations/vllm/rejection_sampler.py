"""The limit of vLLM's rejection sampler, and its error on CPUs, which is found and mended at the start.

On CPUs it reads uninitialised memory where it spreads the temperatures of requests over drafted tokens
(https://github.com/vllm-project/vllm/issues/55005). Where that is found, sampled requests get no drafts, and the
function is replaced by a correct one, since it spoils greedy requests in a batch with sampled ones, too.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from leapahead.core.errors import Refused

MOST_DRAFTED = 128  # its MAX_SPEC_LEN: with more drafted tokens of one request it fails, and vLLM ends
WRAPPED = "_leapahead"  # marks a function or method of vLLM that is replaced already


def spoils_sampling() -> bool:
    """Whether this vLLM loses the result of spreading numbers over drafted tokens; a correct function replaces it.

    Raises:
        Refused: it cannot be replaced.
    """
    torch = import_module("torch")
    sampler: Any = import_module("vllm.v1.sample.rejection_sampler")

    def is_right() -> bool:
        values, ends = torch.tensor([0.625, 3.0, 0.125]), torch.tensor([2, 3, 6], dtype=torch.int32)
        found = sampler.expand_batch_to_tokens(values, ends, 6, 3, 7)
        return bool(found.tolist() == [0.625, 0.625, 7.0, 0.125, 0.125, 0.125])

    def spread(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
        values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return torch.repeat_interleave(values, counts, output_size=num_tokens)

    inner = sampler.expand_batch_to_tokens
    if getattr(inner, WRAPPED, False):
        return True  # it was wrong when the first engine of this process was made
    if is_right():
        return False
    setattr(spread, WRAPPED, True)
    sampler.expand_batch_to_tokens = spread
    if not is_right():
        raise Refused("this vLLM verifies drafts wrongly on CPUs where requests are sampled, so nothing can be drafted")
    return True
